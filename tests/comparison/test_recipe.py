"""Recipes for `logpast compare`: wrong ones are reported before any training."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from logpast.comparison.compare import compare
from logpast.comparison.recipe import ensure_same_recipe, file_name, read_recipe
from logpast.util.errors import UserError


def changed(recipe: Path, **values: object) -> Path:
    """The same file with some keys replaced."""
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | values, sort_keys=False))
    return recipe


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"streams": "x"}, "rivals.yaml: streams .*'x'"),
        ({"precision": "16-true"}, "precision .*'16-true'"),
        ({"tokens": -5}, "tokens .* -5"),
        ({"tokens": "many"}, "tokens .*'many'"),
        ({"tokens_per_step": 0}, "tokens_per_step"),
        ({"seconds": float("nan")}, "seconds"),
        ({"search_tokens": 0}, "search_tokens"),
        ({"validation_tokens": 0}, "validation_tokens"),
        ({"batch_size_when_scoring": 0}, "batch_size_when_scoring"),
        ({"learning_rates": 0.001}, "learning_rates .*0.001"),
        ({"learning_rates": []}, "learning_rates is empty"),
        ({"learning_rates": [0.0]}, "learning_rates .*0.0"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": ["a"]}, "seeds .*'a'"),
        ({"seeds": [-1]}, "seeds .*-1"),
        ({"systems": {}}, "systems is empty"),
        ({"systems": {"a": None}}, "systems"),
        ({"systems": {5: {}}}, "system 5"),
        ({"systems": {"a": {"slotz": 9}}}, "system a: .*'slotz'.* slots"),
        ({"systems": {"a": {"slots": "x"}}}, "system a: slots .*'x'"),
        ({"systems": {"a": {"slots": 9, "heads": 5}}}, "system a: model.width"),
        ({"systems": {"a": {"system": 5}}}, "model '5'"),
        ({"systems": {"a/b": {}, "a_b": {}}}, "a/b and a_b"),
        ({"model": 3}, "model"),
        ({"test": None}, "test"),
        ({"test": "nope"}, "nope"),
        ({"validation": "nope"}, "nope"),
        ({"tokns": 700}, "'tokns'"),
    ],
)
def test_wrong_recipes_are_reported_before_training(
    recipe: Path, tmp_path: Path, values: dict[str, object], problem: str
) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        compare(changed(recipe, **values), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_empty_keys_have_their_defaults(recipe: Path) -> None:
    assert read_recipe(changed(recipe, tokens=None)).tokens == 1_000_000


def test_a_folder_keeps_one_recipe_whose_numbers_may_be_written_differently(recipe: Path, tmp_path: Path) -> None:
    plan = read_recipe(changed(recipe, seconds=20))
    ensure_same_recipe(plan, {}, tmp_path)
    (tmp_path / "rows.jsonl").touch()
    file = tmp_path / "recipe.json"
    file.write_text(file.read_text().replace("20.0", "20"))
    ensure_same_recipe(plan, {}, tmp_path)
    reordered = replace(plan, systems=dict(reversed(plan.systems.items())))
    with pytest.raises(UserError, match=r"\(systems\)"):  # the first one sets the number of parameters
        ensure_same_recipe(reordered, {}, tmp_path)
    file.write_text("{")
    with pytest.raises(UserError, match=r"recipe\.json"):
        ensure_same_recipe(plan, {}, tmp_path)


def test_file_names_have_no_slashes() -> None:
    assert file_name("../Tü/XL + a") == ".._Tü_XL + a"
