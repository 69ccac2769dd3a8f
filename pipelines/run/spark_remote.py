"""A session of Spark Connect: where its server is, and what is checked before it is given work."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkring.conf.errors import ConfigError, first_line
from sparkring.etl.errors import innermost
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.etl.spark_platform.versions import OLDEST, TOO_NEW, version_of
from sparkring.pipelines.run.spark_settings import PORT, VARIABLE
from sparkring.training.launch.failure import LaunchError

REACH_S = 10.0
PORT_KEY = "spark.connect.grpc.binding.port"
PLUGIN = "ClassNotFoundException: org.apache.spark.sql.connect.SparkConnectPlugin"


def open_remote(name: str, settings: Mapping[str, str], remote: str) -> SparkSession:
    """Open a session. ConfigError where packages lack; LaunchError where no server answers.

    Args:
        name: name of the recipe.
        settings: settings of the session; server settings count only if the server is in this process.
        remote: `sc://host:port/...`, or `local[n]`.
    """
    is_own = remote.startswith("local")
    if not is_own:
        check_reachable(remote)
    builder = SparkSession.builder.remote(remote)
    for key, value in settings.items():
        if key != "spark.master" and (is_own or key.startswith("spark.sql.")):
            builder = builder.config(key, value)
    try:
        if is_own and PORT_KEY in settings:
            look_at_port(int(settings[PORT_KEY]))
        with warnings.catch_warnings():
            # PySpark sets them again in the session, after it has started the server with them.
            warnings.filterwarnings("ignore", message="Failed to set spark")
            return builder.getOrCreate()
    except ImportError as error:  # PySparkImportError too
        raise ConfigError(
            name,
            [
                f"Spark Connect ({remote}): {first_line(error)}; install what it needs: pip install "
                f"'pyspark[connect]=={pyspark.__version__}'"
            ],
        ) from error
    except JavaThrew as error:
        if PLUGIN not in str(error):
            raise LaunchError(
                f"Spark Connect ({remote}): its server in this process did not start: {innermost(error)}; where a port "
                f"is taken (the server's is {settings.get(PORT_KEY, PORT)}), name another in spark.conf of the recipe: "
                f"{{{PORT_KEY}: '15003'}}"
            ) from error
        raise ConfigError(name, [no_server(remote)]) from error
    except PySparkException as error:
        raise LaunchError(f"Spark Connect ({remote}): no session: {first_line(error)}") from error


def look_at_port(port: int) -> None:
    """Make PySpark's client call a server of this process at its port; it would call the default one."""
    from pyspark.sql.connect.client import core  # with grpc, which only a client needs

    builder: Any = getattr(core, "DefaultChannelBuilder", None) or core.ChannelBuilder  # of Spark 4, of 3.5
    builder.default_port = staticmethod(lambda: port)


def no_server(remote: str) -> str:
    """Explain what to do where PySpark, as that of PyPI before 4.0, has no server that it could start."""
    version = pyspark.__version__
    return (
        f"Spark Connect ({remote}): PySpark {version} has no server of its own; set spark.conf of the recipe to "
        f"{{spark.jars.packages: 'org.apache.spark:spark-connect_2.12:{version}'}}, or {VARIABLE} to sc://host:{PORT} "
        f"of a server that runs, or unset {VARIABLE} for a classic session"
    )


def check_reachable(remote: str) -> None:
    """Raise LaunchError where nothing listens: PySpark itself would try for minutes."""
    place = urlsplit(remote)
    host, port = place.hostname or "", place.port or PORT
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        raise LaunchError(
            f"Spark Connect ({remote}): {host}:{port} cannot be reached ({error}); start its server, or set "
            f"{VARIABLE} or spark.master to where it is"
        ) from error


def check_versions(name: str, client: str, server: str, home: str | None = None) -> None:
    """Raise ConfigError for versions of Spark that are too old, too new, or not those of each other.

    Args:
        name: name of the recipe.
        client: version of the PySpark here.
        server: version of the session's Spark.
        home: SPARK_HOME that provides the session's Spark, if set.
    """
    place = f" (of SPARK_HOME = {home!r})" if home else ""
    unset = "unset SPARK_HOME, so that the Spark of the PySpark here runs, or " if home else ""
    for what, version in (("this PySpark", client), (f"this session's Spark{place}", server)):
        if not OLDEST <= version_of(version) < TOO_NEW:
            raise ConfigError(
                name,
                [
                    f"{what} is {version}: versions from {OLDEST[0]}.{OLDEST[1]} to below {TOO_NEW[0]} are supported; "
                    "use a cluster, and a pyspark, of one of them"
                ],
            )
    if version_of(client) != version_of(server):
        raise ConfigError(
            name,
            [
                f"the session's Spark{place} is {server}, and the PySpark here is {client}: {unset}install "
                f"pyspark=={'.'.join(map(str, version_of(server)))}.*, as functions and formats differ between them"
            ],
        )
