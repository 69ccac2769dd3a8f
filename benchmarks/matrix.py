"""The job of flights on every Spark that is supported: the same dataset, statistics and weights, byte by byte?

Each version is laid over this environment in a folder of its own (build/matrix, made with pip), classic and, where
asked, as a server of Spark Connect in the same process; the oldest one also over the lowest, and the newest one over
the newest, version of every other package that pyproject.toml allows (torch apart). On `local[2]`, a trial of flights
is run and its model scores the timetable; then a night of examples/nights, once to its end, and once killed by SIGKILL
at its first checkpoint and started again. What is compared with the newest version: the rows of every file, their
bytes, the fitted statistics, the sha256 of the weights, the predictions, and the night's weights; those after the kill
with those without. One version at a time; each command may take --limit-s.

    python benchmarks/matrix.py [--versions 3.5.9 ...] [--connect 4.3.0 ...] [--lowest 3.5.9] [--newest 4.3.0]
        [--rows 1000] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from machine import measured_with, publish

ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = ROOT / "build/matrix"
PY4J = {"3.5": "0.10.9.7", "4.0": "0.10.9.9", "4.1": "0.10.9.9", "4.2": "0.10.9.9", "4.3": "0.10.9.9"}
CLASSIC = ["3.5.9", "4.0.5", "4.1.4", "4.2.1", "4.3.0"]
CONNECT_NEEDS = ["grpcio", "grpcio-status", "googleapis-common-protos", "zstandard"]
LOCKED, LOWEST, NEWEST = "locked", "lowest", "newest"
NIGHT, DAYS = "2026-06-05", ["2026-06-01", "2026-06-06"]
TIMES = ("scored_at",)  # columns of a prediction that no two runs have in common


@dataclass(frozen=True)
class Case:
    """A version of Spark, classic or as Spark Connect, and the packages that it is laid over."""

    version: str
    mode: str
    packages: str = LOCKED


@dataclass(frozen=True)
class Found:
    """What a case gave; `error`: the last line of a command that failed."""

    seconds: float
    rows: str = ""
    files: str = ""
    statistics: str = ""
    weights: str = ""
    predictions: str = ""
    night: str = ""
    killed: str = ""
    error: str = ""


def overlay(spark: str) -> Path:
    """Install a version of PySpark apart from this environment's; the folder is kept."""
    folder = OVERLAYS / spark
    if not (folder / "pyspark").is_dir():
        minor = spark.rpartition(".")[0]
        pip("--no-deps", "--target", folder, f"pyspark=={spark}", f"py4j=={PY4J[minor]}")
    return folder


def connect_overlay() -> Path:
    """Install what a client of Spark Connect needs."""
    folder = OVERLAYS / "connect"
    if not (folder / "grpc").is_dir():
        pip("--target", folder, *CONNECT_NEEDS)
    return folder


def lowest_python() -> str:
    """The interpreter of an environment that has the lowest version of each range, and this environment's torch."""
    folder = OVERLAYS / LOWEST
    python = folder / "bin/python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=600)
        # MLflow 2.19 does not say that it needs a SQLAlchemy of its time.
        pip(f"torch=={version('torch').partition('+')[0]}", *lowest_versions(), "sqlalchemy<2.1", python=str(python))
        (folder / ".ready").touch()
    return str(python)


def newest_overlay() -> Path:
    """Install the newest version of each range that pip finds apart from this environment's; the folder is kept."""
    folder = OVERLAYS / NEWEST
    if not (folder / ".ready").exists():
        pip("--upgrade", "--target", folder, *ranges())
        (folder / ".ready").touch()
    return folder


def newest_versions() -> list[str]:
    """What the overlay has of the dependencies of pyproject.toml."""
    names = {re.split("[<>=]", need)[0] for need in ranges()}
    found = {each.name.lower(): each.version for each in distributions(path=[str(newest_overlay())])}
    return [f"{name}=={found[name]}" for name in sorted(names & found.keys())]


def ranges() -> list[str]:
    """The dependencies of pyproject.toml, but for torch."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [need for need in needs if not need.startswith("torch")]


def lowest_versions() -> list[str]:
    """Each dependency of pyproject.toml at the lower end of its range, but for torch."""
    return [need.partition(",")[0].replace(">=", "==") for need in ranges()]


def pip(*words: str | Path, python: str = sys.executable) -> None:
    command = [python, "-m", "pip", "install", "--quiet", *map(str, words)]
    subprocess.run(command, check=True, timeout=1200)


def environment(case: Case) -> dict[str, str]:
    """The variables of a case's commands."""
    newest = [str(newest_overlay())] if case.packages == NEWEST else []
    folders = [str(overlay(case.version)), *newest, str(ROOT)]
    remote = {}
    if case.mode == "connect":
        folders.insert(0, str(connect_overlay()))
        remote = {"SPARK_REMOTE": "local[2]"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_REMOTE")}
    return kept | remote | {"PYTHONPATH": os.pathsep.join(folders), "MLFLOW_DISABLE_TELEMETRY": "true"}


def run(case: Case, folder: Path, rows: int, limit_s: float) -> Found:
    """Run the job and a scoring in a folder that has the raw tables."""
    out = folder / f"{case.version}-{case.mode}-{case.packages}"
    places = [f"storage.datasets={out}/datasets", f"storage.runs={out}/runs", f"tracking.uri=sqlite:///{out}/mlflow.db"]
    trial = ["run", "flights", "--limit-rows", str(rows), *places]
    began = time.monotonic()
    if error := command(trial, case, folder, limit_s):
        return Found(time.monotonic() - began, error=f"run: {error}")
    seconds = time.monotonic() - began
    (model,) = out.glob("runs/*/*/model")
    wanted = ["predict.rows=scheduled", f"predict.to={out}/predictions"]
    wanted += ["predict.keep=[time_hour, carrier, flight, origin]", f"model={model}", *places]
    if error := command(["predict", "flights", *wanted], case, folder, limit_s):
        return Found(seconds, error=f"predict: {error}")
    found, nights = found_in(out, model, seconds), dict[str, str]()
    for name in ("night", "killed"):
        weights, error = night(case, folder, out / name, name == "killed", limit_s)
        if error:
            return replace(found, error=f"{name}: {error}")
        nights[name] = weights
    return replace(found, **nights)


def night(case: Case, folder: Path, out: Path, is_killed: bool, limit_s: float) -> tuple[str, str]:
    """Run a date of examples/nights, and kill it at its first checkpoint if asked; (sha256 of its weights, error)."""
    words = ["run", str(ROOT / "examples/nights/clicks.yaml"), "--date", NIGHT, "train.epochs=200"]
    words += ["checkpoint.every_steps=20", f"storage.datasets={out}/datasets", f"storage.runs={out}/runs"]
    words += [f"tracking.uri=sqlite:///{out}/mlflow.db"]
    if is_killed and not killed_at_checkpoint(case, folder, out, words, limit_s):
        return "", "no checkpoint to be killed at"
    if error := command(words, case, folder, limit_s):
        return "", error
    (record,) = out.glob("runs/*/*/reproduce.json")
    return str(json.loads(record.read_text())["weights_sha256"]), ""


def killed_at_checkpoint(case: Case, folder: Path, out: Path, words: list[str], limit_s: float) -> bool:
    """Start a command, and kill all of its processes once it has written a checkpoint."""
    job = subprocess.Popen(
        [*program_of(case), *words],
        cwd=folder,
        env=environment(case),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + limit_s
    while job.poll() is None and not [*out.glob("runs/**/COMMIT.json")] and time.monotonic() < limit:
        time.sleep(0.02)
    was_running = job.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    return was_running


def program_of(case: Case) -> list[str]:
    python = lowest_python() if case.packages == LOWEST else sys.executable
    return [python, "-m", "sparkring.pipelines.cli"]


def command(words: list[str], case: Case, folder: Path, limit_s: float) -> str:
    """Run a command of ours; returns the last line of its output where it fails."""
    program = [*program_of(case), *words]
    try:
        done = subprocess.run(
            program, cwd=folder, env=environment(case), capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"not ended after {limit_s:g} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip() and not line.startswith("\tat")]
    return lines[-1] if done.returncode else ""


def found_in(out: Path, model: Path, seconds: float) -> Found:
    """Digest what a case has written."""
    (path,) = out.glob("datasets/flights-trial-*/_manifest.json")
    manifest = json.loads(path.read_text())
    tables = [pq.read_table(path.parent / file["path"]) for file in manifest["files"]]
    predictions = pa.concat_tables([pq.read_table(each) for each in sorted((out / "predictions").glob("*.parquet"))])
    shown = predictions.drop_columns([name for name in TIMES if name in predictions.column_names])
    return Found(
        seconds,
        digest([table.to_pylist() for table in tables]),
        digest([[file["path"].rpartition("/")[2], file["sha256"]] for file in manifest["files"]]),
        digest([manifest["features"], manifest["checks"], manifest["accounting"]]),
        json.loads((model.parent / "reproduce.json").read_text())["weights_sha256"],
        digest(sorted(repr(row) for row in shown.to_pylist())),
    )


def kept(found: Found) -> tuple[str, ...]:
    """What must be equal on every version."""
    return found.rows, found.weights, found.night


def digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()


def table(found: dict[Case, Found], like: Found) -> str:
    """The result as a table; every digest is compared with that of `like`."""
    names = ("rows", "files", "statistics", "weights", "predictions", "night")
    head = f"| Spark | session | packages | {' | '.join(names)} | after kill -9 | seconds of `run` |"
    lines = [head, "|---|---|---|" + "---|" * (len(names) + 2)]
    for case, one in found.items():
        cells = ["equal" if getattr(one, name) == getattr(like, name) != "" else "DIFFERENT" for name in names]
        cells.append("equal" if one.killed == one.night != "" else "DIFFERENT")
        if one.error:
            cells = [one.error, *[""] * len(names)]
        row = [case.version, case.mode, case.packages, *cells, f"{one.seconds:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def closest(found: dict[Case, Found]) -> Case:
    """The case that the others are compared with: of the newest version, classic, over this environment."""
    good = [case for case in found if not found[case].error] or [*found][:1]
    return max(good, key=lambda case: (case.version, case.packages == LOCKED, case.mode == "classic"))


def report(found: dict[Case, Found], rows: int) -> str:
    """The result file."""
    head = (
        "# The job of flights on every Spark\n\n"
        f"{measured_with('pandas', 'pyarrow', 'torch', 'mlflow')}. A trial of {rows} rows on local[2], and a "
        "scoring by its model, each version laid over the same environment. `rows`: values of every file in order; "
        "`files`: the bytes; `statistics`: fitted features, checks, accounting; `weights`: sha256. Equal: as those of "
        "the newest version. `night`: weights of a date of examples/nights; `after kill -9`: of the same, killed at "
        "its first checkpoint and started again, against those without. Packages `lowest`: the lower end of each range "
        "in pyproject.toml "
        f"({', '.join(lowest_versions())}), and the same torch."
        + (
            f" Packages `newest`: the newest that pip finds ({', '.join(newest_versions())})."
            if any(case.packages == NEWEST for case in found)
            else ""
        )
        + "\n\n"
    )
    return head + table(found, found[closest(found)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="*", default=CLASSIC)
    parser.add_argument("--connect", nargs="*", default=CLASSIC[1:])
    parser.add_argument("--lowest", nargs="*", default=CLASSIC[:1])
    parser.add_argument("--newest", nargs="*", default=CLASSIC[-1:])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [Case(v, "classic") for v in arguments.versions] + [Case(v, "connect") for v in arguments.connect]
    cases += [Case(v, "classic", NEWEST) for v in arguments.newest]
    cases += [Case(v, "classic", LOWEST) for v in arguments.lowest]
    found: dict[Case, Found] = {}
    with tempfile.TemporaryDirectory(prefix="matrix") as scratch:
        for words in (["-m", "sparkring.etl.raw", "flights"], [str(ROOT / "examples/nights/make_days.py"), *DAYS]):
            subprocess.run([sys.executable, *words], cwd=scratch, check=True, capture_output=True)
        for case in cases:
            found[case] = run(case, Path(scratch), arguments.rows, arguments.limit_s)
            print(case, found[case], file=sys.stderr, flush=True)
            publish(report(found, arguments.rows), arguments.out)  # now: a long run may be cut
    like = found[closest(found)]
    wrong = [one for one in found.values() if one.error or kept(one) != kept(like) or one.killed != one.night]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
