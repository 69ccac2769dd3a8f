"""Load a recipe: defaults < recipe (over what it extends) < overrides -> RunConfig, with the origin of each value.

Every problem is found before anything is raised: `ConfigError.problems` has one line per problem with the key's path,
the value, the rule, and for a misspelt key the nearest known name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from sparkring.conf.blocks.parallel import PLANNED
from sparkring.conf.bounded_yaml import parse_yaml
from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.errors import ConfigError
from sparkring.conf.recipe_file import AUTO, EXTENDS, LAYOUT, PARALLEL, read_recipe
from sparkring.conf.rules.families import of_family
from sparkring.conf.rules.recipe import RECIPE, leaves
from sparkring.conf.rules.rule import find_problems, nearest
from sparkring.conf.schedule.dated import ORIGIN, DateRequest, apply_date
from sparkring.conf.schedule.dates import DataInterval
from sparkring.conf.schema import NAME, REFERENCE, RUN_NAME
from sparkring.conf.secrets import redacted
from sparkring.conf.tasks import Families

OF_TABLES = ("etl", "predict", "schedule")  # how rows are made of tables; an override `dataset=URI` takes their place
MOST_SHOWN = 200  # characters of a wrong value
SYNONYMS = {"gpu": "cuda", "adam": "adamw", "classification": "multiclass"}  # nearer in spelling is another value
PATTERNS = {  # in words
    NAME: "must be letters, digits and _, and begin with a letter from a to z or _",
    RUN_NAME: "must be lower-case letters from a to z, digits, - and _, and begin with a letter or digit",
}
TYPED = {"type", "anyOf", "oneOf", "$ref", "enum", "const"}  # of a JSON schema: what limits a value


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, and for every leaf key where its value came from."""

    config: RunConfig
    origins: dict[str, str]
    interval: DataInterval | None = None  # of the command's date; None: it has none
    recipe: str = "RECIPE"  # as the command names it
    overrides: tuple[str, ...] = ()  # of the command, `key=value`

    @property
    def digest(self) -> str:
        """sha256 of the resolved values; equal for any two ways of writing the same run."""
        return digest(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def of_family(self, family: Families) -> Resolved:
        """Return the configuration of one of the model families that it trains."""
        return replace(self, config=of_family(self.config, family))


def load_config(recipe: str, overrides: Iterable[str] = (), date: DateRequest | None = None) -> Resolved:
    """Resolve a recipe by name (`flights`) or path (`my/run.yaml`). Raises ConfigError with every problem.

    An override `dataset=URI` takes the place of the recipe's blocks about tables.

    `date`: fills in the recipe's templates and window; without one, a recipe with a schedule is that of its first date.
    """
    read, overrides = read_recipe(recipe, takes_null, of_other_kinds), tuple(overrides)
    where, values, origins = read.where, read.values, read.origins
    problems: list[str] = []
    given: set[str] = set()  # blocks that an override names
    for override in overrides:
        try:
            key, value = parse_override(override)
            if key == EXTENDS:
                raise ValueError("a recipe's file says what it extends, not the command line")
            if (key, value) == (PARALLEL, AUTO):
                key = f"{PARALLEL}.{LAYOUT}"
            if (key, value) == (f"{PARALLEL}.{LAYOUT}", AUTO) and isinstance(values.get(PARALLEL), dict):
                values[PARALLEL] = {name: kept for name, kept in values[PARALLEL].items() if name not in PLANNED}
                origins = {key: line for key, line in origins.items() if key.removeprefix("parallel.") not in PLANNED}
            _set(values, key.split("."), value)
        except ValueError as error:
            problems.append(f"override {override!r}: {error}")
            continue
        origins = {k: v for k, v in origins.items() if k != key and not k.startswith(key + ".")}
        origins[key] = "command line"
        given.add(key.partition(".")[0])
    if "dataset" in given and values["dataset"] is not None and "etl" not in given:
        replaced = [block for block in OF_TABLES if block in values and block not in given]
        values |= dict.fromkeys(replaced)
        origins |= dict.fromkeys(replaced, "command line")
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
        problems += dict.fromkeys(problem_line(e, values, origins) for e in _without_patterns(found))
        raise ConfigError(where, problems) from None
    problems += find_problems(RECIPE, config)
    if problems:
        raise ConfigError(where, problems)
    origins = {key: _origin(key, origins) for key, _ in leaves(config.model_dump(mode="json"))}
    return Resolved(config, origins, dated.interval, recipe, overrides)


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `key.path=value`, value as YAML: `optim.lr=1e-3`, `launch.world=4`, `train.steps=null`."""
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w]*(\.[\w-]+)*", key):
        raise ValueError("an override is key.path=value, such as optim.lr=1e-3")
    try:
        return key, parse_yaml(value)[0]
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or "no document"
        remedy = f"a text with marks of YAML's in it stands in quotes: '{key}=\"{value}\"'"
        raise ValueError(f"the value is not valid YAML ({why}); {remedy}") from error


def _set(values: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set the value of a key; null takes a value of the recipe out, where the key cannot be null."""
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
            if value is None and isinstance(here, dict) and slot in here and not takes_null(tuple(keys)):
                del here[slot]  # as in a recipe that extends another: etl.features.weekday=null
            else:
                here[slot] = value
            return
        if here[slot] is None if isinstance(here, list) else here.get(slot) is None:
            here[slot] = {}
        here = here[slot]


def _origin(key: str, origins: dict[str, str]) -> str:
    """Return the origin of the key, or of the nearest enclosing block written whole; else the default."""
    if key in origins:
        return origins[key]
    while "." in key:
        key = key.rpartition(".")[0]
        if origins.get(key) == "command line":
            return "command line"
    return "default"


def _without_patterns(errors: list[Any]) -> list[Any]:
    """Fold errors of `module:name` into those of a list of words, where a key takes either."""
    words = {error["loc"][:-1] for error in errors if error["type"] == "literal_error"}
    patterns = {e["loc"][:-1] for e in errors if e["type"] == "string_pattern_mismatch"}
    return [
        error | {"msg": f"{error['msg']}, or module:name"}
        if error["type"] == "literal_error" and error["loc"][:-1] in patterns
        else error
        for error in errors
        if error["type"] != "string_pattern_mismatch" or error["loc"][:-1] not in words
    ]


def problem_line(
    error: Any, values: dict[str, Any], origins: dict[str, str], model: type[BaseModel] = RunConfig
) -> str:
    """Describe a pydantic error in one line: key, value, rule, place, and the nearest known name."""
    location = _present(error["loc"], values, error["type"] == "missing")
    key = ".".join(str(part) for part in location)
    where = f" ({origins[key]})" if key in origins else ""
    if error["type"] == "extra_forbidden":
        names = _known_keys(error["loc"][:-1], model)
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(names))}"
        return f"{key}: unknown key{where}; {hint}"
    if error["type"] == "missing":
        return _unknown_name(location[:-1], values, origins, model) or f"{key}: is required and missing"
    if error["type"] == "union_tag_not_found":
        name = re.sub(r"\W", "", error["ctx"]["discriminator"])
        rule = f"is required and missing; it is one of {', '.join(_kinds_at(error['loc'], name, model))}"
        return _unknown_name(location, values, origins, model) or f"{key}.{name}: {rule}"
    rule = error["msg"].removeprefix("Value error, ")
    expected = (error.get("ctx") or {}).get("expected")
    if error["type"] == "literal_error" and isinstance(error["input"], str) and expected:
        options, given = re.findall(r"'([^']+)'", expected), error["input"]
        near = [SYNONYMS[given]] if SYNONYMS.get(given) in options else difflib.get_close_matches(given, options, n=1)
        rule += f"; did you mean {near[0]!r}?" if near else ""
    if error["type"] in ("model_type", "dict_type", "model_attributes_type"):
        rule = _block_rule(key, sorted(_known_keys(error["loc"], model)))
    if error["type"] == "string_pattern_mismatch":
        rule = _pattern_rule(error["ctx"]["pattern"], error["input"]) or rule
    if error["type"] == "union_tag_invalid":
        tag, known = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        near = difflib.get_close_matches(tag, re.findall(r"'([^']+)'", known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        name = re.sub(r"\W", "", error["ctx"]["discriminator"])  # pydantic has it in quotes
        return f"{key}.{name} = {json.dumps(tag)}: is none of {known}{hint}{where}"
    rule = rule[0].lower() + rule[1:]
    given = json.dumps(redacted(error["input"], key, numbers=True), default=str)
    if isinstance(error["input"], dict) and error["type"] == "value_error":  # a block: the rule names a key within
        within = re.match(r"[a-z_]+(?=[.:]| = )", rule)
        joint = "." if within and within[0] in _known_keys(error["loc"], model) else ": "
        return f"{key}{joint}{rule}{where}"
    return f"{key} = {given[:MOST_SHOWN]}: {rule}{where}"


def _unknown_name(location: list[Any], values: dict[str, Any], origins: dict[str, str], model: type[BaseModel]) -> str:
    """Describe overrides of a block that the recipe lacks, where the user chooses the names; "" if there are none.

    Args:
        location: keys of the user that lead to the block.
        values: values of the recipe, with the overrides.
        origins: file and line of each key, or the command line.
        model: class that defines the known keys.
    """
    key, above = ".".join(map(str, location)), values
    own = {origin for each, origin in origins.items() if each.startswith(f"{key}.")}
    if own != {"command line"} or _known_keys(tuple(location[:-1]), model):
        return ""
    for part in location[:-1]:
        above = above[part]
    others = [*above] if isinstance(above, dict) else []
    return f"{key}: the recipe has none of that name; {nearest(location[-1], {*others} - {location[-1]})}"


def _kinds_at(location: tuple[Any, ...], name: str, model: type[BaseModel]) -> list[str]:
    """List the values of the key `name`, which tells the kinds of a block apart."""
    schema = schema_of(model)
    nodes = [schema]
    for part in location:
        nodes = _nodes_below(schema, nodes, part)
    kinds = (variant for outer in nodes for variant in _variants(schema, outer))
    tags = (kind.get("properties", {}).get(name, {}) for kind in kinds)
    return sorted({word for tag in tags for word in tag.get("enum", [tag["const"]] if "const" in tag else [])})


def _block_rule(key: str, names: list[str]) -> str:
    """Describe what a block key expects, for an error about a single value given to it."""
    word = f"{AUTO!r}, or " if key == PARALLEL else ""
    return f"must be {word}a block of keys" + (f": {', '.join(names)}" if names else ", whose names are yours")


def _pattern_rule(pattern: str, value: str) -> str:
    """Describe a schema pattern in words; empty where the pattern is clear by itself."""
    if pattern != REFERENCE:
        return PATTERNS.get(pattern, "")
    module, dot, name = value.rpartition(".")
    near = f"; did you mean {f'{module}:{name}'!r}?" if dot and re.match(REFERENCE, f"{module}:{name}") else ""
    return f"is not module:name, such as my_model:Net{near}"


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


@cache
def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the model's JSON schema, cached because it takes longest to make. Do not change it."""
    return model.model_json_schema()


def _known_keys(location: tuple[Any, ...], model: type[BaseModel]) -> set[str]:
    """List the keys allowed at a pydantic location, through optionals, lists, dicts and unions."""
    schema = schema_of(model)
    nodes = [schema]
    for part in location:
        nodes = _nodes_below(schema, nodes, part) or nodes
    return {name for outer in nodes for node in _variants(schema, outer) for name in node.get("properties", {})}


def takes_null(path: tuple[str, ...]) -> bool:
    """Return whether the key at a path may be null; True for unknown keys."""
    schema = schema_of(RunConfig)
    nodes = [schema]
    for part in path:
        nodes = _nodes_below(schema, nodes, part)
    kinds = [node for outer in nodes for node in _variants(schema, outer)]
    return any(node.get("type") == "null" or not node.keys() & TYPED for node in kinds) or not nodes


def of_other_kinds(path: tuple[str, ...], kind: str) -> set[str]:
    """Return the keys that only other kinds of the block at a path have; empty for an unknown kind."""
    schema = schema_of(RunConfig)
    nodes = [schema]
    for part in path:
        nodes = _nodes_below(schema, nodes, part)
    keys: dict[str, set[str]] = {}
    for node in (variant for outer in nodes for variant in _variants(schema, outer)):
        if isinstance(tag := node.get("properties", {}).get("kind", {}).get("const"), str):
            keys.setdefault(tag, set()).update(node["properties"])
    return set().union(*keys.values()) - keys[kind] if kind in keys else set()


def _variants(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a JSON schema node, with references resolved."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    yield node
    for inner in [*node.get("anyOf", []), *node.get("oneOf", [])]:
        yield from _variants(schema, inner)


def _nodes_below(schema: dict[str, Any], nodes: list[dict[str, Any]], part: Any) -> list[dict[str, Any]]:
    """Return the JSON schema nodes one location part further; [] where it leads nowhere."""
    found: list[dict[str, Any]] = []
    for node in (v for outer in nodes for v in _variants(schema, outer)):
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
    return found


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, for editors (`# yaml-language-server: $schema=...`)."""
    schema = RunConfig.model_json_schema()
    about = "recipe to begin with: a path relative to this file, or a built-in name (docs/how-to/recipes.md)"
    parallel = schema["properties"][PARALLEL]
    parallel = {"anyOf": [{"const": AUTO}, {"$ref": parallel["$ref"]}]} | {
        key: value for key, value in parallel.items() if key != "$ref"
    }
    own = {EXTENDS: {"type": "string", "description": about}}
    return schema | {"properties": own | schema["properties"] | {PARALLEL: parallel}}
