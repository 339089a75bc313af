"""Recipes: found by name, complete, equal to the paper's; mistakes in them are named."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from logpast.ledger.row import hash_recipe
from logpast.models import LogMemoryConfig, RecentConfig
from logpast.training.config import TrainConfig, recorded_settings
from logpast.training.recipes import (
    SHIPPED,
    config_from_recipe,
    find_recipe,
    read_recipe,
    read_yaml,
    shipped_recipes,
)
from logpast.util.errors import UserError
from logpast.util.validation import validate_section

FOR_TRAIN = [name for name in shipped_recipes() if not name.startswith(("rivals-", "sweep-"))]


def config_of(name: str) -> TrainConfig:
    return config_from_recipe(read_recipe(Path(name)), name)


def test_a_shipped_recipe_is_found_by_its_name() -> None:
    assert {"small-cpu", "paper-wikitext103", "rivals-toy", "sweep-toy"} <= set(shipped_recipes())
    for name in shipped_recipes():
        assert find_recipe(Path(name)) == SHIPPED / f"{name}.yaml"
        assert find_recipe(Path(f"{name}.yaml"), Path("elsewhere")) == SHIPPED / f"{name}.yaml"


@pytest.mark.parametrize(("name", "command"), [("sweep-toy", "sweep"), ("rivals-toy.yaml", "compare")])
def test_recipes_of_other_commands_are_refused_with_their_command(name: str, command: str) -> None:
    with pytest.raises(UserError, match=f"logpast {command} {name}"):
        read_recipe(Path(name))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("smal-cpu", "small-cpu"), ("recipes/small-cpu.yaml", "small-cpu"), ("paper-wiki103", "paper-wikitext103")],
)
def test_an_unknown_recipe_gets_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*did you mean {meant}"):
        find_recipe(Path(name))


def test_a_name_that_is_near_nothing_gets_all_names() -> None:
    with pytest.raises(UserError, match=r"xyzzy.*demo, demo-topics, .*transformer-xl-base"):
        find_recipe(Path("xyzzy"))


def test_a_file_is_preferred_to_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small-cpu").write_text("run: mine\n")
    assert read_recipe(Path("small-cpu"))["run"] == "mine"


def test_a_folder_does_not_hide_the_shipped_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert find_recipe(Path("demo")) == SHIPPED / "demo.yaml"


def test_a_missing_file_is_named_with_the_shipped_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.yaml.*small-cpu"):
        read_yaml(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("a: [1,", "not YAML"),
        ("{[steps]: 1}", "not YAML"),
        ("steps: 1\nmodel: {slots: 5}\nsteps: 2\n", "'steps' is given twice"),
        ("- 1\n", "not a recipe"),
        ("model: log_memory", "model"),
        ("model: {system: 3}", "model.system"),
        ("data: my.txt", "data"),
        ("optimizer: [1]", "optimizer"),
    ],
)
def test_malformed_recipes_are_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(UserError, match=rf"bad.yaml.*{named}"):
        read_recipe(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    "recipe", [{"batch_size": 3, "devices": 2}, {"model": {"width": 5, "heads": 2}}, {"steps": None}]
)
def test_settings_that_contradict_each_other_are_named_with_the_file(recipe: dict[str, object]) -> None:
    settings = {"run": "a", "data": {"train": "t"}, "model": {}, "steps": 5} | recipe
    with pytest.raises(UserError, match=r"^file\.yaml: "):
        config_from_recipe(settings, "file.yaml")


def test_an_unknown_system_is_named_with_the_file() -> None:
    with pytest.raises(UserError, match=r"^file\.yaml: model\.system: .*log_memori"):
        config_from_recipe({"model": {"system": "log_memori"}}, "file.yaml")


def test_empty_sections_are_the_same_as_none(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: r\noptimizer:\nmodel:\n")
    assert read_recipe(tmp_path / "recipe.yaml") == {"run": "r", "model": {}}


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"model": {"slotz": 5}}, "unknown key 'model.slotz'; did you mean model.slots"),
        ({"model": {"system": "recnt"}}, "did you mean recent"),
        ({"model": {"slots": "many"}}, "model.slots"),
        ({"model": {}, "stepz": 5}, "unknown key 'stepz'; did you mean steps"),
    ],
)
def test_wrong_keys_and_values_are_named(recipe: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        config_from_recipe({"run": "r", "data": {"train": "x"}, "steps": 1} | recipe, "recipe.yaml")


def test_settings_of_other_systems_are_ignored() -> None:
    recipe = {"run": "r", "data": {"train": "x"}, "steps": 1, "model": {"system": "recent", "slots": 9, "sharpness": 5}}
    assert config_from_recipe(recipe, "recipe.yaml").model == RecentConfig(slots=9)
    assert recipe["model"] == {"system": "recent", "slots": 9, "sharpness": 5}  # unchanged


def test_hashes_of_recipes_do_not_change() -> None:
    """Sweeps find their finished cells by them; a float that is left out or given as 100 is hashed as 100.0."""
    recipe = {"run": "r", "data": {"train": "x"}, "epochs": 2, "optimizer": {"clip": 0, "learning_rate": "6e-4"}}
    for model in ({}, {"sharpness": 100}, {"sharpness": "1e2", "slots": 53}):
        config = config_from_recipe(recipe | {"model": model}, "recipe.yaml")
        assert hash_recipe(recorded_settings(config)) == "3832eaeeb2027044"
    assert type(LogMemoryConfig(sharpness=100).sharpness) is int  # as given, in Python


def test_a_setting_that_is_given_in_two_forms_is_refused() -> None:
    recipe = {"run": "r", "data.train": "y", "data": {"train": "x"}, "steps": 1, "model": {}}
    with pytest.raises(UserError, match=r"recipe.yaml: data.train is given twice"):
        config_from_recipe(recipe, "recipe.yaml")


@pytest.mark.parametrize(("recipe", "name"), [({"data": {"train": "x"}}, "run"), ({"run": "r"}, r"data\.train")])
def test_missing_settings_are_named(recipe: dict[str, object], name: str) -> None:
    with pytest.raises(UserError, match=f"recipe.yaml: {name} is missing"):
        config_from_recipe(recipe | {"model": {}, "steps": 1}, "recipe.yaml")


@dataclass
class Section:
    count: int = 1
    name: str = "a"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError("count must be at least 1")


def test_sections_are_validated() -> None:
    assert validate_section(Section, {"count": 2, "name": None}, "file.yaml") == Section(2)
    for wrong, named in (
        ({"cuont": 2}, "'cuont'; did you mean count"),
        ({"count": "x"}, "count"),
        ({"count": 0}, "count"),
    ):
        with pytest.raises(UserError, match=rf"file.yaml: .*{named}"):
            validate_section(Section, wrong, "file.yaml")


@pytest.mark.parametrize("name", FOR_TRAIN)
def test_shipped_recipes_are_complete(name: str) -> None:
    config = config_of(name)
    assert (config.steps is None) != (config.epochs is None)


@pytest.mark.parametrize(("corpus", "epochs"), [("wikitext103", 90), ("pg19", 4)])
def test_paper_recipes_have_the_settings_of_the_paper(corpus: str, epochs: int) -> None:
    config = config_of(f"paper-{corpus}")
    model, optimizer = config.model, config.optimizer
    assert config.epochs == epochs
    assert config.batch_size * model.window == 16_384
    assert isinstance(model, LogMemoryConfig)
    assert (model.layers, model.heads, model.width, model.window, model.slots) == (12, 12, 768, 256, 53)
    assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup_steps) == (6e-4, 6e-5, 700)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (0.9, 0.95, 0.1, 1.0)
    for slots in range(5, 54, 4):
        for k in (100, 150, 200):
            assert replace(model, slots=slots, sharpness=k).bank.horizon == 2 ** ((slots - 1) // 4)
