"""Every kind of operation survives the journal, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkring.conf.stored import StoredError, parse
from sparkring.pipelines.tracking import ops

AT: dict[str, Any] = {"key": "job", "at": 1.0}
DATASET: dict[str, Any] = {"name": "d", "uri": "/d", "fingerprint": "f", "profile": {}, "schema": []}
MODEL: dict[str, Any] = {"name": "m", "step": 1, "sha256": "5" * 64, "loader_module": "sparkring.pipelines.serving"}
PROMOTE: dict[str, Any] = {
    "registered_model": "m", "alias": "champion", "decision": "held", "reason": "drift", "judged_against": "3",
}  # fmt: skip
LINEAGE_SET: ops.LineageDataset = {"namespace": "file", "name": "/d", "kind": "FILE", "uri": "d"}
LINEAGE_JOB: dict[str, Any] = {
    "namespace": "nights", "name": "flights", "nominal": None, "parent": None, "code_url": None,
    "inputs": [LINEAGE_SET],
}  # fmt: skip
EVERY: list[tuple[ops.Op, str]] = [
    (ops.StartRun(**AT, name="n", parent=None, tags={}, resume=False), "start"),
    (ops.Params(**AT, params={"a": "1"}), "params"),
    (ops.Metrics(**AT, points=[("loss", 0.5, 1, 7)]), "metrics"),
    (ops.Tags(**AT, tags={"a": "b"}), "tags"),
    (ops.DatasetUse(**AT, **DATASET, context="training"), "dataset d"),
    (ops.Artifact(**AT, file="ab12/a.txt", folder=""), "artifact a.txt"),
    (ops.Checkpoint(**AT, step=1, uri="/c", bytes=2, world=1, metric="0.5"), "checkpoint"),
    (ops.History(**AT, recipe="n", number=7, begins=2.0, values={"loss": 0.5}), "history"),
    (ops.HistoryFigure(**AT, recipe="n", step=7, name="test/roc", file="ab12/roc.png"), "history_figure roc"),
    (ops.KeepCheckpoints(**AT, uris=["/c"]), "keep_checkpoints"),
    (ops.Model(**AT, **MODEL, file="ab12/data"), "model m"),
    (ops.Promote(**AT, **PROMOTE), "promote held"),
    (ops.LineageJob(**AT, **LINEAGE_JOB), "lineage_job flights"),
    (ops.LineageData(**AT, inputs=[LINEAGE_SET], outputs=[]), "lineage_data"),
    (ops.Lost(**AT, what="artifact big.bin", why="no room"), "lost artifact big.bin"),
    (ops.End(**AT, status="FINISHED"), "end"),
]


@pytest.mark.parametrize(("op", "label"), EVERY, ids=[label for _, label in EVERY])
def test_an_operation_is_read_back_as_it_was_written_and_names_itself(op: ops.Op, label: str) -> None:
    assert parse(ops.StoredOp, json.dumps(vars(op)), "ops.jsonl").root == op
    assert op.label == label


def test_every_kind_is_tried() -> None:
    assert {type(op) for op, _ in EVERY} == set(ops.Op.__args__)


@pytest.mark.parametrize(
    "changes", [{"loader_module": "os; rm"}, {"file": "/etc/hostname"}, {"step": -1}, {"surprise": 1}, {"key": "a/b"}]
)
def test_a_model_with_an_odd_field_is_refused_by_name(changes: dict[str, Any]) -> None:
    written = vars(ops.Model(**AT, **MODEL, file="ab12/data")) | changes
    with pytest.raises(StoredError, match=f"ops.jsonl: model.{next(iter(changes))}"):
        parse(ops.StoredOp, json.dumps(written), "ops.jsonl")
