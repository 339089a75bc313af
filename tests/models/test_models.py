"""The transformer is GPT-2; the fronts do what they say; memory reaches as far as it should and no further."""

import dataclasses

import pytest
import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.models import (
    SYSTEMS,
    LogMemoryConfig,
    LogMemoryTransformer,
    RecentConfig,
    Transformer,
    build,
    config_from_dict,
    config_to_dict,
    load_gpt2,
)
from logpast.models.decoder import run_blocks
from logpast.util.errors import UserError

SIZES = {"window": 8, "layers": 2, "heads": 2, "width": 16, "vocabulary": 31}
MEMORY = LogMemoryConfig(slots=17, sharpness=20, normalize="area", **SIZES)  # horizon 16
CONTROL = RecentConfig(slots=5, **SIZES)
BOTH = pytest.mark.parametrize("config", [MEMORY, CONTROL], ids=["log_memory", "recent"])


def model_of(config: LogMemoryConfig | RecentConfig) -> Transformer:
    """Larger weights than at initialisation, so that nothing hides behind being small."""
    torch.manual_seed(0)
    model = build(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(model: Transformer, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        torch.randint(31, (batch, model.history)),
        torch.randint(31, (batch, model.window)),
        torch.randint(31, (batch, model.window)),
    )


def test_a_filter_that_the_arithmetic_cannot_hold_is_told() -> None:
    with pytest.raises(UserError, match=r"model: the filter with its peak at 1\.414 \(sharpness=2000\) has no weight"):
        build(LogMemoryConfig(slots=17, sharpness=2000, layers=1, heads=1, width=8, vocabulary=31))


@BOTH
def test_a_history_of_any_length_is_read_from_its_end(config: LogMemoryConfig | RecentConfig) -> None:
    """What is missing counts as missing, and what lies beyond the model's past as never said."""
    torch.manual_seed(0)
    model = build(config).double()
    history, tokens, _ = inputs(model)
    short = torch.cat([torch.full_like(history[:, 3:], -1), history[:, :3]], dim=1)
    torch.testing.assert_close(model(history[:, :3], tokens), model(short, tokens))
    torch.testing.assert_close(model(history[:, :0], tokens), model(torch.full_like(history, -1), tokens))
    longer = torch.cat([tokens, history], dim=1)
    torch.testing.assert_close(model(longer, tokens), model(history, tokens))


@pytest.mark.parametrize("system", ["log_memory", "recent"])
def test_without_slots_it_is_gpt2(system: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=24, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():  # LayerNorms and biases start as ones and zeros, which would hide a mix-up
        torch.nn.init.normal_(parameter, std=0.2)
    sizes = {"window": 24, "layers": 3, "heads": 4, "width": 32, "vocabulary": 101}
    ours = build(SYSTEMS[system].Config(slots=0, **sizes))
    load_gpt2(ours, theirs.state_dict())
    ids = torch.randint(101, (2, 24))
    with torch.no_grad():
        logits = ours(torch.empty(2, 0, dtype=torch.int64), ids)
        torch.testing.assert_close(logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    nats = ours(torch.empty(2, 0, dtype=torch.int64), ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(nats.mean(), theirs(ids, labels=ids).loss, atol=1e-5, rtol=1e-5)


def test_loading_foreign_weights_of_another_size_is_refused() -> None:
    model = build(RecentConfig(slots=0, **SIZES))
    with pytest.raises(UserError, match=r"wte\.weight"):
        load_gpt2(model, {})
    with pytest.raises(UserError, match=r"\(31, 8\)"):
        load_gpt2(model, {"wte.weight": torch.zeros(31, 8)})


def test_gpt2_small_has_its_size() -> None:
    with torch.device("meta"):
        plain = build(RecentConfig(slots=0, window=1024), tokens=50257)
        control = build(RecentConfig(), tokens=50257)
    assert plain.config.vocabulary == 50304
    assert plain.parameter_count() == 124_439_808 + 47 * 768  # GPT-2's own, and the rows that round up its vocabulary
    assert control.parameter_count() == plain.parameter_count() - (1024 - 309) * 768


def test_memory_and_control_differ_in_one_layer_norm() -> None:
    with torch.device("meta"):
        memory, control = build(LogMemoryConfig(), tokens=50257), build(RecentConfig(), tokens=50257)
    extra = set(memory.state_dict()) - set(control.state_dict())
    assert extra == {"memory.norm.weight", "memory.norm.bias"}
    assert memory.history == 8192
    assert control.history == 53


def test_initialisation_is_gpt2s() -> None:
    torch.manual_seed(0)
    model = build(RecentConfig(slots=3, window=40, layers=8, heads=4, width=256, vocabulary=2000))
    block = model.blocks[3]
    for weight in (
        model.table.weight,
        model.positions.weight,
        block.attention.query_key_value.weight,
        block.mlp_in.weight,
    ):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    for weight in (block.attention.out.weight, block.mlp_out.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02 / 16**0.5, rel=0.03)
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm.weight" in name)


def test_control_is_a_plain_gpt_of_context_slots_plus_window() -> None:
    control = model_of(CONTROL)
    plain = build(RecentConfig(slots=0, **{**SIZES, "window": 13})).double()
    plain.load_state_dict(control.state_dict())
    history, tokens, _ = inputs(control)
    both = torch.cat([history, tokens], dim=1)
    torch.testing.assert_close(control(history, tokens), plain(both[:, :0], both)[:, 5:])


def test_slots_stand_before_the_window_oldest_first() -> None:
    model = model_of(MEMORY)
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


# What went wrong in this field: the memory did nothing, or saw the future.


def test_memory_sees_a_token_if_and_only_if_it_lies_within_the_horizon() -> None:
    model = model_of(MEMORY)
    horizon = model.history
    history = torch.randint(31, (1, horizon + 4))
    tokens = torch.randint(31, (1, 8))
    before = model(history, tokens)  # the module takes the last `horizon` of a longer history
    for lag in range(1, horizon + 5):
        changed = history.clone()
        changed[0, -lag] = (changed[0, -lag] + 1) % 31
        moved = (model(changed, tokens) - before).abs().max()
        assert (moved > 1e-9) == (lag <= horizon), lag


def test_gradient_reaches_the_embedding_of_every_token_in_reach_through_a_slot() -> None:
    model = model_of(dataclasses.replace(MEMORY, vocabulary=64))
    history = torch.arange(16).unsqueeze(0)  # every lag its own token, none of which is in the window
    tokens = torch.full((1, 8), 40)
    hidden = model.hidden(torch.cat([model.front(history), model.table(tokens)], dim=1))
    hidden[:, 17:].square().sum().backward()  # without the head, whose gradient would touch every row
    gradient = model.table.weight.grad
    assert gradient is not None
    assert (gradient[:16].abs().sum(1) > 0).all()
    assert (gradient[41:] == 0).all()


def test_zeroing_the_memory_changes_the_loss() -> None:
    model = model_of(MEMORY)
    history, tokens, targets = inputs(model)
    with_memory = model(history, tokens, targets).sum()
    without = model(torch.full_like(history, -1), tokens, targets).sum()
    assert abs(float(with_memory - without)) > 1e-3


@BOTH
def test_every_parameter_learns(config: LogMemoryConfig | RecentConfig) -> None:
    model = model_of(config)
    model(*inputs(model)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@BOTH
def test_no_leak_from_the_future(config: LogMemoryConfig | RecentConfig) -> None:
    model = model_of(config)
    history, tokens, _ = inputs(model)
    before = model(history, tokens)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 31
        after = model(history, changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
        assert (after[:, place] - before[:, place]).abs().max() > 1e-6


@BOTH
def test_missing_tokens_are_zero_vectors(config: LogMemoryConfig | RecentConfig) -> None:
    """They stay in the sequence: -1 gives what a token with a zero embedding gives."""
    model = model_of(config)
    history, tokens, _ = inputs(model)
    history[:, :3] = 7
    with torch.no_grad():
        model.table.weight[7] = 0
    tokens[tokens == 7] = 8
    history[:, 3:][history[:, 3:] == 7] = 8
    zeroed = model(history, tokens)
    history[:, :3] = -1
    torch.testing.assert_close(model(history, tokens), zeroed)


@BOTH
def test_nats_are_cross_entropy_and_ignore_padding(config: LogMemoryConfig | RecentConfig) -> None:
    model = model_of(config)
    history, tokens, targets = inputs(model)
    targets[1, 4:] = -1
    expected = -model(history, tokens).log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected[targets < 0] = 0
    torch.testing.assert_close(model(history, tokens, targets), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(history, tokens, targets), expected)


@BOTH
def test_bfloat16_stays_close(config: LogMemoryConfig | RecentConfig) -> None:
    torch.manual_seed(0)
    model = build(config)
    batch = inputs(model)
    exact = model(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(*batch)
    torch.testing.assert_close(rough, exact, atol=0.02, rtol=0.02)
    rough.sum().backward()


@BOTH
def test_config_round_trip(config: LogMemoryConfig | RecentConfig) -> None:
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", -1), ("window", 0), ("layers", 0), ("heads", 3), ("width", 15), ("sharpness", 0)],
)
def test_illegal_sizes_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(UserError, match=name):
        dataclasses.replace(MEMORY, **{name: value})


def test_unknown_system_is_refused() -> None:
    with pytest.raises(UserError, match="log_memory, recent"):
        config_from_dict({"system": "lstm"})


def test_names() -> None:
    for name, system in SYSTEMS.items():
        assert config_to_dict(system.Config())["system"] == name
        assert config_from_dict({"system": name}) == system.Config()
