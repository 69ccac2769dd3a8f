"""A model as one file of torch.export or ONNX: loaded as strangers load it, beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.manifest import Column
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.cli import main
from sparkring.pipelines.model.export import Exported, Format, Source, compare, export, write
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.serving import Predictor, load_trusted
from sparkring.training.model.calibration import Calibration
from tests.pipelines import served

ROWS, TRACKING = 100, TrackingConfig()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return served.model_folder(tmp_path / "model").uri


def tensors(predictor: Predictor) -> dict[str, torch.Tensor]:
    """What the features make of raw rows."""
    raw = served.pd.DataFrame(served.random_rows(ROWS))
    return predictor._raw_tensors(predictor.raw_arrays(raw))


def test_torch_loads_the_file_and_predicts_the_bits_of_the_model(folder: str, tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "new/a.pt2"
    assert export(folder, "pt2", out, TRACKING, said.append) == Exit.OK
    assert "6 inputs, any number of rows; on 260 random rows its predictions are the model's bit by bit" in said[0]
    predictor = load_trusted(folder)
    assert isinstance(predictor, Predictor)
    texts = {"sparkring.json": ""}
    program = torch.export.load(out, extra_files=texts)
    expected = predictor.predict(served.pd.DataFrame(served.random_rows(ROWS)))["prediction"].to_numpy()
    found = program.module()(tensors(predictor)).detach().numpy()
    assert found.tobytes() == expected.tobytes() and len(np.unique(found)) > 10
    about = json.loads(texts["sparkring.json"])
    assert [each["name"] for each in about["inputs"]] == [*tensors(predictor)]
    assert about["features"] == served.FEATURES["features"] and about["task"] == "binary"
    assert about["weights_sha256"] == open_storage(folder).sha256("weights.safetensors")


def test_a_runtime_of_onnx_predicts_as_the_model_does(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "a.onnx"
    assert main(["export", folder, "--format", "onnx", "--out", str(out)]) == Exit.OK
    predictor = load_trusted(folder)
    assert isinstance(predictor, Predictor)
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    given = {name: each.numpy() for name, each in tensors(predictor).items()}
    expected = predictor.predict(served.pd.DataFrame(served.random_rows(ROWS)))["prediction"].to_numpy()
    np.testing.assert_allclose(session.run(["prediction"], given)[0], expected, rtol=1e-5, atol=1e-5)
    metadata = {each.key: each.value for each in onnx.load(out).metadata_props}
    assert json.loads(metadata["sparkring.json"])["features"] == served.FEATURES["features"]


@pytest.mark.parametrize("form", ["pt2", "onnx"])
@pytest.mark.parametrize(
    "calibration",
    [Calibration(scale=0.5, shift=-1.0), Calibration.through(np.array([[-0.5, -3.0], [0.5, 0.0]]))],
    ids=["line", "curve"],
)
def test_the_file_of_a_calibrated_network_is_calibrated(
    form: Format, calibration: Calibration, folder: str, tmp_path: Path
) -> None:
    own = load_trusted(folder).predict(served.RAW)["prediction"]
    calibration.write(open_storage(folder))
    calibrated, said = load_trusted(folder).predict(served.RAW)["prediction"], list[str]()
    assert (np.abs(calibrated - own) > 0.01).any()
    assert export(folder, form, tmp_path / "out", TRACKING, said.append) == Exit.OK
    assert "its predictions are the model's" in said[0]


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_a_language_model_takes_rows_of_any_length(form: Format, tmp_path: Path) -> None:
    served.text_folder(tmp_path)
    said: list[str] = []
    assert export(str(tmp_path), form, tmp_path / "out", TRACKING, said.append) == Exit.OK
    assert "its predictions are the model's" in said[0]


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1) if x.sum() > 0 else x.mean(dim=1)


class Remembers(torch.nn.Module):
    """Another function on each call: what no file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sum(dim=1) * self.calls


def source(module: torch.nn.Module) -> Source:
    columns = [Column(name="x", dtype="float32", layout="vector", shape=(2,), nulls="mask")]
    exported = Exported(module, lambda columns: (columns["x"],), lambda outputs: outputs)
    return Source(exported, columns, {"model": "models:/a/1"})


class Bright(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.float().mean(dim=(1, 2, 3))


def test_images_are_pixels(tmp_path: Path) -> None:
    column = Column(name="image", dtype="binary", layout="binary", shape=(4, 5, 3))
    exported = Exported(Bright(), lambda columns: (columns["image"],), lambda outputs: outputs)
    made = Source(exported, [column], {})
    write(made, "onnx", path := tmp_path / "a.onnx")
    assert compare(made, "onnx", path)[0] == ""
    assert made.describe()["inputs"] == [{"name": "image", "dtype": "uint8", "shape": [4, 5, 3]}]
    assert made.example(8)["image"].float().max() > 200


class Sum(torch.nn.Module):
    """The sum of a linear layer over the columns; torch calls what its operations make `cat`, `linear` and `sum_1`."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.layer = names, torch.nn.Linear(len(names), 3)

    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(torch.cat([columns[name].unsqueeze(1) for name in self.names], 1)).sum(1)


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_columns_may_have_the_names_that_torch_gives_to_what_it_computes(form: Format, tmp_path: Path) -> None:
    names = ["cat", "linear", "sum_1", "val_0"]
    columns = [Column(name=name, dtype="float32") for name in names]
    module = Exported(Sum(names), lambda found: (found,), lambda output: output)
    made = Source(module, columns, {"model": "m"})
    write(made, form, tmp_path / "out")
    assert compare(made, form, tmp_path / "out")[0] == ""


def test_code_that_cannot_be_traced_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models:/a/1.*\n.*cannot be exported to pt2: .*must\s+not branch on values"):
        write(source(Branches()), "pt2", tmp_path / "a.pt2")


def test_a_file_that_computes_something_else_is_not_written(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(made := source(Remembers()), "pt2", path := tmp_path / "a.pt2")
    problem, _ = compare(made, "pt2", path)
    assert problem == "the pt2 file computes something else than the model on 2 rows; nothing is written"
    monkeypatch.setattr("sparkring.pipelines.model.export.compare", lambda *_: (problem, ""))
    said: list[str] = []
    out = tmp_path / "b.pt2"
    assert export(folder, "pt2", out, TRACKING, said.append) == Exit.QUALITY
    assert problem in said[0] and not out.exists()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"target": "nowhere"}, StoredError, "no model"),
        ({"out": "taken"}, ConfigError, "taken: exists"),
        ({"form": "onnx"}, ConfigError, r"--format onnx needs onnxruntime: pip install 'sparkring\[onnx\]'"),
    ],
)
def test_what_cannot_be_exported_is_said_at_once(
    changed: dict[str, Any],
    error: type[Exception],
    words: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("mine")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    given = {"target": folder, "form": "pt2", "out": "a.pt2"} | changed
    with pytest.raises(error, match=words):
        export(given["target"], given["form"], Path(given["out"]), TRACKING, print)  # type: ignore[arg-type]
    assert Path("taken").read_text() == "mine"
