"""Every command ends with one message and the documented code."""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main, parse, parser
from sparkring.pipelines.cli.commands import recipes
from sparkring.pipelines.cli.exits import exit_code, message
from sparkring.pipelines.run.exit_codes import Exit
from tests.helpers.ports import unused_port


@pytest.mark.parametrize("content", [None, b"no audit at all\n"])
def test_auditing_what_has_no_audit_is_one_line_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "run/audit").mkdir(parents=True)
        (tmp_path / "run/audit/0.ids").write_bytes(content)
    assert main(["audit", str(tmp_path / "run")]) == Exit.DATA
    said = capsys.readouterr().err
    assert said.startswith("sparkring: ") and "Traceback" not in said and said.count("\n") == 1


def test_a_recipe_that_cannot_be_read_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"name: caf\xe9\n")
    assert main(["config", "validate", str(tmp_path / "mine.yaml")]) == Exit.USAGE
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and re.fullmatch(
        r"sparkring( \d+\.\d+\.\d+|, not installed)\n", capsys.readouterr().out
    )


def commands(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of every command, those of groups such as `config` aside."""
    groups = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield of
    for group in groups:
        for inner in group.choices.values():
            yield from commands(inner)


@pytest.mark.parametrize("command", list(commands(parser())), ids=lambda command: command.prog)
def test_the_help_of_a_command_ends_with_examples_of_it(command: argparse.ArgumentParser) -> None:
    assert command.epilog is not None
    examples = command.epilog.splitlines()[1:]
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        assert example.startswith(f"  {command.prog}")
        assert parse(words[1:]).command is command.get_default("command"), example


@pytest.mark.parametrize("words", [[], ["init"], ["config"], ["plan"]], ids=" ".join)
def test_the_help_of_a_group_has_examples_of_its_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    examples = [shlex.split(line.partition(" > ")[0])[1:] for line in shown if line.startswith("  sparkring ")]
    assert examples and all(parse(example) for example in examples)
    assert all(example[: len(words)] == words for example in examples)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_full_disk_is_named_with_the_file_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full is a real device that never has room."""
    real = open

    def report(_: object) -> str:
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", lambda path, mode: real("/dev/full", mode))
            open_storage(str(tmp_path)).put_atomic("report.html", b"x")
        return ""

    monkeypatch.setattr("sparkring.pipelines.report.report.redraw", report)
    assert main(["report", "flights"]) == Exit.RESOURCES
    told = capsys.readouterr().err
    assert "No space left on device" in told and str(tmp_path / "report.html") in told and "same command again" in told
    assert "Traceback" not in told


def test_a_package_that_sparks_workers_lack_is_named_with_what_to_do() -> None:
    text = "[FAILED] Traceback:\n  File 'a.py'\nModuleNotFoundError: No module named 'pydantic'\n SQLSTATE: 38000"
    error = type("PythonException", (Exception,), {"__module__": "pyspark.errors"})(text)
    assert exit_code(error) == Exit.RESOURCES
    assert message(error).startswith("No module named 'pydantic', in the Python of Spark's workers: install")


@pytest.mark.spark
def test_a_full_disk_that_a_task_of_spark_met_is_named_with_the_file_and_what_to_do(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/shard.parquet")

    monkeypatch.setattr("sparkring.pipelines.report.report.redraw", lambda _: spark.range(1).foreach(write))
    assert main(["report", "flights"]) == Exit.RESOURCES
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "No space left on device: '/data/shard.parquet': make room there" in told and "Traceback" not in told


@pytest.mark.parametrize("words", [["config", "schema"], ["config", "show", "flights"]])
def test_a_pipe_whose_reader_has_ended_is_no_error(words: list[str]) -> None:
    """As `| head`, at its earliest. Unix tools end with 141 then, 128 + SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sparkring.pipelines.cli", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writing)
    assert (done.returncode, done.stderr) == (Exit.PIPE, "")


ENDING = """
import atexit, os, sys, threading, time
from sparkring.pipelines.cli import console
from sparkring.pipelines.cli.commands import recipes

class Freed:
    def __del__(self, write=os.write):
        write(1, b"freed")

sys.freed = Freed()

def work():
    time.sleep(0.5)
    print("thread")

def show(arguments):
    atexit.register(print, "handler")
    threading.Thread(target=work).start()
    print("command")
    if sys.argv[3] == "bug":
        raise ValueError
    return 7

recipes._show = show
sys.exit(console())
"""


@pytest.mark.parametrize(("recipe", "code"), [("flights", 7), ("bug", Exit.BUG)])
def test_the_script_ends_after_threads_and_exit_handlers_and_frees_nothing(recipe: str, code: int) -> None:
    """Freeing torch's objects one by one took 0.6 s at the end of `config validate`."""
    command = [sys.executable, "-c", ENDING, "config", "show", recipe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.splitlines()) == (code, ["command", "thread", "handler"])


def test_an_error_that_main_does_not_report_is_left_to_python() -> None:
    text = "import sys; from sparkring.pipelines.cli import console, entry; entry.main = None; sys.exit(console())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "TypeError" in done.stderr


def test_a_broken_connection_is_not_taken_for_a_broken_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(_: object) -> str:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sparkring.pipelines.report.report.redraw", report)
    assert main(["report", "flights"]) == Exit.BUG
    assert "Traceback" in capsys.readouterr().err


def test_the_ui_takes_its_servers_with_it(tmp_path: Path) -> None:
    """MLflow starts servers below it; a SIGTERM to the command alone left them, and the port, behind."""
    (tmp_path / "mine.yaml").write_text("name: mine\ndataset: somewhere\n")
    port = unused_port()
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "ui", "mine.yaml", "--port", str(port)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (tmp_path / "log").open("w") as log:
        ui = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not is_open(port):
            assert ui.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        below = psutil.Process(ui.pid).children(recursive=True)
        assert below
        ui.send_signal(signal.SIGTERM)
        assert ui.wait(60) == Exit.TERMINATED
        assert not psutil.wait_procs(below, timeout=60)[1]
    finally:
        ui.kill()
        ui.wait()


def test_overrides_may_stand_behind_options_and_other_words_may_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse(["run", "flights", "--date", "2013-03-01", "launch.world=1", "--rerun", "train.epochs=2"])
    assert (found.date, found.rerun) == ("2013-03-01", True)
    assert found.overrides == ["launch.world=1", "train.epochs=2"]
    assert parse(["predict", "flights", "a=b", "--date", "2013-03-01", "c=d"]).overrides == ["a=b", "c=d"]
    for words, hint in (
        (["run", "flights", "--dats", "2013-03-01"], "--dats 2013-03-01; did you mean --date?"),
        (["package", "a=b"], "a=b"),
    ):
        with pytest.raises(SystemExit):
            parse(words)
        assert f"sparkring {words[0]}: error: unrecognized arguments: {hint}\n" in capsys.readouterr().err


def test_what_a_command_shows_holds_nothing_that_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(_: Any) -> int:
        print("column \x1b[2J\x1b]0;title\x07 \x1b[31mred\x1b[0m\r")
        raise ValueError("no such column \x1b[2J")

    monkeypatch.setattr(recipes, "_show", show)
    main(["-v", "config", "show", "flights"])
    captured = capsys.readouterr()
    assert captured.out == "column \\x1b[2J\\x1b]0;title\\x07 red\\r\n"
    assert "no such column \\x1b[2J" in captured.err and "\x1b" not in captured.err


FULL = """
import os, subprocess, sys
folder, = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", f"{folder}/datasets"], check=True)
from sparkring.pipelines.cli import main
print("CODE", main(["etl", f"{folder}/r.yaml"]))
print("BETWEEN", file=sys.stderr)
try:
    with open(f"{folder}/datasets/other", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
except OSError:
    pass
print("CODE", main(["etl", f"{folder}/r.yaml"]))
"""
FULL_RECIPE = """
name: r
storage: {{datasets: {folder}/datasets, runs: {folder}/runs}}
tracking: {{enabled: false}}
launch: {{world: 1}}
etl:
  sources: {{t: {{path: {folder}/t.csv, columns: {{id: bigint, x: double, y: double}}}}}}
  rows: t
  key: [id]
  label: y
  features: {{x: {{kind: numeric}}}}
"""


@pytest.mark.slow  # a full disk is named above, and as seen by Spark in tests/training/launch/test_failure.py
@pytest.mark.spark
def test_a_full_disk_of_datasets_is_exit_5_with_what_to_do(tmp_path: Path, private_mounts: list[str]) -> None:
    """A tmpfs without room for the dataset, and then without any."""
    draw = random.Random(1)
    rows = (f"{number},{draw.random()},{draw.random()}\n" for number in range(100_000))
    (tmp_path / "t.csv").write_text("id,x,y\n" + "".join(rows))
    (tmp_path / "r.yaml").write_text(FULL_RECIPE.format(folder=tmp_path))
    (tmp_path / "datasets").mkdir()
    command = [*private_mounts, sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.stdout.count(f"CODE {int(Exit.RESOURCES)}") == 2, done.stdout + done.stderr
    said = done.stderr.split("BETWEEN\n")
    for words, each in zip(("No space left on device", "is on a disk that is full"), said, strict=True):
        last = each.strip().splitlines()[-1]
        assert words in last and "Traceback" not in each and len(last) < 1000, each


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'mlflow'", name="mlflow"), "pip install 'mlflow>=2.19,<4'"),
        (ImportError("cannot import name 'x' from 'sqlalchemy.orm'", name="sqlalchemy.orm"), "'sqlalchemy<2.1'"),
        (ImportError("cannot import name 'y' from 'mlflow.store'", name="mlflow.store"), "'sqlalchemy<2.1'"),
    ],
)
def test_an_mlflow_that_cannot_be_imported_is_one_line_with_the_remedy(error: ImportError, said: str) -> None:
    assert exit_code(error) is Exit.USAGE and said in message(error) and "\n" not in message(error)
