"""Load a recipe: defaults < recipe.yaml < `key.path=value` overrides -> RunConfig, with the origin of each value.

Every problem is found before anything is raised: `ConfigError.problems` has one line per problem with the key's path,
the value, the rule, and for a misspelt key the nearest known name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import digest
from sparkring.conf.rules.recipe import combination_problems, leaves
from sparkring.conf.schedule.dated import ORIGIN, DateRequest, apply_date
from sparkring.conf.schedule.dates import DataInterval
from sparkring.conf.secrets import redact, redacted

# Of a recipe: the longest of ours has 300 values.
MOST_CHARACTERS, MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 1 << 18, 10_000, 50, 100
MOST_SHOWN = 200  # characters of a wrong value
RECIPES: Traversable = files("sparkring.conf.recipes")  # also where the code is shipped as a zip


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` lists every reason, with secrets hidden."""

    def __init__(self, where: str, problems: list[str]):
        self.problems = problems = [redact(problem) for problem in problems]
        super().__init__(problems_text(where, problems))


def problems_text(where: str, problems: list[str]) -> str:
    """One message of every problem at a place."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{where}: {count}\n" + "\n".join(f"  - {p}" for p in problems)


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, and for every leaf key where its value came from."""

    config: RunConfig
    origins: dict[str, str]
    interval: DataInterval | None = None  # of the command's date; None: it has none
    recipe: str = "RECIPE"  # as the command names it

    @property
    def digest(self) -> str:
        """sha256 of the resolved values; equal for any two ways of writing the same run."""
        return digest(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")


def recipe_names() -> list[str]:
    return sorted(p.name.removesuffix(".yaml") for p in RECIPES.iterdir() if p.name.endswith(".yaml"))


def load_config(recipe: str, overrides: Iterable[str] = (), date: DateRequest | None = None) -> Resolved:
    """Resolve a recipe by name (`flights`) or path (`my/run.yaml`). Raises ConfigError with every problem.

    `date`: fills in the recipe's templates and window; without one, a recipe with a schedule is that of its first date.
    """
    where, text = _find(recipe)
    try:
        values, node = parse_yaml(text)
        if not isinstance(values, dict | None):
            raise yaml.YAMLError("a recipe is a mapping of keys to values")
    except yaml.YAMLError as error:
        raise ConfigError(where, [f"not valid YAML: {error}"]) from None
    values, lines = values or {}, dict(_key_lines(node, ""))
    origins = {key: f"{where.rpartition('/')[2]}:{line}" for key, line in lines.items()}
    problems: list[str] = []
    for override in overrides:
        try:
            key, value = parse_override(override)
            _set(values, key.split("."), value)
        except ValueError as error:
            problems.append(f"override {override!r}: {error}")
            continue
        origins = {k: v for k, v in origins.items() if k != key and not k.startswith(key + ".")}
        origins[key] = "command line"
    dated = apply_date(values, date)
    values, problems = dated.values, [*problems, *dated.problems]
    origins |= dict.fromkeys(dated.set_keys, ORIGIN)
    if dated.problems:  # what else is wrong may only follow from it
        raise ConfigError(where, problems)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)  # without a schedule that is right, etl lacks what it would set
        found = [e for e in found if e["loc"][:1] == ("schedule",)] or found
        problems += dict.fromkeys(_problem(e, values, origins) for e in _without_patterns(found))
        raise ConfigError(where, problems) from None
    problems += combination_problems(config)
    if problems:
        raise ConfigError(where, problems)
    origins = {key: _origin(key, origins) for key, _ in leaves(config.model_dump(mode="json"))}
    return Resolved(config, origins, dated.interval, recipe)


def _find(recipe: str) -> tuple[str, str]:
    """Read a recipe by name or by path; returns (where it is from, its text)."""
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        where = recipe
        source: Traversable = Path(recipe)
    else:
        where, source = f"{recipe}.yaml", RECIPES / f"{recipe}.yaml"
    try:
        with source.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(where, [f"is not UTF-8 text ({error}); save it as UTF-8"]) from error
    except OSError as error:
        near = difflib.get_close_matches(recipe, recipe_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(recipe, [f"no such recipe ({error.strerror}){hint} Built in: {recipe_names()}"]) from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(where, [f"has more than {MOST_CHARACTERS} characters: no recipe is that long"])
    return where, text


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


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _key_lines(value, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{prefix}{index}", item.start_mark.line + 1
            yield from _key_lines(item, f"{prefix}{index}.")


def parse_override(text: str) -> tuple[str, Any]:
    """`key.path=value` with the value read as YAML: `optim.lr=1e-3`, `launch.world=4`, `train.steps=null`."""
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w]*(\.[\w-]+)*", key):
        raise ValueError("an override is key.path=value, such as optim.lr=1e-3")
    try:
        return key, parse_yaml(value)[0]
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not valid YAML: {error}") from error


def _set(values: dict[str, Any], keys: list[str], value: Any) -> None:
    here: Any = values
    for position, key in enumerate(keys):
        above = ".".join(keys[:position])
        if isinstance(here, list):
            if not key.isdigit() or int(key) >= len(here):
                raise ValueError(f"{above} is a list of {len(here)}; {key!r} is no position in it")
        elif not isinstance(here, dict):
            raise ValueError(f"{above} is {here!r}, not a block of keys")
        slot: Any = int(key) if isinstance(here, list) else key
        if position == len(keys) - 1:
            here[slot] = value
            return
        if here[slot] is None if isinstance(here, list) else here.get(slot) is None:
            here[slot] = {}
        here = here[slot]


def _origin(key: str, origins: dict[str, str]) -> str:
    """Origin of the key, or of the nearest block above it that was written whole; else the default."""
    if key in origins:
        return origins[key]
    while "." in key:
        key = key.rpartition(".")[0]
        if origins.get(key) == "command line":
            return "command line"
    return "default"


def _without_patterns(errors: list[Any]) -> list[Any]:
    """The errors without those of `module:name` where a word of a list may stand too, which is then said with these."""
    words = {error["loc"][:-1] for error in errors if error["type"] == "literal_error"}
    patterns = {e["loc"][:-1] for e in errors if e["type"] == "string_pattern_mismatch"}
    return [
        error | {"msg": f"{error['msg']}, or module:name"}
        if error["type"] == "literal_error" and error["loc"][:-1] in patterns
        else error
        for error in errors
        if error["type"] != "string_pattern_mismatch" or error["loc"][:-1] not in words
    ]


def _problem(error: Any, values: dict[str, Any], origins: dict[str, str]) -> str:
    """One line for an error of pydantic: key, value, rule, place, and the nearest known name."""
    location = _present(error["loc"], values, error["type"] == "missing")
    key = ".".join(str(part) for part in location)
    where = f" ({origins[key]})" if key in origins else ""
    if error["type"] == "extra_forbidden":
        names = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(names))}"
        return f"{key}: unknown key{where}; {hint}"
    if error["type"] == "missing":
        return f"{key}: is required and missing"
    rule = error["msg"].removeprefix("Value error, ")
    expected = (error.get("ctx") or {}).get("expected")
    if error["type"] == "literal_error" and isinstance(error["input"], str) and expected:
        near = difflib.get_close_matches(error["input"], re.findall(r"'([^']+)'", expected), n=1)
        rule += f"; did you mean {near[0]!r}?" if near else ""
    rule = rule[0].lower() + rule[1:]
    given = json.dumps(redacted(error["input"], key, numbers=True), default=str)
    if isinstance(error["input"], dict) and error["type"] == "value_error":  # a block: the rule names a key within
        within = re.match(r"[a-z_]+(?=[.:]| = )", rule)
        joint = "." if within and within[0] in _known_keys(error["loc"]) else ": "
        return f"{key}{joint}{rule}{where}"
    return f"{key} = {given[:MOST_SHOWN]}: {rule}{where}"


def _present(loc: tuple[Any, ...], values: Any, is_missing: bool) -> list[Any]:
    """Reduce pydantic's location to the keys of the user: it also has union tags, and the key that is missing."""
    path: list[Any] = []
    for position, part in enumerate(loc):
        inside = (isinstance(values, dict) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if inside:
            values = values[part]
            path.append(part)
        elif is_missing and position == len(loc) - 1:
            path.append(part)
    return path or list(loc)


def _known_keys(location: tuple[Any, ...]) -> set[str]:
    """Names of the keys allowed at a location of pydantic's, through optionals, lists, dicts and unions."""
    schema = RunConfig.model_json_schema()

    def variants(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        yield node
        for inner in [*node.get("anyOf", []), *node.get("oneOf", [])]:
            yield from variants(inner)

    nodes = [schema]
    for part in location:
        found: list[dict[str, Any]] = []
        for node in (v for outer in nodes for v in variants(outer)):
            properties = node.get("properties", {})
            values = node.get("additionalProperties") or next(iter(node.get("patternProperties", {}).values()), None)
            if part in properties:
                found.append(properties[part])
            elif part in (properties.get("kind", {}).get("const"), node.get("title")):  # the tag of a union
                found.append(node)
            elif isinstance(part, int) and "items" in node:
                found.append(node["items"])
            elif isinstance(values, dict):
                found.append(values)
        nodes = found or nodes
    return {name for outer in nodes for node in variants(outer) for name in node.get("properties", {})}


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors (`# yaml-language-server: $schema=...`)."""
    return RunConfig.model_json_schema()
