"""One-line changes that break a promise, as data: a YAML file per package. `make mutants` tries them.

A file maps each source file to its mutants, so a source file that moves changes one key. A mutant is found by its text:
`old` stands exactly once in the source file and becomes `new`. `tests` are pytest's arguments that must notice, named
so that a mutant costs seconds. `verdict` is what the last trial found: `caught`, and by which test, or `survived`;
without one it has not been tried. `equivalent` says why a change cannot be noticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

FOLDER = Path(__file__).resolve().parent
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class BlockDumper(yaml.SafeDumper):
    """Write a text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


BlockDumper.add_representer(str, _text)


@dataclass(frozen=True)
class Mutant:
    """One change of one source file, the tests that must notice it, and whether they did."""

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""
    verdict: Literal["", "caught", "survived"] = ""
    by: str = ""  # pytest's line about the first test that noticed


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Every mutant, in the order of the files. TypeError for a key that none has."""
    return [
        Mutant(file=file, **entry)
        for path in sorted(folder.glob("*.yaml"))
        for file, entries in _of_file(path.read_text())
        for entry in entries
    ]


def _of_file(text: str) -> list[tuple[str, list[dict[str, str]]]]:
    """Each source file with its mutants, also where one stands twice, as after a merge: a dict has the last alone."""
    loader = LOADER(text)
    node = loader.get_single_node()
    return [(loader.construct_object(key), loader.construct_object(value, deep=True)) for key, value in node.value]


def save(mutants: Iterable[Mutant], folder: Path = FOLDER) -> None:
    """Write the YAML files, a file per package; mutants stay in their order."""
    packages: dict[str, dict[str, list[dict[str, str]]]] = {}
    for mutant in mutants:
        entry = {name: value for name, value in asdict(mutant).items() if name == "new" or value}
        file = entry.pop("file")
        packages.setdefault(file.partition("/")[0], {}).setdefault(file, []).append(entry)
    for package, entries in packages.items():
        text = yaml.dump(entries, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=100_000)
        (folder / f"{package}.yaml").write_text(text)
