"""Sixty nights in one go: a dated recipe over a lake that shows it only the newest days.

    make nights
    python benchmarks/nights.py --nights 60 --window 28 --out benchmarks/results/nights_2core_202611.md

Real flights, a folder per day. Each night is a command of its own, as a scheduler gives it. From the second night on
the lake holds the newest three days alone, so a night that read an older one would fail. Then a correction two days
back, and `gc`; with `--kills`, random SIGKILLs of the driver, the same command given again, and the same nights
undisturbed. Ends with exit code 1 where a check fails; every check is a line of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from machine import measured_with, publish  # noqa: E402

from sparkring.conf.storage import open_storage  # noqa: E402
from sparkring.etl.raw import unpack_flights  # noqa: E402
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger  # noqa: E402

FIRST = date(2013, 3, 1)
SHOWN = 3  # days the lake holds: the night's own and `lookback`
NAME = "nightly"


@dataclass
class Nights:
    """A lake, a recipe and what its nights gave, all below one folder."""

    folder: Path
    window: int
    every: int  # which flights of a day are used
    seconds: list[float] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)  # date -> bytes of parts that its night added
    failed: list[str] = field(default_factory=list)  # checks
    lines: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> Path:
        return self.folder / "nightly.yaml"

    @property
    def days(self) -> Path:
        """All days, of which `show` puts some into the lake."""
        return self.folder / "days"

    def check(self, holds: bool, line: str) -> None:
        self.lines.append(f"- {'holds' if holds else '**FAILS**'}: {line}")
        print(self.lines[-1], flush=True)
        if not holds:
            self.failed.append(line)

    def prepare(self) -> None:
        """Write the days as folders of CSV, and the recipe, from the demo's."""
        raw = unpack_flights(self.folder / "raw")
        for month in sorted((raw / "flights").iterdir()):
            header, *lines = month.read_text().splitlines(keepends=True)
            for line in lines[:: self.every]:
                year, number, day = (int(word) for word in line.split(",", 3)[:3])
                file = self.days / f"date={date(year, number, day)}/flights.csv"
                if not file.exists():
                    file.parent.mkdir(parents=True)
                    file.write_text(header)
                with file.open("a") as out:
                    out.write(line)
        block = yaml.safe_load((HERE.parent / "conf/recipes/flights.yaml").read_text())
        etl = block["etl"]
        for source in etl["sources"].values():
            source["path"] = source["path"].replace("data/raw/flights", str(raw))
        etl["sources"]["flights"] |= {"path": str(self.folder / "lake"), "partitions": {"date": "date"}}
        for check in etl["checks"]:
            if "max_share" in check:
                check["max_share"] = 0.5  # one night may be worse than the year
        etl["split"] = {"kind": "hash", "shares": {"train": 0.8, "valid": 0.1, "test": 0.1}}
        etl["interval"] = {
            "column": "time_hour", "time_zone": "America/New_York", "sources": {"flights": "date"},
            "last": "{ds}", "window": self.window,
        }  # fmt: skip
        block |= {
            "name": NAME,
            "schedule": {
                "begin": str(FIRST), "timezone": "America/New_York", "window": self.window, "lookback": SHOWN - 1,
                "full_check": 10_000,  # would look at days that the lake does not show
            },
            "storage": {"datasets": str(self.folder / "datasets"), "runs": str(self.folder / "runs")},
            "tracking": {"root": str(self.folder / "mlflow")},
            "retention": {
                "datasets": {"keep": 7}, "parts": {"keep": self.window + 7}, "runs": {"keep": 14},
                "checkpoints": {"keep": 3},
            },
            "launch": {"world": 1},
        }  # fmt: skip
        block["train"] |= {"epochs": 1, "global_batch": 64}
        block["report"] = {"baselines": False}
        self.recipe.write_text(yaml.safe_dump(block, sort_keys=False))

    def show(self, first: date, last: date) -> None:
        """Let the lake hold exactly these days."""
        lake = self.folder / "lake"
        shutil.rmtree(lake, ignore_errors=True)
        lake.mkdir()
        day = first
        while day <= last:
            (lake / f"date={day}").symlink_to(self.days / f"date={day}")
            day += timedelta(days=1)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "sparkring.pipelines.cli", words[0], str(self.recipe), *words[1:]]

    def run(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Run a command: its exit code, and the JSON of its last line of output, if it is any."""
        log = (self.folder / "log").open("a")
        done = subprocess.run(self.command(*words), stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.folder)
        last = (done.stdout.splitlines() or [""])[-1]
        return done.returncode, json.loads(last) if last.startswith("{") else {}

    def night(self, day: date, kills: int = 0, seed: int = 0) -> int:
        """Run one date; with `kills`, after so many SIGKILLs of the driver at random moments."""
        before, began, chance = self.bytes_of_parts(), time.monotonic(), random.Random(seed)
        for _ in range(kills):
            driver = subprocess.Popen(
                self.command("run", "--date", str(day)), cwd=self.folder, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=(self.folder / "log").open("a"),
            )  # fmt: skip
            try:
                driver.wait(chance.uniform(2, 45))
            except subprocess.TimeoutExpired:
                os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
        code, _ = self.run("run", "--date", str(day))
        self.seconds.append(time.monotonic() - began)
        self.written[str(day)] = self.bytes_of_parts() - before
        print(f"{day}: exit code {code}, {self.seconds[-1]:.0f} s", flush=True)
        return code

    def bytes_of_parts(self) -> int:
        return size_of(self.folder / "datasets/parts")

    def record(self, day: date) -> DateRecord:
        record = Ledger(str(self.folder / "runs"), NAME).read(str(day))
        assert record is not None, f"{day} has no entry in the ledger"
        return record

    def weights(self, day: date) -> str:
        """sha256 of the model's weights."""
        folder = open_storage(str(self.folder / "runs")).at(NAME).at(str(self.record(day).run))
        return folder.sha256("model/weights.safetensors")


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0


def quiet_nights(nights: Nights, count: int, kills: dict[int, int]) -> list[date]:
    """Run the nights one by one; the dates."""
    days = [FIRST + timedelta(days=n) for n in range(count)]
    nights.show(FIRST - timedelta(days=nights.window - 1), FIRST)
    for number, day in enumerate(days):
        if number:
            nights.show(day - timedelta(days=SHOWN - 1), day)
        code = nights.night(day, kills.get(number, 0), seed=number)
        if code not in (0, 6):
            nights.check(False, f"{day}: exit code {code}; see {nights.folder / 'log'}")
    return days


def check_ledger(nights: Nights, days: list[date]) -> None:
    records = [nights.record(day) for day in days]
    done = [record for record in records if record.status == "succeeded"]
    nights.check(len(done) == len(days), f"{len(done)} of {len(days)} dates have an entry that says succeeded")
    later = [nights.written[str(day)] for day in days[1:]]
    part = nights.written[str(days[0])] / nights.window
    nights.check(
        max(later) <= 1.1 * SHOWN * part and statistics.median(later) <= 1.1 * part,
        f"with {SHOWN} days in the lake, a night after the first wrote {statistics.median(later) / part:.2f} parts in "
        f"bytes (median), {max(later) / part:.2f} at most",
    )
    code, answer = nights.run("run", "--date", str(days[-1]))
    nights.check(
        code == 0 and answer.get("ds") == str(days[-1]), f"the last date again: exit code {code}, nothing done"
    )


def check_correction(nights: Nights, last: date) -> None:
    """A file two days back is corrected: the night after it rebuilds exactly that part."""
    corrected, day = last - timedelta(days=1), last + timedelta(days=1)
    file = nights.days / f"date={corrected}/flights.csv"
    header, *lines = file.read_text().splitlines(keepends=True)
    file.write_text(header + "".join(lines[:-5]))
    before = nights.record(last).parts
    nights.show(day - timedelta(days=SHOWN - 1), day)
    code, after = nights.night(day), nights.record(day).parts
    changed = sorted(label for label in after if label in before and after[label] != before[label])
    nights.check(
        code in (0, 6) and changed == [str(corrected)], f"{corrected} corrected: rebuilt {changed}, exit code {code}"
    )


def check_gc(nights: Nights) -> None:
    """`gc` names before what it deletes; the champion and its data stay, and no pointer to a checkpoint is left."""
    before = size_of(nights.folder)
    named, done = (
        subprocess.run(nights.command(*words), cwd=nights.folder, capture_output=True, text=True)
        for words in (("gc", "--dry-run"), ("gc",))
    )
    would_go = [line.split()[2:4] for line in named.stdout.splitlines()[:-1]]
    deleted = [line.split()[1:3] for line in done.stdout.splitlines()[:-1]]
    same = would_go == deleted and done.returncode == 0
    nights.check(same, f"gc deletes the {len(deleted)} folders and pointers that gc --dry-run names")
    after = size_of(nights.folder)
    nights.lines.append(f"- gc: {before / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after")
    client = MlflowClient(f"sqlite:///{nights.folder}/mlflow/mlflow.db")
    champion = client.get_model_version_by_alias(NAME, "champion")
    dataset = champion.tags["sparkring.fingerprint"][:12]
    there = (nights.folder / f"datasets/{NAME}-{dataset}/_manifest.json").exists()
    loads = subprocess.run(
        [sys.executable, "-c", "import sys, mlflow; mlflow.pyfunc.load_model(sys.argv[1])", champion.source],
        capture_output=True,
    )
    nights.check(
        there and loads.returncode == 0, f"version {champion.version}, the champion, loads; its dataset is there"
    )
    experiment = client.get_experiment_by_name(NAME).experiment_id
    pointers = client.search_logged_models([experiment], "tags.`sparkring.kind` = 'checkpoint'", max_results=1000)
    dangling = [model.name for model in pointers if not Path(model.tags["sparkring.uri"]).exists()]
    nights.check(not dangling, f"{len(pointers)} pointers to checkpoints in MLflow, {len(dangling)} of them to none")
    began = time.monotonic()
    found = client.search_runs([experiment], "tags.`sparkring.key` = 'job'", max_results=1000)
    took = time.monotonic() - began
    names = sorted(run.info.run_name for run in found)
    nights.check(len({*names}) == len(names), f"{len(names)} runs of dates have as many names; found in {took:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=60)
    parser.add_argument("--window", type=int, default=28, help="days of a dataset")
    parser.add_argument("--every", type=int, default=1, help="use every n-th flight of a day")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs of the driver, spread over the nights")
    parser.add_argument("--folder", type=Path, default=Path("build/nights"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder}: exists; remove it, or choose another --folder")
    folder.mkdir(parents=True)
    nights = Nights(folder, arguments.window, arguments.every)
    nights.prepare()
    chosen = random.Random(1).choices(range(1, arguments.nights), k=arguments.kills)
    kills = {number: chosen.count(number) for number in set(chosen)}
    days = quiet_nights(nights, arguments.nights, kills)
    check_ledger(nights, days)
    check_correction(nights, days[-1])
    if kills:
        undisturbed = Nights(folder / "undisturbed", arguments.window, arguments.every)
        undisturbed.folder.mkdir()
        undisturbed.prepare()
        quiet_nights(undisturbed, arguments.nights, {})
        unequal = [str(day) for day in days if nights.weights(day) != undisturbed.weights(day)]
        nights.check(
            not unequal,
            f"after {arguments.kills} SIGKILLs every model's sha256 is that of undisturbed nights {unequal}",
        )
    check_gc(nights)
    seconds = sorted(nights.seconds)
    text = f"""# {arguments.nights} nights of flights, a window of {arguments.window} days

{measured_with("pyspark", "torch", "mlflow")}

{chr(10).join(nights.lines)}

A night took {statistics.median(seconds):.0f} s (median; {seconds[0]:.0f} to {seconds[-1]:.0f}), with Spark's start.
"""
    publish(text, arguments.out)
    sys.exit(1 if nights.failed else 0)


if __name__ == "__main__":
    main()
