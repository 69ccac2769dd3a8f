"""A run is trained again to the same bits; what makes that pointless is named before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.cli import main
from sparkring.pipelines.cli.reproduce import Request, reproduce, scratch_config
from sparkring.pipelines.job.job import run_job
from sparkring.pipelines.lineage.environment import user_modules
from sparkring.pipelines.lineage.keep import changed_since, datasets, keep_patch, start_files
from sparkring.pipelines.lineage.reproduce_record import RECORD, read_record
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import Runs
from sparkring.training.worker.result import SUMMARY, read_result
from tests.pipelines.promotion.nights import write_dataset

pytestmark = pytest.mark.spark
VALUES = ["a", "b", "c"]


@dataclass
class Workplace:
    """A folder with a finished run of two ranks, its dataset and its registry."""

    folder: Path
    config: RunConfig
    shown: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        runs = Runs(self.config.storage.runs, self.config.name)
        return Path(runs.at(runs.records()[0]).root)

    @property
    def first_shard(self) -> Path:
        return self.folder / "dataset/data/train.parquet"

    def reproduce(
        self, target: str | Path, check: str = "bits", dry_run: bool = False, origin: str = "dataset", **session: Any
    ) -> Exit:
        self.shown.clear()
        request = Request(str(target), check, origin, dry_run)  # type: ignore[arg-type]
        return reproduce(request, self.config.tracking, self.shown.append, **session)

    def refusal(self, target: str | Path, check: str = "bits") -> str:
        with pytest.raises(StoredError) as error:
            self.reproduce(target, check, session=no_session)
        return str(error.value)

    def registry(self) -> tuple[list[str], set[str]]:
        client = MlflowClient(self.config.tracking.store_uri)
        versions = [f"{v.version} {v.last_updated_timestamp}" for v in client.search_model_versions()]
        experiments = [e.experiment_id for e in client.search_experiments()]
        return versions, {run.info.run_id for run in client.search_runs(experiments)}


def no_session() -> Any:
    raise AssertionError("nothing may be started")


@pytest.fixture(scope="module")
def workplace(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("reproduce")
    write_dataset(folder / "dataset", VALUES, 5.0)
    config = RunConfig.model_validate(
        {
            "name": "nightly",
            "dataset": str(folder / "dataset"),
            "storage": {"runs": str(folder / "runs")},
            "model": {"args": {"width": 4, "blocks": 1, "bumps": 2}},
            "optim": {"lr": 0.05},
            "train": {"epochs": 3, "global_batch": 50, "threads_per_rank": 1},
            "parallel": {"engine": "torch"},
            "launch": {"world": 2},
            "tracking": {"root": str(folder / "mlflow"), "system_metrics": False},
            "report": {"baselines": False, "must_beat_guess": False},
        }
    )
    assert run_job(Resolved(config, {}), etl=False, session=lambda: spark) == Exit.OK
    return Workplace(folder, config)


@pytest.fixture
def copied(workplace: Workplace, tmp_path: Path) -> Path:
    """A copy of the run folder, to be edited."""
    shutil.copytree(workplace.run, tmp_path / "runs/nightly/1")
    return tmp_path / "runs/nightly/1"


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_registered_models_run_is_trained_again_to_the_same_bits(workplace: Workplace, spark: Any) -> None:
    before = workplace.registry()
    assert workplace.reproduce("models:/nightly@champion", session=lambda: spark) == Exit.OK
    kept = read_record(open_storage(str(workplace.run))).weights_sha256
    assert kept == open_storage(str(workplace.run / "model")).sha256("weights.safetensors")
    assert f"weights sha256: recorded {kept}, now {kept}" in workplace.shown
    assert workplace.shown[0] == "nothing differs from what the run keeps"
    assert any(line.startswith("loss: recorded ") and line.endswith(", equal") for line in workplace.shown)
    assert workplace.shown[-1].startswith("reproduced: bits are equal; ")
    assert workplace.registry() == before and not [*workplace.folder.glob("runs/reproduced/*")]
    assert len([*workplace.folder.glob("runs/nightly/*/run.json")]) == 1


def test_the_run_keeps_its_environment_in_its_folder_and_in_mlflow(workplace: Workplace) -> None:
    record = read_record(open_storage(str(workplace.run)))
    assert record.environment.packages["torch"] and record.environment.torch_build and record.java
    assert [*record.datasets] == [str(workplace.folder / "dataset")] and record.changed == []
    run_id = json.loads((workplace.run / "run.json").read_text())["mlflow_run_id"]
    client = MlflowClient(workplace.config.tracking.store_uri)
    assert "reproduce/reproduce.json" in {a.path for a in client.list_artifacts(run_id, "reproduce")}


def test_a_dry_run_starts_nothing(workplace: Workplace) -> None:
    assert workplace.reproduce(workplace.run, dry_run=True, session=no_session) == Exit.OK
    assert workplace.shown == [
        "nothing differs from what the run keeps",
        "would train it again, on 2 ranks, and compare bits",
    ]


def test_a_flipped_byte_of_a_shard_is_named_whatever_is_checked(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = workplace.first_shard.read_bytes()
    try:
        workplace.first_shard.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
        for check in ("bits", "metrics"):
            assert main(["reproduce", str(workplace.run), "--check", check]) == Exit.DATA
            error = capsys.readouterr().err
            assert f"nothing was trained, --check {check}: file {workplace.first_shard}" in error and "sha256" in error
    finally:
        workplace.first_shard.write_bytes(whole)


def test_another_torch_refuses_bits_and_not_metrics(workplace: Workplace, copied: Path) -> None:
    edit(copied / RECORD, lambda record: record["environment"]["packages"].update(torch="1.0"))
    said = workplace.refusal(copied)
    assert "torch: 1.0 -> " in said and "not the same environment" in said
    assert said.endswith("--check metrics may still be worth it")
    assert workplace.reproduce(copied, "metrics", dry_run=True, session=no_session) == Exit.OK
    assert workplace.shown[0].startswith("differs  torch: 1.0 -> ")


def test_other_code_of_ours_refuses_bits(workplace: Workplace, copied: Path) -> None:
    edit(copied / RECORD, lambda record: record["environment"]["code"].update({"sparkring.training": "9" * 64}))
    assert "code sparkring.training: 999999999999 -> " in workplace.refusal(copied)


@pytest.fixture
def own_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "net_that_changes.py"
    file.write_text("class Net:\n    width = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    sys.modules.pop("net_that_changes", None)


def test_one_changed_line_of_the_model_is_named_whatever_is_checked(
    workplace: Workplace, copied: Path, own_net: Path
) -> None:
    reference = "net_that_changes:Net"
    edit(copied / SUMMARY, lambda summary: summary["config"]["model"].update(factory=reference))
    recipe = workplace.config.model_copy(
        update={"model": workplace.config.model.model_copy(update={"factory": reference})}
    )
    kept = {name: vars(module) for name, module in user_modules(recipe).items()}
    edit(copied / RECORD, lambda record: record["environment"].update(modules=kept))
    assert workplace.reproduce(copied, dry_run=True, session=no_session) == Exit.OK
    own_net.write_text("class Net:\n    width = 5\n")
    for check in ("bits", "metrics"):
        assert f"module net_that_changes ({own_net}): " in workplace.refusal(copied, check)


def test_another_or_no_dataset_is_named(workplace: Workplace, copied: Path, tmp_path: Path) -> None:
    shutil.copytree(workplace.folder / "dataset", tmp_path / "dataset")
    digest = read_record(open_storage(str(copied))).datasets[str(workplace.folder / "dataset")]
    edit(copied / RECORD, lambda record: record.update(datasets={str(tmp_path / "dataset"): digest}))
    assert workplace.reproduce(copied, dry_run=True, session=no_session) == Exit.OK
    edit(tmp_path / "dataset/_manifest.json", lambda made: made["features"]["features"][1].update(mean=6.0))
    assert f"dataset {tmp_path / 'dataset'}: {digest[:12]} -> " in workplace.refusal(copied, "metrics")
    shutil.rmtree(tmp_path / "dataset")
    assert str(tmp_path / "dataset") in workplace.refusal(copied)


def test_a_file_that_was_left_out_as_damaged_must_still_be(workplace: Workplace, copied: Path) -> None:
    edit(copied / SUMMARY, lambda summary: summary["train"].update(train_left_out=["data/train.parquet"]))
    assert f"file {workplace.first_shard}; it was damaged and left out, and is sound now" in workplace.refusal(copied)


def test_a_model_that_training_began_from_must_be_the_same(workplace: Workplace, copied: Path, tmp_path: Path) -> None:
    shutil.copytree(workplace.run / "model", tmp_path / "start")
    edit(copied / SUMMARY, lambda made: made["config"].update(warm_start={"model": str(tmp_path / "start")}))
    start = start_files(read_result(open_storage(str(copied))).run_config())
    assert len(start) == 3
    edit(copied / RECORD, lambda record: record.update(start=start))
    assert workplace.reproduce(copied, dry_run=True, session=no_session) == Exit.OK
    weights = tmp_path / "start/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert f"file {weights}: " in workplace.refusal(copied, "metrics")
    weights.unlink()
    assert "the model that training began from cannot be read" in workplace.refusal(copied, "metrics")


@pytest.mark.slow  # which weights are compared: the test above
def test_a_run_that_began_with_a_registered_models_weights_says_so_and_keeps_them(
    workplace: Workplace, spark: Any, tmp_path: Path
) -> None:
    stored = workplace.config.model_dump(mode="json")
    changed = {"name": "begun", "storage": {"runs": str(tmp_path / "runs")}}
    stored["model"]["start"] = "models:/nightly/1"
    config = RunConfig.model_validate(stored | changed)
    assert run_job(Resolved(config, {}), etl=False, session=lambda: spark) == Exit.OK
    run = next((tmp_path / "runs/begun").glob("2*"))
    result, weights = read_result(open_storage(str(run))), open_storage(str(workplace.run / "model"))
    sha256 = weights.sha256("weights.safetensors")
    assert result.start.startswith(f"with the weights of models:/nightly/1 (sha256 {sha256[:12]}); ")
    assert result.train.started is not None and "tensors begin with its values" in result.start
    assert result.run_config().model.start.sha256 == sha256  # type: ignore[union-attr]
    assert "training started" in (run / "report.html").read_text()
    assert read_record(open_storage(str(run))).start == {f"{run}/start/weights.safetensors": sha256}
    assert workplace.reproduce(run, dry_run=True, session=no_session) == Exit.OK
    (run / "start/weights.safetensors").write_bytes(b"other")
    assert f"file {run}/start/weights.safetensors: " in workplace.refusal(run)


def test_what_a_run_cannot_be_reproduced_without_is_named(workplace: Workplace, copied: Path) -> None:
    edit(copied / RECORD, lambda record: record.update(weights_sha256=None))
    assert "keeps no sha256 of its weights" in workplace.refusal(copied)
    (copied / RECORD).unlink()
    assert "left no reproduce.json" in workplace.refusal(copied)
    (copied / SUMMARY).unlink()
    assert "is no registered model (models:/<name>@<alias>) and no folder of a finished run" in workplace.refusal(
        copied
    )


def test_a_model_of_other_weights_than_its_run_is_refused(workplace: Workplace) -> None:
    kept = (workplace.run / RECORD).read_bytes()
    try:
        edit(workplace.run / RECORD, lambda record: record.update(weights_sha256="9" * 64))
        assert f"its run {workplace.run} {'9' * 64}" in workplace.refusal("models:/nightly/1")
    finally:
        (workplace.run / RECORD).write_bytes(kept)


def test_the_scratch_run_reaches_nothing_outside_of_its_folder(workplace: Workplace) -> None:
    result = read_result(open_storage(str(workplace.run)))
    full = result.config | {
        "promote": {"rules": [{"metric": "auc", "threshold": 0.9}]},
        "checkpoint": {"resume": True},
        "launch": {"world": 4, "min_world": 1},
        "tracking": {"openlineage": "prod"},
        "spark": {"conf": {"spark.hadoop.fs.s3a.secret.key": "**********", "spark.ui.enabled": "false"}},
    }
    result.config.clear()
    result.config.update(full)
    made = scratch_config(result, "bits", "/scratch")
    assert made.tracking.openlineage is None, "which cannot stand beside enabled: false"
    assert (made.tracking.enabled, made.promote, made.checkpoint.resume) == (False, None, False)
    assert (made.launch.world, made.launch.min_world, made.train.threads_per_rank) == (2, None, 1)
    assert (made.storage.runs, made.dataset, made.parallel.engine) == ("/scratch", result.dataset, "torch")
    assert made.spark.settings() == {"spark.ui.enabled": "false"}


def test_a_changed_environment_between_two_commands_of_a_run_is_kept(workplace: Workplace) -> None:
    record = read_record(open_storage(str(workplace.run)))
    assert changed_since(record, record.environment) == []
    before = json.loads(record.to_json())
    before["environment"]["packages"] |= {"torch": "1.0", "requests": "0"}
    (workplace.folder / "before").mkdir(exist_ok=True)
    (workplace.folder / "before" / RECORD).write_text(json.dumps(before | {"changed": ["numpy"]}))
    earlier = read_record(open_storage(str(workplace.folder / "before")))
    assert changed_since(earlier, record.environment) == ["numpy", "torch"]


def test_every_dataset_that_is_mixed_is_kept(workplace: Workplace) -> None:
    parts = [{"dataset": "/one"}, {"dataset": "/d"}, {"dataset": "/one", "split": "valid"}]
    recipe = RunConfig.model_validate({"name": "b", "dataset": "/d", "data": {"mix": {"parts": parts}}})
    assert [*datasets(recipe, "/d")] == ["/d", "/one"]
    assert [*datasets(workplace.config, "/d")] == ["/d"]


def test_a_patch_is_written_or_said_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = keep_patch(open_storage(str(tmp_path)))
    if said == "diff.patch":  # a checkout, with or without changes
        assert (tmp_path / "diff.patch").exists()
        monkeypatch.setattr("sparkring.pipelines.lineage.keep.MOST_PATCH_BYTES", -1)
        said = keep_patch(open_storage(str(tmp_path)))
    assert said.startswith("not kept: ")


def test_tracking_says_where_the_registry_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "models:/nightly@champion", f"tracking.root={tmp_path}"]) == Exit.DATA
    assert f"{tmp_path} holds no registry yet" in capsys.readouterr().err
