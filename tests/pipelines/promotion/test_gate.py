"""What is decided of a model, with a real store: the model is registered, the alias moves or stays."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from sparkring.conf.load import Resolved
from sparkring.conf.tasks import BINARY
from sparkring.pipelines.context.context import JobContext, Publication, TrialPublication
from sparkring.pipelines.evaluation.evaluate import EVALUATE, HeldOut
from sparkring.pipelines.job.job import register_model
from sparkring.pipelines.promotion.drift import DriftStop, NoReference
from sparkring.pipelines.promotion.gate import Candidate, Compared, Seen, conclude, open_gate, pending, report_decision
from sparkring.pipelines.promotion.prepare import prepare, previous_result
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.tracking.store.registry import Registry
from sparkring.pipelines.tracking.tags import NO_CHAMPION
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.metrics import task_scores
from sparkring.training.worker.result import MODEL, SUMMARY, Promotion, TrainResult
from tests.pipelines.promotion import nights
from tests.pipelines.results import rank_result, train_result

PROMOTED = Promotion(decision="promoted", reasons=[], alias="champion")
NOT_WORSE = {"metric": "brier", "min_relative_change": 0.0}
PROMOTE = {"rules": [NOT_WORSE, {"metric": "loss", "threshold": 50.0}], "slices": ["shop"], "min_slice_rows": 20}


class World:
    """One recipe with a store, a dataset and runs; models differ in their weights."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.dataset = nights.write_dataset(folder / name, ["a", "b", "c"], 5.0)

    def config(self, **blocks: Any) -> Any:
        tracking = {"root": str(self.folder / "mlflow"), "experiment": "tests", "flush_every_s": 0.05,
                    "system_metrics": False, "request_timeout_s": 1, "request_retries": 0}  # fmt: skip
        blocks["tracking"] = tracking | blocks.get("tracking", {})
        storage = {"runs": str(self.folder / "runs")}
        own = {"checkpoint": {"resume": False}}  # each night trains another model, whatever the recipe says
        return nights.config(**(own | {"name": self.name, "storage": storage, "promote": PROMOTE} | blocks))

    @contextmanager
    def job(
        self, ds: str | None, weights: int, publication: type[Publication] = Publication, **blocks: Any
    ) -> Iterator[JobContext]:
        """A job whose model has the weights drawn by that seed."""
        config = self.config(**blocks)
        runs = Runs(config.storage.runs, config.name)
        with runs.begin(config, self.dataset.manifest.fingerprint) as (record, _):
            folder = Path(runs.at(record).root)
            nights.write_model(folder / "model", config, self.dataset.manifest, weights)
            with Tracker(config.tracking.named(self.name), f"{self.name}/{record.folder}", self.name) as tracker:
                spark, of_date = cast(SparkSession, None), publication()
                of_date.ds = ds
                yield JobContext(Resolved(config, {}), "", spark, tracker, runs, record, self.dataset, of_date)
            runs.update(record.folder, status="finished")

    def night(
        self,
        ds: str | None,
        worth: float,
        weights: int,
        between: Callable[[], None] = lambda: None,
        lost: Sequence[str] = (),
        **blocks: Any,
    ) -> Promotion:
        """Judge a model that is sure of the right label by `worth` (of the wrong one below 0), and settle it.

        Args:
            ds: its date.
            worth: of its predictions.
            weights: its seed.
            between: what happens meanwhile.
            lost: lines of baselines that are better.
            blocks: of the recipe, and `publication`.
        """
        with self.job(ds, weights, **blocks) as job, job.tracker.part(EVALUATE):
            table = nights.rows_of(nights.SPLITS["test"], ["a", "b", "c"], seed=2)
            labels = table["late"].to_numpy().astype(np.float64)
            held_out = HeldOut(labels, 0.5 + worth * (labels - 0.5))
            result: TrainResult = train_result(
                run=job.folder.uri, train=rank_result(weights="model"),
                scores={MODEL: task_scores(BINARY, held_out.labels, held_out.scores)},
            )  # fmt: skip
            candidate = Candidate(result, result, held_out, [*lost])
            gate = open_gate(job, candidate, [])
            assert gate is not None
            between()
            register_model(job, candidate, alias=None)
            return gate.settle()

    def champion(self) -> str | None:
        found = Registry(self.config().tracking.named(self.name)).with_alias("champion")
        return found.version if found else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate")


def test_nights_are_judged_against_the_champion_on_the_same_rows(folder: Path) -> None:
    world = World(folder, "judged")
    first = world.night("2024-03-03", 0.8, weights=1)
    assert (first.decision, first.version, first.champion, first.champion_scores) == ("promoted", "1", None, {})
    better = world.night("2024-03-04", 0.8, weights=2)
    assert (better.decision, better.version, better.champion) == ("promoted", "2", "1") and world.champion() == "2"
    assert better.champion_scores["brier"] > 0.2 and len(better.rules) == 5 and all(f.passed for f in better.rules)
    worse = world.night("2024-03-05", -0.9, weights=3)
    assert worse.decision == "rejected" and world.champion() == "2"
    assert worse.reasons[0].startswith("brier not worse than the champion's: not met: it is 0.")
    assert f"the champion's is {worse.champion_scores['brier']:.4f}" in worse.reasons[0]
    older = world.night("2024-03-02", 0.8, weights=4)
    assert (older.decision, world.champion()) == ("older_date", "2")
    assert older.reasons == ["champion stays on version 2, of the later date 2024-03-04"]
    for mode, reasons in (("dry_run", ["would be promoted"]), ("disabled", ["promote.mode is disabled"])):
        found = world.night("2024-03-06", 0.8, weights=5, promote=PROMOTE | {"mode": mode})
        assert (found.decision, found.reasons, world.champion()) == (mode, reasons, "2")
    dry = world.night("2024-03-06", -0.9, weights=6, promote=PROMOTE | {"mode": "dry_run"})
    assert dry.decision == "dry_run" and dry.reasons[0] == "would be rejected" and "brier" in dry.reasons[1]
    again = world.night("2024-03-04", -0.9, weights=2)  # night 2 was killed right behind its promotion
    assert again.decision == "promoted" and [f.champion for f in again.rules] == [None] * 2, "it is not its own rival"
    strict = {"rules": [{"metric": "loss", "threshold": 0.0}]}
    assert world.night("2024-03-04", -0.9, weights=2, promote=strict).decision == "rejected"


def test_a_champion_of_another_job_is_judged_against_too(folder: Path) -> None:
    world = World(folder, "race")
    world.night("2024-03-03", 0.8, weights=1)

    def another_job() -> None:
        assert world.night("2024-03-03", 0.8, weights=2).decision == "promoted"

    found = world.night("2024-03-04", 0.8, weights=3, between=another_job)
    assert (found.decision, found.champion, found.version) == ("promoted", "2", "3") and world.champion() == "3"


def test_a_champion_whose_files_are_gone_is_held(folder: Path) -> None:
    world = World(folder, "deleted")
    world.night("2024-03-03", 0.8, weights=1)
    registry = Registry(world.config().tracking.named("deleted"))
    version = registry.with_alias("champion")
    assert version is not None
    shutil.rmtree(version.source.removeprefix("file://"))
    found = world.night("2024-03-04", 0.8, weights=2)
    assert found.decision == "held" and world.champion() == "1"
    assert found.reasons[0].startswith("version 1 of 'deleted' (") and "its files cannot be read" in found.reasons[0]
    registry._client.delete_model_version("deleted", "1")
    assert world.night("2024-03-05", 0.8, weights=3).decision == "promoted", "deleted as a version, there is none"


def test_without_a_block_a_dated_job_moves_the_alias_forward_only(folder: Path) -> None:
    world = World(folder, "plain")
    assert world.night("2024-03-04", 0.8, weights=1, promote=None).decision == "promoted"
    assert world.night("2024-03-03", 0.8, weights=2, promote=None).decision == "older_date"
    assert world.night("2024-03-05", -0.9, weights=3, promote=None).decision == "promoted"
    with world.job(None, weights=4, promote=None) as job:
        assert open_gate(job, Candidate(train_result(), train_result(), None, []), []) is None


def test_a_backfill_moves_no_alias_and_a_better_baseline_none_either(folder: Path) -> None:
    world = World(folder, "unmoved")
    backfilled = world.night("2024-03-03", 0.8, weights=1, publication=TrialPublication)
    assert (backfilled.decision, backfilled.reasons) == ("disabled", ["a backfill moves no alias without --promote"])
    rejected = world.night("2024-03-04", 0.8, weights=2, lost=["loss: the logistic regression is better"])
    assert (rejected.decision, rejected.reasons) == ("rejected", ["loss: the logistic regression is better"])
    assert world.champion() is None


PREDICTIONS = {"columns": ["prediction"], "measure": "psi", "max": 0.5, "action": "hold"}
REACHED = {"rules": [{"metric": "loss", "threshold": 50.0}]}


def test_predictions_that_are_others_than_the_champions_hold(folder: Path) -> None:
    world, blocks = World(folder, "shifted"), {"promote": REACHED, "drift": {"rules": [PREDICTIONS]}}
    first = world.night("2024-03-03", 0.8, weights=1, **blocks)
    assert (first.decision, first.drift[0].exceeded) == ("promoted", False), "there is nothing to compare with yet"
    found = world.night("2024-03-04", 0.8, weights=2, **blocks)
    assert (found.decision, found.champion, world.champion()) == ("held", "1", "1")
    assert found.reasons[0].startswith("drift of prediction: psi ")
    warned = world.night(
        "2024-03-05", 0.8, weights=3, promote=REACHED, drift={"rules": [PREDICTIONS | {"action": "warn"}]}
    )
    assert warned.decision == "promoted" and warned.drift[0].exceeded
    champion = Registry(world.config().tracking.named("shifted")).with_alias("champion")
    assert champion is not None
    shutil.rmtree(champion.source.removeprefix("file://"))
    away = world.night("2024-03-06", 0.8, weights=4, **blocks)
    assert away.decision == "held" and away.drift[0].exceeded and "its files cannot be read" in away.drift[0].note


def finish(job: JobContext, worth: float, ds: str) -> str:
    """Leave the result of a run with the predictions of a model of that worth; the run's URI."""
    (Path(job.folder.root) / "predictions").mkdir()
    labels = np.arange(200) % 5 < 2
    table = {"id": range(200), "prediction": 0.5 + worth * (labels - 0.5), "label": labels.astype(float)}
    pq.write_table(pa.table(table), job.folder.path("predictions/0.parquet"))
    promotion = replace(PROMOTED, date=ds)
    result = train_result(run=job.folder.uri, predictions=["predictions/0.parquet"], promotion=promotion)
    job.folder.put_atomic(SUMMARY, result.to_json())
    return str(job.folder.uri)


def test_the_previous_run_is_the_last_finished_one_of_an_earlier_date(folder: Path) -> None:
    world, runs = World(folder, "before"), []
    for ds, worth in (("2024-03-02", 0.4), ("2024-03-03", 0.8), ("2024-03-04", 0.2)):
        with world.job(ds, 1) as job:
            runs.append(finish(job, worth, ds))
    with world.job("2024-03-03", 1) as killed:
        finish(killed, 0.1, "2024-03-03")
        with world.job("2024-03-04", 1) as tonight:
            assert previous_result(tonight).run == runs[1]
        job.folder.delete(SUMMARY), killed.folder.delete(SUMMARY)
    nothing = pytest.raises(NoReference, match="no earlier run has finished")
    with World(folder, "first").job("2024-03-04", 1) as alone, nothing:
        previous_result(alone)
    blocks = {"promote": REACHED, "drift": {"against": "previous", "rules": [PREDICTIONS]}}
    same = world.night("2024-03-04", 0.8, weights=2, **blocks)
    assert same.drift[0].value is not None and same.decision == "promoted"
    far = world.night("2024-03-05", 0.3, weights=3, **blocks)
    assert far.decision == "held" and far.reasons[0].startswith("drift of prediction: psi ")


def test_a_server_that_is_away_promotes_nothing(folder: Path, monkeypatch: Any) -> None:
    world = World(folder, "away")
    monkeypatch.setattr(Tracker.settled, "__defaults__", (3.0, 0.5))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(Tracker.close, "__defaults__", (None, 2.0))
    root = str(folder / "journals")
    found = world.night("2024-03-03", 0.8, weights=1, tracking={"uri": uri, "root": root})
    assert found.decision == "held" and "the tracking store does not answer" in found.reasons[0]


def test_drift_stops_before_training(folder: Path) -> None:
    world, root = World(folder, "drifting"), folder / "datasets"
    before = nights.write_part(root, "2024-03-01", nights.rows_of(300, ["a", "b"], 0), "1" * 64)
    now = nights.write_part(root, "2024-03-02", nights.rows_of(300, ["a", "b"], 1, shift=9.0), "2" * 64)
    reference = nights.window(root, "reference", [before])
    world.dataset = nights.window(root, "tonight", [before, now])
    rule = {"columns": ["x"], "measure": "psi", "max": 0.5}

    def drifted(action: str) -> Any:
        drift = {"against": {"dataset": reference.folder.uri}, "rules": [rule | {"action": action}]}
        with world.job("2024-03-02", 1, drift=drift) as job:
            return prepare(job)[1].drift

    with pytest.raises(DriftStop, match=r"nothing is trained, by .* with the action stop: drift of x: psi"):
        drifted("stop")
    (found,) = drifted("hold")
    assert found.exceeded and found.action == "hold"


@pytest.mark.parametrize(
    ("seen", "mode", "decision"),
    [
        (Seen([], Compared(), []), "enabled", ("promoted", [])),
        (Seen(["lost"], Compared(older="older", why_not="away"), ["drift"]), "enabled", ("rejected", ["lost"])),
        (Seen([], Compared(older="older", why_not="away"), ["drift"]), "enabled", ("older_date", ["older"])),
        (Seen([], Compared(why_not="away"), ["drift"]), "enabled", ("held", ["away", "drift"])),
        (Seen([], Compared(), ["drift"]), "enabled", ("held", ["drift"])),
        (Seen([], Compared(), []), "dry_run", ("dry_run", ["would be promoted"])),
        (Seen(["lost"], Compared(), []), "dry_run", ("dry_run", ["would be rejected", "lost"])),
        (Seen([], Compared(why_not="away"), []), "dry_run", ("dry_run", ["would be held", "away"])),
        (Seen([], Compared(older="older"), []), "dry_run", ("older_date", ["older"])),
    ],
)
def test_the_gravest_decides(seen: Seen, mode: str, decision: tuple[str, list[str]]) -> None:
    assert conclude(seen, mode) == decision


def test_a_decision_that_cannot_be_sent_is_held_where_there_are_gates() -> None:
    gates = nights.config(promote=PROMOTE).promote
    found = pending(PROMOTED, gates, "3")
    assert found.decision == "held" and "champion moves where version 3 still has it" in found.reasons[0]
    assert "moves where no version has it" in pending(PROMOTED, gates, NO_CHAMPION).reasons[0]
    plain = pending(PROMOTED, None, None)
    assert plain.decision == "promoted" and "the tracking store does not answer" in plain.reasons[0]
    rejected = replace(PROMOTED, decision="rejected", reasons=["lost"])
    assert pending(rejected, gates, "3") == rejected


def test_exit_codes_of_decisions() -> None:
    codes = {"promoted": Exit.OK, "rejected": Exit.QUALITY, "held": Exit.QUALITY, "dry_run": Exit.OK,
             "older_date": Exit.OK, "disabled": Exit.OK}  # fmt: skip
    for decision, code in codes.items():
        found: Any = decision
        assert report_decision(replace(PROMOTED, decision=found)) is code
