"""The job of flights on every Spark that is supported: the same dataset, statistics and weights, byte by byte?

Each version is laid over this environment in a folder of its own (build/matrix, made with pip), classic and, where
asked, as a server of Spark Connect in the same process, or on a standalone cluster of two workers; the oldest one also
over the lowest, and the newest one over the newest, version of every other package that pyproject.toml allows (torch
apart), over other versions of torch, and in other versions of Python with the packages of this one. On `local[2]`, or
two workers of a core each, a trial of flights is run and its model scores the timetable; then a night of
examples/nights, once to its end, and once killed by SIGKILL at its first checkpoint and started again. What is compared
with the newest version: the rows of every file, their bytes, the
fitted statistics, the sha256 of the weights, the predictions, and the night's weights; those after the kill with those
without. One version at a time; each command may take --limit-s. What a case gave is kept in --keep, and the same
command goes on with the cases that are not there; --most: how many of them at a time.

    python benchmarks/matrix.py [--versions 3.5.9 ...] [--connect 4.3.0 ...] [--cluster 3.5.9 ...] [--lowest 3.5.9]
        [--newest 4.3.0] [--torch 2.12.0 ...] [--python PATH ... [--python-spark 4.3.0]] [--rows 1000]
        [--keep FOLDER] [--most 1] [--out FILE]
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from machine import commit_of_checkout, measured_with, publish

ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = ROOT / "build/matrix"
PY4J = {"3.5": "0.10.9.7", "4.0": "0.10.9.9", "4.1": "0.10.9.9", "4.2": "0.10.9.9", "4.3": "0.10.9.9"}
CLASSIC = ["3.5.9", "4.0.5", "4.1.4", "4.2.1", "4.3.0"]
TORCH = ["2.12.0", "2.14.1", "2.15.0"]  # with the locked 2.13 the last four minors
CONNECT_NEEDS = ["grpcio", "grpcio-status", "googleapis-common-protos", "zstandard"]
LOCKED, LOWEST, NEWEST = "locked", "lowest", "newest"
NIGHT, DAYS = "2026-06-05", ["2026-06-01", "2026-06-06"]
TIMES = ("scored_at",)  # columns of a prediction that no two runs have in common


@dataclass(frozen=True)
class Case:
    """A version of Spark, classic, as Spark Connect or on a cluster, and the packages that it is laid over."""

    version: str
    mode: str
    packages: str = LOCKED  # LOWEST, NEWEST, `torch VERSION`, or `Python VERSION`
    python: str = ""  # path of another interpreter

    @property
    def name(self) -> str:
        return f"{self.version}-{self.mode}-{self.packages.replace(' ', '-')}"


@dataclass(frozen=True)
class Found:
    """What a case gave; `error`: the last line of a command that failed."""

    seconds: float
    load: float = 0.0  # the load average after `run`, this case's own tasks included
    commit: str = ""  # that it ran
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


def interpreter(case: Case) -> str:
    """The Python that runs a case: this one, or that of an environment made for it, with this environment's torch."""
    if case.packages == LOWEST:
        # MLflow 2.19 does not say that it needs a SQLAlchemy of its time.
        return environment_of(LOWEST, sys.executable, [*lowest_versions(), "sqlalchemy<2.1"])
    if case.python:
        return environment_of(case.packages.replace(" ", "-"), case.python, installed_versions())
    return sys.executable


def environment_of(name: str, python: str, needs: list[str]) -> str:
    """Make an environment with these packages; the folder is kept. Returns its interpreter."""
    folder = OVERLAYS / name
    made = folder / "bin/python"
    if not (folder / ".ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True, timeout=600)
        pip(f"torch=={version('torch').partition('+')[0]}", *needs, python=str(made))
        (folder / ".ready").touch()
    return str(made)


def named_python(path: str) -> str:
    """`Python VERSION` of an interpreter."""
    shown = subprocess.run([path, "--version"], check=True, capture_output=True, text=True)
    return shown.stdout.strip()


def newest_overlay() -> Path:
    """Install the newest version of each range that pip finds apart from this environment's; the folder is kept."""
    folder = OVERLAYS / NEWEST
    if not (folder / ".ready").exists():
        pip("--upgrade", "--target", folder, *ranges())
        (folder / ".ready").touch()
    return folder


def torch_overlay(torch: str) -> Path:
    """Install a version of torch apart from this environment's; the folder is kept."""
    folder = OVERLAYS / f"torch-{torch}"
    if not (folder / "torch").is_dir():
        pip("--target", folder, f"torch=={torch}")
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


def installed_versions() -> list[str]:
    """Each dependency of pyproject.toml as this environment has it, but for torch."""
    names = [re.split("[<>=]", need)[0] for need in ranges()]
    return [f"{name}=={version(name)}" for name in names]


def lowest_versions() -> list[str]:
    """Each dependency of pyproject.toml at the lower end of its range, but for torch."""
    return [need.partition(",")[0].replace(">=", "==") for need in ranges()]


def pip(*words: str | Path, python: str = sys.executable) -> None:
    command = [python, "-m", "pip", "install", "--quiet", *map(str, words)]
    subprocess.run(command, check=True, timeout=1200)


def environment(case: Case) -> dict[str, str]:
    """The variables of a case's commands."""
    others = [newest_overlay()] if case.packages == NEWEST else []
    others += [torch_overlay(case.packages.split()[1])] if case.packages.startswith("torch") else []
    folders = [str(folder) for folder in (overlay(case.version), *others, ROOT)]
    remote = {"SPARK_LOCAL_IP": "127.0.0.1"} if case.mode == "cluster" else {}
    if case.mode == "connect":
        folders.insert(0, str(connect_overlay()))
        remote = {"SPARK_REMOTE": "local[2]"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_REMOTE")}
    return kept | remote | {"PYTHONPATH": os.pathsep.join(folders), "MLFLOW_DISABLE_TELEMETRY": "true"}


@contextmanager
def cluster(case: Case, folder: Path) -> Iterator[list[str]]:
    """Start a master and two workers of the case's Spark; gives the overrides that run a job there."""
    if case.mode != "cluster":
        yield []
        return
    deploy, local = "org.apache.spark.deploy", ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with contextlib.ExitStack() as started:
        log = folder / "master.log"
        started.enter_context(daemon(case, log, f"{deploy}.master.Master", *local))
        master = awaited(log, r"Starting Spark master at (\S+)")
        for number in (1, 2):
            log, size = folder / f"worker{number}.log", ["--cores", "1", "--memory", "1g"]
            work = ["--work-dir", str(folder / f"worker{number}"), master]
            started.enter_context(daemon(case, log, f"{deploy}.worker.Worker", *local, *size, *work))
            awaited(log, "(Successfully registered with master)")
        yield [f"spark.master={master}", "spark.conf={spark.executor.memory: 700m}"]


@contextmanager
def daemon(case: Case, log: Path, *java: str) -> Iterator[None]:
    """Run a process of the case's Spark for the block, with its output in a file."""
    home = overlay(case.version) / "pyspark"
    variables = environment(case) | {"SPARK_HOME": str(home), "PYSPARK_PYTHON": program_of(case)[0]}
    with log.open("w") as out:
        process = subprocess.Popen(
            [home / "bin/spark-class", *java], env=variables, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def awaited(log: Path, form: str, limit_s: float = 120.0) -> str:
    """Wait until a log has a line; returns the group of its form."""
    limit = time.monotonic() + limit_s
    while (found := re.search(form, log.read_text(errors="replace"))) is None:
        if time.monotonic() > limit:
            raise TimeoutError(f"{log} has no line {form!r}")
        time.sleep(0.1)
    return found[1]


def run(case: Case, folder: Path, rows: int, limit_s: float) -> Found:
    """Run the case where it runs, in a folder that has the raw tables."""
    out = folder / case.name
    out.mkdir()
    with cluster(case, out) as where:
        return run_jobs(case, folder, rows, limit_s, where)


def run_jobs(case: Case, folder: Path, rows: int, limit_s: float, where: list[str]) -> Found:
    """Run the job, a scoring and the nights.

    Args:
        case: what is run.
        folder: that has the raw tables.
        rows: of the trial.
        limit_s: for each command.
        where: overrides that say where Spark runs.
    """
    out = folder / case.name
    # Horovod was built for one version of torch.
    where = [*where, *(["parallel.engine=torch"] if case.packages.startswith("torch") else [])]
    places = [f"storage.datasets={out}/datasets", f"storage.runs={out}/runs", f"tracking.uri=sqlite:///{out}/mlflow.db"]
    trial = ["run", "flights", "--limit-rows", str(rows), *places, *where]
    began = time.monotonic()
    error = command(trial, case, folder, limit_s)
    found = Found(time.monotonic() - began, os.getloadavg()[0], commit_of_checkout())
    if error:
        return replace(found, error=f"run: {error}")
    (model,) = out.glob("runs/*/*/model")
    wanted = ["predict.rows=scheduled", f"predict.to={out}/predictions"]
    wanted += ["predict.keep=[time_hour, carrier, flight, origin]", f"model={model}", *places, *where]
    if error := command(["predict", "flights", *wanted], case, folder, limit_s):
        return replace(found, error=f"predict: {error}")
    found, nights = replace(found, **digests(out, model)), dict[str, str]()
    for name in ("night", "killed"):
        weights, error = night(case, folder, out / name, where, limit_s)
        if error:
            return replace(found, error=f"{name}: {error}")
        nights[name] = weights
    return replace(found, **nights)


def night(case: Case, folder: Path, out: Path, where: list[str], limit_s: float) -> tuple[str, str]:
    """Run a date of examples/nights; returns the sha256 of its weights, and an error.

    Args:
        case: what is run.
        folder: that has the raw tables.
        out: of this night; where its name is `killed`, it is, at its first checkpoint, and started again.
        where: overrides that say where Spark runs.
        limit_s: for each command.
    """
    words = ["run", str(ROOT / "examples/nights/clicks.yaml"), "--date", NIGHT, "train.epochs=30"]
    words += ["checkpoint.every_steps=20", f"storage.datasets={out.parent}/night-datasets", f"storage.runs={out}/runs"]
    words += [f"tracking.uri=sqlite:///{out}/mlflow.db", *where]
    if out.name == "killed" and not killed_at_checkpoint(case, folder, out, words, limit_s):
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
    return [interpreter(case), "-m", "sparkring.pipelines.cli"]


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


def digests(out: Path, model: Path) -> dict[str, str]:
    """Digest what a case has written: fields of Found."""
    (path,) = out.glob("datasets/flights-trial-*/_manifest.json")
    manifest = json.loads(path.read_text())
    tables = [pq.read_table(path.parent / file["path"]) for file in manifest["files"]]
    predictions = pa.concat_tables([pq.read_table(each) for each in sorted((out / "predictions").glob("*.parquet"))])
    shown = predictions.drop_columns([name for name in TIMES if name in predictions.column_names])
    return {
        "rows": digest([table.to_pylist() for table in tables]),
        "files": digest([[file["path"].rpartition("/")[2], file["sha256"]] for file in manifest["files"]]),
        "statistics": digest([manifest["features"], manifest["checks"], manifest["accounting"]]),
        "weights": json.loads((model.parent / "reproduce.json").read_text())["weights_sha256"],
        "predictions": digest(sorted(repr(row) for row in shown.to_pylist())),
    }


def must_equal(case: Case, found: Found) -> tuple[str, ...]:
    """What is equal on every version; weights are those of one version of torch."""
    return (found.rows,) if case.packages.startswith("torch") else (found.rows, found.weights, found.night)


def digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()


def table(found: dict[Case, Found], like: Found) -> str:
    """The result as a table; every digest is compared with that of `like`."""
    names = ("rows", "files", "statistics", "weights", "predictions", "night")
    head = f"| Spark | session | packages | {' | '.join(names)} | after kill -9 | seconds of `run` | load | commit |"
    lines = [head, "|---|---|---|" + "---|" * (len(names) + 4)]
    for case, one in found.items():
        cells = ["equal" if getattr(one, name) == getattr(like, name) != "" else "DIFFERENT" for name in names]
        cells.append("equal" if one.killed == one.night != "" else "DIFFERENT")
        if one.error:
            cells = [one.error, *[""] * len(names)]
        row = [case.version, case.mode, case.packages, *cells, f"{one.seconds:.0f}", f"{one.load:.1f}", one.commit]
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
        "its first checkpoint and started again, against those without. `load`: the average after `run`, its own tasks "
        "included. Packages `lowest`: the lower end of each range "
        "in pyproject.toml "
        f"({', '.join(lowest_versions())}), and the same torch: pandas 2 and MLflow 2, where the others have pandas 3 "
        "and MLflow 3. Session `cluster`: standalone, a master and two workers of a core each. Packages `torch`: that "
        "version, whose weights may be others, on torch's ring."
        + (
            f" Packages `newest`: the newest that pip finds ({', '.join(newest_versions())})."
            if any(case.packages == NEWEST for case in found)
            else ""
        )
        + (
            f" Packages `Python`: that version, with {', '.join(installed_versions())}, and PyPI's wheel of the same "
            "torch, without Horovod."
            if any(case.python for case in found)
            else ""
        )
        + "\n\n"
    )
    return head + table(found, found[closest(found)]) + "\n"


def found_or_run(case: Case, folder: Path, kept: Path | None, words: argparse.Namespace) -> Found | None:
    """Run a case, or read what was kept of it; None where no more are to be run.

    Args:
        case: what is run.
        folder: that has the raw tables.
        kept: file of what it gave; None: nothing is kept.
        words: of the command line; `most` is counted down.
    """
    if kept is not None and kept.exists():
        return Found(**json.loads(kept.read_text()))
    if words.most <= 0:
        return None
    words.most -= 1
    found = run(case, folder, words.rows, words.limit_s)
    print(case, found, file=sys.stderr, flush=True)
    if kept is not None:
        kept.write_text(json.dumps(asdict(found)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="*", default=CLASSIC)
    parser.add_argument("--connect", nargs="*", default=CLASSIC[1:])
    parser.add_argument("--cluster", nargs="*", default=[CLASSIC[0], CLASSIC[-1]])
    parser.add_argument("--lowest", nargs="*", default=CLASSIC[:1])
    parser.add_argument("--newest", nargs="*", default=CLASSIC[-1:])
    parser.add_argument("--torch", nargs="*", default=TORCH)
    parser.add_argument("--python", nargs="*", default=[], help="paths of other interpreters")
    parser.add_argument("--python-spark", nargs="*", default=CLASSIC[-1:], help="versions of Spark to run in each")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [Case(v, "classic") for v in arguments.versions] + [Case(v, "connect") for v in arguments.connect]
    cases += [Case(v, "cluster") for v in arguments.cluster]
    cases += [Case(v, "classic", NEWEST) for v in arguments.newest]
    cases += [Case(v, "classic", LOWEST) for v in arguments.lowest]
    cases += [Case(CLASSIC[-1], "classic", f"torch {v}") for v in arguments.torch]
    cases += [Case(v, "classic", named_python(path), path) for v in arguments.python_spark for path in arguments.python]
    found: dict[Case, Found] = {}
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="matrix") as scratch:
        for words in (["-m", "sparkring.etl.raw", "flights"], [str(ROOT / "examples/nights/make_days.py"), *DAYS]):
            subprocess.run([sys.executable, *words], cwd=scratch, check=True, capture_output=True)
        for case in cases:
            kept = arguments.keep / f"{case.name}.json" if arguments.keep is not None else None
            one = found_or_run(case, Path(scratch), kept, arguments)
            if one is not None:
                found[case] = one
                publish(report(found, arguments.rows), arguments.out)  # now: a long run may be cut
    like = found[closest(found)]
    wrong = [
        case
        for case, one in found.items()
        if one.error or must_equal(case, one) != must_equal(case, like) or one.killed != one.night
    ]
    return 1 if wrong or len(found) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
