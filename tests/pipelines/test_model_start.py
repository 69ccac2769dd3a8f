"""The weights that a run begins with: found before anything is started, copied once, noted by their sha256."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.model.model_start import ModelStart, resolve_model_start, start_problems
from sparkring.training.checkpoint.weights import FILE
from tests.pipelines import served

HEAD = 16  # hidden units


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    return served.model_folder(tmp_path_factory.mktemp("start") / "model")


def recipe(model: Any, **start: Any) -> RunConfig:
    block = {"args": {"width": HEAD, "blocks": 1}, "start": {"weights": str(model), **start}}
    return RunConfig.model_validate({"name": "flights", "dataset": "somewhere", "model": block})


def resolve(
    config: RunConfig, run: Path, manifest: DatasetManifest | None = None
) -> tuple[RunConfig, ModelStart | None]:
    resolved, record = resolve_model_start(Resolved(config, {}), manifest or served.manifest(), open_storage(str(run)))
    return resolved.config, record


def test_a_run_keeps_a_copy_and_its_sha256_whatever_becomes_of_the_file(model: Storage, tmp_path: Path) -> None:
    file = tmp_path / "encoder.safetensors"
    file.write_bytes(model.read_bytes(FILE))
    config, record = resolve(recipe(file), tmp_path / "run")
    assert record is not None and config.model.start is not None
    assert config.model.start.weights == f"{tmp_path}/run/start/{FILE}"
    assert config.model.start.sha256 == record.sha256 == model.sha256(FILE)
    assert record.text == f"with the weights of {file} (sha256 {record.sha256[:12]})"
    file.write_bytes(served.model_folder(tmp_path / "other", seed=4).read_bytes(FILE))
    assert resolve(recipe(file), tmp_path / "run") == (config, record), "a resumed run"
    assert resolve(recipe(file), tmp_path / "new")[1] != record
    file.unlink()
    assert resolve(recipe(file), tmp_path / "run") == (config, record)


def test_what_a_model_takes_of_the_file_is_said_before_training(
    model: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    resolve(recipe(model.root), tmp_path / "whole")
    (whole,) = [text for text in caplog.messages if text.startswith("model.start: ")]
    total = int(whole.split()[1])
    assert whole == f"model.start: {total} of {total} tensors begin with its values"
    resolve(recipe(model.root, rename={"blocks.0.": "elsewhere."}), tmp_path / "part")
    matched = int(caplog.messages[-1].split()[1])
    assert 0 < matched < total and f"{total - matched} not in the file (" in caplog.messages[-1]


def test_another_file_than_the_sha256_says_is_refused(model: Storage, tmp_path: Path) -> None:
    assert resolve(recipe(model.root, sha256=model.sha256(FILE)), tmp_path / "run")[1] is not None
    with pytest.raises(ConfigError, match=rf"sha256 is {model.sha256(FILE)}, not model\.start\.sha256 = 0000"):
        resolve(recipe(model.root, sha256="0" * 64), tmp_path / "other")
    assert not (tmp_path / "other/model_start.json").exists(), "it is not kept"


def test_other_features_are_said_since_tensors_are_taken_over_by_name(
    model: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = served.manifest()
    features = [dict(feature) for feature in now.features["features"]]
    features[0]["values"] = ["B6", "UA"]
    moved = now.model_copy(update={"features": now.features | {"features": features}})
    with caplog.at_level(logging.WARNING):
        _, record = resolve(recipe(model.root), tmp_path / "run", moved)
    assert record is not None and "its features differ: carrier: other codes" in record.text
    assert "warm_start follows them" in caplog.text
    assert "differ" not in resolve(recipe(model.root), tmp_path / "same")[1].text  # type: ignore[union-attr]


def test_what_cannot_start_a_model_is_named_before(model: Storage, tmp_path: Path) -> None:
    def problem(weights: Any, manifest: DatasetManifest | None = None, **start: Any) -> str:
        return " ".join(start_problems(recipe(weights, **start), manifest).recipe)

    assert problem(model.root) == problem(model.root, served.manifest()) == ""
    gone = f"{tmp_path}/gone.safetensors"
    assert problem(gone) == f"model.start.weights = {gone!r}: there is no {gone}"
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(model.read_bytes(FILE)[:100])
    assert f"model.start.weights = '{damaged}': {damaged}: no weights (its header is" in problem(damaged)
    assert "no tensor of the file has the name and shape" in problem(model.root, served.manifest(), rename={"": "x."})
    assert problem(model.root, rename={"": "x."}) == "", "only its dataset says what the model's tensors are"
    registered = recipe("models:/flights@champion").model_copy(
        update={"tracking": recipe(gone).tracking.model_copy(update={"root": str(tmp_path)})}
    )
    assert "holds no registry yet" in start_problems(registered).recipe[0]


@pytest.mark.parametrize(
    ("weights", "why"),
    [("models:/flights", r"must be models:/<name>@<alias>"), ("pytorch_model.bin", r"is a pickle, which runs code")],
)
def test_what_cannot_be_weights_is_refused_by_its_name(weights: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        recipe(weights)


def test_the_uri_alone_is_enough_and_warm_start_beside_it_is_refused() -> None:
    config = RunConfig.model_validate({"name": "a", "dataset": "d", "model": {"start": "e.safetensors"}})
    assert config.model.start is not None and config.model.start.weights == "e.safetensors"
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
