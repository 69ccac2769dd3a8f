"""The page of configuration keys, from the JSON schema that editors use (`sparkring config schema`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from generator.source import cell, code, prose, table
from sparkring.conf.load import json_schema

Schema = dict[str, Any]
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
SIZES = {"minItems": "at least {} items", "minProperties": "at least {} names", "minLength": "not empty"}
SHOWN = 60  # characters of a default


@dataclass(frozen=True)
class Key:
    """One key of a block."""

    path: str
    kind: str  # its type and allowed values
    default: str
    description: str


@dataclass(frozen=True)
class Block:
    """The keys that stand together at a path; of several kinds, each is a block."""

    path: str
    kind: str  # what selects it among others at this path
    about: str
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        return (f"`{self.path}`" if self.path else "At the top") + (f", {self.kind}" if self.kind else "")


def blocks() -> list[Block]:
    """Every block of a recipe, in the order of the keys that hold them."""
    schema = json_schema()
    return list(_blocks(schema, schema["$defs"], "", ""))


def _blocks(schema: Schema, known: Schema, path: str, kind: str) -> Iterator[Block]:
    required = schema.get("required", ())
    keys, below = [], []
    for name, prop in schema["properties"].items():
        here = f"{path}.{name}" if path else name
        inner = list(_inner(prop, known, here))
        keys.append(Key(here, type_of(prop, known), _default(prop, name in required), _about(prop, inner)))
        below += inner
    yield Block(path, kind, schema.get("description", ""), tuple(keys))
    for where, each, of_kind in below:
        yield from _blocks(each, known, where, of_kind)


def _inner(prop: Schema, known: Schema, path: str) -> Iterator[tuple[str, Schema, str]]:
    """(path, schema, kind) of the blocks that a key holds."""
    if "$ref" in prop:
        name = prop["$ref"].rpartition("/")[2]
        if "properties" in known[name]:
            yield path, known[name], ""
        return
    if "oneOf" in prop:
        for option in prop["oneOf"]:
            for where, each, _ in _inner(option, known, path):
                yield where, each, _selector(each)
        return
    for option in prop.get("anyOf", ()):
        yield from _inner(option, known, path)
    if "items" in prop:
        yield from _inner(prop["items"], known, f"{path}[]")
    for value in _values(prop):
        yield from _inner(value, known, f"{path}.<name>")


def _values(prop: Schema) -> list[Schema]:
    """Schemas of the values of a map."""
    other = prop.get("additionalProperties")
    return [*prop.get("patternProperties", {}).values(), *([other] if isinstance(other, dict) else [])]


def _selector(schema: Schema) -> str:
    """`kind: webhook` or `format: delta`: how a block of several kinds is chosen."""
    for name in ("kind", "format"):
        prop = schema["properties"].get(name, {})
        allowed = [prop["const"]] if "const" in prop else prop.get("enum", [])
        if allowed:
            return f"`{name}`: {', '.join(allowed)}"
    return "without `format`"


def type_of(prop: Schema, known: Schema) -> str:
    """The type of a value in words, with the values or the range that it allows."""
    if "$ref" in prop:
        target = known[prop["$ref"].rpartition("/")[2]]
        return "block" if "properties" in target else type_of(target, known)
    for several in ("oneOf", "anyOf"):
        if several in prop:
            return " or ".join(dict.fromkeys(type_of(option, known) for option in prop[several]))
    if "const" in prop or "enum" in prop:
        return ", ".join(code(str(each)) for each in ([prop["const"]] if "const" in prop else prop["enum"]))
    kind = prop.get("type", "any value")
    if kind == "array":
        items = prop.get("items") or {}
        text = f"list of {type_of(items, known)}" if items else "list"
        if "prefixItems" in prop:
            text = f"[{', '.join(type_of(each, known) for each in prop['prefixItems'])}]"
    elif kind == "object":
        text = " or ".join(f"map of names to {type_of(each, known)}" for each in _values(prop)) or "map"
    else:
        text = {"string": "text", "number": "number", "boolean": "true or false"}.get(kind, kind)
        text += f" like {code(prop['pattern'])}" if "pattern" in prop else ""
    limits = [f"{sign} {prop[name]:g}" for name, sign in LIMITS.items() if name in prop]
    limits += [words.format(prop[name]) for name, words in SIZES.items() if name in prop and "prefixItems" not in prop]
    return " ".join([text, ", ".join(limits)]).strip()


def _default(prop: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    if "$ref" in prop and isinstance(prop.get("default"), dict):
        return "see its keys"
    text = json.dumps(prop.get("default"), ensure_ascii=False)
    return code(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def _about(prop: Schema, inner: list[tuple[str, Schema, str]]) -> str:
    """The key's description; else its block's; of a key that selects a kind, that."""
    if text := prop.get("description"):
        return text
    if "const" in prop:
        return "selects this kind"
    blocks = [each for _, each, _ in inner]
    if len(blocks) == 1:
        return blocks[0].get("description", "")
    return "one of the kinds below" if blocks else ""


def page() -> str:
    """The whole page."""
    text = [
        "# Configuration keys\n",
        "A recipe is YAML with these keys; `key.path=value` on the command line wins over it. Names in `_s` are "
        "seconds, in `_bytes` bytes; `<name>` is a name that the recipe gives, `[]` an item of a list. What a recipe "
        "extends and how it is resolved: [recipes](../how-to/recipes.md).\n",
    ]
    for block in blocks():
        rows = [
            [
                code(key.path.removeprefix(f"{block.path}.") if block.path else key.path),
                key.kind,
                key.default,
                prose(cell(key.description)).replace("None:", "null:"),
            ]
            for key in block.keys
        ]
        depth = "##" if "." not in block.path else "###"
        text += [f"{depth} {block.title}\n", prose(block.about) + "\n" if block.about else ""]
        text.append(table(["key", "type", "default", "meaning"], rows))
    return "\n".join(text)
