"""The recorded sample: raw rows of held-out files, and predictions that the raw rows give again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest, SplitInfo
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.model.pack import add_sample, pack_model
from sparkring.pipelines.model.sample import PREDICTIONS, ROWS, first_rows, sample_of
from sparkring.pipelines.serving import Predictor, make_predictor
from sparkring.training.model.folder import CONFIG as CONFIG_FILE
from sparkring.training.model.folder import DIGESTS, changed_files, describe_model, write_digests
from sparkring.training.model.recipe_model import build_model
from tests.helpers.datasets import listed
from tests.pipelines.served import CONFIG, FEATURES, export, manifest, model_folder

PASSED = {
    "name": "level",
    "kind": "passthrough",
    "column": "lvl",
    "dtype": None,
    "shape": None,
    "nulls": "fill",
    "fill": 7,
}


@pytest.fixture
def dataset(tmp_path: Path) -> tuple[DatasetManifest, Storage]:
    """Three files of test rows, one of them empty, and one of the validation split."""
    folder, files = tmp_path / "dataset", []
    folder.mkdir()
    for split, part, count in (("test", 0, 3), ("test", 1, 0), ("test", 2, 4), ("valid", 0, 5)):
        table = pa.table(
            {
                "carrier": pa.array([None, "UA", "ZZ", "B6", "UA"][:count], pa.string()),
                "month": pa.array([1, None, 2, 7, 1][:count], pa.int32()),
                "wind": pa.array([1.5, 2.0, None, -3.0, float(part)][:count], pa.float64()),
                "hour": pa.array([0, 6, 12, None, 23][:count], pa.int32()),
                "level": pa.array([4, None, part, 9, 1][:count], pa.int32()),
                "late": pa.array([0] * count, pa.int8()),
            }
        )
        path = folder / f"{split}-{part}.parquet"
        pq.write_table(table, path)
        files.append(listed(folder, path, split))
    column = Column(name="level", dtype="int32", logical="int", nulls="fill", fill=7)
    features = FEATURES | {"inputs": FEATURES["inputs"] | {"lvl": "int"}, "features": [*FEATURES["features"], PASSED]}
    made = manifest().model_copy(
        update={
            "columns": (*manifest().columns, column),
            "features": features,
            "files": tuple(files),
            "splits": {"test": SplitInfo(rows=7, files=3), "valid": SplitInfo(rows=5, files=1)},
        }
    )
    return DatasetManifest.model_validate(made.model_dump()), open_storage(str(folder))


@pytest.fixture
def model(dataset: tuple[DatasetManifest, Storage], tmp_path: Path) -> Storage:
    return model_folder(tmp_path / "run", described=dataset[0])


def test_raw_rows_give_the_recorded_predictions(dataset: tuple[DatasetManifest, Storage], model: Storage) -> None:
    predictor = make_predictor(model)
    assert isinstance(predictor, Predictor)
    rows, predictions = sample_of(CONFIG, *dataset, predictor)
    assert rows.column_names == ["carrier", "month", "wind", "hour", "lvl"] and len(rows) == 7 + 5  # 16 are asked for
    assert rows["lvl"].to_pylist()[:3] == [4, None, 0]
    found = predictor.predict(rows.to_pandas(integer_object_nulls=True))["prediction"].tolist()
    assert found == predictions["prediction"].to_pylist() and len(set(found)) > 5


@pytest.mark.parametrize(("asked", "levels"), [(2, [4, None]), (5, [4, None, 0, 4, None])])
def test_only_as_many_rows_are_taken_as_asked_for(
    dataset: tuple[DatasetManifest, Storage], asked: int, levels: list[int | None]
) -> None:
    assert first_rows(CONFIG.train, *dataset, ["level"], asked)["level"].to_pylist() == levels


def test_a_packed_model_holds_its_code_and_its_sample(
    dataset: tuple[DatasetManifest, Storage], model: Storage, tmp_path: Path
) -> None:
    packed = pack_model(CONFIG, Dataset(*dataset), model, tmp_path / "packed")
    assert {path.name for path in packed.data.iterdir()} == {
        *("config.json", "manifest.json", "weights.safetensors"),
        *(ROWS, PREDICTIONS, DIGESTS),
    }
    assert (packed.code / "sparkring/pipelines/serving.py").exists() and any(
        "torch==" in r for r in packed.requirements
    )
    without = CONFIG.model_copy(update={"tracking": CONFIG.tracking.model_copy(update={"sample_rows": 0})})
    bare = pack_model(without, Dataset(*dataset), model, tmp_path / "bare")
    assert not (bare.data / ROWS).exists()


def test_a_model_that_cannot_be_tried_is_registered_with_a_warning(
    dataset: tuple[DatasetManifest, Storage], model: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed = pack_model(CONFIG, Dataset(*dataset), model, tmp_path / "packed")
    (packed.data / ROWS).unlink()
    (packed.data / "weights.safetensors").write_bytes(b"")
    add_sample(CONFIG, Dataset(*dataset), packed.data)
    assert "registered without a sample of predictions: " in caplog.text and not (packed.data / ROWS).exists()


def test_the_sample_of_a_language_model_is_a_prompt(tmp_path: Path) -> None:
    text = {"tokenizer_json": "", "size": 256, "vocab_size": 258, "end_id": 256, "pad_id": 257, "seq_len": 16,
            "splits": {}}  # fmt: skip
    tokens = Column(name="tokens", dtype="int32", layout="vector", shape=(16,), cardinality=258)
    described = manifest().model_copy(update={"columns": (tokens,), "features": {}, "text": text})
    small = {"width": 16, "layers": 1, "heads": 2}
    model = {"factory": "sparkring.training.models.gpt:GPT", "task": "language_model", "args": small}
    config = RunConfig.model_validate({"name": "text", "model": model, "report": {"sample_prompt": "def f("}})
    folder = export(tmp_path, build_model(config, described))
    describe_model(folder, config, described)
    writer = make_predictor(folder)
    rows, predictions = sample_of(config, described, folder, writer)
    assert rows.to_pylist() == [{"prompt": "def f(", "tokens": 20, "temperature": 0.0}]
    assert writer.predict(rows.to_pandas())["text"].tolist() == predictions["text"].to_pylist() != [""]


def test_a_changed_missing_or_added_file_of_a_model_is_named(model: Storage) -> None:
    assert changed_files(model) == []  # of before this was recorded
    write_digests(model)
    assert changed_files(model) == []
    weights = model.read_bytes("weights.safetensors")
    model.put_atomic("weights.safetensors", bytes([1, *weights[1:]]))
    assert changed_files(model) == ["weights.safetensors"]
    model.put_atomic("calibration.json", b"{}")
    model.delete(CONFIG_FILE)
    assert changed_files(model) == ["calibration.json", "config.json", "weights.safetensors"]


SHA = "ab" * 32


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"a": 1}', '{"a": "xyz"}', f'{{"../a": "{SHA}"}}', f'{{"/etc/a": "{SHA}"}}', "\x00"],
)
def test_a_damaged_record_of_digests_is_one_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "sha256.json").write_text(text)
    with pytest.raises(StoredError, match=r"sha256\.json: "):
        changed_files(open_storage(str(tmp_path)))
