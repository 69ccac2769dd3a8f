"""Events are a function of a journal's operations: the same ones whenever they are made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openlineage.client.event_v2 import RunEvent
from openlineage.client.serde import Serde

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.openlineage.events import PRODUCER, JobEvents, run_id

RUNS = {"job": "0af7651916cd43dd8448eb211c80319c"}
SOURCE = ops.LineageDataset(namespace="file", name="/raw", kind="FILE", uri="file:///raw")
START = ops.StartRun(key="job", at=1.0, name="n", parent=None, tags={}, resume=False)
JOB = ops.LineageJob(
    key="job", at=2.0, namespace="nights", name="n", nominal=None, parent=None, code_url="https://x/y.git",
    inputs=[SOURCE],
)  # fmt: skip
MODEL = ops.Model(
    key="evaluate", at=4.0, name="m", step=1, sha256="5" * 64, loader_module="l", file="a/b", registered_model="shop"
)


def end(status: Any, error: str = "") -> ops.End:
    return ops.End(key="job", at=9.5, status=status, error=error)


def events(*taken: ops.Op, versions: dict[str, str] | None = None) -> list[dict[str, Any]]:
    made = JobEvents(TrackingConfig(root="/d"), "n-1")
    found = [made.take(op, RUNS, versions or {}) for op in taken]
    return [*map(shown, [event for event in found if event is not None])]


def shown(event: RunEvent) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Serde.to_json(event))
    return found


@pytest.mark.parametrize(("status", "kind"), [("FINISHED", "COMPLETE"), ("FAILED", "FAIL"), ("KILLED", "ABORT")])
def test_a_jobs_end_is_its_last_event(status: str, kind: str) -> None:
    first, last = events(START, JOB, end(status, "why" if status == "FAILED" else ""))
    assert (first["eventType"], first["eventTime"]) == ("START", "1970-01-01T00:00:01.000+00:00")
    assert (last["eventType"], last["eventTime"]) == (kind, "1970-01-01T00:00:09.500+00:00")
    assert ("errorMessage" in last["run"]["facets"]) == (kind == "FAIL")


def test_ends_of_parts_are_no_ends_of_the_job() -> None:
    assert len(events(START, JOB, ops.End(key="train", at=3.0, status="FAILED", error="why"))) == 1


def test_a_job_that_recorded_no_lineage_has_no_events() -> None:
    assert events(START, end("FINISHED")) == []


def test_what_is_known_later_is_added_to_a_dataset() -> None:
    more = ops.LineageData(key="job", at=3.0, inputs=[{**SOURCE, "version": "7"}], outputs=[{**SOURCE, "name": "/o"}])
    less = ops.LineageData(key="job", at=4.0, inputs=[{**SOURCE, "rows": 3}], outputs=[])
    first, last = events(START, JOB, more, less, end("FINISHED"))
    assert "version" not in first["inputs"][0]["facets"]
    (found,) = last["inputs"]
    assert found["facets"]["version"]["datasetVersion"] == "7" and found["facets"]["dataSource"]["uri"] == "file:///raw"
    assert found["inputFacets"]["inputStatistics"]["rowCount"] == 3
    assert [made["name"] for made in last["outputs"]] == ["/o"] and "inputFacets" not in {**last["outputs"][0]}


def test_a_model_is_an_output_once_it_has_a_version() -> None:
    _, last = events(START, JOB, MODEL, end("FINISHED"), versions={"evaluate": "3"})
    (made,) = last["outputs"]
    assert (made["namespace"], made["name"]) == ("mlflow:///d", "shop")
    assert made["facets"]["version"]["datasetVersion"] == "3"
    _, refused = events(START, JOB, MODEL, end("FINISHED"))
    assert refused["outputs"] == []


def test_a_driver_that_died_is_aborted_when_it_was_last_heard_of() -> None:
    made = JobEvents(TrackingConfig(), "n-1")
    for op in (START, JOB, ops.Metrics(key="train", at=7.0, points=[])):
        made.take(op, RUNS, {})
    left = made.abandoned(RUNS)
    assert left is not None and shown(left)["eventTime"] == "1970-01-01T00:00:07.000+00:00"
    assert shown(left)["eventType"] == "ABORT"
    made.take(end("FINISHED"), RUNS, {})
    assert made.abandoned(RUNS) is None


def test_a_run_has_the_id_that_mlflow_gave_it() -> None:
    assert run_id(RUNS["job"]) == "0af76519-16cd-43dd-8448-eb211c80319c"
    assert run_id("run-1") == run_id("run-1") != run_id("run-2")


def test_a_commit_without_a_place_is_not_sent() -> None:
    tagged = ops.StartRun(key="job", at=1.0, name="n", parent=None, tags={"sparkring.commit": "c0ffee"}, resume=False)
    (known,) = events(tagged, JOB)
    assert known["job"]["facets"]["sourceCodeLocation"]["url"] == "https://x/y.git"
    (unknown,) = events(START, JOB)
    assert "sourceCodeLocation" not in unknown["job"]["facets"]


def test_everything_names_its_producer() -> None:
    more = ops.LineageData(key="job", at=3.0, inputs=[], outputs=[{**SOURCE, "name": "/o", "rows": 5}])
    for event in events(START, JOB, more, end("FAILED", "why")):
        text = json.dumps(event)
        assert event["producer"] == PRODUCER and text.count('"_producer"') == text.count(f'"{PRODUCER}"') - 1
