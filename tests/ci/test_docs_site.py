"""The site of docs/: it builds, a dead link is an error, and the generated reference leaves nothing out."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.rules.recipe import BUILT_IN_TABULAR
from sparkring.pipelines.cli import parser
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.training.launch.messages import Event, Message
from tests.ci.test_docs import ROOT

MODULES = ("api", "commands", "configuration", "exit_codes", "files", "messages", "metrics", "models", "source")


@pytest.fixture(scope="module")
def pages() -> Iterator[SimpleNamespace]:
    """The modules of docs/generator, by name, as docs/hook.py imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield SimpleNamespace(**{name: importlib.import_module(f"generator.{name}") for name in MODULES})
    for name in [each for each in sys.modules if each.partition(".")[0] == "generator"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def known(pages: SimpleNamespace) -> list[Any]:
    """Every definition of the code."""
    return list(pages.source.definitions())


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site with the options of `make check`: with `--quiet` mkdocs counts no warnings, and never fails."""
    (words,) = set(re.findall(r"mkdocs build(.*)", (ROOT / "Makefile").read_text()))
    given = ["--config-file", str(config), "--site-dir", str(site)]
    command = [sys.executable, "-m", "mkdocs", "build", *words.split(), *given]
    names = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=names, capture_output=True, text=True, timeout=600)


@pytest.mark.slow  # `make check` builds it, strictly
def test_the_site_builds_with_its_generated_pages(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    built = {path.stem for path in (tmp_path / "reference").glob("*.html")}
    assert built >= {"configuration", "commands", "exit_codes", "metrics", "messages", "files", "api"}
    assert "train.max_skipped_steps".rpartition(".")[2] in (tmp_path / "reference/configuration.html").read_text()


@pytest.mark.parametrize(
    ("line", "dead"),
    [("[other](other.md#there)", 0), ("[no page](nowhere.md) [no heading](other.md#nowhere)", 2)],
)
def test_a_dead_link_is_an_error(tmp_path: Path, line: str, dead: int) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "README.md").write_text(f"# Page\n\n{line}\n")
    (pages / "other.md").write_text("# Other\n\n## There\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: {pages}\nhooks: []\nnav: [README.md, other.md]\n")
    done = build(config, tmp_path / "site")
    assert (done.returncode != 0) == (dead > 0), done.stderr
    assert done.stderr.count("WARNING") == dead and (f"Aborted with {dead} warnings" in done.stdout) == (dead > 0)


def test_every_configuration_key_has_a_description(pages: SimpleNamespace) -> None:
    keys = [key for block in pages.configuration.blocks() for key in block.keys]
    assert len(keys) > 350
    assert [key.path for key in keys if not key.description.strip()] == []


def test_every_option_of_every_command_has_a_help(pages: SimpleNamespace) -> None:
    found = list(pages.commands.commands(parser()))
    assert len(found) > 25
    rows = [
        (words, *row) for words, command, has_below in found if not has_below for row in pages.commands.options(command)
    ]
    assert [row for row in rows if not row[-1]] == []
    assert [words for words, command, _ in found if not command.description] == []


def test_an_option_is_shown_with_its_default_and_choices(pages: SimpleNamespace) -> None:
    command = argparse.ArgumentParser(prog="sparkring try")
    command.add_argument("--form", choices=["a", "b"], default="a", help="the form of %(prog)s")
    assert pages.commands.options(command) == [["`--form FORM`", "`a`", "the form of sparkring try (a, b)"]]


def test_every_exit_code_has_a_meaning(pages: SimpleNamespace, known: list[Any]) -> None:
    found = pages.exit_codes.codes(known)
    assert {each.name: int(str(each.default)) for each in found} == {each.name: each.value for each in Exit}
    assert [each.name for each in found if not each.comment] == []


def test_every_message_is_described(pages: SimpleNamespace, known: list[Any]) -> None:
    listed = {each.name for each in pages.messages.messages(known)}
    sent = {each.__name__ for union in (Message, Event) for each in union.__args__}  # type: ignore[attr-defined]
    assert sent <= listed
    assert [each.name for each in pages.messages.messages(known) if each.name in sent and not each.doc] == []
    assert pages.messages.receivers(known)["Hello"] == ["ToDriver"]


def test_every_stored_file_is_listed(pages: SimpleNamespace, known: list[Any]) -> None:
    listed: set[int] = set()
    for _, name in pages.files.FILES.values():
        root = pages.files.reader(known, name)
        listed |= {id(root), *(id(each) for each in pages.files.nested(known, root))}
    assert [each.name for each in known if pages.files.is_stored(each) and id(each) not in listed] == []


def test_every_metric_that_is_logged_is_listed(pages: SimpleNamespace) -> None:
    found = set(pages.metrics.names_in_code())
    assert len(found) > 30
    assert sorted(found - pages.metrics.LOGGED.keys()) == [] and sorted(pages.metrics.LOGGED.keys() - found) == []


def test_every_built_in_model_is_listed_with_the_meaning_of_its_parameters(
    pages: SimpleNamespace, known: list[Any]
) -> None:
    page = pages.models.page(known)
    recipes = "".join(path.read_text() for path in (ROOT / "conf/recipes").glob("*.yaml"))
    factories = {BUILT_IN_TABULAR, *re.findall(r"factory: ([\w.:]+)", recipes)}
    assert len(factories) > 3
    assert [each for each in factories if f"`{each.removeprefix('sparkring.')}`" not in page] == []
    rows = [row for each in pages.models.models(known) for row in pages.models.rows(pages.models.constructor(each))]
    assert len(rows) > 20 and [row for row in rows if not all(row)] == []


def test_all_that_pages_tell_users_to_import_is_documented(pages: SimpleNamespace, known: list[Any]) -> None:
    found = [pages.api.definition(known, name) for name in pages.api.names()]
    assert len(found) > 10
    assert [each.name for each in found if not each.doc] == []


def test_generated_tables_have_as_many_cells_in_every_row(pages: SimpleNamespace, known: list[Any]) -> None:
    cells = re.compile(r"(?<!\\)\|")
    for text in (
        pages.configuration.page(),
        pages.commands.page(),
        pages.metrics.page(),
        pages.files.page(known),
        pages.messages.page(known),
    ):
        width = 0
        for line in text.splitlines():
            count = len(cells.findall(line)) if line.startswith("|") else 0
            assert count == width or not width or not count, line
            width = count
