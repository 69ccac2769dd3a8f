"""The pages of docs/tutorials run as they stand: their files are written, their commands and Python run, in order."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pyspark
import pytest

from sparkring.conf.recipe_file import is_path
from sparkring.pipelines.cli import parse
from tests.e2e.commands import run_here

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs/tutorials").glob("*.md")}
LIMIT_S = 560
HERE = "table"  # the page whose job runs in `make test`, in this process: all pages together take many minutes
NEEDS_A_JOB = r"spark-class|mlflow|sparkring predict|sparkring sweep(?!.*--dry-run)"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of code. `file`: what it is written to; "": it is run, unless it is text."""

    language: str
    file: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page)]


def program(page: str) -> str:
    """One shell script of a whole page, so that a `cd` holds until its end."""
    parts = ["set -euo pipefail"]
    for block in blocks(page):
        if block.file:
            parts.append(f"cat > {shlex.quote(block.file)} <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK")
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK")
        elif block.language == "sh":
            parts.append(block.text)
    return "\n".join(parts) + "\n"


def commands(page: str) -> list[list[str]]:
    """The words of every `sparkring` command of a page."""
    text = "\n".join(block.text for block in blocks(page) if block.language == "sh").replace("\\\n", " ")
    found = [line.partition("|")[0] for line in text.splitlines() if re.match(r"\s*sparkring ", line)]
    return [shlex.split(line)[1:] for line in found]


def test_blocks_are_of_known_languages_and_none_is_lost() -> None:
    linked = re.findall(r"^\| \[.*?\]\((\w+)\.md\)", PAGES["README"], re.M)
    assert sorted(linked) == sorted(PAGES.keys() - {"README"}) and len(linked) >= 10
    for name, page in PAGES.items():
        assert {block.language for block in blocks(page)} <= {"sh", "python", "yaml", "text"}, name
        assert all(block.file for block in blocks(page) if block.language == "yaml"), name
        assert len(blocks(page)) * 2 == page.count("```"), name
        for block in blocks(page):
            if block.language == "python":
                compile(block.text, f"{name}.md", "exec")


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"README"}))
def test_every_command_of_a_page_parses_and_its_recipe_is_one_the_page_has(name: str) -> None:
    assert commands(PAGES[name])
    written = {"recipe.yaml", "best.yaml", *(block.file for block in blocks(PAGES[name]))}
    for words in commands(PAGES[name]):
        recipe = getattr(parse(words), "recipe", "flights")
        assert not is_path(recipe) or recipe in written, words


def environment(folder: Path) -> dict[str, str]:
    """As a user has it who has installed sparkring: `sparkring`, `python`, Spark's scripts and MLflow on the PATH."""
    scripts = folder / ".bin"
    scripts.mkdir()
    spark = Path(pyspark.__file__).parent
    starts = {
        "python": f'exec {sys.executable} "$@"',
        "sparkring": f'exec {sys.executable} -m sparkring.pipelines.cli "$@"',
        "mlflow": f'exec {sys.executable} -m mlflow "$@"',
        "uvicorn": f'exec {sys.executable} -m uvicorn "$@"',  # which MLflow's server starts
        **{name: f'exec {spark}/bin/{name} "$@"' for name in ("spark-submit", "spark-class")},
    }
    for name, line in starts.items():
        (scripts / name).write_text(f"#!/bin/sh\n{line}\n")
        (scripts / name).chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name != "SPARK_CONF_DIR"}  # the suite's
    return own | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SPARK_HOME": str(spark),
        "PYSPARK_PYTHON": sys.executable, "MLFLOW_DISABLE_TELEMETRY": "true",
    }  # fmt: skip


def run(page: str, folder: Path) -> None:
    """Run a page in an empty folder; what it started ends with it."""
    log, work = folder / ".log", folder / "work"
    work.mkdir()
    with log.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-c", program(page)], cwd=work, env=environment(folder), stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert shell.wait(LIMIT_S) == 0, log.read_text()[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):  # servers that a page started may have children of their own
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def without_jobs(page: str) -> str:
    """The page up to the first block that needs a cluster or a model, and no job run: its recipe is validated."""
    needs = next(
        (i for i, block in enumerate(blocks(page)) if re.search(NEEDS_A_JOB, block.text)),
        None,
    )
    fewer = "\n".join(f"```{b.language} {b.file}".rstrip() + f"\n{b.text}```" for b in blocks(page)[:needs])
    return fewer.replace("sparkring run", "sparkring config validate")


def run_in_this_process(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page without jobs here, in the current folder: Python and the imports take longer than what it does."""
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, "page", "exec"), {})
        elif block.language == "sh":
            for line in block.text.replace("\\\n", " ").strip().splitlines():
                command, _, pattern = line.partition(" | grep -E ")
                match shlex.split(command):
                    case ["cd", folder]:
                        monkeypatch.chdir(folder)
                    case ["export", "PYTHONPATH=$PWD:${PYTHONPATH:-}"]:
                        monkeypatch.syspath_prepend(str(Path.cwd()))
                    case ["sparkring", *words]:
                        done = run_here(Path.cwd(), *words)
                        assert done.returncode == 0, (line, done.stderr)
                        assert re.search("".join(shlex.split(pattern)), done.stdout), (line, done.stdout)
                    case other:
                        raise AssertionError(f"{other}: teach this test the command")


@pytest.mark.spark
@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"README"}))
def test_what_a_page_does_before_a_job_works_and_one_page_whole(
    tmp_path: Path, spark: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # MLflow adds a model's folder of code
    known = {*sys.modules}
    try:
        run_in_this_process(PAGES[name] if name == HERE else without_jobs(PAGES[name]), monkeypatch)
    finally:  # another page may have a module of the same name
        for module in {*sys.modules} - known:
            if str(tmp_path) in (getattr(sys.modules[module], "__file__", None) or ""):
                del sys.modules[module]
        mlflow.set_tracking_uri(None)  # as it was: it is an environment variable, too


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"README"}))
def test_a_page_runs_as_it_stands(tmp_path: Path, name: str) -> None:
    run(PAGES[name], tmp_path)
