"""AdamW and its learning-rate schedule."""

from dataclasses import replace

import pytest
import torch

from logpast.models import RecentConfig, build
from logpast.training.config import OptimizerConfig
from logpast.training.optimizer import build_optimizer, learning_rate, set_learning_rate

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
