"""YAML that people write: parsed strictly, with errors that say where."""

from __future__ import annotations

import reprlib
from itertools import chain
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.scanner import ScannerError

__all__ = ["parse_yaml"]

FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of PyYAML, for odd texts
DEEPEST, MOST_VALUES = 50, 100_000  # of a text, with its aliases written out


def parse_yaml(text: str) -> Any:
    """The value of a text. Raises YAMLError."""
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """Rejects what plain YAML accepts, but nobody can mean: a key that occurs twice, what contains itself or would be
    endless with its aliases written out. All errors say where.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._measured: dict[yaml.Node, tuple[int, int]] = {}  # depth, and number of values with aliases written out

    def get_single_node(self) -> yaml.Node | None:
        try:
            return super().get_single_node()
        except FAILURES as error:  # an escape that is no character, a version of 5,000 digits
            raise ScannerError(None, None, str(error), self.get_mark()) from None

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self._level += 1
        if self._level > DEEPEST:
            raise ComposerError(None, None, "nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._measured[node] = self._measure(node)
        elif node not in self._measured:
            raise ComposerError(None, None, f"*{event.anchor} contains itself", event.start_mark)
        depth, values = self._measured[node]
        if depth > DEEPEST or values > MOST_VALUES:
            raise ComposerError(None, None, "with its aliases written out it is too large", event.start_mark)
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        within = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = chain.from_iterable(within) if isinstance(node, yaml.MappingNode) else within
        depths, values = zip((0, 0), *(self._measured[each] for each in nodes), strict=True)
        return 1 + max(depths), 1 + sum(values)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                float(value)  # an OverflowError if it is too large to compute with
        except FAILURES:
            written = reprlib.repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"{written} is no {kind}", node.start_mark) from None
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
