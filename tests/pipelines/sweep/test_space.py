from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError
from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.sweep.space import (
    MOST_CORNERS,
    SweepSpec,
    as_overrides,
    corners,
    objective,
    read_spec,
    short,
)

LR: dict[str, Any] = {"low": 1e-3, "high": 0.1, "log": True}
WIDTH: dict[str, Any] = {"low": 8, "high": 30, "step": 8}


def spec(space: dict[str, Any], **more: Any) -> SweepSpec:
    return SweepSpec.model_validate({"space": space} | more)


def config(task: str = "binary", **train: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "shop", "dataset": "d", "model": {"task": task}, "train": train})


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "space: Dictionary should have at least 1 item"),
        ({"optim.lr": {"low": 1, "high": 1}}, "space.optim.lr: low = 1, high = 1: the range is empty"),
        ({"optim.lr": {"low": 2, "high": 1}}, "the range is empty; low must be below high"),
        ({"optim.lr": {"low": 0, "high": 1, "log": True}}, "log = true: low = 0 must be above 0, and step left out"),
        ({"optim.lr": {"low": 1, "high": 9, "log": True, "step": 1}}, "log = true: low = 1 must be above 0, and step"),
        ({"optim.lr": {"low": 1, "high": 2, "step": 5}}, "step = 5: must be above 0 and at most high - low, 1"),
        ({"optim.lr": {"low": 1}}, "space.optim.lr: needs low and high, or choices"),
        ({"optim.name": {"choices": ["adamw", "adamw"]}}, "has fewer than two different values; nothing is searched"),
        ({"optim.name": {"choices": [1, 2], "low": 1}}, "choices stand alone; leave low, high, log and step out"),
        ({"optim.lr": {"low": 1, "high": 2, "lgo": True}}, "space.optim.lr.lgo: Extra inputs are not permitted"),
    ],
)
def test_a_space_in_which_nothing_can_be_searched_is_refused(tmp_path: Path, space: dict[str, Any], said: str) -> None:
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({"space": space}))
    with pytest.raises(ConfigError) as caught:
        read_spec(str(tmp_path / "space.yaml"))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: 1 problem\n  - cannot be read: No such file"):
        read_spec(str(tmp_path / "gone.yaml"))
    (tmp_path / "odd.yaml").write_text("space: {a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_spec(str(tmp_path / "odd.yaml"))


def test_all_corners_are_checked_while_they_are_few_and_then_every_end() -> None:
    few, is_all = corners(spec({"optim.lr": LR, "model.args.width": WIDTH}).space)
    assert is_all and [tuple(each.values()) for each in few] == [(1e-3, 8), (1e-3, 24), (0.1, 8), (0.1, 24)]
    many = spec({f"model.args.a{i}": {"low": 0, "high": 1} for i in range(7)} | {"optim.name": {"choices": [1, 2, 3]}})
    places, is_all = corners(many.space)
    assert not is_all and len(places) <= MOST_CORNERS
    for key, searched in many.space.items():
        assert {place[key] for place in places} == set(searched.ends)
    assert many.space["model.args.a0"].is_whole and not spec({"optim.lr": LR}).space["optim.lr"].is_whole


def test_the_direction_is_the_metrics_own() -> None:
    assert objective(spec({"a": LR}), config()) == ("loss", "min")
    assert objective(spec({"a": LR}, metric="auc"), config()) == ("auc", "max")
    assert objective(spec({"a": LR}), config("regression", best_metric="r2", best_mode="max")) == ("r2", "max")
    assert objective(spec({"a": LR}, metric="gain", mode="max"), config("own.task:Task")) == ("gain", "max")
    with pytest.raises(ConfigError, match="mode = 'min': of 'auc' more is better; leave mode out"):
        objective(spec({"a": LR}, metric="auc", mode="min"), config())
    with pytest.raises(ConfigError, match="metric = 'gain': is none of the task 'binary' whose direction is known"):
        objective(spec({"a": LR}, metric="gain"), config())


def test_values_are_overrides_and_short_texts() -> None:
    values = {"optim.lr": 0.0123456, "optim.name": "adamw", "model.name": "a b", "train.steps": None}
    assert as_overrides(values)[:2] == [
        "optim.lr=0.0123456",
        'optim.name="adamw"',
    ] and "train.steps=null" in as_overrides(values)
    assert short(values) == "lr=0.01235 optim.name=adamw model.name=ab steps=None"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    columns = {"id": range(4000), "x": [0.5] * 4000, "late": [0, 1] * 2000}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    types = {"id": "bigint", "x": "double", "late": "bigint"}
    source = {"path": str(tmp_path / "rows.parquet"), "format": "parquet", "columns": types}
    values = {
        "name": "shop",
        "etl": {
            "sources": {"rows": source}, "rows": "rows", "key": ["id"], "label": "late",
            "features": {"x": {"kind": "numeric"}},
        },
        "storage": {"datasets": str(tmp_path / "datasets"), "runs": str(tmp_path / "runs")},
        "tracking": {"root": str(tmp_path / "mlflow")},
    }  # fmt: skip
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "shop.yaml"


def dry_run(recipe: Path, space: dict[str, Any], *more: str, **settings: Any) -> int:
    (recipe.parent / "space.yaml").write_text(yaml.safe_dump({"space": space} | settings, sort_keys=False))
    return main(["sweep", str(recipe), str(recipe.parent / "space.yaml"), "--dry-run", *more])


def test_a_dry_run_lists_the_space_and_leaves_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(recipe, {"optim.lr": LR, "model.args.width": WIDTH}, metric="auc", trials=7) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "shop: 7 trials for the highest valid/auc; sampler tpe, seed 0, pruner median",
        "  optim.lr          0.001 to 0.1, log",
        "  model.args.width  8 to 30, step 8",
        "checked: all 4 corners",
    ]
    assert not (recipe.parent / "runs").exists() and not (recipe.parent / "mlflow").exists()


@pytest.mark.parametrize(
    ("space", "settings", "said"),
    [
        ({"optim.lrr": LR}, {}, "optim.lrr: unknown key (command line); did you mean 'lr'?"),
        ({"etl.rows": {"choices": ["a", "b"]}}, {}, "space.etl.rows: cannot be searched: trials share the dataset"),
        ({"launch.world": {"choices": [1, 2]}}, {}, "space.launch.world: cannot be searched"),
        ({"train.test_split": {"choices": ["a", "b"]}}, {}, "trials are not scored on the test rows"),
        ({"optim.lr": LR}, {"metric": "rmse"}, "metric = 'rmse': is none of the task 'binary'"),
        ({"optim.lr": LR}, {"metric": "gain", "mode": "max"}, "train.best_metric = 'gain'"),
        ({"train.global_batch": {"low": 64, "high": 8192}}, {}, "at global_batch=8192: train.global_batch = 8192"),
        ({"optim.lr": LR, "optim.name": {"choices": ["sgd", "adam2"]}}, {}, "at lr=0.001 name=adam2 and 1 more: "),
        ({"optim.name": {"choices": ["adamw", "adam2"]}}, {}, "at name=adam2: optim.name = \"adam2\": input should be"),
    ],
)  # fmt: skip
def test_what_no_trial_could_use_is_found_before_spark(
    recipe: Path, capsys: pytest.CaptureFixture[str], space: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    assert dry_run(recipe, space, **settings) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_what_is_wrong_at_all_corners_is_the_recipes_own(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(recipe, {"optim.lr": LR}, "train.global_batch=8192") == Exit.USAGE
    assert "\n  - train.global_batch = 8192" in capsys.readouterr().err


def test_recipes_that_cannot_be_swept_are_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(recipe, {"optim.lr": LR}, "storage.runs=s3://bucket/runs", "warm_start.from=champion") == Exit.USAGE
    said = capsys.readouterr().err
    assert "storage.runs = 's3://bucket/runs': a sweep's sqlite file needs a folder on a local disk" in said
    assert "warm_start.from: is decided for a run of the recipe" in said


def test_a_missing_optuna_is_named_with_its_remedy(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "optuna" else find(name))
    assert dry_run(recipe, {"optim.lr": LR}) == Exit.USAGE
    assert "needs Optuna, which is not installed: pip install 'sparkring[sweep]'" in capsys.readouterr().err
