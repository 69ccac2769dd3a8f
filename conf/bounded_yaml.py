"""Parse YAML of which no few lines can fill the memory, and that has no key twice; each key with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

# Of a recipe: the longest of ours has 300 values.
MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 10_000, 50, 100


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-3` as a float (YAML 1.1 does not), refuses a key given twice, and is bounded.

    Unbounded, a few lines of aliases of aliases stand for gigabytes. Raises YAMLError, with the line.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MOST_DEPTH} levels", self.peek_event().start_mark
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str") and len(node.value) > MOST_DIGITS:
            raise yaml.constructor.ConstructorError(None, None, "a number of so many digits", node.start_mark)
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # half of a surrogate pair can neither be shown nor stored
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise ValueError("a number of more than 64 bits")
            return value
        except (ValueError, OverflowError) as error:  # the 13th month, an empty number
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                what = "given twice" if isinstance(key, str) else "not text; put it in quotes"
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is {what}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Parse bounded YAML into its value and its nodes, which know their lines. Raises YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _count(node, {})
        return _unshared(loader.construct_document(node)), node
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a node with its aliases written out. YAMLError if they are too many."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES  # until it is known: an alias of a block inside itself stands for endless ones
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_count(n, known) for n in inner)
    if known[id(node)] > MOST_VALUES:
        raise yaml.composer.ComposerError(None, None, f"aliases stand for over {MOST_VALUES} values", node.start_mark)
    return known[id(node)]


def _unshared(value: Any) -> Any:
    """Copy the block behind every YAML alias, so that an override of one changes no other."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the path of every key below a node, and its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from key_lines(value, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{prefix}{index}", item.start_mark.line + 1
            yield from key_lines(item, f"{prefix}{index}.")
