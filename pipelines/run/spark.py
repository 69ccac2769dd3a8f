"""The Spark session of a job: created here, or taken over under spark-submit and in a notebook."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pwd
import re
import signal
import socketserver
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyspark
import pyspark.accumulators
from pyspark import SparkConf
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.errors import first_line
from sparkring.etl.spark_platform.application import callers_session, named_python, settings_of, start_python
from sparkring.etl.spark_platform.capabilities import is_classic
from sparkring.etl.spark_platform.jvm import (
    activate,
    active_context,
    adopt_jvm,
    end_jvm,
    jvm_end,
    jvm_held,
    launch_gateway,
    stop_session,
)
from sparkring.pipelines.run.jvm_options import OPTIONS, found_archive, is_refused, options_of
from sparkring.pipelines.run.package import ship_code
from sparkring.pipelines.run.spark_remote import check_versions, open_remote
from sparkring.pipelines.run.spark_settings import CONNECT_MODE, VARIABLE, remote_of, session_settings, submitted
from sparkring.training.launch.failure import Cancelled, LaunchError

log = logging.getLogger(__name__)

AFTER_GRACE_S = 30.0  # for killed ranks to end, and for MLflow's last operations
LOG_PREFIX, LOG_AGE_S = "sparkring-spark-", 7 * 86400.0
JVM_ENDS_S = 60.0  # its shutdown hooks, after its session was stopped
POLL_S, DEAD_S, SILENT_S = 0.2, 5.0, 180.0  # of a JVM that starts: looked at; dead but there; silent
JVM_REMEDIES = {  # what its log has -> what to do
    r"LoginException|invalid null input: name": "this user id has no entry in /etc/passwd: add one where the container "
    'starts, `echo "spark:x:$(id -u):0::/tmp:/bin/sh" >> /etc/passwd`',
    r"UnknownHostException": "this host's name does not resolve: put it into /etc/hosts, or set SPARK_LOCAL_IP",
    r"JAVA_HOME|java: (?:command )?not found|bin/java: No such": "set JAVA_HOME to a Java 17 or newer, or unset it",
    r"Too many open files": "allow more open files, such as `ulimit -n 4096`",
    r"InvalidPathException|Malformed input": "set LC_ALL=C.UTF-8, or TMPDIR to a path of plain letters",
    r"UnsupportedClassVersionError": "Spark needs Java 17 or newer: set JAVA_HOME to one",
    r"OutOfMemoryError|Could not reserve enough space|insufficient memory": "set spark.conf.spark.driver.memory lower",
}


@dataclass(frozen=True)
class Opened:
    """A session. `borrowed`: it was there before; `jvm_log`: of a JVM that was started for it with a log of its own."""

    spark: SparkSession
    borrowed: bool
    jvm_log: Path | None

    def close(self) -> None:
        """Stop the session if it was created here."""
        if self.borrowed:
            return
        with contextlib.suppress(Exception):  # the JVM may have ended first; another error reports that
            if is_classic(self.spark):
                stop_session(self.spark)
            else:
                self.spark.stop()

    def forget_log(self) -> None:
        """Delete the JVM's log: nobody needs it of a session that did not fail."""
        if self.jvm_log is not None:
            self.jvm_log.unlink(missing_ok=True)


class NotWanted(Exception):
    """Nobody waits any longer for the session that is being opened."""


@contextmanager
def spark_session(
    name: str, config: SparkConfig, launch: LaunchConfig, data_bytes: int | None = None
) -> Iterator[SparkSession]:
    """Open the job's session; stop it at the end if it was created here. `data_bytes`: of all sources, where known."""
    with held_session(open_session(name, config, launch, data_bytes, threading.Event()), launch) as spark:
        yield spark


def open_session(
    name: str, config: SparkConfig, launch: LaunchConfig, data_bytes: int | None, unwanted: threading.Event
) -> Opened:
    """Open the job's session, in any thread.

    Args:
        name: name of the recipe.
        config: configuration of the session.
        launch: launch block with the number of ranks.
        data_bytes: bytes of all sources; None if unknown.
        unwanted: set by another thread once nobody waits for the session; NotWanted then, and no JVM is left.
    """
    # PySpark 4.3 warns of pandas 3 at every session; what we use of it is tested with this pandas.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    borrowed = active_context() is not None
    hide_error_copies()
    check_versions(name, pyspark.__version__, pyspark.__version__)
    if (remote := remote_of(name, config, os.environ)) is not None:
        return open_connect(name, config, launch, remote, data_bytes, unwanted)
    is_own = not submitted()
    home = os.environ.get("SPARK_HOME") if is_own and not borrowed else None
    if home and (found := version_of_home(Path(home))):  # before its JVM starts, which another PySpark cannot talk to
        check_versions(name, pyspark.__version__, found, home)
    settings = session_settings(name, config, launch.world, submitted())
    python = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)} if is_own else {}  # the JVM's
    with variables(user_variables(os.environ) | python):
        jvm_log = None
        if not submitted() and config.log == "file":
            options = options_of(settings, data_bytes, found_archive(os.environ))
            jvm_log = start_quick_jvm(settings, options, unwanted)
            if unwanted.is_set():  # the JVM stays, as after a session, until this process ends
                jvm_log.unlink()
                raise NotWanted
        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        with end_of_jvm_named(jvm_log), interrupts_kept():
            spark = builder.getOrCreate()
    if is_own:  # Spark would start the first `python3` of the PATH on its workers, which need not be this one
        with end_of_jvm_named(jvm_log):
            start_python(spark, named_python(spark) or sys.executable)
    check_versions(name, pyspark.__version__, spark.version, home)
    return Opened(spark, borrowed, jvm_log)


def open_connect(
    name: str, config: SparkConfig, launch: LaunchConfig, remote: str, data_bytes: int | None, unwanted: threading.Event
) -> Opened:
    """Open a session of Spark Connect, or take over the one there is.

    Args:
        name: name of the recipe.
        config: the recipe's spark block.
        launch: the number of ranks.
        remote: `sc://host:port/...`, or `local[n]` for a server in a JVM of this process.
        data_bytes: size of all sources in bytes; None if unknown.
        unwanted: set once nobody needs the session any more.
    """
    at = {"master": remote} if remote.startswith("local") else {}
    settings = session_settings(name, config.model_copy(update=at), launch.world, is_submitted=not at)
    borrowed, jvm_log = CONNECT_MODE in os.environ, None
    with variables({"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)} if at else {}):
        if at and not borrowed and active_context() is None and config.log == "file":
            options = options_of(settings, data_bytes, found_archive(os.environ))
            with variables(user_variables(os.environ), without=[VARIABLE]):  # else spark-submit is a client's
                jvm_log = start_quick_jvm(settings, options, unwanted)
        with log_named(jvm_log):
            spark = open_remote(name, settings, remote)
    check_versions(name, pyspark.__version__, spark.version)
    if not at:  # the server's Python need not have our code, and tasks of the ETL are of it too
        ship_code(spark)
    return Opened(spark, borrowed, jvm_log)


@contextmanager
def log_named(jvm_log: Path | None) -> Iterator[None]:
    """Add the log of a JVM to an error of a server of Spark Connect in it."""
    try:
        yield
    except LaunchError as error:
        if jvm_log is None:
            raise
        raise LaunchError(f"{error}; the log of its JVM: {jvm_log}") from error


def hide_error_copies() -> None:
    """Show the copies of errors that PySpark logs as JSON with debug logging alone: we report the errors ourselves."""
    for each in vars(pyspark.accumulators).values():  # a JVM that was killed ends what it sends in the middle
        if isinstance(each, type) and issubclass(each, socketserver.TCPServer):
            each.handle_error = lambda *_: None  # type: ignore[method-assign]
    level = logging.INFO if logging.getLogger().isEnabledFor(logging.DEBUG) else logging.CRITICAL
    if importlib.util.find_spec("pyspark.logger") is None:  # it is there from 4.0 on
        return
    from pyspark.logger import PySparkLogger  # PySpark 3 has none

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        # Made by PySpark's own: a plain logger of that name would raise TypeError for what PySpark gives it.
        PySparkLogger.getLogger(name).setLevel(level)


@contextmanager
def held_session(opened: Opened, launch: LaunchConfig) -> Iterator[SparkSession]:
    """Use a session in this thread, and close it at the end."""
    spark = opened.spark
    if opened.borrowed:
        with callers_session(spark):
            yield spark
        return
    if not is_classic(spark):
        try:
            with end_of_jvm_named(opened.jvm_log):
                yield spark
        finally:
            opened.close()
        opened.forget_log()
        return
    with end_of_jvm_named(opened.jvm_log), jvm_held(spark, launch.grace_s + AFTER_GRACE_S):
        try:
            activate(spark)
            yield spark
        finally:
            opened.close()
    opened.forget_log()


@contextmanager
def end_of_jvm_named(jvm_log: Path | None) -> Iterator[None]:
    """Raise LaunchError for whatever is raised inside once the JVM of this process has ended."""
    try:
        yield
    except Cancelled:  # SIGTERM for the whole group ends the JVM too
        raise
    except Exception as error:
        if (end := jvm_end(error)) is not None:
            raise LaunchError(ended_jvm(*end, jvm_log)) from error
        raise


def ended_jvm(pid: int, code: int, jvm_log: Path | None) -> str:
    """Return the message for a JVM that ended during a job. `code`: exit code, negative for a signal."""
    how = f"exit code {code}"
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        how = "SIGKILL, as by the kernel where memory runs short (`dmesg` says so)"
    elif code < 0:
        how = signal.Signals(-code).name
    where = f"; its log: {jvm_log}" if jvm_log is not None else ""
    return (
        f"Spark's JVM (process {pid}) ended in the middle of the job, by {how}{where}. Where memory is short, lower "
        "spark.driver.memory or launch.world, or take a larger machine; the same command goes on from what is done"
    )


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Restore what Ctrl-C does: PySpark's own handler calls the JVM in the middle of another call, which fails."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def user_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that tell a JVM its user if the user id has no name, as in OpenShift."""
    try:
        pwd.getpwuid(os.getuid())
        return {}
    except KeyError:
        home = environment.get("HOME", "")
        home = home if home and os.access(home, os.W_OK) else tempfile.gettempdir()
        name = environment.get("HADOOP_USER_NAME") or environment.get("USER") or f"uid{os.getuid()}"
        java = f"-Duser.home={home} -Duser.name={name} {environment.get('SPARK_SUBMIT_OPTS', '')}".strip()
        return {"SPARK_SUBMIT_OPTS": java, "HADOOP_USER_NAME": name, "SPARK_USER": name}


@contextmanager
def variables(changes: Mapping[str, str], without: Sequence[str] = ()) -> Iterator[None]:
    """Set environment variables for the block, in which those of `without` are not set."""
    before = {name: os.environ.get(name) for name in [*changes, *without]}
    os.environ.update(changes)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def start_jvm(settings: Mapping[str, str], unwanted: threading.Event) -> Path:
    """Start the JVM that the session will run in, with its output and Spark's log in a file, which is returned.

    A JVM says a dozen lines before any setting of Spark's is heard, and native libraries say more. LaunchError where it
    does not start, dies, or is silent for too long; NotWanted where it is `unwanted` before it has started.
    """
    sweep_logs(time.time())
    descriptor, name = tempfile.mkstemp(prefix=LOG_PREFIX, suffix=".log")
    path = Path(name)
    log.info("Spark starts, %s; its own log: %s", settings["spark.master"], name)
    conf = SparkConf(loadDefaults=True).setAll([*settings.items()])
    with os.fdopen(descriptor, "w") as out, ThreadPoolExecutor(1) as starter:
        started = starter.submit(launch_gateway, conf, {"stdout": out, "stderr": out})  # waits without a limit
        try:
            while not started.done():
                wait([started], timeout=POLL_S)
                if unwanted.is_set():
                    raise NotWanted
                if not started.done() and (why := silent_too_long(path, time.time())):
                    raise LaunchError(jvm_problem(path, why))
            gateway = started.result()
        except (PySparkException, OSError, EOFError) as error:
            raise LaunchError(jvm_problem(path, "it ended")) from error
        except BaseException as error:
            end_writers(path)  # so that the starter ends too
            while wait([started], timeout=POLL_S).not_done:
                end_writers(path)  # it had not started one
            end_writers(path)
            if isinstance(error, NotWanted):
                path.unlink()
            raise
    adopt_jvm(gateway, conf)
    return path


def start_quick_jvm(settings: Mapping[str, str], options: str, unwanted: threading.Event) -> Path:
    """Start a JVM with Java's `options`, or log that it starts only without them."""
    if not options:
        return start_jvm(settings, unwanted)
    try:
        return start_jvm({**settings, OPTIONS: options}, unwanted)
    except LaunchError as error:
        if not is_refused(str(error)):
            raise
        log.warning("this Java does not start with %s; it starts without (%s)", options, error)
        return start_jvm(settings, unwanted)


def end_writers(log: Path) -> None:
    """Kill the children of this process whose output is this file; another thread may have children of its own."""
    tasks = Path("/proc/self/task").glob("*/children")
    for pid in {int(pid) for task in tasks for pid in task.read_text().split()}:
        with contextlib.suppress(OSError):  # it has ended
            if os.path.samefile(f"/proc/{pid}/fd/1", log):
                os.kill(pid, signal.SIGKILL)


def silent_too_long(path: Path, now: float) -> str:
    """Explain why a JVM that has not started is not waited for any longer; empty where it is.

    Downloads of packages may take long, and name each file. One whose main thread has died may live on in others.
    """
    silent_s = now - path.stat().st_mtime
    if silent_s > DEAD_S and 'Exception in thread "main"' in path.read_text(errors="replace"):
        return "it failed, and did not end"
    return f"it wrote nothing for {silent_s:.0f} s" if silent_s > SILENT_S else ""


def jvm_problem(path: Path, why: str) -> str:
    """Return the message for a JVM that did not start: its log's first exception, and what to do."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if not line.startswith("WARNING: ")]
    named = r"Exception|Error\b|error:|fatal error|Unrecognized VM option"
    found = next((line for line in lines if re.search(named, line)), lines[-1] if lines else "")
    found = found.removeprefix('Exception in thread "main" ').strip("# :.")
    problem = first_line(found) if found else "its log names no error"
    remedy = next((remedy for form, remedy in JVM_REMEDIES.items() if re.search(form, "\n".join(lines))), "")
    home = os.environ.get("SPARK_HOME")
    place = f"it is the Spark of SPARK_HOME = {home!r}: unset that for the one of this PySpark" if home else ""
    words = [f"Spark's JVM did not start ({why}): {problem}", f"see its log: {path}", remedy, place]
    return "; ".join(filter(None, words))


def version_of_home(home: Path) -> str | None:
    """Return the version of the Spark in this folder, by the name of a jar; None where it has no such jar."""
    names = [
        re.fullmatch(r"spark-core_[\d.]+-(\d+\.\d+.*)\.jar", jar.name) for jar in home.glob("jars/spark-core_*.jar")
    ]
    return next((name[1] for name in names if name), None)


def sweep_logs(now: float) -> None:
    """Delete this user's logs of Spark that are older than LOG_AGE_S: of sessions that failed or were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{LOG_PREFIX}*.log"):
        with contextlib.suppress(OSError):  # another job has just deleted it
            state = path.lstat()
            if state.st_uid == os.getuid() and now - state.st_mtime > LOG_AGE_S:
                path.unlink()


class JobSession:
    """The session of a job, opened when it is first called for; `replaced` puts one of other settings in its place."""

    def __init__(
        self,
        held: contextlib.ExitStack,
        first: Callable[[], AbstractContextManager[SparkSession]],
        another: Callable[[Mapping[str, str]], AbstractContextManager[SparkSession]],
    ) -> None:
        """Prepare. `held`: closes what is open; `first`: opens the session; `another`: opens one with more settings."""
        self._held, self._first, self._another = held, first, another
        self._is_own = active_context() is None
        self._spark: SparkSession | None = None

    def __call__(self) -> SparkSession:
        if self._spark is None:
            self._spark = self._held.enter_context(self._first())
        return self._spark

    @property
    def is_replaceable(self) -> bool:
        """Whether this process may end the application and begin another; a manager ends with that of its driver."""
        spark = self()
        in_cluster = is_classic(spark) and settings_of(spark).get("spark.submit.deployMode") == "cluster"
        return self._is_own and is_classic(spark) and not in_cluster

    def replaced(self, settings: Mapping[str, str]) -> SparkSession:
        """End the application, and open another with these settings too, in which the job continues."""
        self._held.close()
        if not submitted():  # then the JVM is this process's own
            end_jvm(JVM_ENDS_S)
        self._spark = self._held.enter_context(self._another(settings))
        return self._spark


@contextmanager
def session_on_demand(
    name: str, config: SparkConfig, launch: LaunchConfig, data_bytes: Callable[[], int | None] = lambda: None
) -> Iterator[JobSession]:
    """Give a function that opens the job's session when it is first called, and returns it ever after.

    `data_bytes`: of all sources, where known; asked for then.
    """

    def first() -> AbstractContextManager[SparkSession]:
        return spark_session(name, config, launch, data_bytes())

    with contextlib.ExitStack() as held:
        yield JobSession(held, first, partial(with_settings, name, config, launch))


def with_settings(
    name: str, config: SparkConfig, launch: LaunchConfig, settings: Mapping[str, str]
) -> AbstractContextManager[SparkSession]:
    """Open the job's session with further settings, which win over the recipe's."""
    return spark_session(name, config.model_copy(update={"conf": {**config.conf, **settings}}), launch)


@contextmanager
def session_ahead(
    name: str, config: SparkConfig, launch: LaunchConfig, data_bytes: Callable[[], int | None] = lambda: None
) -> Iterator[JobSession]:
    """Open the session at once in a thread, unlike `session_on_demand`, and close it if unused.

    A session that is not this process's own, or whose JVM writes to the console, waits until it is called for.
    """
    if submitted() or config.log != "file" or remote_of(name, config, os.environ) is not None:
        with session_on_demand(name, config, launch, data_bytes) as session:
            yield session
        return
    unwanted = threading.Event()
    with ThreadPoolExecutor(1, "spark") as thread, contextlib.ExitStack() as held:
        unused = held.enter_context(contextlib.ExitStack())

        @contextmanager
        def first() -> Iterator[SparkSession]:
            with held_session(result_of(opening), launch) as spark:
                unused.pop_all()
                yield spark

        session = JobSession(held, first, partial(with_settings, name, config, launch))
        opening = thread.submit(open_session, name, config, launch, data_bytes(), unwanted)
        unused.callback(close_unused, opening, unwanted)
        yield session


def result_of(opening: Future[Opened]) -> Opened:
    """Wait in short steps: Python handles a signal that comes just before a long wait only after it."""
    while wait([opening], timeout=POLL_S).not_done:
        pass
    return opening.result()


def close_unused(opening: Future[Opened], unwanted: threading.Event) -> None:
    """End the opening of a session, or the session."""
    unwanted.set()
    with contextlib.suppress(Exception):  # what was wrong with it is of no interest: another error is on its way
        opened = result_of(opening)
        opened.close()
        opened.forget_log()
