"""`sparkring run --date` and `sparkring backfill` over a few dates of one small recipe, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient

from tests.e2e.commands import run_here

pytestmark = pytest.mark.spark
DAYS = [f"2024-03-0{day}" for day in range(1, 8)]
FIRST, BACKFILLED = DAYS[2], DAYS[3:6]
ROWS = 200  # of a day

RECIPE: dict[str, Any] = {
    "name": "sales",
    "schedule": {"begin": DAYS[2], "window": 3, "lookback": 1, "wait_for": ["sales/day={ds}/_SUCCESS"]},
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
        "interval": {"column": "day", "sources": {"sales": "day"}},
    },
    "model": {"args": {"width": 8, "blocks": 1}},
    "train": {"epochs": 1, "global_batch": 64},
    "launch": {"world": 1},
    "report": {"baselines": False, "must_beat_guess": False},
    "tracking": {"system_metrics": False, "openlineage": "prod"},
}


def write_day(folder: Path, day: str) -> None:
    draw = np.random.default_rng(int(day[-2:]))
    (target := folder / f"sales/day={day}").mkdir(parents=True)
    shops = draw.choice(["a", "b", "c"], ROWS)
    pq.write_table(pa.table({"shop": shops, "amount": draw.integers(0, 100, ROWS)}), target / "x.parquet")
    (target / "_SUCCESS").touch()


@pytest.fixture(scope="module")
def nights(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[CompletedProcess[str]]]:
    """The folder after four commands, and what each of them wrote."""
    folder = tmp_path_factory.mktemp("nights")
    for day in DAYS[:-1]:
        write_day(folder, day)
    (folder / "sales.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    transport = {"TYPE": "file", "LOG_FILE_PATH": str(folder / "events.jsonl"), "APPEND": "true"}
    environment = {f"OPENLINEAGE__TRANSPORT__{name}": value for name, value in transport.items()}

    def sparkring(command: str, *words: str) -> CompletedProcess[str]:
        return run_here(folder, command, "sales.yaml", *words, environment=environment)

    return folder, [
        sparkring("run", "--date", FIRST),
        sparkring("run", "--date", FIRST),
        sparkring("backfill", "--from-date", FIRST, "--to-date", BACKFILLED[-1], "--train", "last"),
        sparkring("run", "--date", DAYS[6]),
    ]


def said(command: CompletedProcess[str]) -> dict[str, Any]:
    """What a command says of its dates: the last line of its output."""
    found: dict[str, Any] = json.loads(command.stdout.splitlines()[-1])
    return found


def entry(folder: Path, ds: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"data/runs/sales/dates/{ds}/state.json").read_text())
    return found


def test_a_date_is_done_once_and_says_what_it_made(nights: Any) -> None:
    folder, commands = nights
    assert [command.returncode for command in commands] == [0, 0, 0, 75], [command.stderr for command in commands]
    first, again = map(said, commands[:2])
    assert first == again
    assert (first["status"], first["exit_code"], first["attempts"]) == ("succeeded", 0, 1)
    state = entry(folder, FIRST)
    assert sorted(state["parts"]) == DAYS[:3]
    assert state["scores"]["this model"] == first["scores"]["this model"] != {}
    summary = json.loads((folder / f"data/runs/sales/{state['run']}/summary.json").read_text())
    assert (summary["fingerprint"], summary["dataset"]) == (state["fingerprint"], state["dataset"])
    assert summary["origins"]["etl.interval.last"] == "schedule"


def test_a_backfill_trains_on_the_last_date_alone_and_leaves_the_alias(nights: Any) -> None:
    folder, (_, _, done, _) = nights
    assert [entry(folder, ds)["status"] for ds in BACKFILLED] == ["built", "built", "succeeded"], done.stderr
    outcome = said(done)
    assert outcome["dates"] == dict.fromkeys(BACKFILLED, 0) and outcome["skipped"] == [FIRST]
    assert sorted(path.parts[-3] for path in folder.glob("data/datasets/parts/sales/*/*/_part.json")) == DAYS[:6]
    client = MlflowClient(f"sqlite:///{folder}/data/mlflow/mlflow.db")
    assert len(client.search_model_versions("name = 'sales'")) == 2
    assert client.get_model_version_by_alias("sales", "champion").version == 1
    assert len(list(folder.glob("data/runs/sales/2*"))) == 2
    experiment = client.get_experiment_by_name("sales").experiment_id
    dated = client.search_runs([experiment], "tags.`sparkring.recipe` = 'sales'", order_by=["tags.`sparkring.date`"])
    assert [run.data.tags["sparkring.date"] for run in dated] == [FIRST, *BACKFILLED], "also those that are built only"


def test_a_date_whose_upstream_is_not_there_is_not_begun(nights: Any) -> None:
    folder, commands = nights
    last = said(commands[-1])
    assert (last["ds"], last["status"], last["exit_code"]) == (DAYS[6], "try_later", 75)
    assert f"sales/day={DAYS[6]}/_SUCCESS is not there" in last["error"]
    assert not (folder / f"data/runs/sales/dates/{DAYS[6]}/state.json").exists()


def test_openlineage_is_told_what_each_date_read_and_made(nights: Any) -> None:
    folder, _ = nights
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [(event["job"]["name"], event["eventType"]) for event in events]
    jobs = ["sales", "sales.etl", "sales.etl", "sales"]
    assert told == [(job, kind) for job in jobs for kind in ("START", "COMPLETE")]
    assert {event["job"]["namespace"] for event in events} == {"prod"}
    for event, ds in zip(events, [day for day in (FIRST, *BACKFILLED) for _ in range(2)], strict=True):
        assert event["run"]["facets"]["nominalTime"]["nominalStartTime"] == f"{ds}T00:00:00+00:00"
        assert [read["name"] for read in event["inputs"]] == [str(folder / "sales")]
    last = events[-1]
    state = entry(folder, BACKFILLED[-1])
    dataset, model = last["outputs"]
    assert dataset["name"] == str(folder / "data/datasets/sales")
    assert dataset["facets"]["version"]["datasetVersion"] == state["fingerprint"]
    assert dataset["outputFacets"]["outputStatistics"]["rowCount"] == 3 * ROWS
    assert (model["name"], model["facets"]["version"]["datasetVersion"]) == ("sales", "2")
    assert last["run"]["runId"].replace("-", "") == state["mlflow_run_id"]
    assert list((folder / "data/mlflow/buffer").iterdir()) == []
