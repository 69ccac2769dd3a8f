"""What a JVM is told that this process starts on this machine: how to start soon, and how to run a short job.

A job of a minute ends before the compiler of long ones (C2) has repaid what it costs, and spends seconds on loading
Spark's classes. `python -m sparkring.pipelines.run.jvm_options` makes an archive of the classes once, which every later
JVM of the same Java and Spark maps into memory; `make setup` calls it. All of it is left out where it does not apply.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.sources import DeltaSource, FilesSource, IcebergSource
from sparkring.conf.storage import open_storage

log = logging.getLogger(__name__)

SHORT_BYTES = 64 << 20  # of sources; of more, C2's code is worth its price
MOST_FILES = 10_000  # looked at to find out
MOST_SECONDS = 300.0  # for an archive to be written
SHORT = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")  # of an archive that does not fit, which is not used
OPTIONS = "spark.driver.defaultJavaOptions"  # Spark puts them before the user's own
USERS_OWN = (OPTIONS, "spark.driver.extraJavaOptions")
REFUSED = ("Could not create the Java Virtual Machine", "initialization of VM")  # says Java of options


def options_of(settings: Mapping[str, str], data_bytes: int | None, archive: Path | None) -> str:
    """Decide the options of the driver's JVM; empty where they are the user's, or the executors are elsewhere.

    Args:
        settings: of the session.
        data_bytes: of all sources; None where that is not known.
        archive: of Spark's classes; None where there is none.
    """
    if not is_one_jvm(settings["spark.master"]) or any(key in settings for key in USERS_OWN):
        return ""
    short = SHORT if data_bytes is not None and data_bytes <= SHORT_BYTES else ()
    shared = (f'"-XX:SharedArchiveFile={archive}"', *QUIET) if archive is not None else ()
    return " ".join([*short, *shared])


def is_one_jvm(master: str) -> bool:
    """Whether the driver's JVM is the executor too: `local` or `local[n]`, not `local-cluster[...]`."""
    return re.fullmatch(r"local(\[.*])?", master) is not None


def is_refused(message: str) -> bool:
    """Whether a JVM that did not start says that it does not take its options."""
    return any(words in message for words in REFUSED)


def data_bytes(config: RunConfig) -> int | None:
    """Bytes of the files of all sources; None where one is not on this machine, or there are too many to look at.

    Of a table with versions or partitions every file counts, so it is no less than what is read.
    """
    if config.etl is None:
        return None
    paths: list[str] = []
    for source in config.etl.sources.values():
        if not isinstance(source, FilesSource | DeltaSource | IcebergSource) or source.path is None:
            return None
        if "://" in source.path and not source.path.startswith("file:"):
            return None
        paths.append(open_storage(source.path).root)
    return bytes_below(paths)


def bytes_below(paths: Iterable[str]) -> int | None:
    """Bytes of files and folders, of a glob those of the folder it begins in; None above SHORT_BYTES or MOST_FILES."""
    total = files = 0
    for path in paths:
        root = Path(path)
        while any(mark in root.name for mark in "*?["):
            root = root.parent
        for file in [root] if root.is_file() else root.rglob("*"):
            files += 1
            total += file.stat().st_size if file.is_file() else 0
            if files > MOST_FILES or total > SHORT_BYTES:
                return None
    return total


def class_archive(environment: Mapping[str, str]) -> Path | None:
    """Where the archive of this Java and Spark is, or would be; None without Java.

    Java compares an archive with its own build and Spark's files, and does without one that is of others.
    """
    home = environment.get("JAVA_HOME")
    java = Path(home, "bin/java") if home else Path(shutil.which("java") or "")
    if not java.is_file():
        return None
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    known = f"{java.resolve()}\n{Path(pyspark.__file__).parent}\n{pyspark.__version__}"
    return cache / "sparkring/jvm" / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.jsa"


def found_archive(environment: Mapping[str, str]) -> Path | None:
    """The archive that was made for this Java and Spark; None where there is none."""
    archive = class_archive(environment)
    return archive if archive is not None and archive.is_file() else None


def make_archive(environment: Mapping[str, str]) -> Path | None:
    """Make the archive, by a JVM that does a bit of everything and writes down its classes when it ends.

    None, with the reason in the log, where that cannot be done.
    """
    from sparkring.conf.blocks.launch import LaunchConfig
    from sparkring.conf.blocks.spark import SparkConfig
    from sparkring.pipelines.run.spark import spark_session

    archive = class_archive(environment)
    if archive is None or archive.is_file():
        return archive
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
            made = Path(scratch, archive.name)
            conf = {USERS_OWN[1]: f'"-XX:ArchiveClassesAtExit={made}" {" ".join((*SHORT, *QUIET))}'}
            with spark_session("archive", SparkConfig.model_validate({"conf": conf}), LaunchConfig(world=2)) as spark:
                _use(spark, scratch)
            _end_jvm()
            os.replace(made, archive)
    except Exception as error:
        log.warning("no archive of Spark's classes is made: %s; jobs start without it, some seconds later", error)
        return None
    log.info("Spark's classes: %s", archive)
    return archive


def _use(spark: SparkSession, folder: str) -> None:
    """Build a small dataset, which loads the classes that any dataset needs."""
    from sparkring.conf.blocks.etl import EtlConfig
    from sparkring.etl.build import BuildRequest, build_dataset
    from sparkring.etl.sources.pin import PinContext, pin_sources

    known = pa.table({"g": range(7), "w": [1.5] * 7})
    pq.write_table(known, f"{folder}/known.parquet")
    lines = "".join(f"{n},{n % 7},{n / 3:.2f},{n % 2}\n" for n in range(4000))
    Path(folder, "rows.csv").write_text(f"id,g,x,y\n{lines}")
    config = EtlConfig.model_validate(
        {
            "sources": {
                "rows": {
                    "path": f"{folder}/rows.csv",
                    "format": "csv",
                    "columns": {"id": "int", "g": "int", "x": "double", "y": "int"},
                },
                "known": {
                    "path": f"{folder}/known.parquet",
                    "format": "parquet",
                    "columns": {"g": "bigint", "w": "double"},
                },
            },
            "views": {
                "all": "SELECT r.*, k.w, count(*) OVER (PARTITION BY r.g) AS n "
                "FROM rows r LEFT JOIN known k ON k.g = r.g",
            },
            "rows": "all",
            "one_per": "rows",
            "key": ["id"],
            "checks": [
                {"name": "few", "kind": "expression", "sql": "id < 3900", "level": "row"},
                {"name": "once", "kind": "unique", "columns": ["id"]},
                {"name": "known", "kind": "referential", "column": "g", "to": "known.g"},
            ],
            "label": "y",
            "features": {"x": {"kind": "numeric"}, "g": {"kind": "categorical"}},
            "shard": {"shards": {"train": 3}},
        }
    )
    sources = pin_sources(config.sources, PinContext(lambda: spark, folder))
    build_dataset(spark, BuildRequest(config, sources, "archive", f"{folder}/datasets"))


def _end_jvm() -> None:
    """End the JVM of this process and wait for it: it writes the archive when it ends."""
    gateway: Any = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=MOST_SECONDS)
    SparkContext._gateway = SparkContext._jvm = None  # so that a later session starts another


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    make_archive(os.environ)
