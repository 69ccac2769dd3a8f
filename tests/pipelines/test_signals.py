"""What signals ask of a job whose ranks run."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from sparkring.pipelines.run.signals import obeying_signals
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Cancelled
from sparkring.training.launch.messages import KillChildren, StopTraining, WriteCheckpoint

ROOT = Path(__file__).resolve().parents[2]


def test_a_signal_asks_for_a_checkpoint_and_training_goes_on() -> None:
    control = Control()
    before = signal.getsignal(signal.SIGUSR1)
    with obeying_signals(control, grace_s=60):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert control.pending() == [WriteCheckpoint()] and not control.stopping
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("number", "left"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_the_first_signal_asks_for_an_end_and_the_second_makes_it(
    number: signal.Signals, left: type[BaseException]
) -> None:
    control = Control()
    with pytest.raises(left), obeying_signals(control, grace_s=60):
        os.kill(os.getpid(), number)
        assert control.pending() == [StopTraining()] and control.stopping
        os.kill(os.getpid(), number)
        assert control.pending() == [KillChildren("rank")]
        raise Cancelled("as the attempt does")


def test_the_grace_time_ends_what_does_not_end() -> None:
    control = Control()
    with pytest.raises(SystemExit) as caught, obeying_signals(control, grace_s=0.01):
        os.kill(os.getpid(), signal.SIGTERM)
        while not control.cancelled:
            signal.sigtimedwait([], 0.01)
    assert caught.value.code == 143


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    control = Control()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with obeying_signals(control, grace_s=60):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not control.stopping and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


RECIPE = """
name: slow
storage: {datasets: data, runs: runs}
tracking: {root: mlflow}
spark: {master: "local[1]"}
etl:
  sources: {t: {path: t.csv, columns: {a: int, y: boolean}}}
  rows: slow_rows_of_test:rows
  features: {a: {kind: numeric}}
  label: y
"""
ROWS = """
from pathlib import Path

def rows(tables):
    Path("began").touch()
    tables["t"].crossJoin(tables["t"].sparkSession.range(10**13)).count()
"""


@pytest.mark.parametrize(
    ("sent", "codes", "said"),
    [
        ([signal.SIGINT], {130}, "sparkring: interrupted\n"),
        pytest.param(  # also while Python ends
            [signal.SIGINT, signal.SIGINT], {130, -signal.SIGINT}, "sparkring: interrupted", marks=pytest.mark.slow
        ),
        # Handled as SIGTERM is, which tests/e2e/test_job.py sends to a job that trains; the second ones of both above.
        pytest.param([signal.SIGHUP] * 2, {143}, "sparkring: stopped by SIGHUP\n", marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM], {143}, "sparkring: stopped by SIGTERM\n", marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "Ctrl-C twice", "a closed terminal", "SIGTERM"],
)
def test_a_signal_ends_the_etl_in_one_line_and_leaves_nothing_running(
    tmp_path: Path, sent: list[signal.Signals], codes: set[int], said: str
) -> None:
    """Ctrl-C printed frames of py4j; SIGHUP and SIGTERM left the run RUNNING in MLflow."""
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(100)))
    (tmp_path / "slow.yaml").write_text(RECIPE)
    (tmp_path / "slow_rows_of_test.py").write_text(ROWS)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "etl", "slow.yaml"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, start_new_session=True)
    try:
        while not (tmp_path / "began").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        time.sleep(1.0)  # so that the driver waits for Spark
        family = psutil.Process(process.pid).children(recursive=True)
        for number in sent:
            os.killpg(process.pid, number)
            time.sleep(0.2)
        code = process.wait(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = (tmp_path / "log").read_text()
    assert code in codes and said in text and "Traceback" not in text and "Py4J" not in text, text
    _, alive = psutil.wait_procs(family, timeout=120)
    assert family and not alive, "the JVM outlived the job"
    if len(sent) == 1 or signal.SIGHUP in sent:  # a second Ctrl-C leaves that to the next job
        (store,) = (tmp_path / "mlflow").glob("*.db")
        with closing(sqlite3.connect(store)) as connection:
            assert {status for (status,) in connection.execute("SELECT status FROM runs")} == {"KILLED"}
