"""What the pages name exists: files, commands, make targets, settings."""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sparkring.conf.config import RunConfig
from sparkring.pipelines.cli import parser
from sparkring.pipelines.init import images, recommender
from sparkring.pipelines.init.folder import RECIPE

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md"))
}
FOLDERS = ("conf", "etl", "training", "pipelines", "tests", "docs", "examples", "benchmarks", ".ci")
FILE = re.compile(
    rf"(?<![\w/.~-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*{{}},-]*|[\w-]+\.(?:py|yaml|toml|lock))(?!\w)"
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
BRACES = re.compile(r"(.*)\{(.*)\}(.*)")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")]


def expanded(name: str) -> list[str]:
    """`a{b,c}` -> ab, ac."""
    if found := BRACES.match(name):
        return [found[1] + each + found[3] for each in found[2].split(",")]
    return [name]


def exists(page: str, name: str) -> bool:
    """From the root, beside the page, as any file of ours is named, or made by the page or by `sparkring init`."""
    name = name.rstrip("./")
    if name in (RECIPE, images.MODULE, recommender.MODULE) or re.search(
        rf"^(```\w+|cp \S+) {re.escape(name)}$", PAGES[page], re.M
    ):
        return True
    if (ROOT / name).exists() or (ROOT / page).parent.joinpath(name).exists():
        return True
    return any(fnmatch(file, name) or ("/" not in name and file.endswith(f"/{name}")) for file in FILES)


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    names = [*FILE.findall(PAGES[page]), *LINK.findall(PAGES[page])]
    assert [name for name in names for each in expanded(name) if not exists(page, each)] == []


def test_named_commands_exist() -> None:
    text = "\n".join(PAGES.values())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) - targets == set()
    top = parser()
    commands = {*top._subparsers._group_actions[0].choices, *top._option_string_actions}  # type: ignore
    assert set(re.findall(r"(?:^|[`/])sparkring ([a-z-]+)", text, re.M)) - commands == set()


def setting_exists(key: str) -> bool:
    model: object = RunConfig
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return True  # an argument of a model, a name the user gives
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        if field is None:
            return False
        kinds: list[Any] = [field.annotation]
        while kinds and not isinstance(kinds[0], type):
            kinds = [each for kind in kinds for each in getattr(kind, "__args__", ())]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return True


def test_named_settings_exist() -> None:
    pattern = re.compile(rf"`((?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z_0-9]+)+)(?:`|=|: )")
    named = {(page, key) for page, text in PAGES.items() for key in pattern.findall(text)}
    assert len(named) > 20
    foreign = {"spark", "py", "html"}  # Spark's own, file names
    wrong = [
        (page, key)
        for page, key in sorted(named)
        if not setting_exists(key) and not foreign & {key.split(".")[0], key.split(".")[-1]}
        if importlib.util.find_spec(key.rpartition(".")[0]) is None
    ]
    assert wrong == []


ROOM = re.compile(r"^\| `([\w.]+/?)` \| (.+) \|$", re.M)
PACKAGES = ("conf", "etl", "training", "pipelines", "tests")


def rooms(package: str) -> set[str]:
    """The folders (`data/`) and modules (`loop.py`) directly below a package."""
    below = [path for path in (ROOT / package).iterdir() if not path.name.startswith(("_", "."))]
    return {f"{path.name}/" if path.is_dir() else path.name for path in below if path.is_dir() or path.suffix == ".py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_has_a_line_for_every_room(package: str) -> None:
    page = PAGES[f"docs/explanation/packages/{package}.md"]
    named = [name for name, _ in ROOM.findall(page.partition("\n## ")[0])]
    assert sorted(named) == sorted(rooms(package))


@pytest.mark.parametrize("package", sorted({*PACKAGES} - {"tests"}))
def test_each_folder_of_a_package_has_a_file_to_begin_with(package: str) -> None:
    page = PAGES[f"docs/explanation/packages/{package}.md"]
    begins = dict(re.findall(r"^\| `(\w+/)` \| .+ \| `(\w+\.\w+)` \|$", page, re.M))
    assert begins.keys() == {name for name in rooms(package) if name.endswith("/")}
    assert [name for name in begins if not (ROOT / package / name / begins[name]).is_file()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_says_which_three_files_to_read_first(package: str) -> None:
    first = re.search(r"Three files to read first: (.*?)\n\n", PAGES[f"docs/explanation/packages/{package}.md"], re.S)
    assert first is not None
    files = re.findall(rf"`({package}/[\w/]+\.py)`", first[1])
    assert len(set(files)) == 3 and [name for name in files if not (ROOT / name).is_file()] == []


def test_every_path_in_where_to_look_exists() -> None:
    table = PAGES["CONTRIBUTING.md"].partition("## Where to look")[2]
    paths = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|html|toml))`", table)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120
