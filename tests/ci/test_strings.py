"""What our code, recipes and examples name in strings exists: modules, attributes, files. Imports alone are checked by
mypy; a move must break here and not in a job."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from setuptools import find_packages

from tests.ci.test_docs import ROOT

CORE = ("conf", "etl", "training", "pipelines")
NAME = rf"sparkring\.(?:{'|'.join(CORE)})(?:\.\w+)*"
MODULE = re.compile(rf"{NAME}(?::\w+)?")
BARE = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(CORE)})\b(?!\()", re.M)
FILE = re.compile(rf"(?:{'|'.join(CORE)}|tests|benchmarks|\.ci)/[\w./-]+\.(?:py|html|yaml|sh|txt)")
PYTHON = [p for folder in (*CORE, "tests", "benchmarks", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]


def strings(path: Path) -> Iterator[str]:
    """Every string of a Python file, docstrings and the cells of a notebook included."""
    if path.suffix == ".ipynb":
        yield from ("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    else:
        yield path.read_text()


def importable(reference: str) -> bool:
    """Whether `module`, `module:name` or `module.name.name` can be imported."""
    try:
        pkgutil.resolve_name(reference)
    except (ImportError, AttributeError):
        return False
    return True


def test_strings_that_are_modules_can_be_imported() -> None:
    named = {(path.name, text) for path in PYTHON for text in strings(path) if MODULE.fullmatch(text)}
    assert len(named) > 30
    assert [each for each in sorted(named) if not importable(each[1])] == []


def test_modules_named_within_recipes_notebooks_and_settings_can_be_imported() -> None:
    files = [
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "examples").rglob("*.yaml"),
        *(ROOT / "examples").rglob("*.ipynb"),
    ]
    text = "\n".join(string for path in files for string in strings(path))
    named = set(re.findall(rf"{NAME}:\w+", text)) | set(re.findall(rf"from ({NAME}) import", text))
    assert len(named) > 1
    assert [name for name in sorted(named) if not importable(name)] == []


def test_files_named_in_strings_exist() -> None:
    ours = [path for path in PYTHON if not path.is_relative_to(ROOT / "tests")]
    named = {(path, name) for path in ours for text in strings(path) for name in FILE.findall(text)}
    assert len(named) > 3
    assert [(path.name, name) for path, name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_package_is_in_the_wheel() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    listed = {
        name for where in find["where"] for name in find_packages(str(ROOT / where), find["exclude"], find["include"])
    }
    folders = {path.parent for name in CORE for path in (ROOT / name).rglob("*.py")}
    packages = {f"sparkring.{folder.relative_to(ROOT).as_posix().replace('/', '.')}" for folder in folders}
    assert packages | {"sparkring", "pipelines"} == listed


def test_nothing_is_imported_by_a_name_that_a_project_of_a_user_may_have() -> None:
    programs = {path.name: path.read_text() for path in PYTHON}  # programs in strings included
    assert {name: found for name, text in programs.items() if (found := BARE.findall(text))} == {}
