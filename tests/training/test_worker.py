"""Whole training jobs without Spark: worlds, engines, kills and resumption leave the same model behind."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter

from sparkring.conf.load import load_config
from sparkring.conf.manifest import (
    ROW_NUMBER,
    Column,
)
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.conf.tasks import BINARY, MULTILABEL
from sparkring.pipelines.cli.audit import audit_run
from sparkring.training.checkpoint.weights import read_weights
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import (
    ChildEvent,
    Event,
    Heartbeat,
    RankMetrics,
    RankReplaced,
)
from sparkring.training.metrics import task_scores
from sparkring.training.worker.agreement import agree_threads
from sparkring.training.worker.result import WorkerResult
from tests.helpers.datasets import listed, manifest_of, write_manifest
from tests.training.own_example import RECIPE as EXAMPLE_RECIPE

pytestmark = pytest.mark.ranks
HOOKS = "tests.training.own_hooks"
ROWS = {"train": 1000, "valid": 300, "test": 200}
COLUMNS = (
    Column(name="code", dtype="int32", cardinality=7),
    Column(name="x", dtype="float32"),
    Column(name="y", dtype="float32"),
    Column(name="late", dtype="bool", role="label"),
)
TAGS = ["high", "late", "odd"]
NO_FEATURES = {"version": 1, "inputs": {}, "features": []}


def write_table(
    folder: Path,
    poisoned: bool = False,
    sizes: dict[str, int] = ROWS,
    weigh: Callable[[int], Any] | None = None,
    tagged: bool = False,
) -> Path:
    """A learnable binary task in Parquet with a manifest; `poisoned` puts one NaN among the training rows.

    `weigh`: rows -> their weights, (rows,). `tagged`: a second label, whose tags depend on the features.
    """
    files, means = [], {}
    for number, (split, rows) in enumerate(sizes.items()):
        random = np.random.default_rng(number)
        code, x, y = random.integers(0, 7, rows), random.normal(size=rows), random.normal(size=rows)
        late = random.random(rows) < 1 / (1 + np.exp(-(x + 0.5 * code - 2)))
        if poisoned and split == "train":
            x[500] = np.nan
        table = pa.table(
            {
                "code": code.astype(np.int32),
                "x": x.astype(np.float32),
                "y": y.astype(np.float32),
                "late": late,
                ROW_NUMBER: np.arange(rows),
            }
        )
        if weigh is not None:
            table = table.append_column("trust", pa.array(weigh(rows), pa.float64()))
            means[split] = float(np.mean(table["trust"].to_numpy()))
        if tagged:
            has = zip(x > 0.5, late, code % 2 == 1, strict=True)
            tags = [[tag for tag, one in zip(TAGS, row, strict=True) if one] for row in has]
            table = table.append_column("tags", pa.array(tags, pa.list_(pa.string())))
        path = folder / f"data/{split}-00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=100)
        files.append(listed(folder, path, split))
    columns, features = [*COLUMNS], dict[str, Any]()
    if weigh:
        columns.append(Column(name="trust", dtype="float64", role="weight"))
        features |= NO_FEATURES | {"weight": {"column": "trust", "mean": means["train"]}}
    if tagged:
        columns.append(Column(name="tags", dtype="string", layout="ragged", role="label", logical="array<string>"))
        state = {"name": "tags", "kind": "tags", "column": "tags", "values": TAGS, "counts": {}}
        features |= NO_FEATURES | features | {"labels": [state]}
    manifest = manifest_of(
        columns=columns,
        files=files,
        name="worker",
        fingerprint=hashlib.sha256(repr(poisoned).encode()).hexdigest(),
        features=features,
    )
    write_manifest(folder, manifest)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table"))


RECIPE = """
name: worker
dataset: {dataset}
model: {{factory: sparkring.training.models.tabular:Tabular, args: {{width: 16, blocks: 1, bumps: 4, dropout: 0.2}}}}
optim: {{lr: 1e-2, warmup_steps: 5}}
train: {{epochs: 3, global_batch: 100, log_every_steps: 1, dtype: float64, seed: 3, threads_per_rank: 1, device: cpu}}
checkpoint: {{every_steps: 5, keep_last: 20}}
data: {{lanes: 8, audit: true}}
tracking: {{enabled: false}}
"""


class Job:
    """What a run left behind."""

    def __init__(self, folder: Path, table: Path, *words: str):
        recipe = folder.with_suffix(".yaml")
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(RECIPE.format(dataset=table))
        self.folder, self.table = folder, table
        self.config = load_config(str(recipe), words).as_dict()
        self.losses: dict[int, float] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.valid: dict[int, dict[str, float]] = {}
        self.from_step, self.phases = 0, list[str]()
        self.furthest = 0  # step that any rank has begun
        self.servers: list[int] = []  # process ids of parameter servers, the last attempt's last
        self.replaced: list[RankReplaced] = []
        self.results: list[Any] = []

    def run(
        self,
        group: WorkerGroup,
        world: int,
        attempt: int = 1,
        on_step: Callable[[int], None] | None = None,
        entry: str = "sparkring.training.worker.train:train",
        **options: Any,
    ) -> Job:
        def on_event(event: Event) -> None:
            if isinstance(event, RankMetrics) and event.rank == 0 and "train/loss" in event.values:
                self.losses[event.step] = event.values["train/loss"]
                self.metrics[event.step] = event.values
                if on_step is not None:
                    on_step(event.step)
            elif isinstance(event, RankMetrics) and event.rank == 0 and "valid/loss" in event.values:
                self.valid[event.step] = event.values
            elif isinstance(event, ChildEvent) and event.name == "training":
                self.from_step = event.data["from_step"]
            elif isinstance(event, ChildEvent) and event.child.role == "server":
                self.servers.append(event.data["pid"])
            elif isinstance(event, RankReplaced):
                self.replaced.append(event)
            elif isinstance(event, Heartbeat):
                self.phases.append(event.phase)
                self.furthest = max(self.furthest, event.step)

        payload = {"config": self.config, "dataset": str(self.table), "run": str(self.folder)}
        env = {"OWN_HOOKS_FILE": str(self.folder / "seen"), "BEST_FILE": str(self.folder / "best.txt")}
        servers = self.config["parallel"]["servers"]["per_host"]
        job = JobSpec(
            entry,
            payload,
            env=env,
            servers_per_host=servers,
            server_entry="sparkring.training.worker.server:serve",
            replaceable_ranks=servers > 0,
        )
        self.results = group.run(job, world, on_event, attempt, **options).results
        return self

    @property
    def result(self) -> WorkerResult:
        """Rank 0's, as it came over the channel."""
        return TypeAdapter(WorkerResult).validate_python(self.results[0])

    def weights(self) -> dict[str, torch.Tensor]:
        return read_weights(open_storage(str(self.folder / "model")))


@pytest.fixture(scope="module")
def oracle(group: WorkerGroup, table: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One process, never disturbed."""
    return Job(tmp_path_factory.mktemp("oracle") / "run", table).run(group, 1)


@pytest.fixture(scope="module")
def pair(group: WorkerGroup, table: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two ranks of the default engine, never disturbed."""
    return Job(tmp_path_factory.mktemp("pair") / "run", table).run(group, 2)


def test_letters_of_a_url_are_letters_of_a_folder_to_every_rank(group: WorkerGroup, tmp_path: Path) -> None:
    odd = tmp_path / "a?b#c%25d [e] u:p@h;*"
    job = Job(odd / "run", write_table(odd / "table"), "train.epochs=1").run(group, 2)
    assert job.weights() and len([*(odd / "run").rglob("COMMIT.json")]) > 1 and [*(odd / "run").glob("audit/*")]
    assert [each.name for each in tmp_path.iterdir()] == [odd.name]


def test_it_learns(oracle: Job) -> None:
    assert oracle.result.engine == "none" and oracle.result.steps == 30
    assert oracle.losses[30] < 0.9 * oracle.losses[1]
    assert oracle.result.test["accuracy"] > oracle.result.test["positive_share"]


@pytest.mark.parametrize(
    ("world", "words", "engine"),
    [
        pytest.param(2, ["parallel.engine=horovod"], "horovod", marks=pytest.mark.horovod),
        (2, ["parallel.engine=torch"], "torch-gloo"),
        (3, ["parallel.engine=torch", "parallel.zero=2"], "torch-gloo"),
        pytest.param(2, ["parallel.accumulate=3"], "horovod", marks=pytest.mark.horovod),
    ],
)
def test_any_world_and_engine_give_the_same_model(
    group: WorkerGroup, oracle: Job, table: Path, tmp_path: Path, world: int, words: list[str], engine: str
) -> None:
    job = Job(tmp_path / "run", table, *words).run(group, world)
    assert job.result.engine == engine
    assert {r["steps"] for r in job.results} == {30}, "ranks must take the same number of steps"
    np.testing.assert_allclose(
        [job.losses[s] for s in range(1, 31)], [oracle.losses[s] for s in range(1, 31)], rtol=1e-10
    )
    assert job.result.valid == pytest.approx(oracle.result.valid, rel=1e-10)
    assert job.result.test == pytest.approx(oracle.result.test, rel=1e-10)
    for name, expected in oracle.weights().items():
        torch.testing.assert_close(job.weights()[name], expected, rtol=1e-8, atol=1e-11)
    report = audit_run(str(job.folder))
    assert report.ok, report.lines()


@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_is_chosen_by_a_metric_of_all_rows_of_all_ranks(
    group: WorkerGroup, table: Path, tmp_path: Path, world: int
) -> None:
    """300 and 200 rows in batches of 64: shares are uneven and the last batch is padded."""
    stop = "train.early_stopping={metric: auc, mode: max, patience: 2}"
    words = ["train.best_metric=auc", "train.best_mode=max", "train.eval_every_steps=5", "train.eval_batch=64", stop]
    job = Job(tmp_path / "run", table, *words, "parallel.engine=torch").run(group, world)
    curve = {step: values["valid/auc"] for step, values in job.valid.items()}
    best = max(curve, key=lambda step: curve[step])
    assert job.result.best_step == job.result.exported_step == best and job.result.best_value == curve[best]
    assert all(r["valid"] == job.results[0]["valid"] and r["test"] == job.results[0]["test"] for r in job.results)
    parts = [pq.read_table(tmp_path / "run" / r["predictions"]).to_pydict() for r in job.results if r["predictions"]]
    rows = [row for part in parts for row in zip(part["prediction"], part["label"], strict=True)]
    positive, negative = ([score for score, label in rows if label == one] for one in (True, False))
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert len(rows) == 200 and job.result.test["auc"] == sum(pairs) / len(pairs)
    right = sum(score > 0.5 for score in positive)
    assert job.result.test["f1"] == 2 * right / (len(positive) + sum(score > 0.5 for score, _ in rows))


def test_ranks_that_have_no_row_to_evaluate_see_the_metrics_of_the_others_rows(
    group: WorkerGroup, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two rows in each held-out split, for three ranks."""
    table = write_table(tmp_path_factory.mktemp("small"), sizes={"train": 1000, "valid": 2, "test": 2})
    words = ["train.best_metric=f1", "train.best_mode=max", "train.steps=10", "parallel.engine=torch"]
    alone = Job(tmp_path / "alone", table, *words).run(group, 1).result
    job = Job(tmp_path / "run", table, *words).run(group, 3)
    assert alone.test.keys() >= {"auc", "f1"} and sum(r["predictions"] is None for r in job.results) >= 1
    for found in job.results:
        assert found["valid"] == pytest.approx(alone.valid, rel=1e-9, nan_ok=True)
        assert found["test"] == pytest.approx(alone.test, rel=1e-9, nan_ok=True)


def fifths(rows: int) -> np.ndarray:
    """0, 1, 2, 3, 4, 0 ..: every fifth row counts for nothing."""
    return np.arange(rows) % 5


def test_weights_count_in_the_loss_and_every_metric_on_any_world(group: WorkerGroup, tmp_path: Path) -> None:
    """The last batch of the held-out splits is padded; no rank holds a whole batch's weights."""
    table = write_table(tmp_path / "weighted", weigh=fifths)
    words = ["train.epochs=1", "train.best_metric=auc", "train.best_mode=max", "train.eval_batch=64"]
    alone = Job(tmp_path / "alone", table, *words).run(group, 1)
    job = Job(tmp_path / "run", table, *words, "parallel.engine=torch", "parallel.zero=2").run(group, 3)
    np.testing.assert_allclose([*job.losses.values()], [*alone.losses.values()], rtol=1e-10)
    for name, expected in alone.weights().items():
        torch.testing.assert_close(job.weights()[name], expected, rtol=1e-8, atol=1e-11)
    assert job.result.valid == pytest.approx(alone.result.valid, rel=1e-10)
    doubled = Job(tmp_path / "doubled", write_table(tmp_path / "double", weigh=lambda n: 2.0 * fifths(n)), *words)
    torch.testing.assert_close(doubled.run(group, 1).weights(), alone.weights(), rtol=0, atol=0)
    report = audit_run(str(job.folder))
    assert report.ok, "rows of weight 0 are consumed as all others are"
    parts = [pq.read_table(tmp_path / "run" / r["predictions"]) for r in job.results if r["predictions"]]
    scored = pa.concat_tables(parts).sort_by("id").to_pydict()
    assert scored["id"] == [*range(200)]
    labels, scores, weights = np.array(scored["label"], float), np.array(scored["prediction"]), fifths(200)
    expected = task_scores(BINARY, labels, scores, weights)
    for metric in ("loss", "accuracy", "auc", "average_precision", "f1"):
        assert job.result.test[metric] == pytest.approx(expected[metric], rel=1e-12), metric
    assert job.result.test["positive_share"] == pytest.approx(np.average(labels, weights=weights))


def test_several_labels_are_learnt_alike_on_any_world(group: WorkerGroup, tmp_path: Path) -> None:
    """Every parameter, so those of every label; rows have weights, and the last batch of held-out splits is padded."""
    table = write_table(tmp_path / "tagged", weigh=fifths, tagged=True)
    words = ["model.task=multilabel", "model.label=tags", "train.epochs=1", "train.eval_batch=64"]
    words += ["train.best_metric=macro_auc", "train.best_mode=max"]
    alone = Job(tmp_path / "alone", table, *words).run(group, 1)
    job = Job(tmp_path / "run", table, *words, "parallel.engine=torch", "parallel.zero=2").run(group, 2)
    np.testing.assert_allclose([*job.losses.values()], [*alone.losses.values()], rtol=1e-10)
    assert alone.weights()["head.bias"].shape == (3,) and (alone.weights()["head.bias"] != 0).all()
    for name, expected in alone.weights().items():
        torch.testing.assert_close(job.weights()[name], expected, rtol=1e-8, atol=1e-11)
    assert job.result.valid == pytest.approx(alone.result.valid, rel=1e-10)
    parts = [pq.read_table(tmp_path / "run" / r["predictions"]) for r in job.results if r["predictions"]]
    scored = pa.concat_tables(parts).sort_by("id").to_pydict()
    labels, scores = np.array(scored["label"]), np.array(scored["prediction"])
    stored = pq.read_table(table / "data/test-00000.parquet")["tags"].to_pylist()
    assert labels.tolist() == [[float(tag in tags) for tag in TAGS] for tags in stored]
    expected = task_scores(MULTILABEL, labels, scores, fifths(200))
    assert {name: job.result.test[name] for name in expected} == pytest.approx(expected, rel=1e-10)


def kill_one_rank(step: int, at: int, killed: list[int]) -> None:
    """SIGKILL the youngest rank once `at` is reached."""
    if step < at or killed:
        return
    ranks = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    youngest = max(ranks, key=lambda p: p.create_time())
    killed.append(youngest.pid)
    os.kill(youngest.pid, signal.SIGKILL)


def test_a_killed_rank_changes_nothing_in_the_end(group: WorkerGroup, pair: Job, table: Path, tmp_path: Path) -> None:
    """Bit-equal on the same world; and every row is still consumed once per epoch. A command that was told not to go on
    with an earlier one's run goes on with its own all the same."""
    job, killed = Job(tmp_path / "run", table, "checkpoint.resume=false"), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.run(group, 2, on_step=lambda step: kill_one_rank(step, 12, killed))
    job.run(group, 2, attempt=2)
    assert job.from_step >= 5 and job.result.steps == 30
    assert "found data/train-00000.parquet" in job.phases, "whole files are progress"  # phases may overtake one another
    for name, expected in pair.weights().items():
        assert torch.equal(job.weights()[name], expected), name
    report = audit_run(str(job.folder))
    assert report.ok and report.epochs[-1].attempts == (2,), report.lines()


def test_stopped_on_two_ranks_and_finished_on_one(group: WorkerGroup, oracle: Job, table: Path, tmp_path: Path) -> None:
    control = Control()

    def stop_at(step: int) -> None:
        if step == 8:
            control.stop()

    job = Job(tmp_path / "run", table, "train.threads_per_rank=null")
    job.run(group, 2, on_step=stop_at, control=control)
    assert not job.result.finished and 8 <= job.result.steps < 30
    threads = job.result.threads_per_rank
    assert threads == max(1, (os.cpu_count() or 1) // 2)
    job.run(group, 1, attempt=2)
    assert job.result.threads_per_rank == threads, "as the run began, though the host is one rank's alone now"
    assert job.result.finished and job.result.steps == 30
    for name, expected in oracle.weights().items():
        torch.testing.assert_close(job.weights()[name], expected, rtol=1e-8, atol=1e-11)
    assert audit_run(str(job.folder)).ok


def test_threads_are_chosen_once_for_the_run_unless_configured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_storage(str(tmp_path))
    assert agree_threads(run, None, 6, lambda mine: [mine, b"[4, null]", b"[8, null]"], 0) == 4
    assert agree_threads(run, None, 2, lambda mine: [mine, b"[2, null]"], 0) == 4
    assert agree_threads(run, None, 2, lambda mine: [b"[2, 4]", mine], 1) == 4 and not caplog.text
    assert agree_threads(run, 3, 2, lambda mine: [mine], 0) == 3
    assert "threads_per_rank = 3, the run began with 4" in caplog.text
    (tmp_path / "threads.json").write_text('{"threads_per_rank": 0}')
    with pytest.raises(StoredError, match=r"threads\.json: threads_per_rank = 0"):
        agree_threads(run, None, 2, lambda mine: [mine], 0)


def test_a_mix_stopped_on_two_ranks_and_finished_on_one(group: WorkerGroup, table: Path, tmp_path: Path) -> None:
    """Epochs of 700 samples, in which the smaller part's 300 rows end inside a batch."""
    parts = f"[{{dataset: {table}, weight: 2}}, {{dataset: {table}, split: valid}}]"
    words = [f"data.mix={{parts: {parts}, stop: forever, epoch_samples: 700}}", "data.audit=false", "train.epochs=10"]
    control = Control()

    def stop_at(step: int) -> None:
        if step == 10:
            control.stop()

    whole = Job(tmp_path / "whole", table, *words).run(group, 1)
    job = Job(tmp_path / "run", table, *words).run(group, 2, on_step=stop_at, control=control)
    assert not job.result.finished and 10 <= job.result.steps < 70
    job.run(group, 1, attempt=2)
    assert job.from_step >= 10 and job.result.steps == whole.result.steps == 70
    for name, expected in whole.weights().items():
        torch.testing.assert_close(job.weights()[name], expected, rtol=1e-8, atol=1e-11)


def test_another_order_is_refused_by_name_unless_told_otherwise(
    group: WorkerGroup, table: Path, tmp_path: Path, oracle: Job
) -> None:
    Job(tmp_path / "run", table, "train.epochs=1").run(group, 1)
    with pytest.raises(WorkerFailed, match=r"seed: 0 in the checkpoint, 5 now"):
        Job(tmp_path / "run", table, "data.seed=5", "data.audit=false").run(group, 1)
    told = Job(tmp_path / "run", table, "data.seed=5", "data.audit=false", "checkpoint.allow_other_order=true").run(
        group, 1
    )
    assert told.result.steps == 30


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_passes_are_refused_where_batch_normalization_counts_their_rows(
    group: WorkerGroup, table: Path, tmp_path: Path, world: int
) -> None:
    words = ["model={factory: tests.training.own_normalized:Normalized, inputs: [x, y]}"]
    Job(tmp_path / "run", table, *words, "train.epochs=1").run(group, world)
    more = [*words, "parallel.accumulate=2"]
    with pytest.raises(WorkerFailed, match=r"parallel\.accumulate: 1 in the checkpoint, 2 now \(batch normalization"):
        Job(tmp_path / "run", table, *more).run(group, world)
    told = Job(tmp_path / "run", table, *more, "checkpoint.allow_other_order=true").run(group, world)
    assert told.from_step == 10 and told.result.steps == 30


def test_another_dataset_is_refused_by_name(
    group: WorkerGroup, table: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    Job(tmp_path / "run", table, "train.epochs=1").run(group, 1)
    other = write_table(tmp_path_factory.mktemp("other"), poisoned=True)
    with pytest.raises(WorkerFailed, match=r"trained on other batches: dataset: '\w+' in the checkpoint, '\w+' now"):
        Job(tmp_path / "run", other).run(group, 1)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_damaged_file_of_a_held_out_split_is_named_before_the_first_step(
    group: WorkerGroup, tmp_path: Path, split: str
) -> None:
    """Not when training, which may take days, is done."""
    table = write_table(tmp_path / "table")
    path = table / f"data/{split}-00000.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:60] + bytes([data[60] ^ 255]) + data[61:])
    job = Job(tmp_path / "run", table)
    with pytest.raises(WorkerFailed, match=rf"{split}-00000.parquet.*: sha256 is"):
        job.run(group, 2)
    assert job.losses == {}


def test_petastorms_uneven_shards_end_on_every_rank_at_the_same_step(
    group: WorkerGroup, table: Path, tmp_path: Path
) -> None:
    """400, 300 and 300 rows: ranks that read to their ends would wait in the ring for each other for ever."""
    words = ["data.reader=petastorm", "data.audit=false", "data.petastorm.pool=dummy"]
    job = Job(tmp_path / "run", table, *words).run(group, 3)
    assert [r["steps"] for r in job.results] == [3 * 8] * 3  # the last rank takes 34 of each 100 rows
    assert job.losses[24] < job.losses[1]


def test_where_a_reader_spends_its_seconds_is_among_the_metrics(pair: Job) -> None:
    of_reader = {"data_stall_s", "read_s", "decode_s", "shuffle_s", "collate_s", "row_groups", "rows"}
    first, *later = [pair.metrics[step] for step in sorted(pair.metrics)]
    assert {f"data/{name}" for name in of_reader | {"first_batch_s", "verify_s"}} <= first.keys()
    assert {"data/rows", "data/data_stall_s"} <= later[0].keys() and "data/first_batch_s" not in later[0]


def test_early_stopping_ends_every_rank_at_the_same_step(group: WorkerGroup, table: Path, tmp_path: Path) -> None:
    words = ["train.early_stopping={patience: 1, min_delta: 10}", "train.epochs=50", "train.eval_every_steps=5"]
    job = Job(tmp_path / "run", table, *words).run(group, 2)
    assert [r["steps"] for r in job.results] == [10, 10] and job.result.stopped_early


def test_averages_a_plateau_and_an_own_optimizer_go_on_after_a_kill_as_if_it_had_not_happened(
    group: WorkerGroup, table: Path, tmp_path: Path
) -> None:
    """Bit-equal on the same world; what is scored and exported are the averages."""
    words = [
        *("optim.ema=0.9", "optim.schedule=plateau", "optim.plateau={factor: 0.5, patience: 1}", "optim.lr=0.3"),
        *("train.best_metric=positive_share", "train.best_mode=max"),  # the same at every evaluation
        *("train.eval_every_steps=3", "optim.name=tests.training.own_optimizers:SignMomentum", "train.export=last"),
        *("parallel.engine=torch", "parallel.zero=2"),
    ]
    whole = Job(tmp_path / "whole", table, *words).run(group, 2)
    rates = {values["train/lr"] for step, values in whole.metrics.items() if step >= 5}
    assert len(rates) > 1 and all(math.log2(0.3 / rate).is_integer() for rate in rates), "it was lowered by halves"
    job, killed = Job(tmp_path / "run", table, *words), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.run(group, 2, on_step=lambda step: kill_one_rank(step, 17, killed))
    job.run(group, 2, attempt=2)
    assert job.from_step >= 5
    for name, expected in whole.weights().items():
        assert torch.equal(job.weights()[name], expected), name
    assert [job.metrics[30]["train/lr"], job.valid[30]] == [whole.metrics[30]["train/lr"], whole.valid[30]]
    plain = Job(tmp_path / "plain", table, *words, "optim.ema=null", "parallel.zero=0").run(group, 1)
    assert plain.losses[30] == pytest.approx(whole.losses[30], rel=1e-8), "the weights that train are the same"
    assert plain.result.test != pytest.approx(whole.result.test, rel=1e-6), "those that are scored are not"


@pytest.mark.slow  # resumed and carried on: tests/ranks/test_compress.py
def test_a_codecs_residuals_go_on_after_a_kill_and_in_a_world_of_one(
    group: WorkerGroup, oracle: Job, table: Path, tmp_path: Path
) -> None:
    """Bit-equal on the same world; on one rank, which has no codec, all that was left is trained on."""
    coded = "parallel.compress={codec: int4}"
    whole = Job(tmp_path / "whole", table, coded).run(group, 2)
    assert whole.losses[30] != pytest.approx(oracle.losses[30], rel=1e-6), "nothing was compressed"
    job, killed = Job(tmp_path / "run", table, coded), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.run(group, 2, on_step=lambda step: kill_one_rank(step, 12, killed))
    job.run(group, 2, attempt=2)
    assert job.from_step >= 5
    for name, expected in whole.weights().items():
        assert torch.equal(job.weights()[name], expected), name
    alone, control = Job(tmp_path / "alone", table, coded), Control()
    alone.run(group, 2, on_step=lambda step: control.stop() if step == 8 else None, control=control)
    alone.run(group, 1, attempt=2)
    assert alone.result.finished and alone.losses[30] == pytest.approx(oracle.losses[30], rel=0.05)


@pytest.mark.slow  # resumed in a window, and in another world: tests/ranks/test_replicas.py
def test_replicas_go_on_inside_a_window_after_a_kill_and_with_fewer_ranks(
    group: WorkerGroup, oracle: Job, table: Path, tmp_path: Path
) -> None:
    """Bit-equal on the same world; a smaller one begins with the mean; every row is read once in both."""
    apart = "parallel.averaging={kind: local_sgd, every: 7}"
    whole = Job(tmp_path / "whole", table, apart).run(group, 3)
    assert whole.losses[30] != pytest.approx(oracle.losses[30], rel=1e-6), "the ring's gradients were summed"
    job, killed = Job(tmp_path / "run", table, apart), list[int]()
    with pytest.raises(WorkerFailed, match="SIGKILL"):  # past step 10, whose checkpoint waits for that of step 5
        job.run(group, 3, on_step=lambda step: kill_one_rank(step, 11, killed))
    job.run(group, 3, attempt=2)
    assert job.from_step in (5, 10, 15, 20, 25), "not where a window ends"
    assert [job.losses[30], job.valid[30]] == [whole.losses[30], whole.valid[30]]
    for name, expected in whole.weights().items():
        assert torch.equal(job.weights()[name], expected), name
    fewer, control = Job(tmp_path / "fewer", table, apart), Control()
    fewer.run(group, 3, on_step=lambda step: control.stop() if step == 8 else None, control=control)
    fewer.run(group, 2, attempt=2)
    assert fewer.result.finished and fewer.losses[30] == pytest.approx(oracle.losses[30], rel=0.1)
    for run in (job, fewer):
        assert (report := audit_run(str(run.folder))).ok, report.lines()


def test_hooks_see_every_step_on_rank_0_and_change_nothing(
    group: WorkerGroup, pair: Job, table: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path / "run", table, f"train.hooks=[{HOOKS}:Notes]").run(group, 2)
    for name, expected in pair.weights().items():
        assert torch.equal(job.weights()[name], expected), name
    lines = [json.loads(line) for line in (tmp_path / "run/seen").read_text().splitlines()]
    steps, evaluations, checkpoints = ([line for line in lines if line["kind"] == f"{kind}Seen"]
                                       for kind in ("Step", "Evaluation", "Checkpoint"))  # fmt: skip
    assert [line["step"] for line in steps] == [*range(1, 31)] and len({line["pid"] for line in lines}) == 1
    for line in steps:
        assert line["loss"] == pytest.approx(pair.losses[line["step"]], rel=1e-12) and line["world"] == 2
        assert line["lr"] == pair.metrics[line["step"]]["train/lr"]
    assert {line["step"]: line["metrics"]["loss"] for line in evaluations} == {
        step: values["valid/loss"] for step, values in pair.valid.items()
    }
    assert [line["step"] for line in checkpoints] == [5, 10, 15, 20, 25, 30]
    ends = Job(tmp_path / "ends", table, f"train.hooks=[{HOOKS}:Ends]")
    with pytest.raises(WorkerFailed, match=r"own_hooks:Ends\.on_evaluation failed at step 10: ZeroDivision") as error:
        ends.run(group, 2)
    assert "own_hooks.py" in str(error.value) and "share = 1 / (seen.step - seen.step)" in str(error.value)


def test_the_example_of_the_page_trains(group: WorkerGroup, table: Path, tmp_path: Path) -> None:
    """docs/how-to/own_code.md as it stands: model, task with arguments, groups of parameters, schedule and hook."""
    job = Job(tmp_path / "run", table, *EXAMPLE_RECIPE).run(group, 2)
    assert job.losses[30] < 0.8 * job.losses[1]
    assert {"loss", "hit", "worst_code"} <= job.result.test.keys() and job.result.best_step is not None
    assert 0 < job.result.test["worst_code"] <= job.result.test["hit"] <= 1
    assert job.metrics[30]["train/lr"] == pytest.approx(1e-2 * 0.9**29)
    assert "best so far" in (tmp_path / "run/best.txt").read_text()


def test_the_best_checkpoint_is_what_is_exported(group: WorkerGroup, table: Path, tmp_path: Path) -> None:
    words = ["optim.lr=1.0", "optim.schedule=constant", "train.eval_every_steps=1", "train.best_metric=accuracy"]
    job = Job(tmp_path / "run", table, *words, "train.best_mode=max").run(group, 1)
    best = job.result.best_step
    assert best is not None and best < 30 and job.result.exported_step == best
    last = Job(tmp_path / "last", table, *words, "train.best_mode=max", "train.export=last").run(group, 1)
    assert last.result.best_step == best and last.result.exported_step == 30
    assert last.result.test != job.result.test


def test_rows_that_give_no_finite_gradient_are_skipped_by_all_ranks(
    group: WorkerGroup, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = write_table(tmp_path_factory.mktemp("poisoned"), poisoned=True)
    job = Job(tmp_path / "run", table).run(group, 2)
    assert [r["skipped_steps"] for r in job.results] == [3, 3], "one bad row in each of three epochs"
    with pytest.raises(WorkerFailed, match=r"not finite.*samples up to \d+.*first on rank [01]"):
        Job(tmp_path / "strict", table, "train.max_skipped_steps=0").run(group, 2)
