"""What a run costs before it does any work: commands, a dataset that is found, a trial, the demo, nights; two commits.

    python benchmarks/seconds.py [--against before-seconds] [--rows help status ...] [--rounds 5]
           [--out benchmarks/results/seconds_2core_202611.md]

Both commits (the second: HEAD) are checked out in folders of their own. Each row is run by both in the order A B B A,
repeated, with the packages of this environment, a working directory per commit and row, and this checkout's raw data
(`python -m sparkring.etl.raw flights` unpacks it). Wall seconds end with the command; CPU seconds are of its whole tree
of processes, also of those that end after it, such as Spark's JVM. Of the light rows a first run is not counted, in
which Python compiles its files; the jobs begin without dataset, run and MLflow store, as in a fresh checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path

import yaml
from machine import ROOT, measured_with, publish

PR_SET_CHILD_SUBREAPER = 36
# As the script `sparkring` starts; a commit before `console` was has `main` alone
START = """
import sys
from sparkring.pipelines import cli
sys.exit(getattr(cli, "console", cli.main)())
"""
DONE = (0, 6)  # 6: the candidate was not promoted, which a made-up night may give
FIRST_NIGHT = date(2026, 6, 5)
TIMES = 20  # as many rows
LAKE_RECIPE = """
name: found
etl:
  sources: {{rows: {source}}}
  rows: rows
  key: [id]
  split: {{kind: hash, shares: {{train: 0.8, valid: 0.1, test: 0.1}}}}
  features: {{age: {{kind: numeric}}, page: {{kind: categorical}}}}
  label: label
model: {{factory: "sparkring.training.models.tabular:Tabular", task: binary, args: {{width: 16, blocks: 1}}}}
"""


@dataclass(frozen=True)
class Used:
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Place:
    """A commit's code, and the working directory of one row."""

    tree: Path
    folder: Path

    def run(self, *words: str) -> Used:
        """Run a command of this commit's in the folder; RuntimeError with its log where it fails."""
        start = [sys.executable, "-c", START]
        names = os.environ | {"PYTHONPATH": str(self.tree), "SPARK_LOCAL_IP": "127.0.0.1"}
        names.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # else each process compiles our files, which an installed one never does
        log = self.folder / "log"
        before, began = used_by_children(), time.monotonic()
        with log.open("w") as out:
            done = subprocess.run([*start, *words], cwd=self.folder, env=names, stdout=out, stderr=subprocess.STDOUT)
        wall_s = time.monotonic() - began
        wait_for_orphans()
        if done.returncode not in DONE:
            raise RuntimeError(f"{self.tree}: {words}: exit code {done.returncode}\n{log.read_text()[-3000:]}")
        return Used(wall_s, used_by_children() - before)

    def forget(self) -> None:
        """Remove what jobs made: datasets, runs, the MLflow store."""
        for made in [*self.folder.glob("data/*"), *self.folder.glob("*.log")]:
            if made.name != "raw":
                shutil.rmtree(made, ignore_errors=True)


def used_by_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_for_orphans() -> None:
    """Wait for processes that the command left, which come to this one as their subreaper."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


@dataclass
class Row:
    """One line of the result.

    Args:
        name: on the command line.
        words: of the command.
        prepare: makes what the command finds, untimed, once per commit.
        fresh: whether the command starts without datasets, runs and MLflow store each time.
        uncounted: runs of each commit before those that count.
        heavy: measured `--heavy-rounds` times only.
    """

    name: str
    words: Callable[[Place], list[str]]
    prepare: Callable[[Place], object] = lambda place: None
    fresh: bool = False
    uncounted: int = 0
    heavy: bool = True
    used: tuple[list[Used], list[Used]] = field(default_factory=lambda: ([], []))

    def measure(self, places: tuple[Place, Place], rounds: int) -> None:
        for place in places:
            place.folder.mkdir(parents=True)
            (place.folder / "data").mkdir()
            (place.folder / "data/raw").symlink_to(ROOT / "data/raw")
            self.prepare(place)
            for _ in range(self.uncounted):
                place.run(*self.words(place))
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                if self.fresh:
                    places[which].forget()
                used = places[which].run(*self.words(places[which]))
                self.used[which].append(used)
                print(f"{self.name} {'AB'[which]}: {used.wall_s:.2f} s, {used.cpu_s:.2f} CPU", file=sys.stderr)
        for place in places:
            shutil.rmtree(place.folder)

    def line(self) -> str:
        def shown(values: list[float]) -> str:
            return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

        cells = [self.name]
        for part in ("wall_s", "cpu_s"):
            before, now = ([getattr(used, part) for used in of_one] for of_one in self.used)
            ratio = statistics.median(now) / statistics.median(before)
            cells += [shown(before), shown(now), f"{ratio:.2f}"]
        return "| " + " | ".join(cells) + " |"


def light(name: str, *words: str) -> Row:
    return Row(name, lambda place: list(words), uncounted=1, heavy=False)


def rows() -> list[Row]:
    again = "found.yaml"
    return [
        light("help", "--help"),
        Row("status", lambda p: ["status", "clicks.yaml"], clicks, uncounted=1, heavy=False),
        light("config-show", "config", "show", "flights"),
        light("completion", "completion", "bash"),
        light("validate", "config", "validate", "flights"),
        Row("plan", lambda p: ["plan", "show", "flights"], lambda p: p.run("etl", "flights"), uncounted=1, heavy=False),
        Row("done-date", lambda p: night(FIRST_NIGHT), first_night, uncounted=1, heavy=False),
        Row("found-files", lambda p: ["etl", "flights"], lambda p: p.run("etl", "flights"), uncounted=1, heavy=False),
        Row("found-delta", lambda p: ["etl", again], delta, uncounted=1, heavy=False),
        Row("found-iceberg", lambda p: ["etl", again], iceberg, uncounted=1, heavy=False),
        Row("trial", lambda p: ["run", "flights", "--limit-rows", "1000"], fresh=True),
        Row("etl", lambda p: ["etl", "flights"], fresh=True),
        Row(f"etl-{TIMES}x", lambda p: ["etl", "flights", f"etl.sources.flights.path={many_flights()}"], fresh=True),
        Row("demo", lambda p: ["run", "flights"], fresh=True),
        Row("night", next_night, first_night),
    ]


def clicks(place: Place) -> None:
    """Put the example of the nights into the folder, with days of its rows."""
    example = ROOT / "examples/nights"
    shutil.copy(example / "clicks.yaml", place.folder)
    (place.folder / "data/raw").unlink()
    last = FIRST_NIGHT + timedelta(days=30)
    make = [sys.executable, str(example / "make_days.py"), str(FIRST_NIGHT - timedelta(days=4)), str(last)]
    subprocess.run(make, cwd=place.folder, check=True)


def first_night(place: Place) -> None:
    clicks(place)
    place.run(*night(FIRST_NIGHT))


def night(day: date) -> list[str]:
    return ["run", "clicks.yaml", "--date", str(day)]


def next_night(place: Place) -> list[str]:
    """The date after the last one that this folder's ledger has."""
    done = sorted(file.parent.name for file in place.folder.glob("data/runs/clicks/dates/*/state.json"))
    return night(date.fromisoformat(done[-1]) + timedelta(days=1))


def many_flights() -> Path:
    """The flights, `TIMES` times, each time under other flight numbers, since these are in the key; made once."""
    target = ROOT / f"build/seconds/flights-{TIMES}x"
    if target.exists():
        return target
    making = target.with_name("making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    for month in sorted((ROOT / "data/raw/flights/flights").iterdir()):
        header, *lines = month.read_text().splitlines()
        at = header.split(",").index("flight")
        for n in range(TIMES):
            with (making / f"{n}-{month.name}").open("w") as out:
                print(header, file=out)
                for line in lines:
                    words = line.split(",")
                    words[at] = str(int(words[at]) + 10_000 * n)
                    print(",".join(words), file=out)
    making.rename(target)
    return target


def delta(place: Place) -> None:
    from deltalake import write_deltalake

    for _ in range(3):
        write_deltalake(place.folder / "lake", made_rows(), mode="append")
    build_found(place, f"{{format: delta, path: {place.folder / 'lake'}}}")


def iceberg(place: Place) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("c", uri=f"sqlite:///{place.folder}/catalog.db", warehouse=f"file://{place.folder}/lake")
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", made_rows().schema)
    for _ in range(3):
        table.append(made_rows())
    build_found(place, f"{{format: iceberg, path: {table.metadata_location.removeprefix('file://')}}}")
    catalog.close()


def made_rows():
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(0)
    numbers = {"id": random.integers(0, 1 << 60, 1000), "age": random.normal(size=1000)}
    return pa.table({**numbers, "page": random.choice(list("abcd"), 1000), "label": random.random(1000).round()})


def build_found(place: Place, source: str) -> None:
    text = LAKE_RECIPE.format(source=source)
    assert yaml.safe_load(text)
    (place.folder / "found.yaml").write_text(text)
    place.run("etl", "found.yaml")


def fixed_part(measured: list[Row]) -> str:
    """The ETL's seconds that do not grow with rows, from those of 1x and of 20x."""
    found = {row.name: [statistics.median(u.wall_s for u in used) for used in row.used] for row in measured}
    if not {"etl", f"etl-{TIMES}x"} <= found.keys():
        return ""
    fixed = [one - (many - one) / (TIMES - 1) for one, many in zip(found["etl"], found[f"etl-{TIMES}x"], strict=True)]
    return f"\nThe fixed part of the ETL, from 1x and {TIMES}x: {fixed[0]:.1f} s before, {fixed[1]:.1f} s now.\n"


def main() -> None:
    known = {row.name: row for row in rows()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="before-seconds", metavar="COMMIT", help="to compare with")
    parser.add_argument("--rows", nargs="+", choices=known, default=list(known), metavar="ROW", help=" ".join(known))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each commit, of the light rows")
    parser.add_argument("--heavy-rounds", type=int, default=3, help="runs of each commit, of jobs")
    parser.add_argument("--out", type=Path, help="result file")
    arguments = parser.parse_args()
    if not (ROOT / "data/raw/flights").exists():
        sys.exit(f"{ROOT}/data/raw/flights: not unpacked; first: python -m sparkring.etl.raw flights")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    measured = [known[name] for name in arguments.rows]
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory(prefix="seconds-") as scratch:
        trees = [Path(scratch, name, "code") for name in "AB"]
        for tree, commit in zip(trees, (arguments.against, "HEAD"), strict=True):
            subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            for row in measured:
                before, now = (Place(tree, tree.with_name(row.name)) for tree in trees)
                row.measure((before, now), arguments.heavy_rounds if row.heavy else arguments.rounds)
        finally:
            for tree in trees:
                subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    head = f"| | wall s, {arguments.against} | now | now / before | CPU s, {arguments.against} | now | now / before |"
    lines = [head, "|---|---|---|---|---|---|---|", *(row.line() for row in measured)]
    text = f"# Seconds\n\n{measured_with('pyspark', 'torch', 'mlflow')}\n\nMedians (smallest - largest).\n\n"
    publish(text + "\n".join(lines) + "\n" + fixed_part(measured), arguments.out)


if __name__ == "__main__":
    main()
