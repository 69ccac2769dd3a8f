"""Which of two families' models goes on, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.blocks.train import TrainConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.rules.rule import find_problems
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.tasks import BINARY, Family
from sparkring.etl.examine import Examined
from sparkring.pipelines.job import blend, families
from sparkring.pipelines.job.blend import PairedRows
from sparkring.pipelines.job.families import (
    TrainedFile,
    better_family,
    files_of,
    kept_training,
    placed,
    record_choice,
    train_best,
    train_once,
)
from sparkring.pipelines.job.outcome import ModelPlace, outcome
from sparkring.pipelines.sweep.job import SWEEP
from sparkring.pipelines.validate import recipe as validate_recipe
from sparkring.pipelines.validate.dry_run import describe_run
from sparkring.training.worker.result import FamilyChoice, SplitScores, Trained
from tests.pipelines.results import rank_result, train_result

NAN = math.nan


@pytest.mark.parametrize(
    ("trees", "net", "mode", "winner"),
    [
        (0.5, 0.4, "min", "net"),
        (0.4, 0.5, "min", "trees"),
        (0.5, 0.4, "max", "trees"),
        (0.5, 0.5, "min", "trees"),
        (NAN, 9.0, "min", "net"),
        (0.1, NAN, "max", "trees"),
        (math.inf, 0.1, "max", "net"),
        (NAN, NAN, "min", "trees"),
    ],
)
def test_the_better_value_wins_and_no_number_never_does(trees: float, net: float, mode: Any, winner: Family) -> None:
    train = TrainConfig(best_mode=mode, best_metric="auc" if mode == "max" else "loss")
    assert better_family({"trees": trees, "net": net}, train) == winner


def choice(winner: Family = "trees", half_width: float | None = 0.02) -> FamilyChoice:
    return FamilyChoice(
        metric="loss",
        winner=winner,
        values={"trees": 0.5, "net": 0.625},
        half_width=half_width,
        train_s={"trees": 1.0, "net": 2.0},
    )


def test_the_choice_is_said_with_values_and_interval() -> None:
    said = "trees by valid loss 0.5 against 0.625 of the network (-0.12 ± 0.02)"
    assert choice().describe() == said
    assert choice(half_width=None).describe() == said.replace(" ± 0.02", "")
    assert choice(half_width=0.2).describe().endswith("(-0.12 ± 0.2, not certainly better)")


@pytest.mark.parametrize(("metric", "best"), [("loss", "0.5 of trees"), ("auc", "0.625 of the network")])
def test_a_blend_is_compared_with_the_better_family_even_where_it_is_nearer_to_the_other(
    metric: str, best: str
) -> None:
    near = {"loss": 0.5625 + 0.03, "auc": 0.5625 - 0.03}[metric]
    values = {"trees": 0.5, "net": 0.625, "both": near}
    blend = replace(choice("both", 0.1), metric=metric, values=values, share=0.5)
    assert f" against {best} and " in (said := blend.describe())
    assert said.endswith(" ± 0.1, not certainly worse)") and "better" not in said
    ahead = {"loss": 0.45, "auc": 0.65}[metric]
    assert "not certainly better" in replace(blend, values=values | {"both": ahead}).describe()


def trained() -> Trained:
    return Trained(
        train=rank_result(
            predictions="predictions/a.parquet",
            exported_valid=SplitScores(metrics={"loss": 0.5}, predictions="predictions/valid/a.parquet"),
        ),
        attempts=1,
        failed_attempts=[],
        history={"valid/loss": [(10, 0.5)]},
        per_step_s={},
        once_s={},
        predictions=["predictions/a.parquet"],
        valid_predictions=["predictions/valid/a.parquet"],
    )


def test_a_training_of_a_family_is_kept_with_paths_below_the_run() -> None:
    found = placed(trained(), "net")
    assert found.train.weights == "net/model" and found.predictions == ["net/predictions/a.parquet"]
    assert found.valid_predictions == ["net/predictions/valid/a.parquet"]
    assert found.train.predictions == "net/predictions/a.parquet"


def ended_training(tmp_path: Path) -> tuple[Storage, Trained, TrainedFile]:
    """A run folder with a network's training that has ended, and its trained.json."""
    run, found = open_storage(str(tmp_path)), placed(trained(), "net")
    names = ["model/config.json", "model/manifest.json", "model/weights.safetensors", *trained().predictions]
    for name in [*names, *trained().valid_predictions]:
        run.put_atomic(f"net/{name}", name.encode())
    files = {name: run.sha256(name) for name in files_of(run, found)}
    assert len(files) == 5
    file = TrainedFile(trained=found, training_digest="a" * 64, fingerprint="f", files=files)
    run.put_atomic("net/trained.json", file.to_json())
    return run, found, file


def test_a_training_that_has_ended_is_kept_for_the_same_training_and_dataset(tmp_path: Path) -> None:
    assert kept_training(open_storage(str(tmp_path)), "net", "a" * 64, "f") is None
    run, found, _ = ended_training(tmp_path)
    assert kept_training(run, "net", "a" * 64, "f") == found
    assert kept_training(run, "net", "b" * 64, "f") is None and kept_training(run, "net", "a" * 64, "g") is None


def test_a_training_whose_files_are_missing_or_changed_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, found, file = ended_training(tmp_path)
    for name in file.files:
        before = run.read_bytes(name)
        run.put_atomic(name, before[:-1] + b"?")
        assert kept_training(run, "net", "a" * 64, "f") is None
        assert f"net: {run.uri}/{name} is not as its training left it; it is trained again" in caplog.text
        run.delete(name)
        assert kept_training(run, "net", "a" * 64, "f") is None
        run.put_atomic(name, before)
    assert kept_training(run, "net", "a" * 64, "f") == found
    run.put_atomic("net/trained.json", b"{")
    assert kept_training(run, "net", "a" * 64, "f") is None and "trained.json" in caplog.text


def test_a_family_that_an_earlier_command_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, found, _ = ended_training(tmp_path)
    asked: list[Any] = []

    def train(job: Any, start: Any) -> tuple[Trained, dict[str, float]]:
        asked.append((job, start))
        return trained(), {"train_s": 2.0}

    monkeypatch.setattr(families, "train", train)
    monkeypatch.setattr(families, "describe_model", lambda *_: None)
    monkeypatch.setattr(families, "training_digest", lambda config: config)
    dataset = SimpleNamespace(manifest=SimpleNamespace(fingerprint="f"))
    job: Any = SimpleNamespace(
        config="a" * 64, dataset=dataset, folder=run, family="net", training_folder=run.at("net")
    )
    start: Any = object()
    caplog.set_level("INFO")
    assert train_once(job, start) == (found, {}) and not asked and "net: trained by an earlier command" in caplog.text
    job.config = "b" * 64  # of another training: its end is kept in place of the first one's
    assert train_once(job, start) == (found, {"train_s": 2.0}) and asked == [(job, start)]
    assert kept_training(run, "net", "b" * 64, "f") == found and kept_training(run, "net", "a" * 64, "f") is None


def test_a_dry_run_names_both_trainings(tmp_path: Path) -> None:
    (file := tmp_path / "r.yaml").write_text("{name: sales, dataset: d, model: {family: both}, launch: {world: 2}}")
    lines = [*describe_run(load_config(str(file)).config, Examined())]
    assert [line.split()[1] for line in lines if line.startswith("train ")] == [
        "trees",
        "sparkring.training.models.tabular:Tabular",
    ]
    assert any(line.startswith("judge    family and step chosen by loss on 'valid'") for line in lines)


def test_the_last_words_are_of_the_better_family_and_do_not_ask_for_trees_again(tmp_path: Path) -> None:
    (file := tmp_path / "r.yaml").write_text("{name: sales, dataset: d, model: {family: both}}")
    resolved = load_config(str(file))
    said = outcome(train_result(choice=choice()), resolved, ModelPlace("m"))
    assert "ended at round 10" in said and f"  family  {choice().describe()}" in said, "in the words of trees"
    assert "ended at step 10" in outcome(train_result(choice=choice("net")), resolved, ModelPlace("m"))


def test_a_job_of_both_is_recorded_with_both_values() -> None:
    class Recorder:
        def metrics(self, key: str, step: int, values: dict[str, float]) -> None:
            self.values = values

        def tags(self, key: str, tags: dict[str, str]) -> None:
            self.named = tags

    tracker: Any = Recorder()
    record_choice(tracker, choice())
    assert tracker.values == {
        "valid/trees/loss": 0.5, "valid/net/loss": 0.625, "valid/net_minus_trees/loss": 0.125,
        "valid/net_minus_trees_half_width/loss": 0.02,
    }  # fmt: skip
    assert tracker.named == {"sparkring.family": "trees", "sparkring.family_choice": choice().describe()}


def test_without_xgboost_both_is_refused_and_the_network_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "r.yaml").write_text("{name: sales, dataset: d, model: {family: both, args: {widht: 3}}}")
    monkeypatch.setattr(validate_recipe, "is_installed", lambda name: False)
    with pytest.raises(ConfigError) as caught:
        validate_recipe.check_recipe(load_config(str(file)).config)
    first, second = caught.value.problems
    assert first.startswith("model.family = 'both': needs XGBoost") and "sparkring[trees]" in first
    assert second.startswith("model.args = {'widht': 3}")


def test_a_sweep_of_both_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "r.yaml").write_text("{name: sales, dataset: d, model: {family: both}}")
    (problem,) = find_problems(SWEEP, load_config(str(file)).config)
    assert problem.startswith("model.family = 'both': a trial trains one family") and "choices: [net, trees]" in problem


def test_the_interval_is_that_of_the_paired_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(0).normal(size=(200, 2))
    monkeypatch.setattr(blend, "resampled", lambda *_: drawn)
    rows = PairedRows(BINARY, np.arange(3), np.ones(3), np.ones(3), np.ones(3))
    assert rows.half_width("loss", rows.net, rows.trees) == pytest.approx(1.96 * np.std(drawn[:, 0] - drawn[:, 1]))
    drawn[0] = NAN
    assert rows.half_width("loss", rows.net, rows.trees) is None
    assert rows.half_width("calibration_error", rows.net, rows.trees) is None


def test_the_network_alone_starts_from_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def train_once(job: Any, start: Any) -> tuple[Trained, dict[str, float]]:
        started[job] = start
        return trained(), {"train_s": 2.0}

    monkeypatch.setattr(families, "train_once", train_once)
    monkeypatch.setattr(families, "choose", lambda *_: (trained(), choice("net")))
    monkeypatch.setattr(families, "record_choice", lambda *_: None)
    model = ModelConfig(family="both")
    job: Any = SimpleNamespace(config=SimpleNamespace(model=model), of_family=lambda family: family, tracker=None)
    start: Any = object()
    best, _, seconds = train_best(job, start)
    assert started == {"trees": None, "net": start} and best == "net" and seconds["train_s"] == 4.0
