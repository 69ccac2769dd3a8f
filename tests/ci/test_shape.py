"""The shape of the code that was reached and stays: names, lengths, arguments. Its words: test_words.py."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import pytest
from grimp import build_graph

from tests.ci.test_docs import ROOT
from tests.ci.test_strings import CORE

MOST_PARAMETERS = 4  # that need no `Args:` in a docstring
MOST_LINES = 3000  # of a folder's own files
MOST_ROOMS = {"conf": 25, "etl": 21, "training": 16, "pipelines": 18}  # direct children of a package

NOT_OF_A_NOUN = {"on", "of", "in", "are", "were", "do", "doe", "to", "no"}
PLURAL = re.compile(r" (?:(?!of |in |and |or |to )[a-z]+ )?(?!is\b|has\b|was\b|needs\b|less\b|plus\b)[a-z]{2,}s\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
FILES = [path for package in CORE for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def definitions() -> list[tuple[Path, Function | ast.ClassDef]]:
    """Every function and class, with its file."""
    every = ((path.relative_to(ROOT), node) for path in FILES for node in ast.walk(ast.parse(path.read_text())))
    return [(path, node) for path, node in every if isinstance(node, Function | ast.ClassDef)]


def lacks_arguments(node: Function) -> bool:
    """Whether the docstring of a function with many parameters does not list them."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [each for each in given if each.arg not in ("self", "cls")]
    return len(named) > MOST_PARAMETERS and "Args:" not in (ast.get_docstring(node) or "Args:")


def is_room(path: Path) -> bool:
    return (path.is_dir() and any(path.glob("*.py"))) or (path.suffix == ".py" and path.stem != "__init__")


def is_count(part: ast.expr) -> TypeGuard[ast.FormattedValue]:
    """Whether a part of an f-string is a number of things: of a call of len, sum or int, or shown with commas."""
    if not isinstance(part, ast.FormattedValue):
        return False
    if isinstance(part.value, ast.Name | ast.Attribute) and ast.unparse(part.value).isupper():
        return False  # a limit is of many
    is_called = isinstance(part.value, ast.Call) and ast.unparse(part.value.func) in ("len", "sum", "int")
    return is_called or (part.format_spec is not None and ast.unparse(part.format_spec) == "f','")


def counts_by_hand(text: str) -> list[str]:
    """Plurals behind a number that may be 1, for which there is `count_of`."""
    strings = [node.values for node in ast.walk(ast.parse(text)) if isinstance(node, ast.JoinedStr)]
    parts = [pair for values in strings for pair in pairwise(values)]
    counts = [(one, str(next_.value)) for one, next_ in parts if is_count(one) and isinstance(next_, ast.Constant)]
    return [ast.unparse(one.value) + found[0] for one, words in counts if (found := PLURAL.match(words))]


def no_nouns(text: str) -> list[str]:
    """What `count_of` is given in place of the noun of one thing: a plural, or words that no plural is made of."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    of_things = [call.args[1] for call in calls if ast.unparse(call.func) == "count_of"]
    given = [noun.value for noun in of_things if isinstance(noun, ast.Constant)]
    things = [(noun, re.sub(" (is|was|has|needs)$", "", noun).split()) for noun in given]
    return [noun for noun, words in things if re.search("[^s]s$", words[-1]) or {*words} & NOT_OF_A_NOUN]


def test_a_public_class_has_a_name_of_its_own() -> None:
    found = defaultdict(set)
    for path, node in definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name].add(str(path))
    assert len(found) > 500
    assert {name: sorted(files) for name, files in found.items() if len(files) > 1} == {}


def test_many_parameters_are_listed() -> None:
    functions = [(path, node) for path, node in definitions() if isinstance(node, Function)]
    assert len(functions) > 3000
    assert [f"{path}: {node.name}" for path, node in functions if lacks_arguments(node)] == []


def test_folders_are_short_enough_to_be_read() -> None:
    lines: dict[str, int] = defaultdict(int)
    for path in FILES:
        lines[str(path.parent.relative_to(ROOT))] += len(path.read_text().splitlines())
    assert {folder: n for folder, n in lines.items() if n > MOST_LINES} == {}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports for typing and inside functions count too: a circle reads as one file, wherever it is closed."""
    graph = build_graph("sparkring")
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imported.values())) > 3000 and len(imported) > 600
    TopologicalSorter(imported).prepare()  # CycleError has the circle
    one, other = "sparkring.etl.errors", "sparkring.etl.spark_platform.jvm"  # imported for typing alone
    assert other in imported[one]
    imported[other] |= {one}
    with pytest.raises(CycleError):
        TopologicalSorter(imported).prepare()


def test_a_package_has_few_rooms() -> None:
    rooms = {package: [each for each in (ROOT / package).iterdir() if is_room(each)] for package in MOST_ROOMS}
    assert {package: len(found) for package, found in rooms.items() if len(found) > MOST_ROOMS[package]} == {}


def test_one_thing_is_not_several() -> None:
    """Messages said `1 rows`."""
    assert counts_by_hand('f"{len(rows)} damaged files, {count:,} rows, {MOST:,} rows, {rank} has {name} is"') == [
        "len(rows) damaged files",
        "count rows",
    ]
    found = {path.relative_to(ROOT): counts_by_hand(path.read_text()) for path in FILES}
    assert {str(path): parts for path, parts in found.items() if parts} == {}


def test_what_is_counted_is_named_by_the_noun_of_one() -> None:
    """Messages said `on thi host`, and `all but 1 are number`."""
    assert no_nouns(
        "count_of(n, 'on thi'), count_of(n, 'bytes doe'), count_of(n, 'are number'), count_of(n, 'rows')"
    ) == [
        "on thi",
        "bytes doe",
        "are number",
        "rows",
    ]
    assert no_nouns("count_of(n, 'class'), count_of(n, 'data file is')") == []
    found = {path.relative_to(ROOT): no_nouns(path.read_text()) for path in FILES}
    assert {str(path): nouns for path, nouns in found.items() if nouns} == {}


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ('def f(a, b, c, d, e):\n    """Do."""', True),
        ('def f(self, a, b, c, *, d):\n    """Do."""', False),
        ('def f(a, b, c, *, d, e):\n    """Do.\n\n    Args:\n        a: one.\n    """', False),
        ("def f(a, b, c, d, e): ...", False),
    ],
)
def test_the_check_of_arguments_finds_what_it_is_for(source: str, lacks: bool) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, Function) and lacks_arguments(function) == lacks
