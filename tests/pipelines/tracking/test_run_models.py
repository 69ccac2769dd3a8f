"""Models and checkpoints in a store of MLflow 2, which knows no LoggedModel.

The store is MLflow 3's, used as one of MLflow 2: `benchmarks/matrix.py` runs a job with MLflow 2.19 itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from sparkring.pipelines.tracking.errors import StoreUnfit
from sparkring.pipelines.tracking.store import cleanup, models, sink
from sparkring.pipelines.tracking.store.cleanup import Cleanup
from sparkring.pipelines.tracking.store.fetch import copy_model, find_model
from sparkring.pipelines.tracking.store.models import CHECKPOINT_TAG, MODEL_ID, LoggedModels, RunModels, models_of
from sparkring.pipelines.tracking.store.sink import replay
from sparkring.pipelines.tracking.tracker import Tracker
from tests.pipelines.tracking import kill_program
from tests.pipelines.tracking.test_mlflow_store import client_of, quick, tiny_model


@pytest.fixture(autouse=True)
def mlflow_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (sink, cleanup):
        monkeypatch.setattr(user, "models_of", lambda store: RunModels)


@pytest.mark.parametrize(
    "ours, server, form",
    [
        ("2.19.0", None, RunModels),
        ("3.0.1", None, LoggedModels),
        ("3.17.2", 2, RunModels),
        ("2.22.1", 3, RunModels),
        ("3.0.1", 3, LoggedModels),
        ("3.0.1", 4, LoggedModels),
    ],
)
def test_both_the_client_and_the_server_must_know_logged_models(
    monkeypatch: pytest.MonkeyPatch, ours: str, server: int | None, form: type
) -> None:
    monkeypatch.setattr(mlflow, "__version__", ours)
    monkeypatch.setattr(models, "server_major", lambda store: server)
    assert models_of("http://server") is form


def test_a_server_whose_registry_has_no_aliases_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "server_major", lambda store: 1)
    with pytest.raises(StoreUnfit, match=r"http://server is MLflow 1, and 2 or newer is needed"):
        models_of("http://server")


def test_pointers_are_tags_of_their_run_and_go_one_by_one(tmp_path: Path) -> None:
    settings, uris = quick(tmp_path), [f"s3://b/keep/step-{step}" for step in (1, 2, 3)]
    for job in ("other", "keeps"):
        with Tracker(settings, job=job, name=job) as tracker, tracker.part("train"):
            for step, uri in enumerate([*uris, uris[-1]], 1):  # the last one twice: of a resumed job
                tracker.checkpoint("train", min(step, 3), uri, 4096, 2)
            if job == "keeps":
                tracker.keep_checkpoints("train", uris[1:])
    store = Cleanup(settings.named("shop"), knows_runs=True)
    found = store.pointers()
    assert sorted(pointer.uri for pointer in found) == sorted([*uris, *uris[1:]])
    assert {pointer.name for pointer in found} == {f"checkpoint-step-{step}" for step in (1, 2, 3)}
    for _ in range(2):  # a second gc finds it gone already
        store.delete_pointer(found[0].id)
    assert sorted(pointer.id for pointer in store.pointers()) == sorted(pointer.id for pointer in found[1:])
    runs = client_of(settings).search_runs(["1"])
    assert sum(tag.startswith(CHECKPOINT_TAG) for run in runs for tag in run.data.tags) == len(found) - 1


def test_a_model_is_files_of_its_run_and_one_version_that_predicts(tmp_path: Path) -> None:
    settings = quick(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/model.json").write_text('{"factor": 3.0}')
    for job in ("m1", "m2", "m2"):  # the last goes on where the one before ended
        with Tracker(settings, job=job, name="model", resume=True) as tracker:
            tracker.model("job", tmp_path / "data", tiny_model("tripler", scores={"test/loss": 0.5}))
            assert tracker.version("job", timeout_s=60.0) is not None
    found = find_model(settings, "models:/tripler@champion")
    copied = copy_model(settings, found, tmp_path / "copy")
    assert (copied / "model.json").read_text() == '{"factor": 3.0}'
    client = client_of(settings)
    run = client.get_run(found.run_id)
    assert run.data.metrics["test/loss"] == 0.5 and MODEL_ID not in run.data.tags
    (folder,) = client.list_artifacts(found.run_id)
    assert found.source.endswith(f"/artifacts/{folder.path}")
    assert not client.search_logged_models([run.info.experiment_id])


@pytest.mark.parametrize("call", ["log_artifacts", "create_model_version", "set_registered_model_alias"])
def test_a_model_is_registered_once_whatever_call_its_job_ended_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    settings = quick(tmp_path, experiment="kills")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/model.json").write_text('{"factor": 3.0}')
    made = getattr(MlflowClient, call)

    def ends(*args: Any, **kwargs: Any) -> None:
        made(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MlflowClient, call, ends)
        kill_program.register(settings, 1)
    replay(settings)
    kill_program.register(settings, 1)
    client = client_of(settings)
    (version,) = client.search_model_versions("name = 'm1'")
    assert client.get_model_version_by_alias("m1", "champion").version == version.version
    (run,) = client.search_runs([client.get_experiment_by_name("kills").experiment_id])
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == [version.source.rpartition("/")[2]]
