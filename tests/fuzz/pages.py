"""Pages of YAML: recipes of `train`, sweeps, comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from fuzz.harness import Target
from fuzz.mutations import IN_YAML, as_yaml, damaged, damages, edited, edits
from logpast.comparison.recipe import read_recipe as read_comparison
from logpast.comparison.systems import equal_systems
from logpast.data import TokenStore
from logpast.ledger.row import hash_recipe
from logpast.sweeps.sweep import sweep
from logpast.training.config import TrainConfig, recorded_settings
from logpast.training.memory_check import check_training
from logpast.training.recipes import SHIPPED, config_from_recipe, read_recipe
from logpast.util.errors import UserError

TOKENS = 300  # size of the tokenizer that models are sized for
VARIED = {
    "run": "runs/varied", "seed": 3, "steps": 10, "precision": "64-true", "freeze": ["table", "!memory"],
    "init_from": None,
    "data": {"train": "a.txt", "validation": "b.txt", "tokenizer": "bpe-300", "streams": "document", "jitter": True},
    "model": {"system": "compressive", "window": 8, "layers": 1, "heads": 2, "width": 16, "memory": 8, "compressed": 4},
    "optimizer": {"learning_rate": 1e-3, "beta1": 0.8}, "batch_size": 4, "micro_batch_size": 2,
}  # fmt: skip


def recipes(home: Path) -> Target:
    """What `train` does with a recipe before it allocates memory."""
    return _target(home, "recipe.yaml", [VARIED, *_shipped("small-cpu", "transformer-xl-base")], read_as_train)


def sweeps(home: Path) -> Target:
    """`sweep --dry_run`."""
    inline = {"recipe": {**VARIED, "model": {}}, "test": "c.txt", "grids": [{"model.width": [16, 32], "seed": [0, 1]}]}
    variants = {"sizes": {"small": {"model.width": 16}, "large": {"model": {"width": 32}}}, "seed": [0]}
    documents = [
        inline,
        inline | {"set": {"steps": 5}, "grids": [variants], "cpus": 0.5, "gpus": 2},
        *_shipped("sweep-toy"),
    ]
    return _target(home, "sweep.yaml", documents, functools.partial(list_cells, home))


def comparisons(home: Path) -> Target:
    """What `compare` does with its recipe before it opens texts and trains."""
    store = TokenStore.in_memory([list(range(256)) * 2, [1, 2, 3]], TOKENS, TOKENS - 1)
    return _target(home, "comparison.yaml", _shipped("rivals-toy"), functools.partial(size_systems, store))


def read_as_train(file: Path) -> None:
    config = config_from_recipe(read_recipe(file), file)
    saved = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    if TrainConfig.from_dict(yaml.safe_load(saved)) != config:
        raise AssertionError(f"config.yaml would hold another config than {config}")
    hash_recipe(recorded_settings(config))
    with suppress(UserError):
        check_training(config, TOKENS, torch.device("cpu"), compiled=False, processes=1)


def list_cells(home: Path, file: Path) -> None:
    sweep(file, out=home / "out", dry_run=True)


def size_systems(store: TokenStore, file: Path) -> None:
    recipe = read_comparison(file)
    with suppress(UserError):  # it names the system
        equal_systems(recipe, store)


def _shipped(*names: str) -> list[Any]:
    return [yaml.safe_load((SHIPPED / f"{name}.yaml").read_text()) for name in names]


def _target(home: Path, name: str, documents: Iterable[Any], call: Callable[[Path], object]) -> Target:
    file, known = home / name, list(documents)
    inputs = st.tuples(st.sampled_from(range(len(known))), edits(IN_YAML), damages())

    def place(value: Any) -> Callable[[], object]:
        number, changes, damage = value
        return place_bytes(damaged(as_yaml(edited(known[number], changes)), damage))

    def place_bytes(content: bytes) -> Callable[[], object]:
        file.write_bytes(content)
        return lambda: call(file)

    return Target(inputs, place, home, name)
