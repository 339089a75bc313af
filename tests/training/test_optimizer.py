"""AdamW, its learning-rate schedule, and which parameters are trained."""

from dataclasses import replace

import pytest
import torch

from logpast.models import RecentConfig, build
from logpast.training.config import OptimizerConfig
from logpast.training.optimizer import build_optimizer, freeze, learning_rate, set_learning_rate
from logpast.util.errors import UserError

TOP_LEVEL = ["table", "positions", "blocks", "norm"]
SMALL = RecentConfig(slots=3, window=4, layers=1, heads=1, width=8, vocabulary=64)


def test_schedule_is_linear_warm_up_then_cosine() -> None:
    config = OptimizerConfig()
    rates = [learning_rate(config, step, 10_000) for step in range(10_000)]
    assert rates[0] == pytest.approx(6e-4 / 700)
    assert max(rates) == rates[699] == rates[700] == 6e-4
    assert rates[-1] == pytest.approx(6e-5)
    assert rates[(700 + 9_999) // 2] == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-3)
    few = replace(config, warmup_steps=4)
    assert [learning_rate(few, step, 8) for step in (3, 4, 7)] == pytest.approx([6e-4, 6e-4, 6e-5])


def test_weight_decay_is_on_matrices_only() -> None:
    model = build(SMALL)
    decayed, not_decayed = build_optimizer(model, OptimizerConfig(), torch.device("cpu")).param_groups
    assert decayed["weight_decay"] == 0.1
    assert not_decayed["weight_decay"] == 0
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in not_decayed["params"])
    assert len(decayed["params"]) + len(not_decayed["params"]) == len(list(model.parameters()))


def test_set_learning_rate_changes_all_groups() -> None:
    optimizer = build_optimizer(build(SMALL), OptimizerConfig(), torch.device("cpu"))
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        ([], TOP_LEVEL),
        (["blocks", "table"], ["positions", "norm"]),
        (["blocks.*", "table.weight"], ["positions", "norm"]),
        (["[tp]*"], ["blocks", "norm"]),
        (["!norm"], ["norm"]),
        (["*", "!norm", "!positions"], ["positions", "norm"]),
        (["blocks", "!blocks.0.mlp_in"], ["table", "positions", "blocks.0.mlp_in", "norm"]),
    ],
)
def test_frozen_parameters_are_not_in_the_optimizer(patterns: list[str], trained: list[str]) -> None:
    model = build(SMALL)
    freeze(model, patterns)
    expected = {name for name, _ in model.named_parameters() if any(name.startswith(f"{each}.") for each in trained)}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == expected
    groups = build_optimizer(model, OptimizerConfig(), torch.device("cpu")).param_groups
    assert sum(len(group["params"]) for group in groups) == len(expected)


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (["bloks"], "'bloks'; did you mean blocks"),
        (["table", "!recall"], f"'recall'; known: {', '.join(TOP_LEVEL)}"),
        (["block.*"], "'block.*'"),
        ([""], "''"),
        (["*"], "no parameter to train"),
    ],
)
def test_names_to_freeze_that_match_nothing_or_everything_are_refused(patterns: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named.replace("*", r"\*")):
        freeze(build(SMALL), patterns)


def test_a_shared_parameter_is_frozen_by_either_name() -> None:
    for name in ("table", "head"):
        model = build(SMALL)
        model.head = torch.nn.Linear(8, 64, bias=False)
        model.head.weight = model.table.weight
        freeze(model, [name])
        assert not model.table.weight.requires_grad
