"""Read a recipe's file, and what it extends: `extends: other.yaml` begins with the values of another recipe."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from sparkring.conf.blocks.parallel import PLANNED
from sparkring.conf.bounded_yaml import key_lines, parse_yaml
from sparkring.conf.errors import ConfigError
from sparkring.conf.recipes import RECIPES, recipe_names

MOST_CHARACTERS = 1 << 18
EXTENDS = "extends"
TakesNull = Callable[[tuple[str, ...]], bool]
OfOtherKinds = Callable[[tuple[str, ...], str], set[str]]
OF_THIS_FOLDER = ("./", "../")  # how a source's path begins that is relative to its recipe's file
KIND = "kind"
PARALLEL, LAYOUT, AUTO = "parallel", "layout", "auto"


@dataclass(frozen=True)
class RecipeValues:
    """The values of a recipe, before they are checked. `origins`: file and line by key; `where`: the recipe's file."""

    where: str
    values: dict[str, Any]
    origins: dict[str, str]


def read_recipe(recipe: str, takes_null: TakesNull, of_other_kinds: OfOtherKinds) -> RecipeValues:
    """Read a recipe by name or path, over the recipes that it extends. Raises ConfigError.

    Args:
        recipe: its name or path.
        takes_null: whether the key at a path may be null; a null of any other key stands for its default.
        of_other_kinds: the keys that the block at a path has of other kinds only than this one.
    """
    chain = read_chain(recipe)
    made = chain[-1]
    for over in reversed(chain[:-1]):
        made = extend(made, over, takes_null, of_other_kinds)
    return made


def read_chain(recipe: str) -> list[RecipeValues]:
    """Read a recipe, the one it extends, the one that extends, and so on. ConfigError also for a circle."""
    chain, ids = list[RecipeValues](), list[str]()
    by = ""  # file and line of `extends`
    while True:
        try:
            one = _read(recipe, {name_of(other.where) for other in chain})
        except ConfigError as error:
            if not chain:
                raise
            raise ConfigError(chain[0].where, [f"{EXTENDS} ({by}): {recipe}: {p}" for p in error.problems]) from error
        identity = os.path.realpath(one.where) if is_path(recipe) else one.where
        if identity in ids:
            circle = " -> ".join([*(other.where for other in chain[ids.index(identity) :]), one.where])
            raise ConfigError(chain[0].where, [f"{EXTENDS} ({by}): goes in a circle, {circle}; take one of them out"])
        chain.append(one)
        ids.append(identity)
        if EXTENDS not in one.values:
            return chain
        base, by = one.values.pop(EXTENDS), one.origins.pop(EXTENDS)
        if not isinstance(base, str) or not base:
            rule = "must be one recipe: the path of a YAML file, relative to this one, or a built-in name"
            raise ConfigError(chain[0].where, [f"{EXTENDS} = {base!r} ({by}): {rule}"])
        recipe = os.path.normpath(os.path.join(os.path.dirname(one.where), base)) if is_path(base) else base


def extend(
    under: RecipeValues, over: RecipeValues, takes_null: TakesNull, of_other_kinds: OfOtherKinds
) -> RecipeValues:
    """Merge the values of one recipe over those of another: blocks key by key, everything else as a whole.

    A block that becomes one of another kind loses the keys that this kind does not have; a parallel block whose layout
    becomes auto loses those that a plan chooses.

    Args:
        under: the recipe that is extended.
        over: the one that extends it.
        takes_null: tells whether a key accepts null, see `read_recipe`.
        of_other_kinds: keys that only other kinds of a block have, see `read_recipe`.
    """
    replaced, dropped = list[str](), list[str]()

    def merged(base: dict[str, Any], own: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        made, kind = dict(base), own.get(KIND)
        gone = of_other_kinds(path, kind) if isinstance(kind, str) and kind != base.get(KIND) else set[str]()
        if path == (PARALLEL,) and own.get(LAYOUT) == AUTO:
            gone |= {*PLANNED}
        for name in gone & base.keys():
            del made[name]
            replaced.append(".".join((*path, name)))
        for name, value in own.items():
            here, below = (*path, name), made.get(name)
            if value is None and not takes_null(here):
                made.pop(name, None)
                dropped.append(".".join(here))
            elif isinstance(value, dict):
                made[name] = merged(below if isinstance(below, dict) else {}, value, here)
            else:
                made[name] = value
                replaced.append(".".join(here))
        return made

    values = merged(under.values, over.values, ())
    gone = tuple(f"{key}." for key in (*replaced, *dropped))
    origins = {key: line for key, line in under.origins.items() if not f"{key}.".startswith(gone)}
    origins |= {key: line for key, line in over.origins.items() if key not in dropped}
    return RecipeValues(over.where, values, origins)


def _read(recipe: str, names_taken: Collection[str]) -> RecipeValues:
    """Read one file. `names_taken`: of files that origins name already, so this one is named by its path."""
    where, text = _find(recipe)
    try:
        values, node = parse_yaml(text)
        if not isinstance(values, dict | None):
            raise yaml.YAMLError("a recipe is a mapping of keys to values")
    except yaml.YAMLError as error:
        raise ConfigError(where, [f"not valid YAML: {error}"]) from None
    shown = where if name_of(where) in names_taken else name_of(where)
    lines = {key: f"{shown}:{line}" for key, line in key_lines(node, "")}
    if values and values.get(PARALLEL) == AUTO:  # short for a block with this one key
        values, lines = values | {PARALLEL: {LAYOUT: AUTO}}, lines | {f"{PARALLEL}.{LAYOUT}": lines[PARALLEL]}
    if values and is_path(recipe):
        _locate_sources(values, os.path.dirname(where))
    return RecipeValues(where, values or {}, lines)


def _locate_sources(values: dict[str, Any], folder: str) -> None:
    """Make source paths that begin with `./` or `../` absolute, from the recipe's folder: so both can move together."""
    sources = etl.get("sources") if isinstance(etl := values.get("etl"), dict) else None
    for source in sources.values() if isinstance(sources, dict) else ():
        path = source.get("path") if isinstance(source, dict) else None
        if isinstance(path, str) and path.startswith(OF_THIS_FOLDER):
            source["path"] = os.path.abspath(os.path.join(folder, path))


def name_of(where: str) -> str:
    return where.rpartition("/")[2]


def is_path(recipe: str) -> bool:
    """Return whether a recipe is given by its path; otherwise it is a built-in recipe's name."""
    return recipe.endswith((".yaml", ".yml")) or "/" in recipe


def _find(recipe: str) -> tuple[str, str]:
    """Read a recipe by name or by path; returns (where it is from, its text)."""
    if is_path(recipe):
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
