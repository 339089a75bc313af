"""Systems of a comparison: equal numbers of parameters, and as many tokens per step as stated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logpast.comparison.recipe import read_recipe
from logpast.comparison.systems import _batch_size, equal_systems
from logpast.data import TokenStore
from logpast.data.batching import Batches, Lanes
from logpast.models import SYSTEMS, RecentConfig, TransformerXLConfig
from logpast.util.errors import UserError


@pytest.mark.parametrize("recipe", ["rivals-toy", "rivals-small"])
def test_shipped_recipes_have_every_system_at_equal_size(recipe: str) -> None:
    plan = read_recipe(Path(recipe))
    assert {settings["system"] for settings in plan.systems.values()} == set(SYSTEMS)
    sizes = {"rivals-toy": 2048, "rivals-small": 50257}
    store = TokenStore.in_memory([[1] * 1000], sizes[recipe], 0)
    found = equal_systems(plan, store)
    for system in found:
        assert abs(system.parameters / found[0].parameters - 1) < 0.02


def test_systems_of_different_sizes_are_reported(recipe: Path, store: TokenStore) -> None:
    text = recipe.read_text().replace("memory_when_scoring: 12", "mlp: 400")
    recipe.write_text(text)
    with pytest.raises(UserError, match=r"system xl .* parameters"):
        equal_systems(read_recipe(recipe), store)


def test_a_million_layers_are_counted_without_building_them(recipe: Path, store: TokenStore) -> None:
    small = equal_systems(read_recipe(recipe), store)
    recipe.write_text(recipe.read_text().replace("layers: 1\n", "layers: 1000000\n"))
    for one, many in zip(small, equal_systems(read_recipe(recipe), store), strict=True):
        assert many.model.layers == 1_000_000
        assert many.parameters > 300_000 * one.parameters


def test_tokens_per_step_are_counted_exactly() -> None:
    """Also for documents whose last segment is mostly padding: budgets are counted in these."""
    store = TokenStore.in_memory([[1] * length for length in (3, 61, 9, 17, 5, 33)], size=5, eot=4)
    plan = SimpleNamespace(tokens_per_step=40, streams="document")
    for config in (RecentConfig(slots=0, window=8), TransformerXLConfig(window=8, memory=8, segments=2)):
        rows, tokens = _batch_size(plan, config, store)  # type: ignore[arg-type]
        batches: Any = (
            Lanes(store, 8, rows, 2, 0, "document")
            if isinstance(config, TransformerXLConfig)
            else Batches(store, 8, 0, rows, 0, "document")
        )
        steps = batches.steps_per_epoch if isinstance(batches, Lanes) else 3 * batches.windows_per_epoch
        seen = [int((batches.at(step, slice(None)).targets >= 0).sum()) for step in range(steps)]
        assert sum(seen) / steps == pytest.approx(tokens, rel=1e-6)
