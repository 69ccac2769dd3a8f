"""`sparkring run` night by night over a window: a night writes one part, and trains on all of the window's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient

from tests.e2e.commands import run_here

pytestmark = pytest.mark.spark
DAYS = [f"2024-03-0{day}" for day in range(1, 5)]
ROWS = 400  # of a day

RECIPE = {
    "name": "sales",
    "etl": {
        "sources": {
            "sales": {
                "path": "sales",
                "format": "parquet",
                "columns": {"shop": "string", "amount": "bigint"},
                "partitions": {"day": "date"},
            }
        },
        "views": {"made": "SELECT *, CAST(amount > 50 AS float) AS large FROM sales"},
        "rows": "made",
        "one_per": "sales",
        "features": {"shop": {"kind": "categorical"}, "amount": {"kind": "numeric"}},
        "label": "large",
        "interval": {"column": "day", "sources": {"sales": "day"}, "last": DAYS[2], "window": 3},
    },
    "model": {"args": {"width": 8, "blocks": 1}},
    "train": {"epochs": 2, "global_batch": 64},
    "data": {"audit": True},
    "checkpoint": {"every_steps": 5, "keep_last": 1},
    "launch": {"world": 2},
    "report": {"baselines": False, "must_beat_guess": False},
}


def write_day(folder: Path, day: str) -> None:
    draw = np.random.default_rng(int(day[-2:]))
    amounts = pa.array(draw.integers(0, 100, ROWS))
    (target := folder / f"sales/day={day}").mkdir(parents=True)
    shops = [*draw.choice(["a", "b", day], ROWS - 20), *(f"{day} {n}" for n in range(20))]
    pq.write_table(pa.table({"shop": shops, "amount": amounts}), target / "x.parquet")


@pytest.fixture(scope="module")
def nights(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[int]]:
    """Three nights and an audit of each run: folder, log, exit codes."""
    folder = tmp_path_factory.mktemp("nights")
    for day in DAYS:
        write_day(folder, day)
    (folder / "sales.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    nights = (("etl", "2024-03-03"), ("run", "2024-03-04"), ("etl", "2024-03-05"))
    done = [run_here(folder, command, "sales.yaml", f"etl.interval.last={day}") for command, day in nights]
    done += [run_here(folder, "audit", str(run)) for run in folder.glob("data/runs/sales/2*")]
    return folder, "".join(each.stderr for each in done), [each.returncode for each in done]


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Of both windows' datasets, the older one first."""
    found = [json.loads(path.read_text()) for path in folder.glob("data/datasets/sales-*/_manifest.json")]
    return sorted(found, key=lambda manifest: manifest["parts"][0]["interval"])


def test_a_night_writes_one_part_and_leaves_the_others_as_they_are(nights: Any) -> None:
    folder, log, codes = nights
    assert codes == [0, 0, 3, 0], log
    assert "2024-03-05 (etl.sources.sales); add the files, or set etl.interval.missing " in log
    assert sorted(path.parts[-3] for path in folder.glob("data/datasets/parts/sales/*/*/_part.json")) == DAYS
    both = manifests(folder)
    assert [[part["interval"] for part in manifest["parts"]] for manifest in both] == [DAYS[:3], DAYS[1:]]
    shared = [{f["path"]: f["sha256"] for f in m["files"] if DAYS[1] in f["path"]} for m in both]
    assert shared[0] == shared[1] != {}
    shops = [{v for v in m["features"]["features"][0]["values"] if " " not in v} for m in both]
    assert shops == [{"a", "b", *DAYS[:3]}, {"a", "b", *DAYS[1:]}]


def test_a_run_trains_on_the_window_and_names_its_parts(nights: Any) -> None:
    """That every row was consumed once per epoch is what the audit proved."""
    folder, _, _ = nights
    (run,) = folder.glob("data/runs/sales/2*")
    summary, manifest = json.loads((run / "summary.json").read_text()), manifests(folder)[1]
    assert (summary["parts"], summary["written_parts"]) == (DAYS[1:], DAYS[3:])
    assert manifest["fingerprint"] == summary["fingerprint"] and manifest["accounting"]["rows_out"] == 3 * ROWS
    assert summary["train"]["steps"] == 2 * (manifest["splits"]["train"]["rows"] // 64)
    trained = set(manifest["features"]["features"][0]["values"])
    test = [pq.read_table(folder / "data/datasets" / f["path"]) for f in manifest["files"] if f["split"] == "test"]
    unseen = sum(shop not in trained for table in test for shop in table["shop"].to_pylist())
    assert summary["unseen"] == {"shop": unseen} and unseen > 0
    page = (run / "report.html").read_text()
    assert f"3: {', '.join(DAYS[1:])}" in page and f"<dt>written for this run</dt><dd>{DAYS[3]}</dd>" in page
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("sales")
    assert experiment is not None
    jobs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    of_step = [(job.data.tags["sparkring.key"], job.data.metrics) for job in jobs]
    built = [(found["parts/all"], found["parts/written"]) for key, found in of_step if key == "etl"]
    assert built == [(3.0, 3.0), (3.0, 1.0)]
    assert [found["test/unseen/shop"] for key, found in of_step if key == "evaluate"] == [unseen]
    pointers = client.search_logged_models([experiment.experiment_id], "tags.`sparkring.kind` = 'checkpoint'")
    kept = sorted(str(step) for step in (run / "checkpoints").glob("step-*"))  # of at least 6 that were written
    assert sorted(pointer.tags["sparkring.uri"] for pointer in pointers) == kept and len(kept) <= 2
    hours = {f"system/cost/core_hours_{part}" for part in ("etl", "train", "evaluate")}
    (job,) = [found for key, found in of_step if key == "job" and "test/loss" in found]
    assert {name for name in job if name.startswith("system/cost/")} == hours and min(job[name] for name in hours) > 0
    assert {f"system/cost/{name}": value for name, value in summary["cost"].items()} == {
        n: pytest.approx(job[n]) for n in hours
    }
    built_only = [found for key, found in of_step if key == "job" and "test/loss" not in found]
    assert [sorted(n for n in found if n.startswith("system/cost/")) for found in built_only] == [
        ["system/cost/core_hours_etl"]
    ] * len(built_only)
