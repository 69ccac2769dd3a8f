"""How the ETL grows where there are many files, not many rows: pins, manifests, and windows of a year of days.

    python benchmarks/etl_scale.py --days 365 --out benchmarks/results/etl_scale_2core_202611.md

- A manifest of 100,000 files: written, and opened as a reader does it.
- A source of 10,000 small Parquet files: pinned (each hashed), and read by Spark.
- A listing of 1,000,000 files: pinned by size and time, fingerprint included.
- A window of a year of tiny days: from scratch, then a night that writes one part and finds the others. Where fewer
  days are `--written` than there are, the parts of the others are copies of one that was, under their own names.

CPU seconds are of this process, its JVM and Spark's Python workers; memory is this process's, without the JVM.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import logging
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etl_write import cpu_by_process, session, used_s
from machine import measured_with, publish
from pyspark.sql import SparkSession

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    DataFile,
    DatasetManifest,
    Lineage,
    SplitInfo,
    read_manifest,
)
from sparkring.conf.sources import FilesSource
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, Built, build_dataset, find_dataset
from sparkring.etl.sources.files.listing import FileList, SourceFile
from sparkring.etl.sources.files.source import file_fingerprint, pin_files
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.windows.parts import PART_NAME, part_folder
from sparkring.etl.windows.window import KnownParts, PinnedWindow, pin_window

LAST = dt.date(2024, 12, 30)  # of the first window; the night after it is the next day


@dataclass(frozen=True)
class WindowSize:
    """`written`: days whose parts Spark writes for the first window; the parts of others are copies of the last."""

    days: int
    written: int
    day_rows: int


class Timer:
    """Lines of a table: what was done, its wall and CPU seconds, and this process's peak of memory so far."""

    def __init__(self) -> None:
        self.lines = ["| | wall s | CPU s | peak of Python, GiB |", "|---|---|---|---|"]

    def time(self, what: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.monotonic(), cpu_by_process()
        found = work()
        taken, used = time.monotonic() - wall, used_s(cpu)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.lines.append(f"| {what} | {taken:.2f} | {used:.2f} | {peak:.2f} |")
        print(self.lines[-1], file=sys.stderr, flush=True)
        return found


def measure_manifest(timer: Timer, folder: Path, count: int) -> None:
    """A manifest over `count` files that are there, empty, so that finding the dataset looks at each."""
    storage = open_storage(str(folder))
    files = []
    for number in range(count):
        path = f"data-0123456789ab/{number // 1000:03d}/train-{number:05d}.parquet"
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        files.append(DataFile(path=path, split="train", rows=20000, bytes=0, sha256=sha256, row_groups=(16384, 3616)))
        if number % 1000 == 0:
            (folder / path).parent.mkdir(parents=True)
        (folder / path).touch()
    rows = 20000 * count
    manifest = DatasetManifest(
        name="large",
        fingerprint="0" * 64,
        created_at="2026-11-23T00:00:00+00:00",
        columns=(Column(name="value", dtype="float32"),),
        files=tuple(files),
        splits={"train": SplitInfo(rows=rows, files=count)},
        accounting=Accounting(rows_in=rows, rows_out=rows),
        lineage=Lineage(sources={}),
    )
    data = timer.time(f"manifest of {count:,} files: to JSON", manifest.to_json).encode()
    storage.put_atomic(MANIFEST_NAME, data)
    del manifest, files
    timer.time(f"manifest of {count:,} files ({len(data) / 2**20:.0f} MiB): read", lambda: read_manifest(storage))
    found = timer.time(
        f"dataset of {count:,} files: found, each file looked at", lambda: find_dataset(storage, "0" * 64)
    )
    assert found is not None and len(found.files) == count


def measure_source(timer: Timer, spark: SparkSession, folder: Path, count: int) -> None:
    """A source of many small files, by bytes and by size and time, and what Spark makes of it."""
    for number in range(count):
        file = folder / f"{number % 100:02d}" / f"{number:05d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"v": np.arange(100) + 100 * number, "s": [f"x{i}" for i in range(100)]}), file)
    columns = {"v": "bigint", "s": "string"}
    config = FilesSource(format="parquet", path=str(folder), columns=columns)
    by_stat = config.model_copy(update={"fingerprint": "stat"})
    timer.time(f"source of {count:,} files: pinned by their bytes", lambda: pin_files("small", config))
    pinned = timer.time(f"source of {count:,} files: pinned by size and time", lambda: pin_files("small", by_stat))
    rows = timer.time(f"source of {count:,} files: footers checked, frame made", lambda: pinned.read(spark))
    query = ["count(*)", "sum(v)", "count(DISTINCT s)"]
    found = timer.time(f"source of {count:,} files: an aggregate of all rows", lambda: rows.selectExpr(*query).first())
    total = 100 * count
    assert tuple(found) == (total, total * (total - 1) // 2, 100), found
    plain = timer.time(
        f"the same {count:,} files by spark.read alone", lambda: spark.read.parquet(*pinned.listed.spark_paths())
    )
    timer.time("the same aggregate of it", lambda: plain.selectExpr(*query).first())


def measure_listing(timer: Timer, count: int) -> None:
    """The fingerprint of a listing, without the files: no file system is asked."""
    config = FilesSource(format="parquet", path="/lake/table", columns={"v": "bigint"}, fingerprint="stat")
    files = tuple(
        SourceFile(f"{n // 1000:04d}/{n:07d}.parquet", f"/lake/table/{n // 1000:04d}/{n:07d}.parquet", n, n)
        for n in range(count)
    )
    listed = FileList(open_storage("/"), files)
    timer.time(f"listing of {count:,} files: fingerprint", lambda: file_fingerprint(config, listed))


def recipe_of_days(lake: Path, last: dt.date, window: int) -> EtlConfig:
    return EtlConfig.model_validate(
        {
            "sources": {
                "events": {
                    "format": "parquet",
                    "path": str(lake),
                    "partitions": {"day": "date"},
                    "columns": {"id": "bigint", "at": "timestamp", "value": "double", "kind": "string"},
                }
            },
            "views": {"labeled": "SELECT *, value > 0 AS label FROM events"},
            "rows": "labeled",
            "key": ["id"],
            "checks": [
                {"name": "id_once", "kind": "unique", "columns": ["id"], "max_share": 1.0},
                {"name": "has_kind", "kind": "null_share", "column": "kind", "max_share": 0.1},
            ],
            "split": {"kind": "hash", "shares": {"train": 0.8, "test": 0.2}},
            "features": {"value": {"kind": "numeric"}, "kind": {"kind": "categorical"}},
            "label": "label",
            "interval": {"column": "at", "sources": {"events": "day"}, "last": str(last), "window": window},
        }
    )


def measure_window(timer: Timer, spark: SparkSession, folder: Path, size: WindowSize) -> None:
    """A window of many days, and the night after it."""
    days, rows = size.days, size.day_rows
    lake, root, rng = folder / "lake", folder / "datasets", np.random.default_rng(0)
    for number in range(days + 1):
        day = LAST + dt.timedelta(days=number - days + 1)
        first = np.datetime64(day, "us")
        at = pa.array(first + rng.integers(0, 86_400_000_000, rows).astype("timedelta64[us]"))
        table = pa.table(
            {
                "id": np.arange(rows) + rows * number,
                "at": at.cast(pa.timestamp("us", "UTC")),
                "value": rng.normal(size=rows),
                "kind": rng.choice(["a", "b", "c"], rows),
            }
        )
        (lake / f"day={day}").mkdir(parents=True)
        pq.write_table(table, lake / f"day={day}" / "events.parquet")

    def night(last: dt.date, window: int, known: KnownParts = KnownParts()) -> Built:  # noqa: B008
        config, title = recipe_of_days(lake, last, window), f"window of {window} days to {last}"
        title += ", parts of the night before known" if known.fingerprints else ""
        pinned = timer.time(f"{title}: pinned", lambda: pin_window(config, {}, known=known))
        request = BuildRequest(config, pinned, "days", str(root))
        built: Built = timer.time(f"{title}: built", lambda: build_dataset(spark, request))
        assert built.manifest.accounting.rows_out == window * rows
        timer.lines[-1] = timer.lines[-1].replace("built", f"built, {len(built.written_parts)} parts written", 1)
        return built

    written = night(LAST, size.written)
    if size.written < days:
        pinned = pin_window(recipe_of_days(lake, LAST, days), {})
        copy_parts(root, written.manifest.parts[-1].folder, pinned)
        first = night(LAST, days)
    else:
        first = written
    tomorrow = LAST + dt.timedelta(days=1)
    known = KnownParts(str(root), "days", {part.interval: part.fingerprint for part in first.manifest.parts})
    second = night(tomorrow, days, known)
    assert second.written_parts == (str(tomorrow),)
    again = night(tomorrow, days)
    assert not again.rebuilt and again.manifest == second.manifest


def copy_parts(root: Path, folder: str, pinned: PinnedWindow) -> None:
    """Put copies of a written part where those of the window would be that were not written."""
    part = json.loads((root / folder / PART_NAME).read_text())
    for one in pinned.parts:
        target = root / part_folder("days", one.interval.label, one.fingerprint)
        if not target.exists():
            shutil.copytree(root / folder, target)
            own = part | {"interval": one.interval.label, "fingerprint": one.fingerprint}
            (target / PART_NAME).write_text(json.dumps(own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000, help="of the manifest")
    parser.add_argument("--small", type=int, default=10_000, help="small files of the source")
    parser.add_argument("--listed", type=int, default=1_000_000)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--written", type=int, default=365, help="days whose parts Spark writes; others are copies")
    parser.add_argument("--day-rows", type=int, default=200)
    parser.add_argument("--out", type=Path, help="result file; else printed")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.ERROR)
    timer, size = Timer(), WindowSize(arguments.days, min(arguments.written, arguments.days), arguments.day_rows)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measure_manifest(timer, folder / "manifest", arguments.files)
        measure_listing(timer, arguments.listed)
        base = session("1g", "local[2]")
        base.conf.set("spark.sql.shuffle.partitions", "8")  # as a job's session on one machine
        spark = build_session(base, {})
        spark.range(10).count()
        measure_window(timer, spark, folder / "window", size)
        measure_source(timer, spark, folder / "small", arguments.small)
        spark.stop()
    lines = ["# Many files and many parts", "", f"{measured_with('pyspark', 'pyarrow')}.", "", *timer.lines, ""]
    publish("\n".join(lines), arguments.out)


if __name__ == "__main__":
    main()
