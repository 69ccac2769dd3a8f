"""What a JVM of ours is told: decided by the recipe and its data, and left out where Java does not take it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.config import RunConfig
from sparkring.pipelines.run import jvm_options
from sparkring.pipelines.run.jvm_options import (
    OPTIONS,
    SHORT,
    SHORT_BYTES,
    bytes_below,
    class_archive,
    data_bytes,
    found_archive,
    options_of,
)
from sparkring.pipelines.run.spark_classes import make_archive
from sparkring.pipelines.run.spark_settings import WORKER_DAEMON, session_settings
from sparkring.pipelines.run.worker_daemon import installed_first

LOCAL = {"spark.master": "local[2]"}
ARCHIVE = Path("/a b/c.jsa")


@pytest.mark.parametrize(
    ("settings", "data", "archive", "told"),
    [
        (LOCAL, SHORT_BYTES, None, " ".join(SHORT)),
        (LOCAL, SHORT_BYTES + 1, None, ""),
        (LOCAL, None, None, ""),
        (LOCAL, None, ARCHIVE, '"-XX:SharedArchiveFile=/a b/c.jsa" -Xlog:cds=off -Xlog:cds+dynamic=off'),
        ({"spark.master": "spark://h:7077"}, 0, ARCHIVE, ""),
        ({"spark.master": "local-cluster[2,1,1024]"}, 0, ARCHIVE, ""),
        (LOCAL | {"spark.driver.extraJavaOptions": "-Dx=1"}, 0, ARCHIVE, ""),
        (LOCAL | {OPTIONS: "-XX:+UseG1GC"}, 0, ARCHIVE, ""),
    ],
)
def test_only_a_short_job_of_this_machine_is_compiled_for_a_quick_start(
    settings: dict[str, str], data: int | None, archive: Path | None, told: str
) -> None:
    assert options_of(settings, data, archive) == told


@pytest.mark.parametrize(
    ("master", "own", "daemon"),
    [
        ("local[2]", {}, WORKER_DAEMON),
        ("local-cluster[2,1,1024]", {}, None),
        ("spark://h:7077", {}, None),
        ("local[2]", {"spark.python.daemon.module": "mine"}, "mine"),
    ],
)
def test_workers_are_forked_with_their_imports_where_the_driver_runs_them(
    master: str, own: dict[str, str], daemon: str | None
) -> None:
    settings = session_settings("s", SparkConfig.model_validate({"master": master, "conf": own}), 2, is_submitted=False)
    assert settings.get("spark.python.daemon.module") == daemon


def test_the_installed_pyspark_comes_before_its_archive_and_behind_that_of_another_spark() -> None:
    installed, other = "/a/site-packages/pyspark/python/lib/pyspark.zip", "/opt/spark/python/lib/pyspark.zip"
    path = [installed, other, "/job", "/a/site-packages"]
    assert installed_first(path) == [other, "/job", "/a/site-packages", installed]
    assert installed_first(path[:3]) == path[:3], "there is no other PySpark"


def recipe(*sources: dict[str, Any]) -> RunConfig:
    named = {f"t{n}": source for n, source in enumerate(sources)}
    etl = {"sources": named, "rows": "t0", "features": {"x": {"kind": "numeric"}}}
    return RunConfig.model_validate({"name": "r", "etl": etl})


def test_the_bytes_of_all_sources_of_this_machine_are_known(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1/a.csv").write_bytes(b"x" * 70)
    (tmp_path / "one.csv").write_bytes(b"x" * 30)
    columns = {"format": "csv", "columns": {"x": "int"}}
    one, all_ = ({"path": f"{tmp_path}/{name}", **columns} for name in ("one.csv", "day=*/*.csv"))
    assert data_bytes(recipe(one)) == 30
    assert data_bytes(recipe(one, all_)) == 130, "of a glob the whole folder counts, which is no less"
    assert data_bytes(recipe(one, {"path": "s3://bucket/t", **columns})) is None
    assert data_bytes(recipe(one, {"table": "a.b"})) is None
    assert data_bytes(RunConfig.model_validate({"name": "r", "dataset": str(tmp_path)})) is None
    assert data_bytes(recipe({"path": f"{tmp_path}/missing.csv", **columns})) == 0


def test_counting_ends_where_it_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(4):
        (tmp_path / f"{n}.csv").write_bytes(b"x" * 10)
    assert bytes_below([str(tmp_path)]) == 40
    monkeypatch.setattr(jvm_options, "MOST_FILES", 3)
    assert bytes_below([str(tmp_path)]) is None
    monkeypatch.setattr(jvm_options, "MOST_FILES", 10)
    monkeypatch.setattr(jvm_options, "SHORT_BYTES", 39)
    assert bytes_below([str(tmp_path)]) is None


def test_the_archive_is_that_of_the_java_that_spark_starts(tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/java").touch()
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAVA_HOME": str(tmp_path / name)}
        archive = class_archive(cache)
        assert archive is not None and archive.parent == tmp_path / "cache/sparkring/jvm"
        assert found_archive(cache) is None
        found.append(archive)
    assert found[0] != found[1]
    found[0].parent.mkdir(parents=True)
    found[0].touch()
    one, other = ({**cache, "JAVA_HOME": str(tmp_path / name)} for name in ("one", "other"))
    assert found_archive(one) == found[0] and found_archive(other) is None
    assert class_archive({"JAVA_HOME": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path)}) is None


def test_jars_that_were_installed_again_need_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java passes over an archive of jars of another time, and Spark starts 3 s later."""
    for name in ("java/bin", "spark/jars"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("java/bin/java", "spark/__init__.py", "spark/jars/spark.jar"):
        (tmp_path / name).touch()
    monkeypatch.setattr("pyspark.__file__", str(tmp_path / "spark/__init__.py"))
    environment = {"XDG_CACHE_HOME": str(tmp_path), "JAVA_HOME": str(tmp_path / "java")}
    before = class_archive(environment)
    os.utime(tmp_path / "spark/jars/spark.jar", (1, 1))
    after = class_archive(environment)
    assert before is not None and after is not None and before != after
    assert before.name.partition("-")[0] == after.name.partition("-")[0], "of one environment"


def test_archives_that_no_job_has_used_for_long_are_deleted(tmp_path: Path) -> None:
    """Each environment has one, of 190 MB."""
    (tmp_path / "java/bin").mkdir(parents=True)
    (tmp_path / "java/bin/java").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path), "JAVA_HOME": str(tmp_path / "java")}
    own = class_archive(environment)
    assert own is not None
    own.parent.mkdir(parents=True)
    long_ago, lately = time.time() - 61 * 86400, time.time() - 59 * 86400
    earlier = f"{own.name.partition('-')[0]}-0123.jsa"  # of jars that were there before
    names = {own.name: long_ago, earlier: lately, "unused.jsa": long_ago, "used.jsa": lately, "other": long_ago}
    for name, used in names.items():
        (own.parent / name).write_text("as it was")
        os.utime(own.parent / name, (used, used))
    assert make_archive(environment) == own and own.read_text() == "as it was"
    assert {each.name for each in own.parent.iterdir()} == {own.name, "used.jsa", "other"}
    assert found_archive(environment) == own and own.stat().st_mtime > lately, "a job marks it as used"


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "java/bin").mkdir(parents=True)
    (tmp_path / "java/bin/java").touch()
    (tmp_path / "cache").touch()
    assert make_archive({"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAVA_HOME": str(tmp_path / "java")}) is None
    assert "no archive of Spark's classes is made: " in caplog.text and "Not a directory" in caplog.text


TOLD = """
import logging, sys
from pathlib import Path
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.pipelines.run import jvm_options
from sparkring.pipelines.run.spark import spark_session
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("py4j").setLevel(logging.WARNING)
if sys.argv[1]:
    jvm_options.SHORT = (sys.argv[1],)
with spark_session("told", SparkConfig(), LaunchConfig(world=1), data_bytes=1) as spark:
    bean = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    print("TOLD", [each for each in bean.getInputArguments() if each.startswith("-XX")])
    print("WORKERS", spark.sparkContext.parallelize([0], 1).map(lambda _: "pyarrow" in sys.modules).collect())
"""


@pytest.mark.spark
@pytest.mark.parametrize(
    ("flag", "archive", "told", "warned"),
    [
        pytest.param("", None, [*SHORT], "", marks=pytest.mark.slow),  # as the suite's session below
        pytest.param(  # Spark's launcher lets Java ignore it
            "-XX:+NoSuchFlag", None, ["-XX:+NoSuchFlag", "-XX:+IgnoreUnrecognizedVMOptions"], "", marks=pytest.mark.slow
        ),
        ("-XX:+UseG1GC -XX:+UseParallelGC", None, [], "this Java does not start with -XX:+UseG1GC -XX:+UseParallelGC"),
        pytest.param(
            "-XX:-UseSerialGC",
            b"of another Java",
            ["-XX:-UseSerialGC", "-XX:SharedArchiveFile={archive}"],
            "",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["taken", "unknown flag", "conflict", "foreign archive"],
)
def test_java_is_told_or_starts_without(
    tmp_path: Path, flag: str, archive: bytes | None, told: list[str], warned: str
) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TMPDIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        # Not what else all JVMs of the suite are told
        "JAVA_TOOL_OPTIONS": options_of(LOCAL, None, found_archive(os.environ)),
    }
    path = class_archive(environment)
    assert path is not None
    if archive is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(archive)
    done = subprocess.run([sys.executable, "-c", TOLD, flag], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = next(line for line in done.stdout.splitlines() if line.startswith("TOLD"))
    assert all(each.format(archive=path) in found for each in told)
    assert ("UseSerialGC" in found) == any("SerialGC" in each for each in told) and "UseG1GC" not in found
    assert done.stderr.count("this Java does not start with") == len(warned[:1]) and warned in done.stderr
    assert "WORKERS [True]" in done.stdout, "Spark's daemon has imported what its workers use"


@pytest.mark.spark
def test_workers_of_the_etl_and_agents_of_ranks_are_of_one_daemon_with_what_they_import(spark: Any) -> None:
    """In the suite's session, which has the settings of a job's."""

    def of_sql(batches: Any) -> Any:
        for _ in batches:
            imported = [name in sys.modules for name in ("pandas", "sparkring.pipelines.launch.barrier")]
            imported.append(gc.get_freeze_count() > 100_000)  # PySpark collects garbage after each task
            imported.append(".zip" not in str(sys.modules["pyspark"].__file__))
            yield pa.RecordBatch.from_pydict({"daemon": [os.getppid()], "imported": [all(imported)]})

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(of_sql, "daemon long, imported boolean").collect()
    (of_agents,) = spark.sparkContext.parallelize([0], 1).map(lambda _: os.getppid()).collect()
    assert row.imported and row.daemon == of_agents


@pytest.mark.spark
@pytest.mark.slow
def test_the_archive_is_made_once_and_the_next_jvm_maps_it(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"JAVA_TOOL_OPTIONS": ""}  # the suite's names the archive that there is
    made = [sys.executable, "-m", "sparkring.pipelines.run.spark_classes"]
    subprocess.run(made, env=environment, check=True, cwd=tmp_path)
    archive = found_archive(environment)
    assert archive is not None and [*archive.parent.iterdir()] == [archive]
    before = archive.stat().st_mtime_ns
    subprocess.run(made, env=environment, check=True, cwd=tmp_path)
    assert archive.stat().st_mtime_ns == before
    maps = f"print('MAPPED', {str(archive)!r} in open(f'/proc/{{bean.getPid()}}/maps').read())\n"
    code = TOLD.replace("    print(", f"    {maps}    print(", 1)
    done = subprocess.run([sys.executable, "-c", code, ""], env=environment, capture_output=True, text=True)
    assert "MAPPED True" in done.stdout, done.stderr


def java_at(folder: Path) -> str:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/java").touch()
    return str(folder)


def test_an_archive_of_another_user_or_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    environment = {"JAVA_HOME": java_at(tmp_path / "java"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    archive = class_archive(environment)
    assert archive is not None
    archive.parent.mkdir(parents=True, mode=0o700)
    archive.write_bytes(b"")
    for place, mode in ((archive, 0o600), (archive.parent, 0o700)):
        archive.chmod(0o600)
        archive.parent.chmod(0o700)
        assert found_archive(environment) == archive
        for bits in (0o020, 0o002):
            place.chmod(mode | bits)
            assert found_archive(environment) is None
    archive.parent.chmod(0o700)
    archive.chmod(0o600)
    if os.getuid() == 0:
        os.chown(archive, 54321, -1)
        assert found_archive(environment) is None


def test_without_a_home_there_is_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id without a name
    java = java_at(tmp_path / "java")
    assert class_archive({"JAVA_HOME": java}) is None
    assert class_archive({"JAVA_HOME": java, "HOME": str(tmp_path)}) is not None
