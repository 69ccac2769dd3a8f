"""The JVM of a classic session, through py4j. Everything here is private to Spark: as it is in 3.5 to 4.3.

Callers ask `can` first; a session of Spark Connect has no JVM here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sparkring.etl.spark_platform.capabilities import is_classic

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import DataFrame, SparkSession

try:
    from py4j.protocol import Py4JError as JvmError  # any; below: it cannot be reached; Java threw
    from py4j.protocol import Py4JJavaError as JavaThrew
    from py4j.protocol import Py4JNetworkError as JvmGone
except ImportError:  # a client of Spark Connect alone

    class JvmError(Exception):  # type: ignore[no-redef]
        """Never raised: there is no JVM."""

    class JavaThrew(JvmError):  # type: ignore[no-redef]
        """Never raised: there is no JVM."""

    class JvmGone(JvmError):  # type: ignore[no-redef]
        """Never raised: there is no JVM."""


BEFORE_SPARKS_OWN = 1000  # Hadoop runs shutdown hooks by falling priority; Spark's is below 100


def jvm_of(spark: SparkSession) -> Any:
    """Return the packages of the JVM."""
    return spark._jvm


def java_session(spark: SparkSession) -> Any:
    """Return the session in the JVM."""
    return spark._jsparkSession


def java_context(spark: SparkSession) -> Any:
    """Return the SparkContext in the JVM, in Scala."""
    return spark.sparkContext._jsc.sc()


def plans_of(query: DataFrame) -> Any:
    """Return the analyzed, optimized and physical plan of a query."""
    return query._jdf.queryExecution()


def is_loadable(spark: SparkSession, name: str) -> bool:
    """Return whether the driver's JVM has the Java class; with Connect, a task's JVM."""
    if not is_classic(spark):
        return is_loadable_in_task(spark, name)
    return bool(jvm_of(spark).org.apache.spark.util.Utils.classIsLoadable(name))


def is_loadable_in_task(spark: SparkSession, name: str) -> bool:
    """Return `is_loadable` by an SQL statement; False if the server forbids it."""
    from pyspark.errors import PySparkException

    with suppress(PySparkException):
        return bool(spark.sql(f"SELECT java_method('java.lang.Class', 'forName', '{name}')").collect())
    return False


def active_context() -> SparkContext | None:
    """Return the SparkContext of this process, or None; with Spark Connect alone always None.

    PySpark registers a context before it starts, in any thread; a context without a master is not returned.
    """
    if "pyspark" not in sys.modules:  # what made one has imported it
        return None
    try:
        from pyspark import SparkContext
    except ImportError:
        return None
    context = SparkContext._active_spark_context
    return context if getattr(context, "_jsc", None) is not None else None


def launch_gateway(conf: SparkConf, popen: dict[str, Any]) -> Any:
    """Start a JVM by spark-submit, with these arguments of Popen."""
    from pyspark.java_gateway import launch_gateway as launch  # py4j, which a client of Spark Connect alone lacks

    return launch(conf, popen)


def adopt_jvm(gateway: Any, conf: SparkConf) -> None:
    """Make the next session of this process use a JVM that was started for it."""
    from pyspark import SparkContext

    SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def end_jvm(limit_s: float) -> None:
    """End the JVM of this process and wait for it; a later session starts another."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=limit_s)
    SparkContext._gateway = SparkContext._jvm = None


def stop_session(spark: SparkSession) -> None:
    """Stop a session without PySpark's wait of up to 1.5 s for the threads that receive accumulators, which poll."""
    context: Any = spark.sparkContext
    server, context._accumulatorServer = context._accumulatorServer, None
    try:
        spark.stop()
    finally:
        threading.Thread(target=server.shutdown, daemon=True).start()  # the JVM sends nothing any more


def activate(spark: SparkSession) -> None:
    """Make it the active session of this thread, as PySpark does in the thread that opens it."""
    type(spark)._activeSession = spark
    java = java_session(spark)
    getattr(jvm_of(spark), java.getClass().getName()).setActiveSession(java)


def jvm_end(error: BaseException, limit_s: float = 5.0) -> tuple[int, int] | None:
    """Return (process id, exit code) of the JVM this process started; None if it runs or is another's.

    `error`: what was raised meanwhile; after a lost connection this waits for the exit, `limit_s` at most.
    """
    from pyspark import SparkContext

    process = getattr(getattr(SparkContext, "_gateway", None), "proc", None)
    if process is None:
        return None
    if isinstance(error, (JvmGone, OSError)) or isinstance(error.__context__, (JvmGone, OSError)):
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    code = process.poll()
    return None if code is None else (process.pid, code)


@contextmanager
def jvm_held(spark: SparkSession, limit_s: float) -> Iterator[None]:
    """Keep the JVM alive after a SIGTERM until this process has ended, for `limit_s` at most.

    `timeout`, systemd and batch systems send SIGTERM to the whole process group. The JVM would take the executors away
    while the ranks write their last checkpoint.
    """
    jvm = jvm_of(spark)
    lang, hooks = jvm.java.lang, jvm.org.apache.hadoop.util.ShutdownHookManager.get()
    ended = lang.ProcessHandle.of(os.getpid()).get().onExit()
    wait = lang.invoke.MethodHandles.publicLookup().bind(
        ended, "join", lang.invoke.MethodType.methodType(lang.Class.forName("java.lang.Object"))
    )
    hook = lang.invoke.MethodHandleProxies.asInterfaceInstance(lang.Class.forName("java.lang.Runnable"), wait)
    hooks.addShutdownHook(hook, BEFORE_SPARKS_OWN, int(limit_s), jvm.java.util.concurrent.TimeUnit.SECONDS)
    try:
        yield
    finally:
        with suppress(Exception):  # the JVM has ended, or is waiting for us to end
            hooks.removeShutdownHook(hook)
