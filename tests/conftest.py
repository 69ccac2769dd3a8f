"""Shared fixtures, and the suite's guard over itself: what a test starts or sets must be gone when it ends."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck

from sparkring.pipelines.run.jvm_options import found_archive, options_of
from sparkring.training.launch import attempt
from sparkring.training.launch.channel import control_client
from sparkring.training.launch.host.processes import usable_cores
from sparkring.training.launch.host.shared_imports import shared_imports
from tests.descendants import Descendants, imports_for_all
from tests.helpers.codegen import COMPILED

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
if not os.environ.get("SPARKRING_TEST_GPU"):  # ranks with device `auto` would take them: results of tests are the CPU's
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile our files again
# Of all that tests start: a thread of OpenMP that waits for others gives its core away, as in our ranks.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Of all JVMs that tests start, clusters and users' own sessions too: what a short job's has.
os.environ.setdefault("JAVA_TOOL_OPTIONS", options_of({"spark.master": "local"}, 0, found_archive(os.environ)))
# Of all sessions that tests start: how they read their plans. Removed where a job is to be as a user's.
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).resolve().parent / "helpers/spark_conf")
FIRST_STATES: dict[str, list[Any]] = {}  # by module: of its generators, before its first test
ROOT = Path(__file__).resolve().parent.parent
SPARK_DAEMONS = ("pyspark.daemon", "pyspark/daemon", "sparkring.pipelines.run.worker_daemon")
KEPT = SimpleNamespace(modules=0)  # how many were imported when collections of garbage last left out what there was
LONGEST = (  # above 20 s on a quiet machine of two cores (benchmarks/suite.py); those whose name begins so
    *("test_job", "test_worker", "test_mesh", "test_notebook", "test_cost", "test_chaos", "test_spark_submit"),
    *("test_on_ray", "test_etl_build", "test_spark.py", "test_etl_shard", "test_jdbc", "test_hosts", "test_tutorials"),
    *("test_baseline", "test_layouts", "test_source.py", "test_tables", "test_state", "test_etl_files"),
    *("test_collective", "test_kernels", "test_lake_job", "test_working_directory"),
)
# Both of hypothesis' limits are durations, and a fixture of one folder for all examples is what our tests want.
hypothesis.settings.register_profile(
    "no clock",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("no clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden anew from the recipes")


def pytest_configure(config: pytest.Config) -> None:
    # A suite that runs in the background has Ctrl-C switched off, one under nohup SIGHUP, and so would all they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line("markers", "horovod: needs Horovod, which set-up leaves out without a C++ compiler")


def pytest_collectstart() -> None:
    gc.disable()  # until all are imported: to collect of what stays was a third of that time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU, or Horovod, are skipped where there is none, and say so; the longest files come first."""
    import torch

    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "torch sees no GPU (tests look for one with `make test-gpu` only)"
    if importlib.util.find_spec("horovod") is None:
        missing["horovod"] = "Horovod is not installed"
    for item in items:
        if os.environ.get("SPARKRING_TEST_GPU") and item.path.is_relative_to(ROOT / "tests/ranks"):
            item.add_marker(pytest.mark.gpu)  # tests/ranks/problem.py puts the ranks on GPUs
        for marker in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[marker]))
    # Else the last file that a worker takes would keep the others waiting for minutes.
    items.sort(key=lambda item: not item.path.name.startswith(LONGEST))


def _lives_on(pid: int) -> bool:
    """Whether a test left the process behind: it is alive and below this one, and none of the shared session's."""
    try:
        process = psutil.Process(pid)
        spark_daemon = any(daemon in word for word in process.cmdline() for daemon in SPARK_DAEMONS)
        shared = imports_for_all(process) and not imports_for_all(process.parent())
        known = "java" in process.name() or spark_daemon or shared
        ours = process.status() != psutil.STATUS_ZOMBIE and not known
        return ours and os.getpid() in {each.pid for each in process.parents()}
    except psutil.NoSuchProcess:
        return False


def _job_properties() -> set[str]:
    """What this thread says of its Spark jobs, such as their description: the session keeps it from test to test."""
    pyspark = sys.modules.get("pyspark.core.context")
    if pyspark is None or (context := pyspark.SparkContext._active_spark_context) is None:
        return set()
    from py4j.protocol import Py4JError

    try:
        properties = context._jsc.sc().getLocalProperties()
        names = [str(name) for name in properties.stringPropertyNames().toArray()]
        return {name for name in names if not name.startswith("__") and properties.getProperty(name)}  # __: Spark's own
    except Py4JError:  # its JVM was killed by the test
        return set()


@pytest.fixture(scope="session", autouse=True)
def imports_once() -> Iterator[None]:
    """Let the ranks of all tests come from processes that have imported torch for an earlier test."""
    with ExitStack() as stack:
        for threads in {1, usable_cores()}:  # of one rank on this machine, and of several
            stack.enter_context(shared_imports({"OMP_NUM_THREADS": str(threads), **os.environ}))
        yield


@pytest.fixture(scope="session", autouse=True)
def short_intervals() -> Iterator[None]:
    """Let agents and drivers in this process report and check more often than those of a thousand ranks may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_client, "HEARTBEAT_S", 0.1)
        patch.setattr(attempt, "CHECK_S", 0.05)
        yield


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> None:
    """Let generators of a module draw the same in each of its tests, whichever tests this worker ran before."""
    generators = [value for value in vars(request.module).values() if isinstance(value, np.random.Generator)]
    if generators:
        first = FIRST_STATES.setdefault(request.module.__name__, [each.bit_generator.state for each in generators])
        for generator, state in zip(generators, first, strict=True):
            generator.bit_generator.state = state


@pytest.fixture(scope="session")
def descendants() -> Descendants:
    return Descendants()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(descendants: Descendants, request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaks environment variables, processes, or what it says of Spark jobs fails, named, instead of
    poisoning the next one."""
    on_spark = "spark" in request.fixturenames or request.node.get_closest_marker("spark") is not None
    environment, processes, properties = (
        dict(os.environ),
        descendants.pids(),
        _job_properties() if on_spark else set[str](),
    )
    yield
    said = _job_properties() - properties if on_spark else set[str]()
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    sklearn_sets = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # when it is imported
    changed -= (
        {
            "PYTEST_CURRENT_TEST",
            "TORCHINDUCTOR_CACHE_DIR",
            "TRITON_CACHE_DIR",
            "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        }
        | sklearn_sets
        | {k for k in changed if k.startswith(("SPARK_", "PYSPARK_"))}
    )
    deadline = time.monotonic() + 60
    while (left := [*filter(_lives_on, descendants.pids() - processes)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for pid in left:
        try:
            names.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}")
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
    assert not names, f"the test left processes behind: {names}"
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    assert not said, f"the test left properties of Spark jobs: {sorted(said)}"


@pytest.fixture(scope="session")
def private_mounts() -> list[str]:
    """How a command begins that may mount what only itself sees; skips where the machine does not let us."""
    command = ["unshare", "-rm"]
    if subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    return command


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for the whole suite, with the settings of a short job's on this machine."""
    from pyspark.sql import SparkSession

    from sparkring.conf.blocks.spark import SparkConfig
    from sparkring.etl.spark_platform.jvm import stop_session
    from sparkring.pipelines.run.jvm_options import OPTIONS
    from sparkring.pipelines.run.spark_settings import session_settings
    from tests.etl.sources.postgres import driver_jar

    settings = session_settings("tests", SparkConfig(), 2, is_submitted=False)
    settings |= {
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        OPTIONS: options_of(settings, 0, found_archive(os.environ)),
    } | ({"spark.jars": jar} if (jar := driver_jar()) else {})
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    yield session
    stop_session(session)


@pytest.fixture
def compiled_plans(spark: Any) -> Iterator[None]:
    """Let the suite's session compile the plans of a test that has many rows, or is about what Java compiles."""
    for key, value in COMPILED.items():
        spark.conf.set(key, value)
    yield
    for key in COMPILED:
        spark.conf.unset(key)


def quicken_stores() -> None:
    """Give each new sqlite store of MLflow in this process the tables of the first: migrating them takes seconds.

    None waits for the disk: that a machine loses its power is no test's claim, and a killed process loses nothing.
    """
    from mlflow.store.db import utils
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    migrate, lock = utils._initialize_tables, threading.Lock()
    first = sqlite3.connect(":memory:", check_same_thread=False)

    def initialize(engine: Any) -> None:
        if engine.dialect.name != "sqlite":
            return migrate(engine)
        with lock:
            if is_empty := not first.execute("SELECT * FROM sqlite_master").fetchone():
                migrate(engine)
            with engine.connect() as connection:
                store = connection.connection.driver_connection
                store.backup(first) if is_empty else first.backup(store)

    utils._initialize_tables = initialize


def pytest_collection_finish() -> None:
    """Tests with tiny models spend their time in threads that wait for each other, and in collections of garbage."""
    import torch

    if "mlflow" in sys.modules:
        quicken_stores()
    torch.set_num_threads(1)
    keep_objects()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """A package that a test was the first to import is half a million objects."""
    if len(sys.modules) > KEPT.modules + 200:
        gc.collect()
        keep_objects()


def keep_objects() -> None:
    """Take what there is out of later collections, each of which took up to half a second."""
    KEPT.modules = len(sys.modules)
    gc.freeze()
