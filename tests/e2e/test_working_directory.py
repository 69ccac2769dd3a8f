"""No file of the directory one types in is run, or chooses what is run: neither as a module nor as a configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ports import unused_port
from tests.spark_connect import OVERLAY, needs_connect
from tests.training.launch.host.test_search_path import NAMES

MARKER = "ran"
EVIL = "import os, pathlib\npathlib.Path(os.environ['MARKER']).write_text(__name__)\n"
PLANTED = {
    ".pyiceberg.yaml": "catalog:\n  prod:\n    uri: sqlite:////tmp/none.db\n    py-io-impl: evil.Class\n",
    "openlineage.yml": "transport:\n  type: evil.Class\n",
    "matplotlibrc": "backend: module://evil\ntext.usetex: True\n",
    "gunicorn.conf.py": EVIL,
    "sitecustomize.py": EVIL,
    "usercustomize.py": EVIL,
    "evil.py": EVIL + "class Class: pass\n",
    "pyproject.toml": "[project]\nname = 'evil'\nversion = '1'\n",
    "uv.lock": "version = 1\n",
} | {f"{name}.py": EVIL for name in NAMES}
ICEBERG = """
name: lake
etl:
  sources:
    t: {format: iceberg, table: prod.db.t}
  rows: t
  split: {kind: hash, shares: {train: 0.8, valid: 0.2}}
  features: {a: {kind: numeric}}
  label: late
"""
FIGURE = """
from sparkring.pipelines.report.figures import curves, to_svg
assert "<svg" in to_svg(curves({"loss": [(1, 2.0), (2, 1.0)]}, "loss"))
"""
CONNECT = """
import sys
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.run.spark import spark_session
config = SparkConfig(conf={"spark.connect.grpc.binding.port": sys.argv[1]})
with spark_session("x", config, LaunchConfig(world=1)) as spark:
    print(type(spark).__module__, spark.range(5).mapInArrow(lambda batches: batches, "id long").count())
"""
SCRIPT = "import queue, random, evil_free\nprint('queue of', queue.__file__, evil_free.X)\n"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for name, text in PLANTED.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MARKER": str(folder / MARKER)} | variables
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert not (folder / MARKER).exists(), (folder / MARKER).read_text()
    return done


def test_a_catalog_in_the_working_directory_is_not_taken(planted: Path) -> None:
    (planted / "lake.yaml").write_text(ICEBERG)
    main = "import sys; sys.path.append('.'); from sparkring.pipelines.cli import main; sys.exit(main())"
    done = run(planted, "-P", "-c", main, "config", "validate", "lake.yaml")
    assert ".pyiceberg.yaml of the working directory is not read; PYICEBERG_HOME=. reads it" in done.stderr
    assert "catalog 'prod'" in done.stderr and "PYICEBERG_CATALOG__PROD__URI" in done.stderr, done.stderr


def test_figures_do_not_follow_a_matplotlibrc_there(planted: Path) -> None:
    done = run(planted, "-P", "-c", FIGURE)
    assert done.returncode == 0, done.stderr


def test_a_checkout_starts_none_of_the_programs_that_its_configuration_names(planted: Path) -> None:
    subprocess.run(["git", "init", "--quiet", "."], cwd=planted, check=True)
    program = planted / "program"
    program.write_text(f"#!/bin/sh\ntouch {planted / MARKER}\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external"):
        subprocess.run(["git", "config", key, str(program)], cwd=planted, check=True)
    code = "from pathlib import Path; from sparkring.pipelines.tracking.checkout import git_commit, git_remote; "
    done = run(planted, "-P", "-c", code + "git_commit(Path('.')); git_remote(Path('.')); print('asked')")
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr  # and `run` has found no marker


@pytest.mark.spark
def test_nothing_that_a_job_starts_imports_a_file_named_as_a_module_of_pythons(planted: Path) -> None:
    (planted / "train.py").write_text(SCRIPT)
    (planted / "evil_free.py").write_text("X = 'of the folder'")
    done = run(planted, "-P", "-m", "sparkring.pipelines.cli", "launch", "--world", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of the folder") + done.stderr.count("of the folder") == 2, done.stdout + done.stderr


@pytest.mark.spark
def test_nor_do_workers_of_a_server_of_spark_connect_in_the_process(planted: Path) -> None:
    needs_connect()
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(OVERLAY)])
    done = run(planted, "-P", "-c", CONNECT, str(unused_port()), PYTHONPATH=path, SPARK_REMOTE="local[2]")
    assert (done.returncode, done.stdout) == (0, "pyspark.sql.connect.session 5\n"), done.stderr
