"""Nights of one recipe with gates, against a real store: the alias moves to what is better, and to nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient

from sparkring.pipelines.context.context import Publication
from sparkring.pipelines.job import job
from tests.e2e.commands import run_here

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECIPE = {
    "name": "sales",
    "etl": {
        "sources": {
            "sales": {
                "path": "sales",
                "format": "parquet",
                "columns": {"shop": "string", "amount": "bigint", "large": "float"},
                "partitions": {"day": "date"},
            }
        },
        "rows": "sales",
        "features": {"shop": {"kind": "categorical"}, "amount": {"kind": "numeric"}},
        "label": "large",
        "interval": {"column": "day", "sources": {"sales": "day"}, "last": "2024-03-03", "window": 3},
    },
    "model": {"args": {"width": 8, "blocks": 1}},
    "optim": {"lr": 0.03},
    "train": {"epochs": 4, "global_batch": 64},
    "warm_start": {"from": "champion"},
    "launch": {"world": 1},
    "report": {"baselines": False, "must_beat_guess": False},
    "promote": {
        "rules": [
            {"metric": "auc", "threshold": 0.8},
            {"metric": "loss", "min_relative_change": 0.0, "confidence": 0.6},
        ],
        "slices": ["shop"],
        "min_slice_rows": 50,
    },
    "drift": {
        "rules": [
            {"columns": ["amount"], "measure": "psi", "max": 1.0, "action": "stop"},
            {"columns": ["prediction"], "measure": "jensen_shannon_divergence", "max": 0.4, "action": "hold"},
        ]
    },
}  # fmt: skip


def write_day(folder: Path, day: str, permuted: bool = False, scale: int = 1) -> None:
    """The last day has most rows, so that a model of it is better for sure."""
    draw, rows = np.random.default_rng(int(day[-2:])), 2000 if day == "2024-03-04" else 150
    amounts = draw.integers(0, 100, rows)
    large = (draw.random(rows) < 1 / (1 + np.exp(-(amounts - 50) / 10))).astype(np.float32)
    (target := folder / f"sales/day={day}").mkdir(parents=True, exist_ok=True)
    table = {"shop": draw.choice(["a", "b"], rows), "amount": amounts * scale}
    pq.write_table(pa.table(table | {"large": draw.permutation(large) if permuted else large}), target / "x.parquet")


@pytest.fixture(scope="module")
def nights(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, int]]:
    """All nights and a rollback: folder, log, exit codes."""
    folder = tmp_path_factory.mktemp("nights")
    for day in ("2024-03-01", "2024-03-02", "2024-03-03"):
        write_day(folder, day)
    (folder / "sales.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    done, context = {}, job.JobContext

    def night(name: str, day: str, *words: str) -> None:
        """The date is handed to the job here, as `sparkring run --date` does."""
        dated = Publication()
        dated.ds = day
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                job, "JobContext", lambda *given, **more: replace(context(*given, **more), publication=dated)
            )
            done[name] = run_here(folder, "run", "sales.yaml", f"etl.interval.last={day}", *words)

    night("first", "2024-03-03")
    night("shifted", "2024-03-03", "promote.rules=[]", "promote.slices=[]", "optim.lr=1e-9", "warm_start=null")
    write_day(folder, "2024-03-04", scale=1000)
    night("other unit", "2024-03-04")
    write_day(folder, "2024-03-04", permuted=True)
    night("permuted", "2024-03-04")
    write_day(folder, "2024-03-04")
    night("better", "2024-03-04")
    done["rollback"] = run_here(folder, "rollback", "sales.yaml", "--reason", "late planes")
    return folder, "".join(each.stderr for each in done.values()), {n: each.returncode for n, each in done.items()}


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Of the finished runs, oldest first."""
    found = sorted(folder.glob("data/runs/sales/2*/summary.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in found]


def test_the_alias_moves_to_what_is_better_and_to_nothing_else(nights: Any) -> None:
    folder, log, codes = nights
    expected = {"first": 0, "shifted": 6, "other unit": 3, "permuted": 6, "better": 0, "rollback": 0}
    assert codes == expected, log
    found = [summary["promotion"] for summary in summaries(folder)]
    assert [(p["decision"], p["date"], p["version"], p["champion"]) for p in found] == [
        ("promoted", "2024-03-03", "1", None),
        ("held", "2024-03-03", "2", "1"),
        ("rejected", "2024-03-04", "3", "1"),
        ("promoted", "2024-03-04", "4", "1"),
    ]
    assert found[1]["reasons"][0].startswith("drift of prediction: jensen_shannon_divergence 0.")
    assert found[2]["reasons"][0].startswith("auc >= 0.8: not met: it is 0.")
    assert "nothing is trained, by drift.rules with the action stop: drift of amount: psi" in log
    better = summaries(folder)[-1]
    assert found[-1]["champion_scores"]["loss"] > better["scores"]["this model"]["loss"]
    assert {f["slice"] for f in found[-1]["rules"]} == {"", "shop = a", "shop = b"}


def test_training_starts_from_the_champion_and_says_so(nights: Any) -> None:
    folder, log, _ = nights
    starts = [summary["start"] for summary in summaries(folder)]
    assert starts[0] == "from scratch: no version has the alias 'champion' yet" and starts[1] == ""
    assert all(start.startswith("from version 1: ") for start in starts[2:]), starts
    run = Path(summaries(folder)[-1]["run"])
    assert (run / "start/weights.safetensors").exists() and "training starts from version 1: " in log


def test_the_store_and_the_report_say_what_was_decided(nights: Any) -> None:
    folder, _, _ = nights
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    aliases = {name: str(version) for name, version in client.get_registered_model("sales").aliases.items()}
    assert aliases == {"champion": "1", "previous": "4", "challenger": "3"}, "rolled back from version 4"
    tags = client.get_model_version("sales", "4").tags
    assert (tags["sparkring.decision"], tags["sparkring.reason"]) == (
        "rolled_back", "rolled back to version 1: late planes"
    )  # fmt: skip
    assert client.get_model_version("sales", "3").tags["sparkring.date"] == "2024-03-04"
    experiment = client.get_experiment_by_name("sales")
    assert experiment is not None
    wanted = "tags.`sparkring.decision` = 'rejected' and tags.`sparkring.key` = 'job' and metrics.`test/auc` < 0.8"
    (rejected,) = client.search_runs([experiment.experiment_id], wanted)
    assert rejected.data.tags["sparkring.champion_before"] == "1"
    assert rejected.data.metrics["test/champion/auc"] > 0 and "drift/amount/psi" in rejected.data.metrics
    page = (Path(summaries(folder)[2]["run"]) / "report.html").read_text()
    assert "<h2>Promotion</h2>" in page and "auc &gt;= 0.8" in page and "drift of" in page
