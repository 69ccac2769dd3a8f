"""A rule over configuration: the one form of them, how they are made, and what runs a list of them.

A stage is a list of rules over the same facts, checked as soon as these are known (conf/rules/__init__.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from sparkring.conf.config import RunConfig

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Rule(Generic[Facts]):
    """A reason to refuse settings.

    keys: of the recipe, that it is about; () for all.
    find: one line per problem: key, value, why; what to do.
    refused: False where training can run all the same, and the lines are logged.
    """

    keys: tuple[str, ...]
    find: Callable[[Facts], Iterable[str]]
    refused: bool = True


def refuse(keys: tuple[str, ...], applies: Callable[[Facts], bool], why: str, remedy: str = "") -> Rule[Facts]:
    """Make a rule that refuses a combination. `why` and `remedy` are formatted with the facts as {0}."""
    text = f"{why}; {remedy}" if remedy else why
    return Rule(keys, lambda facts: [text.format(facts)] if applies(facts) else [])


def warn(keys: tuple[str, ...], applies: Callable[[Facts], bool], why: str) -> Rule[Facts]:
    """Make a rule that logs why settings have no effect. `why` is formatted with the facts as {0}."""
    return Rule(keys, lambda facts: [why.format(facts)] if applies(facts) else [], refused=False)


def no_effect(keys: tuple[str, ...], applies: Callable[[RunConfig], bool], why: str, remedy: str) -> Rule[RunConfig]:
    """Make a rule for keys that nothing reads where it applies: a value other than the default is refused."""

    def find(config: RunConfig) -> Iterator[str]:
        for key in keys if applies(config) else ():
            for value, default in _value_and_default(config, key):
                if value != default:
                    is_block = isinstance(value, BaseModel)
                    shown = value.model_dump(mode="json", exclude_defaults=True) if is_block else value
                    yield f"{key} = {shown!r}: has no effect {why}; {remedy}"

    return Rule(keys, find)


def _value_and_default(config: RunConfig, key: str) -> Iterator[tuple[Any, Any]]:
    """Yield a key's value and its default; nothing if a block above it is null."""
    *above, name = key.split(".")
    block: BaseModel | None = config
    for part in above:
        block = getattr(block, part) if block is not None else None
    if block is not None:
        yield getattr(block, name), type(block).model_fields[name].get_default(call_default_factory=True)


def find_problems(rules: Iterable[Rule[Facts]], facts: Facts) -> list[str]:
    """List what a stage refuses, each line once."""
    return _lines((rule for rule in rules if rule.refused), facts)


def find_notes(rules: Iterable[Rule[Facts]], facts: Facts) -> list[str]:
    """List what has no effect in a combination that can run."""
    return _lines((rule for rule in rules if not rule.refused), facts)


def _lines(rules: Iterable[Rule[Facts]], facts: Facts) -> list[str]:
    return list(dict.fromkeys(line for rule in rules for line in rule.find(facts)))


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Suggest the nearest known name, or list all. `otherwise`: text to show in place of the list."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"there are {names}"
