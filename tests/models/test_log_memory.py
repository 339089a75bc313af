"""The paper's model: which tokens its slots depend on, and how."""

import dataclasses

import pytest
import torch

from logpast.filters import FilterBank
from logpast.models import LogMemoryConfig, LogMemoryTransformer, RecentConfig, build
from logpast.models.decoder import run_blocks
from logpast.util.errors import UserError
from models.helpers import MEMORY, changed, inputs, large


def test_slots_precede_the_window_oldest_first() -> None:
    model = large(MEMORY)
    assert isinstance(model, LogMemoryTransformer)
    history, tokens, _ = inputs(model)
    bank, table = FilterBank(slots=17, sharpness=20, normalize="area"), model.table.weight
    slots = torch.stack([
        sum(bank.weights[i, t - 1] * table[history[:, -t]] for t in range(1, bank.horizon + 1))  # type: ignore[misc]
        for i in reversed(range(17))
    ], dim=1)  # fmt: skip
    x = torch.cat([model.memory.norm(slots), table[tokens]], dim=1) + model.positions.weight
    expected = run_blocks(model.blocks, x, model.norm)[:, 17:] @ table.T
    torch.testing.assert_close(model(history, tokens), expected)


def test_output_depends_on_a_token_if_and_only_if_it_is_within_the_horizon() -> None:
    model = large(MEMORY)
    horizon = model.history
    history = torch.randint(31, (1, horizon + 4))
    tokens = torch.randint(31, (1, 8))
    before = model(history, tokens)  # the model takes the last `horizon` tokens of a longer history
    for lag in range(1, horizon + 5):
        difference = (model(changed(history, -lag), tokens) - before).abs().max()
        assert (difference > 1e-9) == (lag <= horizon), lag


def test_gradient_reaches_the_embedding_of_every_token_within_the_horizon() -> None:
    model = large(dataclasses.replace(MEMORY, vocabulary=64))
    history = torch.arange(16).unsqueeze(0)  # a different token at every lag, none of which is in the window
    tokens = torch.full((1, 8), 40)
    hidden = model.hidden(torch.cat([model.make_slots(history), model.table(tokens)], dim=1))
    hidden[:, 17:].square().sum().backward()  # without the head, whose gradient reaches every row
    gradient = model.table.weight.grad
    assert gradient is not None
    assert (gradient[:16].abs().sum(1) > 0).all()
    assert (gradient[41:] == 0).all()


def test_an_empty_history_changes_the_loss() -> None:
    model = large(MEMORY)
    history, tokens, targets = inputs(model)
    with torch.no_grad():
        difference = model(history, tokens, targets) - model(torch.full_like(history, -1), tokens, targets)
    assert difference.sum().abs() > 1e-3


def test_memory_and_control_differ_in_one_layer_norm() -> None:
    with torch.device("meta"):
        memory, control = build(LogMemoryConfig(), tokens=50257), build(RecentConfig(), tokens=50257)
    extra = set(memory.state_dict()) - set(control.state_dict())
    assert extra == {"memory.norm.weight", "memory.norm.bias"}
    assert memory.history == 8192
    assert control.history == 53


def test_illegal_filters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"model\.sharpness"):
        dataclasses.replace(MEMORY, sharpness=0)
    with pytest.raises(UserError, match=r"peak at 1\.414 \(sharpness=2000\)"):
        build(LogMemoryConfig(slots=17, sharpness=2000, layers=1, heads=1, width=8, vocabulary=31))
