"""A session of Spark Connect beside the suite's classic one: a server in the same JVM, so they share their catalog."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import unused_port

OVERLAY = Path(__file__).resolve().parents[1] / "build/matrix/connect"  # of `make matrix`
PORT = "spark.connect.grpc.binding.port"
REMOTE = "SPARK_CONNECT_MODE_ENABLED"  # makes pyspark.sql.functions give columns of Connect

if importlib.util.find_spec("grpc") is None and OVERLAY.is_dir():
    sys.path.append(str(OVERLAY))  # now: PySpark looks for it once, when a classic session begins


def server_port(spark: Any) -> int:
    """Where the server listens, which is started with its first session and ends with the application."""
    context = spark.sparkContext._jsc.sc()
    found = context.conf().get(PORT, "")
    if not found:
        found = str(unused_port())
        context.conf().set(PORT, found)
        spark._jvm.org.apache.spark.sql.connect.service.SparkConnectService.start(context)
    return int(found)


def needs_connect() -> None:
    """Skip the test where what a client of Connect needs is not there."""
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("a client of Spark Connect needs grpcio (pip install 'pyspark[connect]', or make matrix)")


@contextmanager
def connect_session(spark: Any) -> Iterator[Any]:
    """A session for the block; skips the test where what a client of Connect needs is not there."""
    needs_connect()
    port = server_port(spark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas' version
        from pyspark.sql.connect.session import SparkSession

        os.environ[REMOTE] = "1"
        session = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").create()
        SparkSession._default_session = SparkSession._active_session.session = session
        try:
            yield session
        finally:
            SparkSession._default_session = SparkSession._active_session.session = None
            session.client.close()
            os.environ.pop(REMOTE)
