"""Where a session of Spark Connect is found, and which are refused before they are given work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.errors import ConfigError
from sparkring.conf.load import load_config
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.pipelines.model.plan import runs_here
from sparkring.pipelines.run import spark as spark_module
from sparkring.pipelines.run import spark_remote, spark_settings
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.spark_remote import check_reachable, check_versions
from sparkring.pipelines.run.spark_settings import remote_of
from sparkring.pipelines.validate.recipe import slot_problems
from sparkring.training.launch.failure import LaunchError
from tests.spark_connect import OVERLAY, needs_connect


@pytest.mark.parametrize(
    ("master", "variable", "found"),
    [
        (None, None, None),
        ("local[2]", None, None),
        ("sc://host:1", None, "sc://host:1"),
        (None, "sc://host:1", "sc://host:1"),
        (None, "local[2]", "local[2]"),
        ("sc://host:1", "sc://host:1", "sc://host:1"),
    ],
)
def test_a_server_is_named_by_the_recipe_or_by_a_variable(
    master: str | None, variable: str | None, found: str | None
) -> None:
    environment = {"SPARK_REMOTE": variable} if variable else {}
    assert remote_of("r", SparkConfig(master=master), environment) == found


@pytest.mark.parametrize("master", ["local[2]", "spark://h:7077", "sc://other"])
def test_two_places_for_spark_are_one_too_many(master: str) -> None:
    with pytest.raises(ConfigError, match=r"spark\.master = .* SPARK_REMOTE = 'sc://host'.*unset SPARK_REMOTE"):
        remote_of("r", SparkConfig(master=master), {"SPARK_REMOTE": "sc://host"})


@pytest.mark.parametrize(
    "remote",
    ["", "yarn", "sc://", "sc://:15002", "sc://h:port", "sc://h:99999", "sc://h:0", "http://h:1", "localhost:1"],
)
def test_what_is_no_address_is_an_error_of_the_configuration(remote: str) -> None:
    """`sc://h:port` ended in a traceback, others as a server that does not answer, or in Spark's own words."""
    with pytest.raises(ConfigError, match=r"SPARK_REMOTE = '.*': is no address of Spark Connect; set it to sc://host:"):
        remote_of("r", SparkConfig(), {"SPARK_REMOTE": remote})
    if remote.startswith("sc://"):
        with pytest.raises(ConfigError, match=r"spark.master = 'sc://.*': is no address of Spark Connect"):
            remote_of("r", SparkConfig(master=remote), {})


@pytest.mark.parametrize(
    "remote", ["local", "local[*]", "local-cluster[2,1,1024]", "sc://h", "sc://[::1]:15002/;use_ssl=true;token=a%2Fb"]
)
def test_what_pyspark_takes_is_an_address(remote: str) -> None:
    assert remote_of("r", SparkConfig(), {"SPARK_REMOTE": remote}) == remote


def test_a_pyspark_without_a_server_of_its_own_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark 3.5 of PyPI, and SPARK_REMOTE=local[2]: it ended in a traceback."""

    class Threw(JavaThrew):
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return f"An error occurred while calling None.JavaSparkContext.\n: java.lang.{spark_remote.PLUGIN}\n\tat x"

    def fails() -> None:
        raise Threw

    builder = SimpleNamespace(remote=lambda _: SimpleNamespace(getOrCreate=fails))
    monkeypatch.setattr(spark_remote, "SparkSession", SimpleNamespace(builder=builder))
    with pytest.raises(ConfigError, match=r"has no server of its own; set spark.conf .*spark-connect_2\.12.*sc://host"):
        spark_remote.open_remote("r", {}, "local[2]")


class Context:
    """Stands for the SparkContext of a session that the caller has opened."""

    master = "local[3]"


@pytest.mark.parametrize(
    ("master", "variables", "context", "found"),
    [
        (None, {}, None, "local[2]"),
        ("spark://h:7077", {}, None, "spark://h:7077"),
        (None, {}, Context, "local[3]"),
        ("spark://h:7077", {}, Context, "local[3]"),  # a session is not opened twice in a process
        (None, {"PYSPARK_GATEWAY_PORT": "1"}, None, ""),
        (None, {"SPARK_REMOTE": "sc://h"}, None, "sc://h"),
        (None, {"SPARK_REMOTE": "local[5]"}, None, "local[5]"),
        ("sc://h", {}, None, "sc://h"),
        (None, {"SPARK_CONNECT_MODE_ENABLED": "1"}, None, ""),  # of a notebook's session, whose server is not known
    ],
)
def test_where_the_session_is_or_will_be(
    master: str | None, variables: dict[str, str], context: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**variables, "PATH": os.environ["PATH"]})
    monkeypatch.setattr(spark_settings, "active_context", lambda: context)
    assert spark_settings.expected_master("r", SparkConfig(master=master), 2) == found


def test_a_context_that_starts_meanwhile_is_not_taken_for_spark_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of a job is opened by a thread, while the job validates its recipe."""
    looks: list[Any] = [None, Context]
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(spark_settings, "active_context", lambda: looks.pop(0))
    assert spark_settings.expected_master("r", SparkConfig(), 2) == "local[3]"


@pytest.mark.parametrize(("remote", "count"), [("sc://gpus:15002", 0), ("local[3]", 1), ("local[4]", 0)])
def test_slots_are_counted_where_the_session_will_be(remote: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SPARK_REMOTE": remote, "PATH": os.environ["PATH"]})
    monkeypatch.setattr(spark_settings, "active_context", lambda: None)
    config = load_config("flights", ["launch.cpus_per_rank=2"]).config
    assert len(slot_problems(config)) == count and runs_here(config) == remote.startswith("local")


@pytest.mark.parametrize(
    ("client", "server", "words"),
    [
        ("3.4.3", "3.4.3", r"this PySpark is 3\.4\.3: versions from 3\.5 to below 5"),
        ("5.0.0", "5.0.0", r"this PySpark is 5\.0\.0"),
        ("4.0.1", "3.4.1", r"this session's Spark is 3\.4\.1"),
        ("4.2.1", "4.0.2", r"Spark is 4\.0\.2, and the PySpark here is 4\.2\.1: install pyspark==4\.0\.\*"),
    ],
)
def test_versions_that_do_not_fit_are_refused(client: str, server: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_versions("r", client, server)


def test_versions_that_do_not_fit_by_another_spark_home_name_it_and_its_value() -> None:
    with pytest.raises(
        ConfigError, match=r"\(of SPARK_HOME = '/opt/spark'\) is 4\.0\.2, .*: unset SPARK_HOME, .*, or inst"
    ):
        check_versions("r", "4.2.1", "4.0.2", "/opt/spark")


def test_versions_that_fit_are_not() -> None:
    for client, server in (("3.5.9", "3.5.2-amzn-1"), ("4.3.0", "4.3.0"), ("4.9.0", "4.9.1")):
        check_versions("r", client, server)


def test_a_server_that_does_not_answer_is_one_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port} cannot be reached.*start its server"):
            check_reachable(f"sc://127.0.0.1:{port}/;user_id=me")


CLIENT_ALONE = """
import sys
sys.modules["py4j"] = None  # not installed
from pyspark.util import is_remote_only
assert is_remote_only()
import sparkring.etl.build
import sparkring.pipelines.job.job
import sparkring.pipelines.launch.barrier
import sparkring.pipelines.predict.job
from sparkring.pipelines.run.spark_settings import submitted
assert not submitted()
"""


def test_a_client_of_spark_connect_alone_has_all_that_a_job_imports() -> None:
    environment = {**os.environ, "SPARK_SKIP_CONNECT_COMPAT_TESTS": "1"}  # PySpark's own: as where pyspark-client is
    done = subprocess.run([sys.executable, "-c", CLIENT_ALONE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_places_for_spark_are_an_error_of_the_configuration(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    words = [
        sys.executable,
        "-m",
        "sparkring.pipelines.cli",
        "launch",
        "--world",
        "1",
        "--master",
        "local[1]",
        str(script),
    ]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "SPARK_REMOTE": "sc://h"}, capture_output=True, text=True
    )
    assert done.returncode == Exit.USAGE and "SPARK_REMOTE" in done.stderr, done.stderr


TAKEN = """
import sys
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.cli.exits import exit_code, message
from sparkring.pipelines.run.spark import spark_session
config = SparkConfig(conf={"spark.connect.grpc.binding.port": sys.argv[1]})
try:
    with spark_session("x", config, LaunchConfig(world=1)):
        pass
except Exception as error:
    print(message(error))
    sys.exit(exit_code(error))
"""


@pytest.mark.spark
def test_of_a_server_whose_port_is_taken_one_line_is_shown_that_names_the_log() -> None:
    needs_connect()
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(OVERLAY)])
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        command = [sys.executable, "-c", TAKEN, str(taken.getsockname()[1])]
        environment = os.environ | {"PYTHONPATH": path, "SPARK_REMOTE": "local[1]"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == Exit.RESOURCES and done.stderr == "", done.stderr
    (line,) = done.stdout.splitlines()
    log = Path(line.rpartition("; the log of its JVM: ")[2])
    assert "did not start: Failed to bind to address" in line and "BindException" in log.read_text()
    log.unlink()


def test_a_server_in_this_process_has_a_jvm_with_a_log_that_is_started_as_no_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str | None] = []

    def start(*_: Any) -> Path:
        seen.append(os.environ.get("SPARK_REMOTE"))
        return tmp_path / "jvm.log"

    def fails(*_: Any) -> None:
        seen.append(os.environ.get("SPARK_REMOTE"))
        raise LaunchError("its server did not start")

    monkeypatch.setenv("SPARK_REMOTE", "local[2]")
    monkeypatch.setattr(spark_module, "active_context", lambda: None)
    monkeypatch.setattr(spark_module, "start_quick_jvm", start)
    monkeypatch.setattr(spark_module, "open_remote", fails)
    with pytest.raises(LaunchError, match=r"its server did not start; the log of its JVM: .*jvm\.log"):
        spark_module.open_session("r", SparkConfig(), LaunchConfig(), None, threading.Event())
    assert seen == [None, "local[2]"]
    with pytest.raises(LaunchError, match=r"its server did not start$"):
        spark_module.open_session("r", SparkConfig(log="console"), LaunchConfig(), None, threading.Event())
