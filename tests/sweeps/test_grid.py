"""From the YAML file of a sweep to its cells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from logpast.ledger.row import hash_recipe
from logpast.models import LogMemoryConfig, RecentConfig
from logpast.sweeps.grid import Cell, cells_of, read_config
from logpast.training.recipes import SHIPPED
from logpast.util.errors import UserError

SweepFile = Callable[..., Path]


def cells(file: Path) -> list[Cell]:
    return cells_of(read_config(file), file, file.parent / "out")


def test_a_grid_has_all_combinations(sweep_file: SweepFile) -> None:
    found = cells(sweep_file())
    assert [cell.name for cell in found] == [
        f"slots{slots}-{system}-seed0" for slots in (5, 9, 17) for system in ("delta", "k20")
    ]
    delta, memory = found[2:4]
    assert memory.choices == {"model.slots": 9, "system": "k20"}
    assert (type(delta.config.model).__name__, delta.config.model.slots) == ("RecentConfig", 9)  # type: ignore[attr-defined]
    assert (memory.config.model.slots, memory.config.model.sharpness) == (9, 20)  # type: ignore[attr-defined]
    assert memory.config.model.layers == 1
    assert memory.config.run == sweep_file().parent / "out" / "runs" / memory.name
    assert memory.config.resume == "auto"


def test_cells_of_several_grids_are_listed_once(sweep_file: SweepFile) -> None:
    grids = [{"model.slots": [5, 9]}, {"model.slots": [9], "seed": [0, 1]}, {"many": {"nine": {"model.slots": 9}}}]
    assert [cell.name for cell in cells(sweep_file(grids=grids))] == ["slots5-seed0", "slots9-seed0", "slots9-seed1"]


def test_repeats_add_no_cell_and_each_key_is_computed_once(
    sweep_file: SweepFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid may have thousands of cells, and each is compared along every axis."""
    keys = list[str]()
    monkeypatch.setattr("logpast.sweeps.grid.hash_recipe", lambda value: keys.append(hash_recipe(value)) or keys[-1])
    found = cells(sweep_file(grids=[{"model.slots": [5, 9] * 3000, "seed": [0, 1]}]))
    assert sorted(keys) == sorted(cell.key for cell in found)


def test_settings_that_a_system_lacks_make_no_new_cell(sweep_file: SweepFile) -> None:
    grids = [{"model.system": ["recent", "log_memory"], "model.sharpness": [20, 30]}]
    assert len(cells(sweep_file(grids=grids))) == 3


@pytest.mark.parametrize("idle", [{"model.memory": [16, 32]}, {"checkpoint_every": [1, 2]}])
def test_axes_without_effect_are_reported(idle: dict[str, list[int]], sweep_file: SweepFile) -> None:
    (axis,) = idle
    for grid in (idle, {"model.slots": [5, 9]} | idle):
        with pytest.raises(UserError, match=axis):
            cells(sweep_file(grids=[grid]))
    assert (
        len(cells(sweep_file(grids=[{axis: idle[axis][:1], "model.slots": [5, 9, 9]}]))) == 2
    )  # a single value is no choice


def test_variants_may_set_recipe_and_test(sweep_file: SweepFile, tmp_path: Path) -> None:
    one = yaml.safe_load(sweep_file().read_text())["recipe"]
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(one))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(one | {"batch_size": 7}))
    corpora = {name: {"recipe": f"{name}.yaml", "test": f"{name}.txt"} for name in ("one", "two")}
    found = cells(sweep_file(recipe="one.yaml", grids=[{"corpus": corpora}], set={"model": {"layers": 3}}))
    assert [(cell.config.batch_size, cell.test) for cell in found] == [(4, "one.txt"), (7, "two.txt")]
    assert {cell.config.model.layers for cell in found} == {3}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"grid": []}, "'grid'; .*grids"),
        ({"grids": []}, "grids"),
        ({"grids": [5]}, "grid must map fields"),
        ({"grids": [{"model.slots": 5}]}, "model.slots needs a list"),
        ({"grids": [{"model.slotz": [5]}]}, r"'model.slotz'; .*model.slots.*cell slotz5"),
        ({"grids": [{"model.slots": ["many"]}]}, "model.slots cannot be 'many'"),
        ({"grids": [{"model.slots": [-1]}]}, "model.slots .* got -1"),
        ({"grids": [{"model.slots": [5], "a": {"b": {"model.slots": 9}}}]}, "model.slots is set by a"),
        ({"grids": [{"a": {"x": {"steps": 1}}}, {"a": {"x": {"steps": 2}}}]}, "x-seed0"),
        ({"grids": [{"run": ["a", "b"]}]}, "run is set by the sweep"),
        ({"set": {"steps": {"many": 3}}}, "'steps.many'"),
        ({"grids": [{"xyz": [5]}]}, "'xyz'; known: run, "),
        ({"set": {"model.slots": 5, "model": {"slots": 9}}}, "model.slots is given twice"),
        ({"grids": [{"a": {"b": {"model.slots": 5, "model": {"slots": 9}}}}]}, "model.slots is given twice"),
        ({"recipe": "none.yaml"}, "none.yaml"),
        ({"recipe": {"model": 5}}, "model must hold settings"),
        ({"set": {"model.system": "rnn"}}, "'rnn'"),
        ({"test": 5}, "test .* 5"),
        ({"gpus": "all"}, "gpus .*'all'"),
        ({"grids": [{"seed": [None, 1]}]}, "seed is empty"),
        ({"cpus": 0.00001}, "cpus .* 1e-05"),
        ({"cpus": float("nan")}, "cpus .* nan"),
        ({"cpus": True}, "cpus .* True"),
        ({"gpus": -0.5}, "gpus .* -0.5"),
        ({"gpus": 1.5}, "gpus .* 1.5"),
        ({"gpus": 0.00001}, "gpus .* 1e-05"),
        ({"grids": [{}]}, "grid must map fields"),
        ({"grids": [{"model": [5]}]}, "model must hold settings"),
        ({"grids": [{"model.system": [5]}]}, "model.system"),
        ({"set": {"optimizer": None}}, "optimizer is empty"),
        ({"grids": [{5: [5]}]}, "keys .* 5"),
        ({"grids": [{None: [5]}]}, "keys .* None"),
        ({"grids": [{"steps": [0]}]}, r"steps .* 0 \(cell steps0-seed0\)"),
        ({"set": {"epochs": 2}}, "steps.*epochs"),
        ({"grids": [{"test": [5]}]}, "test .* 5"),
        ({"grids": [{"data": [5]}]}, "data"),
        ({"grids": [{"a": {"ü" * 101: {"steps": 1}}}]}, "is too long"),
    ],
)
def test_mistakes_in_the_file_are_reported(values: dict[str, Any], problem: str, sweep_file: SweepFile) -> None:
    if "set" in values and "grids" not in values:
        values = values | {"grids": [{"seed": [0]}]}
    with pytest.raises(UserError, match=problem):
        cells(sweep_file(**values))


def test_grids_of_too_many_cells_are_refused_at_once(sweep_file: SweepFile) -> None:
    axes = ("seed", "steps", "batch_size", "model.slots")
    with pytest.raises(UserError, match=r"\.yaml: its grids have 1e\+12 combinations"):
        cells(sweep_file(grids=[{axis: list(range(1, 1001)) for axis in axes}]))
    with pytest.raises(UserError, match=r"\.yaml: its grids have 12000 combinations"):
        cells(sweep_file(grids=[{"seed": [0, 1], "model.slots": [5, 9]}] * 3000))


@pytest.mark.parametrize("recipe", ["small-cpuu", "sweep-toy", "."])
def test_the_sweep_that_names_a_wrong_recipe_is_named(recipe: str, sweep_file: SweepFile) -> None:
    file = sweep_file(recipe=recipe)
    with pytest.raises(UserError, match=f"^{file}: recipe: .*{recipe}"):
        cells(file)


def test_a_cell_needs_a_test_text(sweep_file: SweepFile) -> None:
    place = sweep_file()
    values = yaml.safe_load(place.read_text())
    place.write_text(yaml.safe_dump({name: value for name, value in values.items() if name != "test"}))
    with pytest.raises(UserError, match="no test"):
        cells(place)


def test_sweep_paper_has_the_cells_of_the_paper() -> None:
    found = cells(SHIPPED / "sweep-paper.yaml")
    assert len(found) == 13 * 4 * 2
    models = {(cell.test, cell.config.model.slots, getattr(cell.config.model, "sharpness", None)) for cell in found}  # type: ignore[attr-defined]
    lengths, kinds = range(5, 54, 4), (None, 100, 150, 200)
    assert models == {(f"{c}:test", slots, k) for c in ("wikitext103", "pg19") for slots in lengths for k in kinds}
    assert {(cell.test, cell.config.data.train, cell.config.epochs) for cell in found} == {
        ("wikitext103:test", "wikitext103:train", 90), ("pg19:test", "pg19:train", 4),
    }  # fmt: skip


def test_sweep_small_and_sweep_toy() -> None:
    found = cells(SHIPPED / "sweep-small.yaml")
    wanted = [(slots, k, seed) for slots in (53, 5) for k in (None, 100) for seed in (0, 1)]
    wanted += [(53, 200, 0), (53, 200, 1), *((slots, k, 0) for slots in (37, 21) for k in (None, 100))]
    for train, test in (("wiki22k:train", "wikitext103:test"), ("pg19:train", "pg19:test")):
        some = [c for c in found if c.config.data.train == train]
        points = [(c.config.model.slots, getattr(c.config.model, "sharpness", None), c.config.seed) for c in some]  # type: ignore[attr-defined]
        assert points == wanted
        assert {(c.test, c.config.steps, c.config.epochs) for c in some} == {(test, 9000, None)}
    assert len(found) == 2 * len(wanted)
    assert len(cells(SHIPPED / "sweep-toy.yaml")) == 6


def test_sweep_pairs_has_the_papers_best_cell_and_its_control() -> None:
    found = [(cell.config.data.train, cell.config.model) for cell in cells(SHIPPED / "sweep-pairs.yaml")]
    assert [(train, type(model), model.slots, getattr(model, "sharpness", 0)) for train, model in found] == [  # type: ignore[attr-defined]
        ("wiki22k:train", RecentConfig, 53, 0), ("wiki22k:train", LogMemoryConfig, 53, 200),
        ("pg19:train", RecentConfig, 53, 0), ("pg19:train", LogMemoryConfig, 53, 200),
    ]  # fmt: skip


def test_a_copy_of_a_shipped_sweep_finds_its_shipped_recipe(tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text((SHIPPED / "sweep-toy.yaml").read_text())
    assert [cell.name for cell in cells(copy)] == [cell.name for cell in cells(SHIPPED / "sweep-toy.yaml")]
