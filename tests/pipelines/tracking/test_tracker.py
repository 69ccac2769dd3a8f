"""The driver's side of tracking: what it writes into the journal, and that nothing it is given ends a job."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking.checkout import git_remote
from sparkring.pipelines.tracking.ops import DatasetInfo, ModelInfo
from sparkring.pipelines.tracking.tracker import Tracker, git_commit


def away(root: Path) -> TrackingConfig:
    """Tracking whose server does not answer, so that the journal keeps everything."""
    values: dict[str, Any] = {"root": str(root), "uri": "http://127.0.0.1:9", "system_metrics": False}
    return TrackingConfig(experiment="tests", request_timeout_s=1, request_retries=0, **values)


def journaled(root: Path) -> list[dict[str, Any]]:
    (journal,) = root.rglob("ops.jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()]


def test_everything_recorded_is_in_the_journal_under_its_run(tmp_path: Path) -> None:
    tracker = Tracker(away(tmp_path), job="j", name="flights", tags={"world": 2})  # type: ignore[dict-item]
    with tracker.part("train"):
        tracker.metrics("train", 3, {"loss": 0.5, "bad": float("nan")}, time_s=7.0)
        info = DatasetInfo(name="d", uri="/d", fingerprint="f", profile={"rows": 1}, schema=[])
        tracker.dataset("train", info, "training")
        tracker.checkpoint("train", 3, "/c/step-3", bytes=9, world=2, metric=0.5)
        tracker.artifact("train", "text", "note.txt", "notes")
    tracker.close(timeout_s=30)
    found = {(op["op"], op["key"]): op for op in journaled(tmp_path)}
    assert found["start", "job"]["tags"]["world"] == "2" and found["start", "train"]["parent"] == "job"
    assert found["metrics", "train"]["points"] == [["loss", 0.5, 3, 7000]]
    assert found["tags", "train"]["tags"] == {"sparkring.not_finite.bad": "1"}
    assert found["dataset", "train"]["context"] == "training" and found["dataset", "train"]["profile"] == {"rows": 1}
    assert found["checkpoint", "train"]["metric"] == "0.5" and found["artifact", "train"]["folder"] == "notes"
    assert [op["key"] for op in journaled(tmp_path) if op["op"] == "end"] == ["train", "job"]


def test_what_comes_after_the_end_of_a_run_is_a_warning_and_an_unknown_run_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(away(tmp_path), job="j", name="n")
    with tracker.part("etl"):
        pass
    tracker.params("etl", {"late": 1})
    with pytest.raises(KeyError, match="no open run 'train'"):
        tracker.params("train", {"a": 1})
    tracker.close(timeout_s=30)
    assert "params for the run 'etl' came after its end" in caplog.text
    assert not [op for op in journaled(tmp_path) if op["op"] == "params"]


def test_disabled_tracking_touches_nothing(tmp_path: Path) -> None:
    with (
        Tracker(TrackingConfig(enabled=False, root=str(tmp_path)), job="j", name="n") as tracker,
        tracker.part("train"),
    ):
        tracker.metrics("train", 1, {"loss": 1.0})
        tracker.artifact("train", "x", "x.txt")
        assert tracker.run_id() is None and tracker.flush()
    assert list(tmp_path.iterdir()) == []


def test_git_commit(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    assert git_commit(tmp_path) is None
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = git_commit(tmp_path)
    assert commit and len(commit) == 40
    (tmp_path / "f").write_text("x")
    subprocess.run([*git, "add", "f"], check=True)
    assert git_commit(tmp_path) == f"{commit}+changes"


def test_git_remote_has_no_credentials(tmp_path: Path) -> None:
    assert git_remote(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert git_remote(tmp_path) == tmp_path.as_uri()
    url = "https://ann:s3cret@example.com/nights.git"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", url], check=True)
    assert git_remote(tmp_path) == "https://example.com/nights.git"


def test_settings_travel_with_the_journal(tmp_path: Path) -> None:
    """A journal is replayed to the store and experiment it was written for, whatever the next job uses."""
    settings = away(tmp_path)
    tracker = Tracker(settings, job="x", name="x")
    tracker.close(timeout_s=20)
    (folder,) = (tmp_path / "buffer").iterdir()
    assert json.loads((folder / "state.json").read_text())["settings"] == {"experiment": "tests", "uri": settings.uri}


def test_a_model_with_a_score_that_is_no_number_is_recorded_without_it(tmp_path: Path) -> None:
    """Test rows of one class have no AUC: the job ended in a traceback of the JSON encoder."""
    put: dict[str, Any] = {}
    of_tracker: Any = Tracker.__new__(Tracker)
    of_tracker._put_file = lambda *where, **fields: put.update(fields)
    info = ModelInfo(name="m", step=1, sha256="a", loader_module="m", scores={"test/auc": math.nan, "test/loss": 0.5})
    of_tracker.model("job", tmp_path, info)
    assert put["scores"] == {"test/loss": 0.5}
