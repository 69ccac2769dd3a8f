"""A trial: under names of its own, on few rows, judged by nothing, told to nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkring.conf.load import ConfigError, load_config
from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.trial import TAG, trial_batch, trial_overrides

RECIPE: dict[str, Any] = {
    "name": "sales",
    "etl": {
        "sources": {"sales": {"path": "sales.csv", "columns": {"x": "double", "y": "boolean"}}},
        "rows": "sales",
        "one_per": "sales",
        "features": {"x": {"kind": "numeric"}},
        "label": "y",
    },
    "train": {"epochs": 40, "global_batch": 4096},
    "optim": {"warmup_steps": 500},
    "report": {"must_beat": ["auc"]},
    "promote": {"rules": [{"metric": "auc", "threshold": 0.9}]},
    "tracking": {"experiment": "shop", "tags": {"team": "a"}},
    "notify": {"targets": [{"kind": "command", "command": ["true"]}]},
}


def write(folder: Path, **keys: Any) -> str:
    (path := folder / "sales.yaml").write_text(yaml.safe_dump(RECIPE | keys))
    return str(path)


def test_a_trial_touches_no_name_of_the_recipe_and_is_judged_by_nothing(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    config = load_config(recipe, trial_overrides(load_config(recipe), 1000)).config
    tracking = config.tracking.named(config.name)
    assert (config.name, tracking.experiment, tracking.registered_model) == ("sales-trial", "shop-trial", "sales-trial")
    assert tracking.tags == {"team": "a", TAG: "1000 rows"}
    assert config.etl is not None and (config.etl.limit_rows, config.etl.one_per) == (1000, None)
    assert (config.train.epochs, config.train.steps, config.train.global_batch) == (1, None, 64)
    assert (config.report.must_beat, config.promote, config.drift, config.notify.targets) == ([], None, None, [])
    words = ["train.steps=7", "optim.warmup_steps=2"]
    steps = load_config(recipe, [*words, *trial_overrides(load_config(recipe, words), 1000)]).config
    assert (steps.train.steps, steps.optim.warmup_steps) == (7, 2), "as the command line says"


def test_the_batch_fits_into_the_rows_and_stays_divisible() -> None:
    assert [trial_batch(batch, 1000) for batch in (64, 4096, 96, 7 * 2048, 999)] == [64, 64, 96, 112, 999]


@pytest.mark.parametrize(
    ("keys", "words", "said"),
    [
        ({"dataset": "somewhere", "etl": None, "promote": None}, [], "--limit-rows: the recipe has no etl block"),
        ({}, ["--date", "2026-01-01"], "--limit-rows: a trial has no date"),
    ],
)
def test_where_a_trial_is_not_possible_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], words: list[str], said: str
) -> None:
    assert main(["run", write(tmp_path, **keys), "--limit-rows", "100", *words]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_rows_are_not_limited_where_counts_would_not_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="limit_rows: with one_per every row is counted"):
        load_config(write(tmp_path), ["etl.limit_rows=5"])
