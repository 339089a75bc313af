"""Valid documents with a few odd changes: the inputs that hypothesis draws."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NAMES = [
    "model",
    "data.train",
    "scores",
    "step",
    "grids",
    "é\u2028\x1b[2J",
    "a\nb",
    "",
    " ",
    "<<",
    "__class__",
    "x" * 3000,
]
TEXTS = [
    "", " ", "x", "a\nb", "\x1b[2Jx", "\u2028\u202e", "τ" * 200, "x" * 300, "x" * 6000, "a\0b", "null", "nan",
    "1e300", "-1", "0x10", "1_000", "true", "../../x", "/", "/dev/null", "/etc/passwd", "~", "~nobody-here/x",
    "~/x", ".", "..", "a/b", "a//b/", "file:///x", "http://127.0.0.1:9/x", "*", "[", "{}", "%s%n", "gpt2",
    "bpe-300", "bpe-0", "bpe-99999999999", "wikitext103", "pg19:train[5:2]", "kjv:test[:1]", "recent", "log_memory",
    "transformer_xl", "small-cpu", "sweep-toy", "<|endoftext|>", "\ufeff", "\ud800",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400,
    0.0, -0.0, 0.5, 1e-320, 1e-9, 1e18, 1e300, -1e300, 1.7e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, [], {}, [[]], [{}], {"": {}}, {"a": {"b": {"c": 1}}}, [None], [1, "1", 1.0], {"x": None}, ["\0"],
    [[[[[[[[1]]]]]]]],
]  # fmt: skip
# What only the text of a document can say; the key stands for it until the document is written.
IN_YAML = {
    "@deep": "[" * 3000 + "]" * 3000,
    "@deeper": "{a: " * 3000 + "}" * 3000,
    "@self": "&self {a: *self, b: 1}",
    "@selves": "&selves [*selves]",
    "@laughs": "{x0: &x0 {p: 1}, "
    + ", ".join(f"x{n}: &x{n} {{p: *x{n - 1}, q: *x{n - 1}}}" for n in range(1, 60))
    + "}",
    "@list": "[&l0 [1, 2], " + ", ".join(f"&l{n} [*l{n - 1}, *l{n - 1}]" for n in range(1, 60)) + "]",
    "@digits": "9" * 5000,
    "@hex": "0x" + "f" * 5000,
    "@sexagesimal": "1" + ":59" * 3000,
    "@date": "2001-99-99",
    "@time": "2001-01-01 99:99:99",
    "@timestamp": "!!timestamp x",
    "@bool": "!!bool x",
    "@int": "!!int x",
    "@float": "!!float x",
    "@binary": "!!binary =",
    "@omap": "!!omap [1]",
    "@set": "!!set {a, b}",
    "@python": "!!python/object/apply:os.getpid []",
    "@key": "{? [a, b] : 1}",
    "@mapkey": "{? {a: b} : 1}",
    "@merge": "{<<: [1]}",
    "@number": "{1: 2, 1.5: 3, null: 4, true: 5}",
    "@twice": "{a: 1, a: 2}",
    "@nowhere": "*nowhere",
    "@equal": "=",
    "@tab": "\t- x",
}
IN_JSON = {
    "@deep": "[" * 3000 + "]" * 3000,
    "@deepest": "[" * 200_000,
    "@deeper": '{"a": ' * 3000 + "1" + "}" * 3000,
    "@digits": "9" * 5000,
    "@exponent": "1e999",
    "@small": "-1e-999999999",
    "@surrogate": '"\\ud800"',
    "@twice": '{"a": 1, "a": 2}',
    "@comment": "1 // x",
    "@control": '"\x01"',
}
CHANGES = (
    "replace",
    "replace",
    "replace",
    "delete",
    "add",
    "wrap",
    "key",
    "swap",
    "self",
    "many",
    "text",
    "list",
    "near",
)


def odd_values(special: dict[str, str]) -> SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from([*TEXTS, *NUMBERS, *OTHERS]),
        st.sampled_from(sorted(special)),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=20),
        st.dates() if special is IN_YAML else st.booleans(),
    )


def edits(special: dict[str, str], most: int = 3) -> SearchStrategy[list[tuple[int, str, Any]]]:
    """Changes to a document: where, which, and an odd value for it."""
    return st.lists(st.tuples(st.integers(0, 999), st.sampled_from(CHANGES), odd_values(special)), max_size=most)


def edited(document: Any, changes: list[tuple[int, str, Any]]) -> Any:
    """The document with the changes; it itself stays as it is."""
    found = [deepcopy(document)]
    for where, change, value in changes:
        places = list(_places(found))
        if not places:  # all was deleted
            break
        container, key = places[where % len(places)]
        _change(container, key, change, value, places[(7 * where + 1) % len(places)])
    return found[0] if found else []  # a list that contains itself may have been emptied


def _places(root: list[Any]) -> Any:
    """(container, key) of every value, outermost first; a container that is met again is not entered."""
    waiting, seen = [root], set[int]()
    for container in waiting:  # grows
        if id(container) in seen or len(seen) > 300:
            continue
        seen.add(id(container))
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            yield container, key
            if isinstance(container[key], dict | list):
                waiting.append(container[key])


def _change(container: Any, key: Any, change: str, value: Any, other: tuple[Any, Any]) -> None:
    old = container[key]
    if change == "delete" and isinstance(container, dict):
        del container[key]
    elif change == "add" and isinstance(old, dict):
        old[NAMES[hash(str(value)[:3]) % len(NAMES)] if not isinstance(value, str) else value] = deepcopy(value)
    elif change == "add" and isinstance(old, list):
        old.append(deepcopy(value))
    elif change == "wrap":
        container[key] = [old] if isinstance(old, dict) else {"a": old}
    elif change == "key" and isinstance(container, dict):
        container[value if isinstance(value, str | int | float) else NAMES[len(str(value)) % len(NAMES)]] = (
            container.pop(key)
        )
    elif change == "swap":
        there, where = other
        container[key] = deepcopy(there[where]) if there is not container or where != key else None
    elif change == "self" and isinstance(old, dict | list):
        container[key] = container
    elif change == "many" and isinstance(old, list):
        container[key] = (old * 3000)[:3000]
    elif change == "text" and not isinstance(old, dict | list):
        container[key] = str(old)
    elif change == "list" and isinstance(old, list):
        del old[len(old) // 2 :]
    elif change == "near" and type(old) in (int, float):
        container[key] = old + 1 if value is not None else -old
    else:
        container[key] = deepcopy(value)


class _Dumper(yaml.SafeDumper):
    """Writes what SafeDumper refuses as its text."""


_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))


def as_yaml(document: Any) -> bytes:
    text = yaml.dump(document, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=10**6)
    return _with_special(text, IN_YAML, ("'{}'", '"{}"', "{}"))


def as_json(document: Any, indent: int | None = None) -> bytes:
    try:
        text = json.dumps(document, ensure_ascii=False, default=str, indent=indent)
    except (ValueError, RecursionError):  # it contains itself, which JSON cannot say
        text = "[" * 5000
    return _with_special(text, IN_JSON, ('"{}"',))


def _with_special(text: str, special: dict[str, str], forms: tuple[str, ...]) -> bytes:
    if "@" in text:
        for name in sorted(special, key=len, reverse=True):
            for form in forms:
                text = text.replace(form.format(name), special[name])
    return text.encode("utf-8", "surrogatepass")


Damage = tuple[str, int, bytes]


def damages() -> SearchStrategy[Damage | None]:
    """Changes of bytes, or mostly none."""
    kinds = st.sampled_from(
        ["flip", "cut", "insert", "remove", "repeat", "utf-16", "bom", "latin1", "crlf", "append", "replace"]
    )
    damage = st.tuples(kinds, st.integers(0, 10**6), st.binary(max_size=6))
    return st.one_of(st.none(), st.none(), st.none(), damage)


def damaged(content: bytes, damage: Damage | None) -> bytes:
    if damage is None:
        return content
    kind, where, data = damage
    at = where % (len(content) + 1)
    if kind == "flip" and content:
        at = where % len(content)
        return content[:at] + bytes([content[at] ^ (1 << where % 8)]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + data + content[at:]
    if kind == "remove":
        return content[:at] + content[at + 1 + where % 40 :]
    if kind == "repeat":
        return content[:at] + content[at : at + 40] * 50 + content[at:]
    if kind == "utf-16":
        return content.decode("utf-8", "replace").encode("utf-16")
    if kind == "bom":
        return b"\xef\xbb\xbf" + content
    if kind == "latin1":
        return content + "é".encode("latin1")
    if kind == "crlf":
        return content.replace(b"\n", b"\r\n")
    return content + data if kind == "append" else data
