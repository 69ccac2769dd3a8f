"""The last words of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved, load_config
from sparkring.pipelines.job.outcome import (
    ModelPlace,
    ended_line,
    longer_command,
    next_command,
    outcome,
    score_table,
    suggested_commands,
    trees_command,
    verdict_line,
)
from sparkring.pipelines.run.trial import TAG
from sparkring.training.worker.result import MODEL, BaselineGap
from tests.pipelines.results import rank_result, train_result


def resolved(tmp_path: Path, *words: str) -> Resolved:
    (file := tmp_path / "r.yaml").write_text(
        "{name: sales, dataset: d, model: {factory: sparkring.training.models.tabular:Tabular}}"
    )
    return replace(load_config(str(file), words), recipe="my sales.yaml")


def recipe(tmp_path: Path, *words: str) -> RunConfig:
    return resolved(tmp_path, *words).config


def test_scores_are_a_table_with_blanks_where_a_model_has_none() -> None:
    assert score_table({"a": {"loss": 350170946.29}}, "t")[1].split() == ["a", "350,170,946"]
    scores = {MODEL: {"loss": 0.59912, "auc": 0.7}, "majority rate": {"auc": 0.0, "accuracy": 2 / 3}}
    assert score_table(scores, "test split") == [
        "test split       loss     auc  accuracy",
        f"{MODEL:<13}  0.5991  0.7000",
        "majority rate          0.0000    0.6667",
    ]


def test_where_training_ended_and_whose_weights_the_model_has(tmp_path: Path) -> None:
    stopped = recipe(tmp_path, "train.early_stopping.metric=rmse", "train.early_stopping.patience=3")
    assert ended_line(rank_result(steps=30, stopped_early=True, exported_step=15, best_step=15), stopped) == (
        "ended at step 30, early: no better rmse in 3 evaluations; "
        "the model is that of step 15, the best by loss (0.5000)"
    )
    last = rank_result(steps=30, exported_step=30, best_step=15)
    assert ended_line(last, recipe(tmp_path)) == "ended at step 30; the model is that of step 30"


def test_the_last_words_name_the_version_the_report_and_what_to_run(tmp_path: Path) -> None:
    result = train_result(timings={"spark_s": 3.0, "launch_s": 1.4, "total_s": 9.6})
    said = outcome(
        result, resolved(tmp_path), ModelPlace("models:/sales/7, 'champion' now", "models:/sales/7", True)
    ).splitlines()
    assert said == [
        "sales: ended at step 10; the model is that of step 10, the best by loss (0.5000)",
        "",
        "  test split    loss",
        f"  {MODEL:<10}  0.5000",
        "",
        "  model   models:/sales/7, 'champion' now",
        "  report  /runs/again/1/report.html",
        "  browse  sparkring ui 'my sales.yaml'   (MLflow experiment 'sales')",
        "  next    sparkring serve-check models:/sales/7",
        "  time    10 s: spark 3, launch 1",
    ]
    scores = resolved(tmp_path, "train.test_split=null")
    again = outcome(train_result(tracking_url="http://mlflow/1"), scores, ModelPlace("m")).splitlines()
    assert "  valid split    loss" in again and "  browse  http://mlflow/1" in again
    assert not [line for line in again if "next" in line], "a model that is not registered cannot be asked for"
    untracked = outcome(train_result(), resolved(tmp_path, "tracking.enabled=false"), ModelPlace("m"))
    assert "browse" not in untracked, "MLflow has nothing of it"
    gap = BaselineGap(rows=100, ours=0.5, theirs=0.25, half_width=0.125)
    scores = {MODEL: {"loss": 0.5}, "majority rate": {"loss": 0.2}}
    lost = train_result(trees_gap=gap, best_gap=replace(gap, theirs=0.2, half_width=None), scores=scores)
    verdict = "worse than gradient-boosted trees (log loss (nats) 0.5 against 0.25, +0.25 ± 0.12); behind majority"
    verdict += " rate (log loss (nats) 0.5 against 0.2, +0.3 without an interval)"
    assert f"\n  verdict  {verdict}\n" in outcome(lost, resolved(tmp_path), ModelPlace("m"))
    assert verdict_line(lost, recipe(tmp_path)) == verdict
    doubted = replace(lost, cautions=["too good to be true: x"])
    assert verdict_line(doubted, recipe(tmp_path)) == "; but ".join(filter(None, [verdict, "too good to be true: x"]))


@pytest.mark.parametrize(
    ("words", "best_step", "evaluations", "command"),
    [
        ([], 10, 2, "train 'my sales.yaml' train.epochs=2"),
        (["train.epochs=30"], 10, 5, "train 'my sales.yaml' train.epochs=60"),
        (["optim.lr=0.1", "train.epochs=30"], 10, 5, "train 'my sales.yaml' optim.lr=0.1 train.epochs=60"),
        (["train.steps=10"], 10, 5, "train 'my sales.yaml' train.steps=20"),
        (["train.epochs=30"], 8, 5, ""),
        ([], 10, 1, ""),
        ([f"tracking.tags={{{TAG}: 100 rows}}"], 10, 5, ""),
    ],
)
def test_a_run_whose_last_evaluation_was_the_best_says_how_to_train_longer(
    tmp_path: Path, words: list[str], best_step: int, evaluations: int, command: str
) -> None:
    history = {"valid/loss": [(2 * number, 1.0 / number) for number in range(6 - evaluations, 6)]}
    result = train_result(train=rank_result(steps=10, best_step=best_step), history=history)
    found = longer_command(result, resolved(tmp_path, *words))
    assert found == (f"sparkring {command}   (the last evaluation was the best)" if command else "")
    said = outcome(result, resolved(tmp_path, *words), ModelPlace("m"))
    assert ("longer" in said) == bool(command)


@pytest.mark.parametrize(
    ("words", "ours", "command"),
    [
        ([], 0.5, "sparkring train 'my sales.yaml' model.family=trees   (trains trees instead)"),
        ([], 0.37, ""),
        (["model.family=trees"], 0.5, ""),
        (["parallel.zero=1"], 0.5, ""),
        ([f"tracking.tags={{{TAG}: 100 rows}}"], 0.5, ""),
    ],
    ids=["worse", "within the interval", "trees already", "a recipe that trees refuse", "a trial"],
)
def test_a_network_that_loses_to_trees_says_how_to_train_them(
    tmp_path: Path, words: list[str], ours: float, command: str
) -> None:
    gap = BaselineGap(rows=100, ours=ours, theirs=0.25, half_width=0.125)
    result, given = train_result(trees_gap=gap), resolved(tmp_path, *words)
    assert trees_command(result, given) == command
    assert ("  trees " in outcome(result, given, ModelPlace("m"))) == bool(command)


REGISTERED, CHAMPION = ModelPlace("", "models:/s/7"), ModelPlace("", "models:/s/7", has_alias=True)
PREDICT = "predict={rows: planes, to: scored}"
SOURCE = "{path: p.parquet, format: parquet, columns: {x: double, y: int}}"
ETL = f"etl={{sources: {{planes: {SOURCE}}}, rows: planes, features: {{x: {{kind: numeric}}}}, label: y}}"


@pytest.mark.parametrize(
    ("words", "model", "command"),
    [
        ([ETL, PREDICT], CHAMPION, "predict 'my sales.yaml'"),
        ([ETL, PREDICT], REGISTERED, "predict 'my sales.yaml' model=models:/s/7"),
        ([ETL, PREDICT, "predict.model=models:/s/3"], REGISTERED, "predict 'my sales.yaml'"),
        ([], REGISTERED, "serve-check models:/s/7"),
        (["tracking.root=my/mlflow"], REGISTERED, "serve-check models:/s/7 tracking.root=my/mlflow"),
        (["tracking.uri=http://mlflow:5000"], CHAMPION, "serve-check models:/s/7 tracking.uri=http://mlflow:5000"),
        ([ETL, PREDICT, f"tracking.tags={{{TAG}: 100 rows}}"], CHAMPION, "run 'my sales.yaml'"),
    ],
)
def test_the_next_command_is_one_that_works(tmp_path: Path, words: list[str], model: ModelPlace, command: str) -> None:
    """A trial's model is not what `predict` asks for, nor is one that has not got the alias."""
    assert (
        next_command(resolved(tmp_path, *(["dataset=null"] * (ETL in words)), *words), model) == f"sparkring {command}"
    )


def test_suggested_commands_hold_no_secrets(tmp_path: Path) -> None:
    given = replace(resolved(tmp_path, "train.epochs=2"), overrides=("spark.conf.x=https://me:hunter2@host/",))
    result = train_result(history={"valid/loss": [(5, 0.6), (10, 0.5)]})
    found = suggested_commands(result, given, ModelPlace("models:/sales/7", "models:/sales/7"))
    assert [*found] == ["longer", "next"] and "hunter2" not in found["longer"] and "train.epochs=4" in found["longer"]
