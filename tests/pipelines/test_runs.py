"""Run folders: which run a command goes on with, and what run.json says after every kind of end."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem

from sparkring.conf.blocks.trees import TreesConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved, load_config
from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.job import job as job_module
from sparkring.pipelines.launch.preflight import SlotRequest
from sparkring.pipelines.run import runs as runs_module
from sparkring.pipelines.run.process_id import start_ticks
from sparkring.pipelines.run.runs import Runs, RunTaken, training_digest
from sparkring.training.launch.failure import LaunchError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name: runs
dataset: {folder}/dataset
model: {{factory: sparkring.training.models.tabular:Tabular}}
train: {{epochs: 1, global_batch: 10}}
storage: {{runs: {folder}/runs}}
tracking: {{enabled: false}}
"""


def resolved(folder: Path, *words: str) -> Resolved:
    recipe = folder / "runs.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return load_config(str(recipe), words)


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_job` with its parts that need Spark or a dataset left out."""
    monkeypatch.setattr(etl_step, "wanted_fingerprint", lambda config, sources: "f")
    monkeypatch.setattr(etl_step, "pin", lambda *_: SimpleNamespace(snapshots={}))
    monkeypatch.setattr(etl_step, "require", lambda config, fingerprint: SimpleNamespace(manifest=None))
    monkeypatch.setattr("sparkring.pipelines.run.spark.session_ahead", lambda *_: nullcontext(lambda: None))
    for name in ("check_recipe", "check_against", "describe_job", "keep_environment"):
        monkeypatch.setattr(job_module, name, lambda *_, **__: None)
    monkeypatch.setattr("sparkring.pipelines.launch.preflight.check_slots", lambda *_, **__: None)


def test_what_a_job_needs_at_its_end_is_imported_while_spark_starts(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[str] = []

    @contextmanager
    def starting(*_: object) -> Iterator[Callable[[], None]]:
        events.append("Spark starts")
        yield lambda: events.append("Spark is needed")

    monkeypatch.setattr("sparkring.pipelines.run.spark.session_ahead", starting)
    monkeypatch.setattr(job_module, "check_recipe", lambda *_: events.append("the recipe is checked"))
    monkeypatch.setattr(job_module, "import_later_parts", lambda *_: events.append("imports"))
    monkeypatch.setattr(job_module, "train_and_publish", failing)
    with pytest.raises(LaunchError):
        job_module.run_job(resolved(tmp_path), etl=False)
    assert events == ["the recipe is checked", "Spark starts", "imports", "Spark is needed"]


def failing(*_: object) -> None:
    raise LaunchError("no room")


@pytest.mark.parametrize(
    ("end", "status"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted"), (LaunchError("no room"), "failed")],
)
def test_attempt_numbers_survive_an_orderly_end(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException, status: str
) -> None:
    """Used again they would overwrite the audit, and MLflow would take the new attempt's points for a replay."""
    recipe, begun = resolved(tmp_path), []

    def train_best(job: JobContext, *_: object) -> None:
        first = job.record.attempts + 1
        begun.append(first)
        job.count_attempt(first)
        job.count_attempt(first + 1)
        raise end

    monkeypatch.setattr(job_module, "train_best", train_best)
    for attempts in (2, 4):
        with pytest.raises(type(end)):
            job_module.run_job(recipe, etl=False)
        (record,) = Runs(recipe.config.storage.runs, "runs").records()
        assert (record.status, record.attempts) == (status, attempts)
    assert begun == [1, 3]


def test_a_job_begins_on_as_few_slots_as_it_may_go_on_with(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check_slots(spark: Any, request: SlotRequest) -> None:
        raise LaunchError(f"{request.world} {request.least} {request.wait_s:g}")

    monkeypatch.setattr("sparkring.pipelines.launch.preflight.check_slots", check_slots)
    with pytest.raises(LaunchError, match="4 2 900"):
        words = ("launch.world=4", "launch.min_world=2", "launch.hosts_wait_s=900")
        job_module.run_job(resolved(tmp_path, *words), etl=False)


def test_the_workers_python_is_checked_before_a_dataset_is_built(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(etl_step, "find", lambda *_: None)
    monkeypatch.setattr(etl_step, "foresee", lambda *_: None)
    monkeypatch.setattr(etl_step, "build", lambda *_, **__: pytest.fail("the dataset was built first"))
    for name in ("check_folders", "check_foreseen"):
        monkeypatch.setattr(job_module, name, lambda *_: None)
    monkeypatch.setattr("sparkring.pipelines.launch.preflight.check_workers", failing)
    with pytest.raises(LaunchError, match="no room"):
        job_module.run_job(resolved(tmp_path), etl=True)


def without_locks(folder: str, name: str) -> Runs:
    """Runs in a folder that is reached through fsspec, as some object stores are."""
    runs, fs = Runs(folder, name), PyFileSystem(FSSpecHandler(LocalFileSystem(auto_mkdir=True)))
    runs.storage = Storage(fs, runs.storage.root, runs.storage.uri)
    return runs


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"pid": 2**22 + 1}, False),  # it has ended
        ({"start_ticks": 1}, False),  # another process has its pid now
        ({"host": "elsewhere/boot1/1"}, False),  # cannot be seen
        ({"status": "failed"}, False),
    ],
)
def test_on_an_object_store_a_run_is_held_by_a_process_of_this_host_that_lives(
    tmp_path: Path, changes: dict[str, Any], taken: bool
) -> None:
    job, runs = resolved(tmp_path).config, without_locks(str(tmp_path / "runs"), "runs")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE) as other:
        ticks = start_ticks(other.pid)
        assert ticks is not None
        with runs.begin(job, "f") as (record, _):
            runs.update(record.folder, **{"pid": other.pid, "start_ticks": ticks} | changes)
        with pytest.raises(RunTaken) if taken else nullcontext(), runs.begin(job, "f") as (again, continued):
            assert continued and again.folder == record.folder
        other.communicate(b"end\n")


BEGIN = f"""
import sys
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from sparkring.conf.load import load_config
from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.launch.preflight import SlotRequest
from sparkring.pipelines.run.runs import Runs, RunTaken, training_digest
{inspect.getsource(without_locks)}
config = load_config(sys.argv[1]).config
runs = Runs(config.storage.runs, "runs")
print("ready", flush=True), sys.stdin.readline()
try:
    with runs.begin(config, "f") as (record, _):
        print(record.folder, flush=True)
        sys.stdin.readline()
except RunTaken:
    print("taken", flush=True)
    sys.stdin.readline()
"""


def test_of_commands_started_in_the_same_moment_one_takes_the_run(tmp_path: Path) -> None:
    job = resolved(tmp_path)
    runs = Runs(job.config.storage.runs, "runs")
    with runs.begin(job.config, "f") as (begun, _):
        runs.update(begun.folder, status="interrupted")
    command = [sys.executable, "-c", BEGIN, str(tmp_path / "runs.yaml")]
    several = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) for _ in range(3)]
    try:
        for process in several:
            assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        for process in several:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        said = [process.stdout.readline().strip() for process in several]  # type: ignore[union-attr]
        assert sorted(said) == sorted([begun.folder, "taken", "taken"])
        with pytest.raises(RunTaken, match="is being trained by process"), runs.begin(job.config, "f"):
            pass
    finally:
        for process in several:
            process.communicate("end\n")
    with runs.begin(job.config, "f") as chosen:
        assert chosen == (runs.read(begun.folder), True)


@pytest.mark.parametrize("locks", [True, False])
def test_a_run_is_looked_at_without_being_taken(tmp_path: Path, locks: bool) -> None:
    """A second job in one folder was refused when Spark had started; it is before."""
    job, other = resolved(tmp_path).config, resolved(tmp_path, "data.seed=9").config
    runs = (Runs if locks else without_locks)(str(tmp_path / "runs"), "runs")
    runs.check_free(job, "f")
    script = BEGIN if locks else BEGIN.replace("runs = Runs(", "runs = without_locks(")
    command = [sys.executable, "-c", script, str(tmp_path / "runs.yaml")]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline() == "ready\n"
        holder.stdin.write("go\n")
        holder.stdin.flush()
        folder = holder.stdout.readline().strip()
        before = runs.read(folder)
        with pytest.raises(RunTaken, match=f"{folder}: the same run is being trained by process {holder.pid}"):
            runs.check_free(job, "f")
        anyway = resolved(tmp_path, "data.seed=9", "checkpoint.allow_other_order=true").config
        runs.check_free(anyway, "f")  # a live run of another training is passed over
        runs.check_free(job, "another dataset")
        runs.check_free(other, "f")
        runs.check_free(resolved(tmp_path, "checkpoint.resume=false").config, "f")
        assert runs.read(folder) == before
        holder.communicate("end\n")
    runs.check_free(job, "f")
    with runs.begin(job, "f") as (record, continued):
        assert continued and record.folder == folder
        runs.update(folder, status="finished")
        runs.check_free(job, "f")


@pytest.mark.parametrize("locks", [True, False])
def test_a_step_of_the_clock_gives_no_live_run_away(tmp_path: Path, private_mounts: list[str], locks: bool) -> None:
    """With the clock, the kernel moves the time of boot in /proc/stat, and so the create time of every process."""
    job = resolved(tmp_path).config
    stepped = re.sub(r"btime (\d+)", lambda found: f"btime {int(found[1]) + 2}", Path("/proc/stat").read_text())
    (tmp_path / "stat").write_text(stepped)
    (tmp_path / "begin.py").write_text(BEGIN if locks else BEGIN.replace("runs = Runs(", "runs = without_locks("))
    run = f"mount --bind {tmp_path}/stat /proc/stat && exec {sys.executable} {tmp_path}/begin.py {tmp_path}/runs.yaml"
    with (Runs if locks else without_locks)(job.storage.runs, "runs").begin(job, "f"):
        command = [*private_mounts, "sh", "-c", run]
        done = subprocess.run(command, input="\n\n", text=True, capture_output=True, cwd=ROOT)
    assert done.stdout.split() == ["ready", "taken"], done.stderr


DAMAGES = {
    "empty": b"",
    "cut": b'{"folder": "20',
    "not text": b"\xff\xfe",
    "a list": b"[]",
    "nested deeply": b"[" * 100_000,
    "of a newer version": b'{"format": 2}',
}


def test_settings_of_tables_that_decide_the_model_make_another_training(tmp_path: Path) -> None:
    def digest_of(*words: str) -> str:
        return training_digest(resolved(tmp_path, *words).config)

    plain = digest_of()
    words = ("lr=0.1", "optimizer=adam", "max_rows=5000", "admit_after=2", "wire=bf16", "lag=2")
    assert len({digest_of(f"tables.{word}") for word in words} | {plain}) == 7


OF_TREES = {
    "rounds": 7, "early_stopping_rounds": 7, "learning_rate": 0.5, "max_depth": 3, "rows_per_leaf": 9.0,
    "subsample": 0.5, "columns_per_tree": 0.5, "l2": 9.0, "min_gain": 0.5, "max_bin": 9, "memory_share": 0.9,
    "categories_per_split": 9, "refit": True,
}  # fmt: skip


def test_each_setting_of_trees_that_decides_the_model_makes_another_training(tmp_path: Path) -> None:
    def digest_of(*words: str) -> str:
        return training_digest(resolved(tmp_path, *words).config)

    assert OF_TREES.keys() == TreesConfig.model_fields.keys(), "each setting is tried"
    trees, network = digest_of("model.family=trees"), digest_of()
    same = {key for key, value in OF_TREES.items() if digest_of("model.family=trees", f"trees.{key}={value}") == trees}
    assert same == {"memory_share"} and trees != network
    assert {digest_of(f"trees.{key}={value}") for key, value in OF_TREES.items()} == {network}
    both = digest_of("model.family=both")
    same = {key for key, value in OF_TREES.items() if digest_of("model.family=both", f"trees.{key}={value}") == both}
    assert same == {"memory_share"} and len({both, trees, network}) == 3
    assert digest_of("model.family=both", "optim.lr=0.5") != both


DECIDE = {"data", "model", "optim", "train", "trees", "tables", "warm_start", "parallel"}
DECIDE_NOTHING = {  # of the weights; `etl` and `dataset` decide the fingerprint, which is compared too
    *("etl", "dataset", "storage", "spark", "launch", "checkpoint", "tracking", "report", "promote", "predict"),
    *("schedule", "drift", "notify", "retention", "description"),
}


def test_of_each_block_it_is_known_whether_it_decides_the_model() -> None:
    """A block that is forgotten lets an unfinished run go on under other settings of it."""
    assert RunConfig.model_fields.keys() - {"name"} == DECIDE | DECIDE_NOTHING


EXACT = [
    ("launch.world=4",),
    ("parallel.zero=2", "parallel.engine=torch"),
    ("parallel.accumulate=2",),
    ("parallel.servers.per_host=1",),
    ("parallel.servers.per_host=2", "parallel.servers.backup=1"),
    ("parallel.bucket_bytes=1000",),
    ("train.device=cpu", "train.threads_per_rank=1"),
    ("spark.master=local[4]",),
]
INEXACT = [
    ("parallel.precision=bf16",),
    ("parallel.compress.codec=int8",),
    ("parallel.sync_batch_norm=false",),
    ("parallel.averaging.kind=local_sgd",),
    ("parallel.averaging.kind=local_sgd", "parallel.averaging.every=7"),
    ("parallel.servers.per_host=1", "parallel.servers.bound=2"),
    ("parallel.servers.per_host=1", "parallel.servers.bound=null"),
    ("data.seed=9",),
    ("train.global_batch=20",),
    ("optim.lr=0.5",),
    ("model.args.width=8",),
]


@pytest.mark.parametrize("words", EXACT, ids=" ".join)
def test_a_run_is_continued_under_another_strategy_with_the_same_weights(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    runs = Runs(f"{tmp_path}/runs", "runs")
    with runs.begin(resolved(tmp_path).config, "f") as (record, _):
        first = runs.update(record.folder, status="failed").folder
    with runs.begin(resolved(tmp_path, *words).config, "f") as (record, continued):
        assert continued and record.folder == first


@pytest.mark.parametrize("words", INEXACT, ids=" ".join)
def test_what_decides_the_model_begins_a_new_run_and_is_named(
    tmp_path: Path, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    runs, allowed = Runs(f"{tmp_path}/runs", "runs"), "checkpoint.allow_other_order=true"
    with runs.begin(resolved(tmp_path).config, "f") as (record, _):
        first = runs.update(record.folder, status="failed").folder
    key = words[-1].partition("=")[0]
    with runs.begin(resolved(tmp_path, *words, allowed).config, "f") as (record, continued):
        assert continued and record.folder == first and f"run {first} is continued" in caplog.text
        runs.update(record.folder, status="failed")
    caplog.clear()
    with runs.begin(resolved(tmp_path, *words).config, "f") as (record, continued):
        assert continued and record.folder == first, "it is that training now"
        runs.update(record.folder, status="failed")
    assert not caplog.text
    with runs.begin(resolved(tmp_path).config, "f") as (record, continued):
        assert not continued and record.folder != first
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"The unfinished run {first} is another training: " in line and f"{key}: " in line and allowed in line


def test_another_dataset_begins_a_new_run_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    runs, config = Runs(f"{tmp_path}/runs", "runs"), resolved(tmp_path).config
    with runs.begin(config, "f") as (record, _):
        first = runs.update(record.folder, status="failed").folder
    with runs.begin(config, "g") as (record, continued):
        assert not continued and f"run {first} is another training: the dataset is another one. " in caplog.text
        runs.update(record.folder, status="finished")
    with runs.begin(resolved(tmp_path, "checkpoint.allow_other_order=true").config, "h") as (record, continued):
        assert continued and (record.folder, record.fingerprint) == (first, "h")


@pytest.mark.parametrize("allowed", [False, True])
def test_a_trial_and_a_date_take_no_run_of_another(
    tmp_path: Path, allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    words = (f"checkpoint.allow_other_order={str(allowed).lower()}",)
    runs, config = Runs(f"{tmp_path}/runs", "runs"), resolved(tmp_path, *words).config
    with runs.begin(config, "f") as (record, _):
        first = runs.update(record.folder, status="failed").folder
    with runs.begin(resolved(tmp_path, *words, "optim.lr=0.5").config, "f", others="none") as (record, continued):
        assert not continued and record.folder != first and not caplog.text
        runs.update(record.folder, status="finished")
    with runs.begin(config, "g", skip_taken=True, others="same dataset") as (record, continued):
        assert not continued and record.folder != first and not caplog.text
        runs.update(record.folder, status="finished")
    changed = resolved(tmp_path, *words, "optim.lr=0.7").config
    with runs.begin(changed, "f", skip_taken=True, others="same dataset") as (record, continued):
        assert continued == allowed and (record.folder == first) == allowed and "optim.lr: " in caplog.text


@pytest.mark.parametrize("allowed", ["true", "false"])
def test_a_run_of_another_training_that_lives_is_not_called_unfinished(
    tmp_path: Path, allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    runs, words = Runs(f"{tmp_path}/runs", "runs"), (f"checkpoint.allow_other_order={allowed}",)
    with runs.begin(resolved(tmp_path).config, "f") as (live, _):
        with runs.begin(resolved(tmp_path, *words, "optim.lr=0.5").config, "f") as (record, continued):
            assert not continued and record.folder != live.folder and not caplog.text
        with runs.begin(resolved(tmp_path, *words, "optim.lr=0.5").config, "f") as (again, continued):
            assert continued and again.folder == record.folder
    with runs.begin(resolved(tmp_path).config, "f") as (again, continued):
        assert continued and again.folder == live.folder, "looking at it has not kept its lock"


@pytest.mark.parametrize("allowed", [False, True])
def test_another_training_that_came_behind_a_finished_run_is_named_or_continued(
    tmp_path: Path, allowed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    seconds = itertools.count(10)
    monkeypatch.setattr(runs_module.time, "strftime", lambda *_: f"20260101-0000{next(seconds)}")
    words = (f"checkpoint.allow_other_order={str(allowed).lower()}",)
    runs, config = Runs(f"{tmp_path}/runs", "runs"), resolved(tmp_path, *words).config
    with runs.begin(resolved(tmp_path, "optim.lr=0.9").config, "f") as (record, _):
        runs.update(record.folder, status="failed")  # before it, so of no interest
    with runs.begin(resolved(tmp_path, "checkpoint.resume=false").config, "f") as (record, _):
        runs.update(record.folder, status="finished")
    caplog.clear()
    with runs.begin(config, "f") as (record, continued):
        assert not continued and not caplog.text
        runs.update(record.folder, status="finished")
    with runs.begin(resolved(tmp_path, "optim.lr=0.5", "checkpoint.resume=false").config, "f") as (record, _):
        other = runs.update(record.folder, status="failed").folder
    with runs.begin(config, "f") as (record, continued):
        assert continued == allowed and (record.folder == other) == allowed
    assert other in caplog.text and "optim.lr: " in caplog.text


def test_a_finished_run_is_never_continued(tmp_path: Path) -> None:
    runs, config = Runs(f"{tmp_path}/runs", "runs"), resolved(tmp_path, "checkpoint.allow_other_order=true").config
    with runs.begin(config, "f") as (record, _):
        runs.update(record.folder, status="finished")
    with runs.begin(config, "f") as (_, continued):
        assert not continued


@pytest.mark.parametrize("data", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_run_that_cannot_be_read_is_named_and_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    runs, config = Runs(f"{tmp_path}/runs", "runs"), resolved(tmp_path).config
    with runs.begin(config, "f") as (record, _):
        damaged = runs.update(record.folder, status="failed").folder
    (tmp_path / "runs/runs" / damaged / "run.json").write_bytes(data)
    with runs.begin(config, "f") as (record, continued):
        assert not continued and record.folder != damaged
        assert f"{damaged}/run.json: " in caplog.text and "passed over" in caplog.text
        assert [r.folder for r in runs.records()] == [record.folder]
    with pytest.raises(StoredError, match=f"{damaged}/run.json: "):
        runs.update(damaged, attempts=1)


@pytest.mark.parametrize(
    "changes",
    [{"folder": "../../outside"}, {"folder": "elsewhere"}, {"attempts": -1}, {"pid": "1"}, {"status": "x"}, {"new": 1}],
)
def test_a_run_says_nothing_of_other_folders_and_no_impossible_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    runs = Runs(f"{tmp_path}/runs", "runs")
    with runs.begin(resolved(tmp_path).config, "f") as (record, _):
        file = tmp_path / "runs/runs" / record.folder / "run.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        with pytest.raises(StoredError, match=f"{record.folder}/run.json: .*{next(iter(changes))}"):
            runs.update(record.folder, attempts=3)
    assert not (tmp_path / "outside").exists()


def test_the_next_command_sweeps_what_a_killed_one_left_half_written(tmp_path: Path) -> None:
    """And not what a live process still writes."""
    runs, config = Runs(f"{tmp_path}/runs", "runs"), resolved(tmp_path).config
    with runs.begin(config, "f") as (record, _):
        folder = runs.at(runs.update(record.folder, status="failed"))
    killed = "import os, sys; from sparkring.conf.storage import open_storage as o; "
    killed += "os.fsync = lambda fd: os.kill(os.getpid(), 9)"
    for name in ("summary.json", "model/weights.safetensors"):
        subprocess.run([sys.executable, "-c", f"{killed}; o({folder.uri!r}).put_atomic({name!r}, b'x')"], cwd=ROOT)
    assert len([p for p in folder.list_files() if p.endswith(".part")]) == 2
    with folder.create("report.html") as file, runs.begin(config, "f") as (_, continued):
        assert continued
        (left,) = [p for p in folder.list_files() if p.endswith(".part")]
        assert left.startswith("report.html.")
        file.write(b"whole")
    assert folder.read_bytes("report.html") == b"whole" and folder.sweep() == []
