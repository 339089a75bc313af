"""YAML: what nobody can mean is refused, with its line."""

from itertools import pairwise

import pytest
import yaml

from logpast.util.yaml_text import parse_yaml

CHAIN = "[" + ", ".join(f"&x{n} [*x{n - 1}]" if n else "&x0 [1]" for n in range(100)) + "]"
LAUGHS = (
    "[&a [1, 2], " + ", ".join(f"&{new} [*{old}, *{old}]" for old, new in pairwise("abcdefghijklmnopqrstuvwxyz")) + "]"
)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{a: " * 3000 + "}" * 3000, "nested too deeply"),
        (CHAIN, "with its aliases .* too large"),
        ("&self {slots: *self}", r"\*self contains itself"),
        (LAUGHS, "with its aliases .* too large"),
        ("9" * 5000, "'9.*' is no int"),
        ("0x" + "f" * 5000, "'0xf.*' is no int"),
        ("2001-99-99", "'2001-99-99' is no timestamp"),
        ("!!timestamp x", "'x' is no timestamp"),
        ("!!bool x", "'x' is no bool"),
        ("1" + ":59" * 3000 + ".5", "'1:59.*' is no float"),
        ("{a: 1, a: 2}", "'a' is given twice"),
        ("*nowhere", "undefined alias"),
        (r'"\U00110000"', "not in range"),
        (r'"\UFFFFFFFF"', "too large"),
        ("!!int {=: x}", "a list or mapping is no int"),
    ],
    ids=[
        "deep",
        "chain",
        "itself",
        "laughs",
        "digits",
        "hex",
        "date",
        "time",
        "bool",
        "overflow",
        "twice",
        "undefined",
        "no-character",
        "no-code-point",
        "mapping",
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(value: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=rf"(?s){problem}.*line 2, column"):
        parse_yaml(f"run: a\nmodel: {value}\n")


def test_a_version_that_is_no_number_is_refused_with_its_line() -> None:
    with pytest.raises(yaml.YAMLError, match=r"(?s)digits.*line 1, column"):
        parse_yaml(f"%YAML {'1' * 5000}.1\n---\nrun: a\n")


def test_an_alias_is_what_it_stands_for() -> None:
    text = "model: &sizes {width: 16, layers: [1, 2]}\ndata: {<<: *sizes, width: 32}\n"
    assert parse_yaml(text)["data"] == {"width": 32, "layers": [1, 2]}
