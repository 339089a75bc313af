"""A sweep of six cells of one second each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from logpast.data import TokenStore

SYSTEMS = {"delta": {"model.system": "recent"}, "k20": {"model.sharpness": 20}}


@pytest.fixture
def sweep_file(tmp_path: Path, store: TokenStore) -> Callable[..., Path]:
    """Writes the YAML file of the sweep; arguments replace its keys."""

    def write(**values: Any) -> Path:
        recipe = {
            "data": {"train": str(store.path), "validation": str(store.path)},
            "model": {"window": 8, "layers": 1, "heads": 2, "width": 16},
            "optimizer": {"learning_rate": 3e-3, "final_learning_rate": 3e-4, "warmup_steps": 5},
            "steps": 60, "batch_size": 4, "accelerator": "cpu", "tensorboard": False,
            "checkpoint_every": 10, "validate_every": 30, "keep": 1, "log_every": 1,
        }  # fmt: skip
        grids = [{"model.slots": [5, 9, 17], "system": SYSTEMS}]
        file = tmp_path / "sweep.yaml"
        content = {"recipe": recipe, "test": str(store.path), "grids": grids} | values
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return file

    return write
