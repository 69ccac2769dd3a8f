from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from sparkring.conf.load import load_config
from sparkring.conf.recipes import recipe_names
from sparkring.conf.schedule.dates import DataInterval
from sparkring.pipelines.tracking.params import ALWAYS, MOST_PARAMS, flat_params, run_params, telling_keys


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_run_has_at_most_40_parameters_each_as_in_the_configuration(recipe: str) -> None:
    resolved = load_config(recipe)
    whole = flat_params(resolved.as_dict()) | {"fingerprint": "f" * 64}
    params = flat_params(run_params(resolved, "f" * 64))
    assert len(whole) > 150 and len(params) <= 40 and params.items() <= whole.items()
    assert [key for key in ALWAYS if key != "date"] == list(params)[: len(ALWAYS) - 1]


def test_what_is_not_at_its_default_is_shown_and_the_contents_of_the_dataset_are_not() -> None:
    params = run_params(load_config("flights"), "f")
    assert params["model.args.dropout"] == 0.2 and params["etl.split.boundaries.test"] == "2013-12-02"
    assert params["report.must_beat"] == ["loss", "auc"] and "checkpoint.keep_last" not in params
    assert not [key for key in params if key.startswith(("etl.sources", "etl.views", "etl.checks", "etl.features"))]


def test_the_command_lines_keys_come_before_others_though_at_their_default_or_part_of_a_list() -> None:
    resolved = load_config("gpt-124m", ["checkpoint.keep_last=2", "optim.betas.0=0.8"])
    names = [key for key in run_params(resolved, "f") if key not in ALWAYS]
    assert sorted(names[:2]) == ["checkpoint.keep_last", "optim.betas"] and "model.args.width" in names[2:]


def test_a_date_is_a_parameter_and_blocks_of_other_runs_are_not() -> None:
    day = datetime(2013, 3, 1, tzinfo=UTC)
    resolved = replace(load_config("flights"), interval=DataInterval("2013-03-01", day, day, 15_765))
    params = run_params(resolved, "f", leave_out=("etl", "spark"))
    assert params["date"] == "2013-03-01" and "date" not in run_params(load_config("flights"), "f")
    assert "optim.weight_decay" in params and not [key for key in params if key.startswith("etl")]


def test_of_too_many_keys_the_most_telling_are_kept() -> None:
    known = ["name", *(f"report.r{n}" for n in range(30)), *(f"model.args.m{n}" for n in range(30)), "launch.grace_s"]
    kept = telling_keys(known, known, {"report.r29"})
    assert len(kept) == MOST_PARAMS == 40 and kept[:3] == ["name", "report.r29", "model.args.m0"]
    assert [key.partition(".")[0] for key in kept[2:]] == ["model"] * 30 + ["launch"] + ["report"] * 7


def test_params_are_flat_text() -> None:
    values = {"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "name": "run", "none": None, "empty": {}, "on": True}
    assert flat_params(values) == {
        "optim.lr": "0.1",
        "optim.betas": "[0.9, 0.99]",
        "name": "run",
        "none": "null",
        "empty": "{}",
        "on": "true",
    }
    long = flat_params({"k" * 300: "v" * 9000})
    assert [(len(k), len(v)) for k, v in long.items()] == [(250, 6000)]
