"""Make an archive of Spark's classes, which later JVMs of this Java and Spark map into memory (`make setup` calls it).

Run it by `python -m sparkring.pipelines.run.spark_classes`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.sources.snapshot import PinContext
from sparkring.etl.spark_platform.jvm import end_jvm
from sparkring.etl.windows.window import pin_dataset
from sparkring.pipelines.run.jvm_options import QUIET, SHORT, USERS_OWN, class_archive, found_archive
from sparkring.pipelines.run.spark import spark_session

log = logging.getLogger(__name__)

MOST_SECONDS = 300.0  # for an archive to be written
UNUSED_S = 60 * 86400.0


def make_archive(environment: Mapping[str, str]) -> Path | None:
    """Make the archive, by a JVM that does a bit of everything and writes down its classes when it ends.

    None, with the reason in the log, where that cannot be done.
    """
    archive = class_archive(environment)
    if archive is None:
        return None
    remove_unused(archive)
    if found_archive(environment) is not None:
        return archive
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.parent.chmod(0o700)
        with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
            made = Path(scratch, archive.name)
            conf = {USERS_OWN[1]: f'"-XX:ArchiveClassesAtExit={made}" {" ".join((*SHORT, *QUIET))}'}
            with spark_session("archive", SparkConfig.model_validate({"conf": conf}), LaunchConfig(world=2)) as spark:
                _use(spark, scratch)
            end_jvm(MOST_SECONDS)
            made.chmod(0o600)
            os.replace(made, archive)
    except Exception as error:
        log.warning("no archive of Spark's classes is made: %s; jobs start without it, some seconds later", error)
        return None
    log.info("Spark's classes: %s", archive)
    return archive


def remove_unused(archive: Path) -> None:
    """Delete archives, of 190 MB each, of this environment's earlier jars, and such as no job has used for UNUSED_S."""
    environment = archive.name.partition("-")[0]
    for other in archive.parent.glob("*.jsa"):
        with suppress(OSError):  # another set-up may have deleted it
            is_earlier = other.name.startswith(f"{environment}-")
            if other != archive and (is_earlier or time.time() - other.stat().st_mtime > UNUSED_S):
                other.unlink()
                log.info("Spark's classes that no job uses any more: %s is deleted", other)


def _use(spark: SparkSession, folder: str) -> None:
    """Build a small dataset, which loads the classes that any dataset needs."""
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
    pinned = pin_dataset(config, {}, PinContext(lambda: spark, folder))
    build_dataset(spark, BuildRequest(config, pinned, "archive", f"{folder}/datasets"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    make_archive(os.environ)
