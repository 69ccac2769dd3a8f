"""Where a session of Spark Connect is found, and which are refused before they are given work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.errors import ConfigError
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.spark_remote import check_reachable, check_versions, remote_of
from sparkring.training.launch.failure import LaunchError


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
from sparkring.pipelines.run.spark import submitted
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
