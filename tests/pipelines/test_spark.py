"""The session of a job under signals to its whole process group, as `timeout`, systemd and batch systems send them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.pipelines.run import spark as spark_module
from sparkring.pipelines.run.jvm_options import OPTIONS
from sparkring.pipelines.run.spark import jvm_problem, open_session, session_on_demand, version_of_home
from sparkring.training.launch.failure import LaunchError

pytestmark = pytest.mark.spark
SUBMIT = str(Path(pyspark.__file__).parent / "bin/spark-submit")
JOB = """
import signal, sys, time
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.pipelines.run.spark import spark_session
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
with spark_session("held", SparkConfig(), LaunchConfig()) as spark:
    print("WORKERS", spark.sparkContext.pythonExec == sys.executable, flush=True)
    rdd = spark.sparkContext.parallelize(range(4), 2)
    print("COUNTED", rdd.count(), flush=True)
    while not told:
        time.sleep(0.05)
    time.sleep(1.5)  # the last checkpoint; a JVM left alone is gone after one second
    print("COUNTED AGAIN", rdd.map(lambda x: x + 1).sum(), flush=True)
    sys.exit(143)
"""


BY_SUBMIT = pytest.param([SUBMIT, "--master", "local[2]"], id="submit", marks=pytest.mark.slow)


@pytest.mark.parametrize("command", [pytest.param([sys.executable], id="sparkring"), BY_SUBMIT])
def test_a_jvm_told_to_end_waits_for_the_job_to_have_ended(tmp_path: Path, command: list[str]) -> None:
    """Its workers run this Python, which spark-submit is told and a job of ours knows."""
    (tmp_path / "job.py").write_text(JOB)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    if command == [sys.executable]:
        del environment["PYSPARK_PYTHON"]
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
        assert "WORKERS True\n" in output
        assert any(line.startswith("COUNTED 4") for line in output)
        os.killpg(process.pid, signal.SIGTERM)
        assert any(line.startswith("COUNTED AGAIN 10") for line in output)
        assert process.wait(timeout=300) == 143


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


@pytest.mark.parametrize(
    ("mode", "has_context", "is_replaceable"),
    [("client", False, True), ("cluster", False, False), ("client", True, False)],
)
def test_an_application_is_replaced_only_where_this_process_may_end_it(
    monkeypatch: pytest.MonkeyPatch, mode: str, has_context: bool, is_replaceable: bool
) -> None:
    monkeypatch.setattr(spark_module, "active_context", lambda: object() if has_context else None)
    monkeypatch.setattr(spark_module, "settings_of", lambda _: {"spark.submit.deployMode": mode})
    monkeypatch.setattr(spark_module, "spark_session", lambda *_: nullcontext(object()))
    with session_on_demand("r", SparkConfig(), LaunchConfig()) as session:
        assert session.is_replaceable == is_replaceable


def test_another_application_has_the_settings_beside_the_recipes_and_takes_the_firsts_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []

    @contextmanager
    def recorded(name: str, config: SparkConfig, *_: Any) -> Iterator[object]:
        events.append(config.settings())
        yield object()
        events.append("close")

    monkeypatch.setattr(spark_module, "spark_session", recorded)
    monkeypatch.setattr(spark_module, "submitted", lambda: True)  # then its JVM stays
    with session_on_demand("r", SparkConfig(conf={"a": "1", "b": "1"}), LaunchConfig()) as session:
        first = session()
        assert session.replaced({"b": "2"}) is session() is not first
    assert events == [{"a": "1", "b": "1"}, "close", {"a": "1", "b": "2"}, "close"]


AHEAD = """
import os, sys, threading, time
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.pipelines.run import spark as spark_module
from sparkring.pipelines.run.signals import ended_by_signals
from sparkring.pipelines.run.spark import session_ahead
until, opens, opened = sys.argv[1], threading.Event(), threading.Event()
launch = spark_module.launch_gateway

def launching(*args):
    opens.set()
    return launch(*args)

def open_session(*args):
    opens.set()
    try:
        return whole(*args)
    finally:
        opened.set()

whole, spark_module.open_session, spark_module.launch_gateway = spark_module.open_session, open_session, launching
try:
    with ended_by_signals(), session_ahead("ahead", SparkConfig(), LaunchConfig(world=2)) as session:
        assert opens.wait(60)
        if until == "used":
            spark = session()
            assert session() is spark
            print("workers", spark.sparkContext.pythonExec, os.environ.get("PYSPARK_PYTHON"))
            active = spark._jvm.org.apache.spark.sql.classic.SparkSession.getActiveSession()
            print("active", active.isDefined(), "found", spark.sql("SELECT 10").collect()[0][0])
        elif until == "signal":
            print("waiting", flush=True)
            while True:  # a signal that comes just before a long wait is noticed after it
                time.sleep(0.05)
        elif until == "opened":
            assert opened.wait(120)
        raise ValueError("an invalid recipe")
except ValueError as error:
    print(error)
context = spark_module.active_context()
print("left", context, [thread.name for thread in threading.enumerate() if thread.name.startswith("spark")])
"""


def start_ahead(folder: Path, until: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder), "SPARK_CONF_DIR": str(folder)}
    (folder / "spark-defaults.conf").write_text("spark.pyspark.python /of/the/cluster/python\n")
    return subprocess.Popen(
        [sys.executable, "-c", AHEAD, until],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_empty_group(group: int) -> None:
    deadline = time.monotonic() + 60
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        pytest.fail(f"processes of the group {group} are left")


@pytest.mark.parametrize(
    ("until", "said"),
    [
        ("starting", []),
        pytest.param("opened", [], marks=pytest.mark.slow),
        # Workers run the Python that Spark's defaults name, and a later session names its own.
        ("used", ["workers /of/the/cluster/python None", "active True found 10"]),
    ],
)
def test_a_session_that_is_opened_ahead_is_used_or_leaves_nothing(tmp_path: Path, until: str, said: list[str]) -> None:
    process = start_ahead(tmp_path, until)
    out, err = process.communicate(timeout=600)
    assert out.splitlines() == [*said, "an invalid recipe", "left None []"], (out, err)
    wait_for_empty_group(process.pid)
    assert not list(tmp_path.glob("sparkring-spark-*.log")) or said, "the log of a job that fails is kept"


def test_a_signal_while_a_session_is_opened_ahead_ends_the_job_and_its_jvm(tmp_path: Path) -> None:
    process = start_ahead(tmp_path, "signal")
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0 and "Stopped: stopped by SIGTERM" in err, err
    wait_for_empty_group(process.pid)
    assert not list(tmp_path.glob("sparkring-spark-*.log"))


LOUD = """
import logging, os, sys, tempfile, time
from pathlib import Path
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.run.spark import spark_session
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("py4j").setLevel(logging.WARNING)
config = SparkConfig(log=sys.argv[1], conf={"spark.pyspark.python": "/a/python"})
with spark_session("loud", config, LaunchConfig(world=1)) as spark:
    spark._jvm.java.lang.System.err.println("SAID BY THE JVM")
    print(spark.sparkContext.pythonExec)
    for file in Path(tempfile.gettempdir()).glob("sparkring-spark-*.log"):
        os.link(file, file.with_suffix(".kept"))
    # PySpark's own shutdown waits for the polls of its threads: a job ends without it
    spark.sparkContext._accumulatorServer.shutdown = lambda: (time.sleep(20), print("WAITED"))
"""


@pytest.mark.parametrize(
    ("log", "python"),
    [("file", "/from/the/environment"), pytest.param("console", None, marks=pytest.mark.slow)],
)
def test_sparks_own_log_is_in_the_file_that_is_named_or_on_the_console_and_its_python_is_the_recipes(
    tmp_path: Path, log: str, python: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    environment |= {"PYSPARK_PYTHON": python} if python else {}
    done = subprocess.run([sys.executable, "-c", LOUD, log], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "/a/python\n"), done.stderr
    kept = "".join(file.read_text() for file in tmp_path.glob("sparkring-spark-*.kept"))
    assert not list(tmp_path.glob("sparkring-spark-*.log")), "it is deleted after a session that did not fail"
    in_file, on_console = kept.splitlines(), done.stderr.splitlines()
    assert ("SAID BY THE JVM" in in_file, "SAID BY THE JVM" in on_console) == (log == "file", log == "console")
    if log == "file":
        assert len(on_console) == 1 and str(tmp_path) in on_console[0]


STARTS = """
import os, sys
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.run import spark
from sparkring.training.launch.failure import LaunchError
spark.DEAD_S, spark.SILENT_S = 0.5, 2.0
for home in sys.argv[1:]:
    os.environ["JAVA_HOME"] = home
    try:
        with spark.spark_session("x", SparkConfig(), LaunchConfig(world=1)):
            pass
    except LaunchError as error:
        print(error)
"""
JAVAS = [  # None: there is none
    (None, "set JAVA_HOME to a Java 17 or newer"),
    ("exit 1", "(it ended): "),
    ("exit 0", "(it ended): "),
    ("sleep 600", "it wrote nothing for"),
    ("echo 'Exception in thread \"main\" java.net.UnknownHostException: h' >&2; sleep 600", "SPARK_LOCAL_IP"),
    ("echo 'javax.security.auth.login.LoginException: no name' >&2; exit 1", "/etc/passwd"),
    ("echo 'java.io.IOException: Too many open files' >&2; exit 1", "ulimit -n"),
]


def test_a_jvm_that_does_not_start_is_one_error_with_its_log_and_a_remedy(tmp_path: Path) -> None:
    """The program that Spark starts as Java fails, hangs, or says why."""
    homes = [tmp_path / f"home-{number}" for number in range(len(JAVAS))]
    for home, (java, _) in zip(homes, JAVAS, strict=True):
        if java is not None:
            (home / "bin").mkdir(parents=True)
            (home / "bin/java").write_text(f"#!/bin/bash\n[ $# = 1 ] && exit 0\n{java}\n")
            (home / "bin/java").chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", STARTS, *map(str, homes)]
    with (tmp_path / "said").open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, start_new_session=True)
    try:
        assert process.wait(300) == 0
    finally:  # the two that hang
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logs = {str(path) for path in tmp_path.glob("sparkring-spark-*.log")}
    for said, (java, words) in zip((tmp_path / "said").read_text().splitlines(), JAVAS, strict=True):
        assert said.startswith("Spark's JVM did not start (") and words in said, (java, said)
        logs -= {log for log in logs if log in said}
    assert len(list(tmp_path.glob("sparkring-spark-*.log"))) == len(JAVAS) and not logs, "each names its own"


def test_a_warning_of_java_is_not_why_it_did_not_start(tmp_path: Path) -> None:
    """One that was killed leaves nothing else in its log."""
    log = tmp_path / "log"
    log.write_text("WARNING: Using incubator modules: jdk.incubator.vector\n")
    assert jvm_problem(log, "it ended") == (
        f"Spark's JVM did not start (it ended): its log names no error; see its log: {log}"
    )


@pytest.mark.parametrize("version", ["3.5.6", "4.0.2", "4.9.1-amzn-0"])
def test_the_spark_of_another_spark_home_is_refused_by_that_name_before_its_jvm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / f"jars/spark-core_2.13-{version}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(spark_module, "active_context", lambda: None)
    monkeypatch.setattr(spark_module, "submitted", lambda: False)  # the suite's session may be open
    config = load_config("flights", []).config
    said = rf"the session's Spark \(of SPARK_HOME = '{tmp_path}'\) is {version}, .*: unset SPARK_HOME"
    with pytest.raises(ConfigError, match=said):
        open_session("r", config.spark, config.launch, None, threading.Event())


def test_a_spark_home_without_a_spark_is_named_where_no_jvm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").touch()
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    assert version_of_home(Path("/nowhere")) is None
    assert "the Spark of SPARK_HOME = '/nowhere': unset that" in jvm_problem(tmp_path / "log", "it ended")


@pytest.mark.parametrize(
    ("written", "named", "starts_without"),
    [
        (  # over an archive of classes that is cut off
            "#\n# A fatal error has been detected by the Java Runtime Environment:\n#\n#  SIGBUS (0x7) at pc=0x0\n#\n",
            "A fatal error has been detected by the Java Runtime Environment",
            True,
        ),
        (
            "NOTE: Picked up JDK_JAVA_OPTIONS\nUnrecognized VM option 'Bogus=1'\n"
            "Error: Could not create the Java Virtual Machine.\n",
            "Unrecognized VM option 'Bogus=1'",
            True,
        ),
        (
            "Error: Could not create the Java Virtual Machine.\n",
            "Error: Could not create the Java Virtual Machine",
            True,
        ),
        ("java.net.BindException: Cannot assign\n", "java.net.BindException: Cannot assign", False),
    ],
)
def test_options_that_java_refuses_or_crashes_over_are_left_out_once(
    written: str, named: str, starts_without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    log, tried = tmp_path / "log", []
    log.write_text(written)
    assert jvm_problem(log, "it ended") == f"Spark's JVM did not start (it ended): {named}; see its log: {log}"

    def start(settings: Mapping[str, str], unwanted: threading.Event) -> Path:
        tried.append(settings)
        if len(tried) == 1:
            raise LaunchError(jvm_problem(log, "it ended"))
        return log

    monkeypatch.setattr(spark_module, "start_jvm", start)
    if not starts_without:
        with pytest.raises(LaunchError, match="BindException"):
            spark_module.start_quick_jvm({"a": "b"}, "-XX:+X", threading.Event())
        return
    assert spark_module.start_quick_jvm({"a": "b"}, "-XX:+X", threading.Event()) == log
    assert tried == [{"a": "b", OPTIONS: "-XX:+X"}, {"a": "b"}]
    assert caplog.text.count("this Java does not start with -XX:+X; it starts without") == 1


def test_logs_of_a_week_ago_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("sparkring-spark-old.log", "sparkring-spark-new.log", "others.log"):
        (tmp_path / name).touch()
    for name in ("sparkring-spark-old.log", "others.log"):
        os.utime(tmp_path / name, (1, 1))
    spark_module.sweep_logs(time.time())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["others.log", "sparkring-spark-new.log"]


NAMELESS = """
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.run.spark import spark_session
with spark_session("x", SparkConfig(), LaunchConfig(world=1)) as spark:
    print(spark.range(5).count())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all may write in; those of pytest are below one of its user's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def as_nameless(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user id without a name, home or group; skips the test where that may not be done.

    It may look into every folder, as Python's own may be in another user's home.
    """
    left_out = ("HOME", "USER", "LOGNAME", "HADOOP_USER_NAME", "SPARK_USER")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder)} | variables
    user = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"]
    command = [*user, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", sys.executable]
    try:
        can = subprocess.run(
            [*command, "-c", "import sparkring.conf"], env=environment, cwd=folder, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("no setpriv here")
    if can.returncode:
        pytest.skip("this user may not run programs as another")
    return subprocess.run([*command, *words], env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow  # the whole job is below, and a message of Java that names the cause is tested above
def test_a_user_id_without_a_name_works(open_folder: Path) -> None:
    """As a container of OpenShift has it, with a home that cannot be written."""
    done = as_nameless(open_folder, "-c", NAMELESS, HOME="/")
    assert done.stdout == "5\n", done.stderr


WHOLE_JOB = """
name: nameless
etl:
  sources: {raw: {path: raw.csv, format: csv, columns: {a: double, y: bigint}}}
  rows: raw
  features: {a: {kind: numeric}}
  label: y
model: {task: binary, args: {width: 4, blocks: 1}}
train: {steps: 2, global_batch: 32}
launch: {world: 1}
report: {must_beat_guess: false}
"""


@pytest.mark.slow  # a message of Java that names the cause is tested above
def test_a_whole_job_of_a_user_id_without_a_name_and_a_home_ends_well(open_folder: Path) -> None:
    (open_folder / "raw.csv").write_text("a,y\n" + "".join(f"{n * 7919 % 101},{n % 2}\n" for n in range(300)))
    (open_folder / "nameless.yaml").write_text(WHOLE_JOB)
    done = as_nameless(open_folder, "-m", "sparkring.pipelines.cli", "run", "nameless.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "verdict" in done.stdout


VERBOSE = """
import logging, sys
from sparkring.pipelines.cli import main
assert main([*sys.argv[1:], "config", "show", "flights"]) == 0
from sparkring.pipelines.run.spark import hide_error_copies
hide_error_copies()
from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger
for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
    PySparkLogger.getLogger(name).error("a copy", errorClass="UNRESOLVED_COLUMN")
"""


@pytest.mark.parametrize("words", [["-v"], []], ids=["debug log", "usual log"])
def test_copies_of_sql_errors_are_logged_by_pysparks_own_class(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", VERBOSE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("a copy" in done.stderr) == bool(words)


KILLS = """
import os, signal, sys
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.cli.exits import exit_code, message
from sparkring.pipelines.run.spark import spark_session

try:
    with spark_session("kills", SparkConfig(), LaunchConfig(world=1)) as spark:
        try:
            spark.sparkContext.parallelize([1], 1).map(lambda _: os.kill(os.getpid(), signal.SIGKILL)).collect()
        except Exception as error:
            print(int(exit_code(error)), message(error).splitlines())
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
        spark.range(5).count()
except Exception as error:
    print(int(exit_code(error)), message(error).splitlines())
"""


@pytest.mark.spark
def test_a_killed_worker_and_a_killed_jvm_are_one_line_with_its_end_and_exit_5(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLS], env=environment, capture_output=True, text=True, timeout=300)
    worker, jvm = done.stdout.splitlines()
    assert worker.startswith("5 ['a Python worker of Spark ended in the middle of a task (Python worker exited unexp")
    assert re.search(r"5 \[\"Spark's JVM \(process \d+\) ended in the middle of the job, by SIGKILL, as", jvm)
    assert re.search(r"its log: \S+\.log\. ", jvm) and "socketserver" not in done.stderr, done.stderr
