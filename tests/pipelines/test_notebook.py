"""A notebook as the driver: a real kernel, spoken to as a front end does."""

from __future__ import annotations

import ast
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
jupyter_client = pytest.importorskip("jupyter_client", reason="the dev extra brings ipykernel")
pytestmark = [pytest.mark.spark, pytest.mark.ranks]


@dataclass
class Cell:
    """What a front end shows below a cell."""

    text: str = ""  # what was printed or logged
    value: str = ""
    shown: str = ""  # as HTML
    error: dict[str, Any] = field(default_factory=dict)  # ename, evalue, traceback


class Kernel:
    """One ipykernel process, as JupyterLab or an editor would start it."""

    def __init__(self, folder: Path) -> None:
        """Start it of an environment that is not activated: the first `python3` of its PATH is another Python."""
        (folder / "bin").mkdir()
        (folder / "bin/python3").write_text("#!/bin/sh\nexit 9\n")
        (folder / "bin/python3").chmod(0o755)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
        variables |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        variables |= {"SPARK_LOCAL_IP": "127.0.0.1", "IPYTHONDIR": str(folder)}
        self.manager, self.client = jupyter_client.manager.start_new_kernel(
            startup_timeout=120, cwd=str(folder), env=variables
        )

    def run(self, code: str, interrupt_at: str | None = None, timeout_s: float = 180.0) -> Cell:
        """Execute one cell to its end; interrupt it once what it has printed matches `interrupt_at`."""
        cell, request = Cell(), self.client.execute(code)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.text += content["text"]
            elif kind == "execute_result":
                cell.value, cell.shown = content["data"]["text/plain"], content["data"].get("text/html", "")
            elif kind == "error":
                cell.error = content
            elif kind == "status" and content["execution_state"] == "idle":
                return cell
            if interrupt_at is not None and re.search(interrupt_at, cell.text):
                self.manager.interrupt_kernel()
                interrupt_at = None
        raise TimeoutError(f"the cell has not ended within {timeout_s:g} s; it said {cell.text!r}")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)  # asked to end, one with a session of Spark takes 2.5 s


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kernel, list[Cell]]]:
    """A kernel that has run the example, and what its cells showed."""
    document = json.loads((ROOT / "examples/notebook/train.ipynb").read_text())
    kernel = Kernel(tmp_path_factory.mktemp("ipython"))
    try:
        yield kernel, [kernel.run("".join(c["source"])) for c in document["cells"] if c["cell_type"] == "code"]
    finally:
        kernel.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_example_trains_and_its_result_history_and_prints_are_in_the_cells(
    notebook: tuple[Kernel, list[Cell]],
) -> None:
    _, cells = notebook
    assert not [cell.error for cell in cells if cell.error]
    _, _, ran, history, *_ = cells
    assert json.loads(ran.value) == pytest.approx([1.0, -2.0, 0.5], abs=1e-3)
    assert sorted(re.findall(r"\[rank (\d)\] rank \d of 2: \[1\.0, -2\.0, 0\.5\]", ran.text)) == ["0", "1"]
    losses = [loss for _, loss in json.loads(history.value.replace("(", "[").replace(")", "]"))]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


def test_a_recipe_of_a_frame_trains_in_the_notebooks_session_and_shows_its_report(
    notebook: tuple[Kernel, list[Cell]],
) -> None:
    kernel, cells = notebook
    *_, recipe, trained, scores = cells
    assert "label arrival: binary" in recipe.value and "4,000 rows looked at" in recipe.value
    assert trained.value.startswith("Run(arrivals-trial, model=models:/arrivals-trial/1, test/")
    assert trained.shown.startswith("<iframe srcdoc=") and "&lt;title&gt;" in trained.shown
    auc, model = ast.literal_eval(scores.value)
    assert auc > 0.8 and model == "models:/arrivals-trial/1"
    again = kernel.run("spark.range(3).count(), trained.dataset, sorted(recipe.values)[:3]")
    count, dataset, blocks = ast.literal_eval(again.value)
    assert count == 3 and Path(dataset.removeprefix("file://")).is_dir() and blocks == ["etl", "model", "name"]


def test_a_session_that_names_another_python_runs_the_notebooks_own_and_need_not_be_passed(
    notebook: tuple[Kernel, list[Cell]],
) -> None:
    code = """
few = {"train.epochs": 1, "launch.world": 1, "tracking.enabled": False, "report.baselines": False}
sparkring.run(recipe, limit_rows=1000, overrides=few).code in (0, 6), spark.sparkContext.pythonExec
"""
    assert notebook[0].run(code).value == "(True, 'python3')"


def test_a_session_that_was_stopped_is_refused_with_how_to_make_another(notebook: tuple[Kernel, list[Cell]]) -> None:
    code = """
spark.stop()
refused = []
for call in (lambda: sparkring.run(recipe, spark), lambda: sparkring.launch(print, 1, spark=spark)):
    try:
        call()
    except ValueError as error:
        refused.append(str(error))
spark = SparkSession.builder.master("local[2]").getOrCreate()
refused, spark.range(3).count()
"""
    refused = "spark: the session was stopped; make another by SparkSession.builder.getOrCreate()"
    assert ast.literal_eval(notebook[0].run(code).value) == ([refused, refused], 3)


def test_a_session_of_a_launch_ends_with_it(notebook: tuple[Kernel, list[Cell]]) -> None:
    """The second one was told that `local[1]` has one slot, which the first one had opened."""
    code = """
from pyspark import SparkContext
spark.stop()
ranks = [sparkring.launch(lambda ctx: ctx.rank, world, preload=()).results for world in (1, 2)]
left = SparkContext._active_spark_context
spark = SparkSession.builder.master("local[2]").getOrCreate()
ranks, left
"""
    cell = notebook[0].run(code)
    assert cell.value == "([[0], [0, 1]], None)", cell.error


def test_an_error_of_a_cells_function_is_shown_with_rank_and_traceback(notebook: tuple[Kernel, list[Cell]]) -> None:
    code = """
def broken(ctx):
    if ctx.rank == 1:
        raise KeyError("column 'price'")
    import time
    time.sleep(600)

sparkring.launch(broken, world=2, spark=spark, preload=())
"""
    error = notebook[0].run(code).error
    assert error["ename"] == "WorkerFailed"
    assert re.match(r"rank 1 on .* raised KeyError: \"column 'price'\"", error["evalue"])
    assert "in broken" in error["evalue"]


def test_what_a_cells_function_cannot_take_along_is_named(notebook: tuple[Kernel, list[Cell]]) -> None:
    code = "def reads(ctx):\n    return spark.range(3).count()\n\nsparkring.launch(reads, world=2, spark=spark)"
    error = notebook[0].run(code).error
    assert error["ename"] == "TypeError"
    assert "__main__.reads cannot be sent to the workers: 'spark'" in error["evalue"]


def test_an_interrupt_ends_the_ranks_and_the_session_goes_on(notebook: tuple[Kernel, list[Cell]]) -> None:
    kernel, _ = notebook
    code = """
def waits(ctx):
    import os, subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    print("PIDS", os.getpid(), child.pid)
    time.sleep(600)

sparkring.launch(waits, world=2, spark=spark, preload=())
"""
    cell = kernel.run(code, interrupt_at=r"(?s)PIDS \d+ \d+\n.*PIDS \d+ \d+\n")  # both ranks are there
    assert cell.error["ename"] == "KeyboardInterrupt"
    pids = [int(pid) for pair in re.findall(r"PIDS (\d+) (\d+)", cell.text) for pid in pair]
    assert len(pids) == 4, cell.text
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]
    again = kernel.run("sparkring.launch(lambda ctx: ctx.rank, world=2, spark=spark, preload=()).results")
    assert again.value == "[0, 1]", again.error
