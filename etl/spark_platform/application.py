"""The application of a session: its identity, settings, and what travels to its executors."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkring.etl.spark_platform.capabilities import all_settings, is_classic
from sparkring.etl.spark_platform.jvm import JvmGone, activate, java_context, jvm_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GONE = (JvmGone, OSError)  # what a call for tidying up raises after Ctrl-C: the session is of no use then
DESCRIPTION, INTERRUPT = "spark.job.description", "spark.job.interruptOnCancel"
# Of importlib.invalidate_caches, which pyspark calls, while another thread imports
IMPORTING = "dictionary changed size during iteration"
SHIPPED = "_sparkring_code"  # of a session of Spark Connect


def settings_of(spark: SparkSession) -> Mapping[str, str]:
    """Return the application's settings; with Spark Connect, those its server shows to a session."""
    if is_classic(spark):
        return dict(spark.sparkContext.getConf().getAll())
    return all_settings(spark)


def check_session(spark: Any) -> None:
    """Raise TypeError for an object that is not a session, ValueError for a session that was stopped."""
    if not hasattr(spark, "createDataFrame"):
        raise TypeError(f"spark = {spark!r}: must be the SparkSession whose executors run the ranks")
    if has_ended(spark):
        raise ValueError("spark: the session was stopped; make another by SparkSession.builder.getOrCreate()")


def has_ended(spark: Any) -> bool:
    """Return whether the session was stopped, or its application ended by the cluster."""
    if not is_classic(spark):
        return bool(spark.is_stopped)
    return spark.sparkContext._jsc is None or bool(java_context(spark).isStopped())


def master_of(spark: SparkSession) -> str:
    if is_classic(spark):
        return str(spark.sparkContext.master)
    return spark.conf.get("spark.master", "Spark Connect") or "Spark Connect"


def application_id(spark: SparkSession) -> str:
    if is_classic(spark):
        return str(spark.sparkContext.applicationId)
    return spark.conf.get("spark.app.id", "") or ""


def java_version(spark: SparkSession) -> str:
    """Return the Java version of the driver's JVM; "" if a Connect server hides it."""
    if is_classic(spark):
        return str(jvm_of(spark).java.lang.System.getProperty("java.version"))
    with suppress(Exception):
        return str(spark.sql("SELECT java_method('java.lang.System', 'getProperty', 'java.version')").collect()[0][0])
    return ""


def default_parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark would run at a time; Connect reads it from a plan, without a job."""
    if is_classic(spark):
        return int(spark.sparkContext.defaultParallelism)
    return splits_of(spark.range(1)._explain_string())  # type: ignore[operator]


def numbered_rows(spark: SparkSession, name: str, count: int, partitions: int) -> DataFrame:
    """Make rows with the numbers from 0 to `count` - 1 in a column, for tasks to read files by.

    Spark must not take what is read by them for small, and broadcast it in a join: it knows the size of a range, not of
    an RDD. With Connect, which has no RDDs, `build_session` prevents that.
    """
    if is_classic(spark):
        numbers = spark.sparkContext.parallelize(range(count), partitions)
        return spark.createDataFrame(numbers.map(lambda n: (n,)), f"{name} int")
    return spark.range(0, count, 1, partitions).selectExpr(f"CAST(id AS INT) AS {name}")


def splits_of(plan: str) -> int:
    """Read into how many partitions a range is split: `Range (0, 1, step=1, splits=2)`."""
    found = re.search(r"\bRange \(.*splits=(\d+)\)", plan)
    assert found is not None, plan
    return int(found[1])


@contextmanager
def described(spark: SparkSession, does: str) -> Iterator[None]:
    """Describe the block's jobs in Spark's UI and wherever else they are shown."""
    if not is_classic(spark):
        with tagged(spark, does):
            yield
        return
    context = spark.sparkContext
    before = context.getLocalProperty(DESCRIPTION)
    context.setLocalProperty(DESCRIPTION, does)
    try:
        yield
    finally:
        with suppress(*GONE):
            context.setLocalProperty(DESCRIPTION, before)  # type: ignore[arg-type]


@contextmanager
def tagged(spark: SparkSession, tag: str) -> Iterator[None]:
    """Give the block's jobs, those of this thread, a tag by which `cancel` finds them, and interrupts their tasks."""
    if not is_classic(spark):
        spark.addTag(tag)
        try:
            yield
        finally:
            spark.removeTag(tag)
        return
    context = spark.sparkContext
    context.addJobTag(tag)
    context.setLocalProperty(INTERRUPT, "true")
    try:
        yield
    finally:
        with suppress(*GONE):
            context.removeJobTag(tag)
            context.setLocalProperty(INTERRUPT, None)  # type: ignore[arg-type]


def cancel(spark: SparkSession, tag: str) -> None:
    """Cancel the jobs with this tag."""
    if is_classic(spark):
        spark.sparkContext.cancelJobsWithTag(tag)
    else:
        spark.interruptTag(tag)


def add_archive(spark: SparkSession, path: Path) -> None:
    """Give every task the unpacked archive, below SparkFiles' folder under the archive's name."""
    if is_classic(spark):
        spark.sparkContext.addArchive(str(path))
    else:
        spark.addArtifacts(str(path), archive=True)


def add_file(spark: SparkSession, path: Path) -> None:
    """Give every task the file, in SparkFiles' folder."""
    if is_classic(spark):
        spark.sparkContext.addFile(str(path))
    else:
        spark.addArtifacts(str(path), file=True)


def add_code(spark: SparkSession, path: Path) -> None:
    """Put an archive of Python modules on the path of every task; by Connect, of this session and `fresh_session`s."""
    if is_classic(spark):
        try:
            spark.sparkContext.addPyFile(str(path))
        except RuntimeError as error:
            if IMPORTING not in str(error):  # else raised at its end, when the archive is there
                raise
        return
    is_added = False
    while not is_added:
        try:
            spark.addArtifacts(str(path), pyfile=True)
            is_added = True
        except RuntimeError as error:  # raised before it sends anything
            if IMPORTING not in str(error):
                raise
    setattr(spark, SHIPPED, [*getattr(spark, SHIPPED, []), path])


def shipped_names(spark: SparkSession) -> list[str]:
    """List the archives that were put on the path."""
    if is_classic(spark):
        return [*(spark.sparkContext._python_includes or [])]
    return [path.name for path in getattr(spark, SHIPPED, [])]


def fresh_session(spark: SparkSession) -> SparkSession:
    """Open another session of the same application, with views and settings of its own."""
    if is_classic(spark):
        return spark.newSession()
    session = type(spark)(spark.client._builder)  # type: ignore[arg-type]
    for path in getattr(spark, SHIPPED, []):
        add_code(session, path)
    return session


def driver_address(spark: SparkSession) -> tuple[str, str]:
    """Return the driver's address for the ranks' agents: (address to bind, name to connect to)."""
    if is_classic(spark):
        settings = settings_of(spark)
        host = settings.get("spark.driver.host") or "127.0.0.1"
        return settings.get("spark.driver.bindAddress") or host, host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((spark.client.host, 1))  # sends nothing: it chooses the interface
        return towards.getsockname()[0], towards.getsockname()[0]


def served_folder(spark: SparkSession) -> Path:
    """Create a folder for files that executors fetch during the session."""
    if is_classic(spark):
        return Path(str(spark.sparkContext._temp_dir))
    folder = tempfile.mkdtemp(prefix="sparkring-artifacts-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def in_process(spark: SparkSession) -> bool:
    """Return whether executors are threads of the driver's JVM and share its Python path."""
    return is_classic(spark) and re.fullmatch(r"local(\[.*])?", master_of(spark)) is not None


def named_python(spark: SparkSession) -> str | None:
    """Find the workers' Python that the user has named: in Spark's configuration, or else by a variable.

    The configuration, spark-defaults.conf too, is read by spark-submit alone.
    """
    return settings_of(spark).get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")


def workers_python(spark: SparkSession) -> str:
    """Return the Python that executors start."""
    return str(spark.sparkContext.pythonExec) if is_classic(spark) else "that of the Spark Connect server"


def start_python(spark: SparkSession, python: str) -> None:
    """Make executors start this Python from now on; a server of Spark Connect has its own."""
    if is_classic(spark):
        spark.sparkContext.pythonExec = python


@contextmanager
def callers_session(spark: SparkSession) -> Iterator[None]:
    """Let a session that was made elsewhere run this Python for the block, and be the active one again after it.

    PySpark makes active whichever session a DataFrame is created in, and a build's own has none of the caller's views.
    """
    before = type(spark).getActiveSession() or spark
    with this_python(spark):
        try:
            yield
        finally:
            if is_classic(before):
                with suppress(*GONE):
                    activate(before)


@contextmanager
def this_python(spark: SparkSession) -> Iterator[None]:
    """Let local executors run this Python for the block, unless the user has named one.

    Of a session that was made elsewhere, as in a notebook, Spark takes the first `python3` of the PATH.
    """
    before = workers_python(spark)
    if master_of(spark).startswith("local") and named_python(spark) is None:
        start_python(spark, sys.executable)
    try:
        yield
    finally:
        start_python(spark, before)
