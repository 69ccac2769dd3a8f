"""The whole ETL of a table beside Spark's own stored shuffle of the same rows.

    python benchmarks/etl_whole.py --rows 10000000 --rounds 2 --out benchmarks/results/etl_whole_2core_202611.md

The table has nine columns: a key, a time, five numbers (two of them with nulls), two texts. The ETL makes seven
features of it, a label and a split by hash, and checks four rules, by the functions that a job calls. "shuffle" is what
Spark alone does to store the same columns shuffled: partitions by the key's hash, sorted within, written as Parquet, as
many files as ours. In one session, in the order A B B A, after a warm-up at a twentieth of the rows. Wall and CPU
seconds are of this process, its JVM and Spark's Python workers; stages are from Spark's event log of the first round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etl_write import cpu_by_process, used_s
from machine import measured_with, publish
from peak_memory import Peaks, spark_peaks
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_events import Work, event_settings, read_events

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.windows.window import pin_dataset
from sparkring.pipelines.run.spark_settings import DEFAULTS

TARGET = 1.5  # ours over the shuffle
FILES = 24  # as many as ours: at least 8 of each split
COLUMNS = {
    "id": "bigint",
    "at": "timestamp",
    "amount": "double",
    "age": "int",
    "distance": "double",
    "hour": "int",
    "score": "float",
    "city": "string",
    "device": "string",
}


@dataclass(frozen=True)
class Measured:
    """Of one run. `bytes`: of what it stored; `began_ms` and `ended_ms` are of the epoch."""

    wall_s: float
    cpu_s: float
    bytes: int
    began_ms: float
    ended_ms: float
    peaks: Peaks


def session(folder: Path, memory: str, master: str) -> SparkSession:
    settings = DEFAULTS | event_settings(folder / "events") | {"spark.local.dir": str(folder / "local")}
    settings |= {"spark.driver.memory": memory, "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": "8"}
    builder = SparkSession.builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def make_source(spark: SparkSession, rows: int, folder: Path) -> None:
    """Numbers of several shapes, a text of 5,000 values and one of 12, both skewed; some nulls."""
    uniform = [f"(xxhash64(id, {i}) & 1048575) / 1048576.0D" for i in range(7)]
    spark.range(rows).selectExpr(
        "id",
        "timestamp_micros(1704067200000000 + id * 1000003) AS at",
        f"if({uniform[0]} < 0.03, null, exp({uniform[1]} * 9)) AS amount",
        f"if({uniform[2]} < 0.01, null, cast({uniform[2]} * 90 AS int)) AS age",
        f"round({uniform[3]} * 4000, 1) AS distance",
        "cast(id / 3600 % 24 AS int) AS hour",
        f"cast(({uniform[4]} + {uniform[5]} - 1) * 2 AS float) AS score",
        f"concat('city-', cast(pow(5000, {uniform[6]}) AS int)) AS city",
        f"concat('device-', cast(pow(12, {uniform[5]}) AS int)) AS device",
    ).write.parquet(str(folder))


def recipe(source: Path) -> EtlConfig:
    return EtlConfig.model_validate(
        {
            "sources": {
                "events": {"format": "parquet", "path": str(source), "columns": COLUMNS, "fingerprint": "stat"}
            },
            "views": {"labeled": "SELECT *, score + distance / 4000 > 0.5 AS label FROM events"},
            "rows": "labeled",
            "one_per": "events",
            "key": ["id"],
            "checks": [
                {"name": "has_id", "kind": "null_share", "column": "id", "level": "row"},
                {"name": "age_known", "kind": "null_share", "column": "age", "max_share": 0.1},
                {"name": "distance", "kind": "range", "column": "distance", "min": 0, "max": 4000},
                {"name": "hour", "kind": "expression", "sql": "hour BETWEEN 0 AND 23", "level": "row"},
            ],
            "split": {"kind": "hash", "shares": {"train": 0.8, "valid": 0.1, "test": 0.1}},
            "features": {
                "amount": {"kind": "numeric", "transform": "log1p"},
                "age": {"kind": "numeric"},
                "distance": {"kind": "numeric"},
                "score": {"kind": "numeric"},
                "hour": {"kind": "cyclic", "period": 24},
                "city": {"kind": "categorical"},
                "device": {"kind": "categorical"},
            },
            "label": "label",
            "keep": ["id"],
        }
    )


def run_etl(spark: SparkSession, source: Path, target: Path) -> None:
    config = recipe(source)
    request = BuildRequest(config, pin_dataset(config, {}), "whole", str(target))
    built = build_dataset(spark, request)
    print({name: round(seconds, 1) for name, seconds in built.seconds.items()}, file=sys.stderr)


def stored(spark: SparkSession, source: Path) -> DataFrame:
    """The columns that the ETL stores, as it stores them."""
    rows = spark.read.parquet(str(source)).drop("at")
    return rows.withColumn("label", F.expr("score + distance / 4000 > 0.5"))


def run_shuffle(spark: SparkSession, source: Path, target: Path) -> None:
    place = F.xxhash64(F.lit(0), F.col("id"))
    rows = stored(spark, source).withColumn("__order", place)
    rows.repartition(FILES, "__order").sortWithinPartitions("__order").drop("__order").write.parquet(str(target))


def measure(work: Callable[[Path], object], target: Path) -> Measured:
    shutil.rmtree(target, ignore_errors=True)
    began, wall, cpu = time.time(), time.monotonic(), cpu_by_process()
    with spark_peaks([target, target.parent / "local"], 1.0) as peaks:
        work(target)
    wall_s, cpu_s = time.monotonic() - wall, used_s(cpu)
    size = sum(f.stat().st_size for f in target.rglob("*.parquet"))
    shutil.rmtree(target)
    return Measured(wall_s, cpu_s, size, began * 1000, time.time() * 1000, peaks)


def table_of(work: Work) -> list[str]:
    lines = ["| job | stage | tasks | CPU s | MiB read | rows read | MiB shuffled | MiB fetched | MiB spilled |"]
    lines.append("|" + "---|" * 9)
    for s in work.stages:
        sizes = [f"{n / 2**20:.0f}" for n in (s.shuffled, s.fetched, s.spilled)]
        name = s.name.split("/")[-1].replace("NativeMethodAccessorImpl.java:0", "JVM")
        lines.append(
            f"| {s.job} | {name} | {s.tasks} | {s.cpu_s:.1f} | {s.read / 2**20:.0f} | {s.read_rows:,} | "
            + " | ".join(sizes)
            + " |"
        )
    sizes = [f"{work.total(what) / 2**20:,.0f} MiB {what}" for what in ("read", "shuffled", "fetched", "spilled")]
    lines += ["", f"{work.jobs} jobs, {len(work.stages)} stages, {work.total('tasks')} tasks; {', '.join(sizes)}.", ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each, in the order AB BA AB ...")
    parser.add_argument("--memory", default="1g", help="heap of the driver, which in local mode does the work")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--out", type=Path, help="result file; else printed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        text = report(arguments, Path(temporary))
    publish(text, arguments.out)


def report(arguments: argparse.Namespace, folder: Path) -> str:
    spark = session(folder, arguments.memory, arguments.master)
    results: dict[str, list[Measured]] = {"ours": [], "shuffle": []}
    for rows, kept in ((arguments.rows // 20, False), (arguments.rows, True)):
        source, target = folder / f"source-{rows}", folder / "target"
        make_source(spark, rows, source)
        works: dict[str, Callable[[Path], object]] = {
            "ours": partial(run_etl, spark, source),
            "shuffle": partial(run_shuffle, spark, source),
        }
        for number in range(arguments.rounds if kept else 1):
            for name in list(works)[:: 1 if number % 2 == 0 else -1]:
                found = measure(works[name], target)
                if kept:
                    results[name].append(found)
                print(f"{rows} rows, {name}: {found.wall_s:.1f} s wall, {found.cpu_s:.1f} s CPU", file=sys.stderr)
    spark.stop()
    lines = [
        f"# The whole ETL of {arguments.rows:,} rows beside Spark's own stored shuffle",
        "",
        f"{measured_with('pyspark', 'pyarrow')}; {arguments.master} with {arguments.memory} of heap.",
        "",
        "| | wall s (each) | CPU s (each) | MiB stored | most MiB of the driver | of the JVM | of Python workers "
        "| on disk, shuffle files and target |",
        "|" + "---|" * 8,
    ]
    for name, runs in results.items():
        walls, cpus = (", ".join(f"{getattr(r, what):.1f}" for r in runs) for what in ("wall_s", "cpu_s"))
        most = [max(getattr(r.peaks, what) for r in runs) for what in ("driver", "jvm", "workers", "disk")]
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in [runs[0].bytes, *most])
        lines.append(f"| {name} | {walls} | {cpus} | {sizes} |")
    wall, cpu = (
        statistics.median(getattr(r, what) for r in results["ours"])
        / statistics.median(getattr(r, what) for r in results["shuffle"])
        for what in ("wall_s", "cpu_s")
    )
    lines += ["", f"ours over shuffle: {wall:.2f}x wall, {cpu:.2f}x CPU, target {TARGET}x", ""]
    for name, runs in results.items():
        lines += [f"## Stages of {name}", ""]
        lines += table_of(read_events(folder / "events", runs[0].began_ms, runs[0].ended_ms))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
