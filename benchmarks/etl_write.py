"""What exact, shuffled, hashed shards cost over a plain `df.write.parquet` of the same rows.

    python benchmarks/etl_write.py --rows 20000000 --rounds 2 --out benchmarks/results/etl_write_2core_202611.md

"shuffled" is what Spark alone can do about a stored order: range partitions of the key's hash, sorted; its files differ
in rows, its row groups are what they are, nothing is checked or hashed. All read the same Parquet files (16 columns,
72 bytes a row) in the same session, in the order A B C C B A after one warm-up of each at a twentieth of the rows. Wall
and CPU seconds (this process, its JVM and Spark's Python workers) per write.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import measured_with

from sparkring.conf.blocks.etl import ShardConfig
from sparkring.conf.manifest import Column
from sparkring.conf.storage import open_storage
from sparkring.etl.columns.types import manifest_column
from sparkring.etl.shards.shard import ORDER, Target, number_rows, plan_files, with_order, write_shards
from sparkring.etl.shards.write import SHARD
from sparkring.etl.split import SPLIT

FLOATS, CODES = 10, 4
TARGET = 1.3  # ours over plain
WHY = """Why the target is missed: a plain write moves no row. A stored order that is a shuffle has every row
serialised, moved and sorted once, which alone ("shuffled") costs more than the target leaves. Ours adds the two passes
over the key that make shards exact, and the hand-over of rows to Python as Arrow, where they are checked, encoded and
hashed.
"""


def session(memory: str, master: str) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).config("spark.driver.memory", memory)
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": memory,
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def make_source(spark: SparkSession, rows: int, folder: Path) -> None:
    """A table as it is after the features: codes of skewed vocabularies, standardised floats, a label and an id."""
    if (folder / "_SUCCESS").exists():
        return
    uniform = [f"(xxhash64(id, {i}) & 1048575) / 1048576.0" for i in range(FLOATS + CODES)]
    floats = [f"cast(({u} + {u} * {u} - 1) * 2 as float) as f{i}" for i, u in enumerate(uniform[:FLOATS])]
    codes = [f"cast(pow(200, {u}) as int) as c{i}" for i, u in enumerate(uniform[FLOATS:])]
    table = spark.range(rows).selectExpr("id", *floats, *codes, "xxhash64(id, 99) % 5 = 0 as label")
    table.write.mode("overwrite").parquet(str(folder))


def write_plain(rows: DataFrame, target: Path) -> None:
    rows.write.parquet(str(target))


def write_shuffled(rows: DataFrame, target: Path) -> None:
    place = F.xxhash64(F.lit(0), F.col("id"))
    rows.repartitionByRange(shard_count_of(rows), place).sortWithinPartitions(place).write.parquet(str(target))


def shard_count_of(rows: DataFrame) -> int:
    """As many files as ours."""
    columns = columns_of(rows)
    return len(plan_files(rows, {"train": rows.count()}, columns, ShardConfig()).shards)


def columns_of(rows: DataFrame) -> list[Column]:
    return [manifest_column(f.name, f.dataType, "feature") for f in rows.schema.fields]


def write_ours(rows: DataFrame, target: Path) -> None:
    columns = columns_of(rows)
    marked = rows.withColumn(SPLIT, F.lit("train"))
    counts = {"train": marked.count()}
    ordered = with_order(marked, ["id"], 0)
    plan = plan_files(rows, counts, columns, ShardConfig())
    numbered = number_rows(ordered, plan.shards)
    write_shards(numbered, columns, [Target("", "data", plan)], open_storage(str(target)))


def cpu_by_process() -> dict[tuple[int, float], float]:
    """CPU seconds so far of this process and of everything below it, by pid and time of birth."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


def used_s(before: dict[tuple[int, float], float]) -> float:
    """CPU seconds since. Workers that ended meanwhile had been idle for a minute: what they used was before."""
    return sum(now - before.get(process, 0.0) for process, now in cpu_by_process().items())


def measure(write: Callable[[DataFrame, Path], None], rows: DataFrame, target: Path) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds, bytes written)"""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    wall, cpu = time.monotonic(), cpu_by_process()
    write(rows, target)
    taken = time.monotonic() - wall, used_s(cpu)
    size = sum(f.stat().st_size for f in target.rglob("*.parquet"))
    shutil.rmtree(target)
    return *taken, size


def report(arguments: argparse.Namespace, results: dict[str, list[tuple[float, float, int]]]) -> str:
    lines = [
        f"# Writing {arguments.rows:,} rows: exact hashed shards against a plain write",
        "",
        f"{measured_with('pyspark', 'pyarrow')}; {arguments.master} with {arguments.memory} of heap.",
        "",
        "| | wall s (each) | wall s, median | CPU s, median | MiB |",
        "|---|---|---|---|---|",
    ]
    medians = {}
    for name, runs in results.items():
        wall, cpu = (statistics.median(r[i] for r in runs) for i in (0, 1))
        medians[name] = wall, cpu
        each = ", ".join(f"{r[0]:.1f}" for r in runs)
        lines.append(f"| {name} | {each} | {wall:.1f} | {cpu:.1f} | {runs[0][2] / 2**20:.0f} |")
    lines.append("")
    for name, over, aim in (
        ("ours", "plain", f", target {TARGET}x"),
        ("shuffled", "plain", ""),
        ("ours", "shuffled", ""),
    ):
        wall, cpu = (medians[name][i] / medians[over][i] for i in (0, 1))
        lines.append(f"- {name} over {over}: {wall:.2f}x wall, {cpu:.2f}x CPU{aim}")
    lines += ["", WHY] if medians["ours"][0] > TARGET * medians["plain"][0] else [""]
    return "\n".join(lines)


def profile(spark: SparkSession, source: Path, target: Path) -> str:
    """Where the time goes: what each step adds, on the smaller table, warm."""
    rows = spark.read.parquet(str(source))
    columns = columns_of(rows)
    count = rows.count()
    ordered = with_order(rows.withColumn(SPLIT, F.lit("train")), ["id"], 0)
    plan = plan_files(rows, {"train": count}, columns, ShardConfig())
    numbered = number_rows(ordered, plan.shards)
    shuffled = numbered.drop(SPLIT).repartitionById(len(plan.shards), F.col(SHARD))
    arranged = shuffled.sortWithinPartitions(ORDER, *rows.columns)
    to_arrow = arranged.mapInArrow(lambda batches: (b.slice(0, 0).select([0]) for b in batches), "id long")

    def discard(frame: DataFrame) -> Callable[[], None]:
        return lambda: frame.write.format("noop").mode("overwrite").save()

    steps: dict[str, Callable[[], object]] = {
        "read": discard(rows),
        "find where shards begin (two passes over the key)": lambda: number_rows(ordered, plan.shards),
        "read + number": discard(numbered),
        "read + number + shuffle": discard(shuffled),
        "read + number + shuffle + sort": discard(arranged),
        "read + number + shuffle + sort + to Python": discard(to_arrow),
        "read + write, plain": lambda: measure(write_plain, rows, target),
        "all of ours": lambda: measure(write_ours, rows, target),
    }
    lines = ["", f"Steps alone, {count:,} rows, warm:", "", "| step | wall s | CPU s |", "|---|---|---|"]
    for name, step in steps.items():
        step()
        wall, cpu = time.monotonic(), cpu_by_process()
        step()
        lines.append(f"| {name} | {time.monotonic() - wall:.1f} | {used_s(cpu):.1f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each, in the order ABC CBA ABC ...")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/sparkring-etl-write"))
    parser.add_argument("--memory", default="1g", help="heap of the driver, which in local mode does the work")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--out", type=Path, help="result file; else printed")
    arguments = parser.parse_args()
    spark = session(arguments.memory, arguments.master)
    writers = {"plain": write_plain, "shuffled": write_shuffled, "ours": write_ours}
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in writers}
    for rows, kept in ((arguments.rows // 20, False), (arguments.rows, True)):
        source = arguments.folder / f"source-{rows}"
        make_source(spark, rows, source)
        for number in range(arguments.rounds if kept else 1):
            for name in list(writers)[:: 1 if number % 2 == 0 else -1]:
                found = measure(writers[name], spark.read.parquet(str(source)), arguments.folder / "target")
                if kept:
                    results[name].append(found)
                print(f"{rows} rows, {name}: {found[0]:.1f} s wall, {found[1]:.1f} s CPU", file=sys.stderr)
    text = report(arguments, results) + profile(
        spark, arguments.folder / f"source-{arguments.rows // 20}", arguments.folder / "target"
    )
    spark.stop()
    if arguments.out:
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
