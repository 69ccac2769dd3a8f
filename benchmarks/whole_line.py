"""Whole-line throughput by stage, on the flights once and repeated: where the seconds go, and how they grow.

    python benchmarks/whole_line.py --repeat 1 20 --out benchmarks/results/whole_line_2core_202611.md

Every repetition k gets flight numbers of its own (number + 10,000 k), so keys stay unique and joins fan out as before.
Each size is one `sparkring run` of the flights recipe in its own process and folder; seconds are its summary.json's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.csv as pacsv
from machine import measured_with, publish
from peak_memory import peak_pss

from sparkring.etl.raw import unpack_flights

ROOT = Path(__file__).resolve().parent.parent


def repeated(raw: Path, target: Path, times: int) -> None:
    """The raw tables with every flight `times` times, under other flight numbers."""
    target.mkdir(parents=True)
    for item in raw.iterdir():
        if item.name != "flights":
            (target / item.name).symlink_to(item.resolve())
    (target / "flights").mkdir()
    for month in sorted((raw / "flights").glob("*.csv")):
        options = pacsv.ConvertOptions(
            strings_can_be_null=True, null_values=["NA"], column_types={"time_hour": "string"}
        )
        table = pacsv.read_csv(month, convert_options=options)
        at = table.schema.get_field_index("flight")
        for k in range(times):
            copy = table.set_column(at, "flight", pc.add(table["flight"], 10_000 * k))
            text = target / "flights" / f"{month.stem}-{k:02d}.csv"
            pacsv.write_csv(copy, text, pacsv.WriteOptions(quoting_style="none"))
            text.write_text(text.read_text().replace(",,", ",NA,").replace(",,", ",NA,"))


def run(folder: Path, words: list[str]) -> dict[str, Any]:
    """The job's summary, and its peak memory (driver, JVM and ranks together)."""
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "run", "flights", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = folder / "job.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        with peak_pss(process.pid, every_s=0.5) as peak:
            process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text()[-4000:]}")
    (summary,) = (folder / "data/runs/flights").glob("*/summary.json")
    found: dict[str, Any] = json.loads(summary.read_text())
    return found | {"peak_bytes": peak[0]}


def rows_of(summary: dict[str, Any], folder: Path) -> dict[str, float]:
    """What the table shows of one size."""
    (manifest,) = (folder / "data/datasets").glob("*/_manifest.json")
    accounting = json.loads(manifest.read_text())["accounting"]
    times, train = summary["timings"], summary["train"]
    return {
        "rows in": accounting["rows_in"],
        "etl s": times["etl_s"],
        "etl rows/s": accounting["rows_in"] / times["etl_s"],
        "launch s": times["launch_s"],
        "train s": train["train_s"],
        "train rows/s": train["rows_per_s"],
        "evaluate s": times["evaluate_s"],
        "total s": times["total_s"],
        "peak memory GiB": summary["peak_bytes"] / 2**30,
        "etl share": times["etl_s"] / times["total_s"],
        "launch share": times["launch_s"] / times["total_s"],
        "train share": train["train_s"] / times["total_s"],
        "evaluate share": times["evaluate_s"] / times["total_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="further overrides of the recipe")
    arguments = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        raw = unpack_flights(Path(scratch) / "raw")
        for times in arguments.repeat:
            folder = Path(scratch) / f"x{times}"
            repeated(raw, folder / "data/raw/flights", times)
            words = ["spark.conf={spark.driver.memory: 4g}", "train.epochs=1", *arguments.words]
            columns[f"{times}x"] = rows_of(run(folder, words), folder)
    lines = [
        "# Whole line by stage: flights, one epoch, two ranks\n",
        f"{measured_with('pyspark', 'torch', 'mlflow', 'pyarrow')}.\n",
        "| | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for name in next(iter(columns.values())):
        values = [f"{column[name]:.0%}" if "share" in name else f"{column[name]:,.1f}" for column in columns.values()]
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    publish("\n".join(lines) + "\n", arguments.out)


if __name__ == "__main__":
    main()
