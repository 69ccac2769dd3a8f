"""Drift by what parts have counted: which parts, which columns, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkring.conf.blocks.drift import DriftConfig, DriftDataset
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.promotion.drift import (
    NoReference,
    compared_parts,
    dataset_reference,
    drift_metrics,
    input_drift,
    lines_of,
    prediction_drift,
    trained_reference,
)
from tests.pipelines.promotion import nights

RULE = {"columns": "all", "measure": "psi", "max": 0.5, "action": "stop"}


def drift(**changes: Any) -> DriftConfig:
    return DriftConfig.model_validate({"rules": [RULE | changes]})


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Five parts of 400 rows: the fourth has other numbers, the fifth other shops."""
    root = tmp_path_factory.mktemp("datasets")
    shift, shops = [0.0, 0.0, 0.0, 4.0, 0.0], [["a", "b", "c"]] * 4 + [["a", "d", "e"]]
    return root, [
        nights.write_part(root, f"2024-03-0{n + 1}", nights.rows_of(400, shops[n], n, shift[n]), f"{n}" * 64)
        for n in range(5)
    ]


def compared(days: Any, name: str, reference: slice, own: slice, config: DriftConfig) -> dict[str, Any]:
    root, parts = days
    before = nights.window(root, f"{name}-before", parts[reference])
    found = input_drift(
        config,
        nights.window(root, f"{name}-now", parts[own]),
        dataset_reference(DriftDataset(dataset=before.folder.uri)),
    )
    return {each.column: each for each in found}


def test_only_what_is_new_is_compared_so_a_bad_day_does_not_hide(days: Any) -> None:
    found = compared(days, "shifted", slice(0, 3), slice(1, 4), drift())
    assert found["x"].exceeded and not found["shop"].exceeded
    assert lines_of([*found.values()], "stop") == [f"drift of x: psi {found['x'].value:.4g}, at most 0.5"]
    assert lines_of([*found.values()], "hold") == []
    whole = DriftConfig.model_validate({"rules": [RULE], "parts": "all"})
    diluted = compared(days, "diluted", slice(0, 3), slice(1, 4), whole)
    assert diluted["x"].value < found["x"].value / 2
    assert drift_metrics([*found.values()]) == {f"drift/{c}/psi": found[c].value for c in ("x", "shop")}


def test_other_categories_are_seen(days: Any) -> None:
    found = compared(days, "shops", slice(0, 3), slice(2, 5, 2), drift(columns=["shop"]))
    assert [*found] == ["shop"] and found["shop"].exceeded
    quiet = compared(days, "quiet", slice(0, 2), slice(1, 3), drift())
    assert not any(each.exceeded for each in quiet.values()) and quiet["x"].value > 0


def test_which_parts_are_compared(days: Any) -> None:
    _, parts = days
    assert compared_parts(parts[1:4], parts[:3], "new") == parts[3:4]
    assert compared_parts(parts[1:4], parts[:3], "all") == parts[1:4]
    assert compared_parts(parts[1:4], parts[:1], "last") == parts[3:4] and compared_parts(parts, parts, "last") == []
    corrected = parts[1].model_copy(update={"fingerprint": "9" * 64})
    assert compared_parts([corrected, parts[2]], parts[:3], "new") == [corrected]


def test_what_is_not_there_is_no_drift_and_what_is_damaged_holds(days: Any, tmp_path: Path) -> None:
    root, parts = days
    now = nights.window(root, "absent-now", parts[1:4])
    (first,) = input_drift(drift(columns=["x"]), now, NoReference("no version has the alias yet", absent=True))
    assert (first.exceeded, first.value, first.note) == (False, None, "no version has the alias yet")
    same = compared(days, "same", slice(0, 3), slice(0, 3), drift())
    assert not same["x"].exceeded and "every part is one of dataset" in same["x"].note
    for action, held in (("stop", "hold"), ("hold", "hold"), ("warn", "warn")):
        (found,) = input_drift(drift(columns=["x"], action=action), now, NoReference("damaged", absent=False))
        assert found.exceeded and found.action == held
        assert lines_of([found], held) == ["drift of x: not compared: damaged"]
    gone = nights.write_part(tmp_path, "2024-03-01", nights.rows_of(50, ["a"], 0), "a" * 64)
    before = nights.window(tmp_path, "gone", [gone])
    (tmp_path / gone.folder / "statistics.arrow").unlink()
    (found,) = input_drift(drift(columns=["x"]), now, dataset_reference(DriftDataset(dataset=before.folder.uri)))
    assert found.exceeded and found.action == "hold" and "the counts of the day partitions cannot be read" in found.note


def test_a_reference_is_a_dataset_over_parts(days: Any, tmp_path: Path) -> None:
    root, parts = days
    with pytest.raises(NoReference, match=r"drift.against: .*not a dataset"):
        dataset_reference(DriftDataset(dataset=str(tmp_path)))
    whole: Dataset = nights.write_dataset(tmp_path / "whole", ["a"], 5.0)
    with pytest.raises(NoReference, match="has no day partitions"):
        trained_reference("version 1", nights.config(), whole.manifest)
    over = nights.window(root, "own", parts[:1]).manifest
    assert trained_reference("version 1", nights.config(dataset=str(root / "own")), over).root.uri == str(root)
    built = nights.config(dataset=None, storage={"datasets": str(root)})
    assert trained_reference("version 1", built, over).root.uri == str(root)


def test_predictions_are_compared_where_a_rule_asks(days: Any) -> None:
    config = DriftConfig.model_validate(
        {"rules": [RULE, RULE | {"columns": ["prediction"], "action": "hold", "max": 0.2}]}
    )
    draw = np.random.default_rng(0)
    before = draw.random(2000)
    (same,) = prediction_drift(config, draw.random(2000), before)
    (moved,) = prediction_drift(config, np.clip(before + 0.2, 0, 1), before)
    assert not same.exceeded and moved.exceeded
    assert lines_of([moved], "hold")[0].startswith("drift of prediction: psi ")
    (first,) = prediction_drift(config, before, NoReference("no version yet", absent=True))
    assert not first.exceeded
    (other,) = prediction_drift(config, before, np.ones((3, 4)))
    assert other.exceeded and "classes" in other.note
