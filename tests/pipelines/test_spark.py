"""The session of a job under signals to its whole process group, as `timeout`, systemd and batch systems send them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines import spark as spark_module
from sparkring.pipelines.spark import session_on_demand

pytestmark = pytest.mark.spark
SUBMIT = str(Path(pyspark.__file__).parent / "bin/spark-submit")
JOB = """
import signal, sys, time
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.pipelines.spark import spark_session
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
with spark_session("held", SparkConfig(), LaunchConfig()) as spark:
    rdd = spark.sparkContext.parallelize(range(4), 2)
    print("COUNTED", rdd.count(), flush=True)
    while not told:
        time.sleep(0.05)
    time.sleep(3)  # the last checkpoint; a JVM left alone is gone after one second
    print("COUNTED AGAIN", rdd.map(lambda x: x + 1).sum(), flush=True)
    sys.exit(143)
"""


@pytest.mark.parametrize("command", [[sys.executable], [SUBMIT, "--master", "local[2]"]], ids=["sparkring", "submit"])
def test_a_jvm_told_to_end_waits_for_the_job_to_have_ended(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    process = subprocess.Popen(
        [*command, "job.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert any(line.startswith("COUNTED 4") for line in output)
        os.killpg(process.pid, signal.SIGTERM)
        assert any(line.startswith("COUNTED AGAIN 10") for line in output)
        assert process.wait(timeout=60) == 143


def test_a_session_is_opened_once_when_it_is_needed_and_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    @contextmanager
    def recorded(name: str, *_: Any) -> Iterator[object]:
        events.append(f"open {name}")
        yield object()
        events.append("close")

    monkeypatch.setattr(spark_module, "spark_session", recorded)
    with session_on_demand("unused", SparkConfig(), LaunchConfig()):
        pass
    assert events == []
    with session_on_demand("used", SparkConfig(), LaunchConfig()) as session:
        assert session() is session() and events == ["open used"]
    assert events == ["open used", "close"]


LOUD = """
import logging, sys
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.spark import spark_session
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("py4j").setLevel(logging.WARNING)
with spark_session("loud", SparkConfig(log=sys.argv[1]), LaunchConfig(world=1)) as spark:
    spark._jvm.java.lang.System.err.println("SAID BY THE JVM")
    print("ours")
"""


@pytest.mark.parametrize("log", ["file", "console"])
def test_sparks_own_log_is_in_the_file_that_is_named_or_on_the_console(tmp_path: Path, log: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LOUD, log], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ours\n"), done.stderr
    kept = "".join(file.read_text() for file in tmp_path.glob("sparkring-spark-*.log"))
    in_file, on_console = kept.splitlines(), done.stderr.splitlines()
    assert ("SAID BY THE JVM" in in_file, "SAID BY THE JVM" in on_console) == (log == "file", log == "console")
    if log == "file":
        assert len(on_console) == 1 and str(tmp_path) in on_console[0]
