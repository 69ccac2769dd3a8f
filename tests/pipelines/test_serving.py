from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from sparkring.conf.blocks.model import StartConfig
from sparkring.conf.blocks.predict import PredictConfig
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.manifest import Column
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.model.export import export
from sparkring.pipelines.model.model_start import copy_weights
from sparkring.pipelines.predict.model import get_model
from sparkring.pipelines.promotion.champion import NotComparable, read_champion
from sparkring.pipelines.serving import (
    BATCH_ROWS,
    _load_pyfunc,
    make_predictor,
    rows_at_once,
    signature_inputs,
    signature_outputs,
)
from sparkring.pipelines.tracking.alias import Version
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.model.folder import copy_model_files, weight_files, write_digests
from sparkring.training.model.starting import start_from
from sparkring.training.models.initial import InitialModel
from tests.pipelines.served import CONFIG, RAW, manifest, model_folder, random_rows, text_folder, trees_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_model_files(model_folder(tmp_path / "run"), open_storage(str(tmp_path / "model")))
    return tmp_path / "model"


def rewrite(folder: Path, **model: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= model
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["factory", "task"])
def test_a_model_folder_names_no_code_that_is_not_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """`subprocess:Popen` ran when MLflow loaded the model; importing a module runs its code too."""
    made = tmp_path / "made"
    (tmp_path / "planted.py").write_text(f"open({str(made)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rewrite(folder, **{key: "planted:Model"})
    with pytest.raises(StoredError, match=rf"config\.json: model\.{key} = 'planted:Model'.*MODULES=planted"):
        _load_pyfunc(str(folder))
    assert not made.exists()
    monkeypatch.setenv("SPARKRING_MODEL_MODULES", "subprocess,os")
    call = {"factory": "subprocess:Popen", "task": "os:system"}[key]
    rewrite(folder, **{key: call} | ({"args": {"args": ["touch", str(made)]}} if key == "factory" else {}))
    with pytest.raises(ValueError, match=r"not a class|must|does not take"):
        _load_pyfunc(str(folder))
    assert not made.exists()


def test_images_are_scored_few_at_a_time() -> None:
    number, image = Column(name="x", dtype="float32"), Column(name="p", dtype="binary", layout="binary")
    assert rows_at_once([number]) == BATCH_ROWS
    assert rows_at_once([number, image.model_copy(update={"shape": (1024, 1024, 4)})]) == 8
    assert rows_at_once([image.model_copy(update={"shape": (1 << 20, 1024, 3)})]) == 1


def test_a_decoder_is_code_that_must_be_trusted_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["data"]["decoders"] = {"photo": "planted:decode", "map": "image"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StoredError, match=r"data\.decoders\.photo = 'planted:decode'.*MODULES=planted"):
        _load_pyfunc(str(folder))
    monkeypatch.setenv("SPARKRING_MODEL_MODULES", "planted")
    assert _load_pyfunc(str(folder)) is not None, "no feature of its is an image: nothing is imported"


def test_only_modules_that_travel_with_the_model_are_trusted_without_asking(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow puts a model's folder `code` on Python's path before it calls the loader."""
    code, own = folder.parent / "code", "class Own:\n    pass\n"
    (code / "bakery").mkdir(parents=True)
    (code / "bakery/net.py").write_text(own)
    rewrite(folder, factory="bakery.net:Own")
    with pytest.raises(StoredError, match=r"model\.factory = 'bakery\.net:Own': a stored file may name"):
        _load_pyfunc(str(folder))  # not on the path
    monkeypatch.syspath_prepend(code)
    with pytest.raises(
        ValueError, match=r"'bakery\.net:Own'.*must|not a class|derived"
    ):  # imported: it is no module of torch
        _load_pyfunc(str(folder))
    rewrite(folder, factory="subprocess:Popen")
    with pytest.raises(StoredError, match=r"model\.factory = 'subprocess:Popen': a stored file may name"):
        _load_pyfunc(str(folder))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("config.json", b"", "config.json: "),
        ("config.json", b'{"name": "x", "gone": 1}', "gone = 1"),
        ("config.json", b'{"name": "x", "optim": {"lr": "1"}}', "optim.lr = '1'"),
        ("manifest.json", b"[]", "manifest.json: "),
        ("weights.safetensors", b"", "weights.safetensors: no weights"),
        ("weights.safetensors", b"PK\x03\x04", "weights.safetensors: no weights"),
        ("weights.safetensors", pickle.dumps({"a": 1}), "weights.safetensors: "),
        ("weights.safetensors", pickle.dumps(subprocess.run), "weights.safetensors: no weights"),
    ],
)
def test_a_damaged_model_folder_is_one_error_that_names_the_file(
    folder: Path, name: str, data: bytes, words: str
) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(StoredError, match=words):
        _load_pyfunc(str(folder))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"task": "sparkring.training.models.gpt:GPT"},
            r"config\.json .*model\.task = 'sparkring\.training\.models\.gpt:GPT': is .*not a class",
        ),
        (
            {"factory": "sparkring.training.models..x:X"},
            r"config\.json .*model\.factory = 'sparkring\.training\.models\.\.x:X': module",
        ),
        ({"task": "sparkring.training.models:__builtins__"}, r"config\.json .*model\.task = .*not a class"),
        ({"factory": "sparkring.training.models:__builtins__"}, r"config\.json .*model\.factory = .*not a class"),
        ({"args": {"width": 32}}, r"config\.json .*size mismatch"),
    ],
)
def test_a_model_folder_whose_parts_make_no_model_is_one_error(folder: Path, model: dict[str, Any], words: str) -> None:
    rewrite(folder, **model)
    with pytest.raises(StoredError, match=words) as caught:
        _load_pyfunc(str(folder))
    assert str(folder) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_column_of_more_codes_than_an_int32_has_is_refused_by_file_and_key(folder: Path) -> None:
    content = json.loads(manifest(1).to_json())
    content["columns"][0]["cardinality"] = 2**40
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(StoredError, match=r"manifest\.json: columns\.0\.cardinality = 1099511627776: .*less than"):
        _load_pyfunc(str(folder))


def test_a_table_larger_than_its_weights_is_refused_before_it_takes_memory(folder: Path) -> None:
    content = json.loads(manifest(1).to_json())
    content["columns"][0]["cardinality"] = 2**31 - 1
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(StoredError, match="size mismatch"):  # and not torch's, that it cannot allocate
        _load_pyfunc(str(folder))


def test_a_model_trained_compiled_serves_without_a_compiler(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["train"]["compile"] = True
    (folder / "config.json").write_text(json.dumps(config))
    model = _load_pyfunc(str(folder)).model
    assert not any("forward" in vars(module) or module._compiled_call_impl for module in model.modules())


def test_raw_rows_give_what_the_module_gives_for_their_features(folder: Path) -> None:
    predictor = _load_pyfunc(str(folder))
    columns = {
        "carrier": torch.tensor([2, 1, 0]),
        "month": torch.tensor([2, 3, 1]),
        "wind": torch.tensor([0.0, 0.0, 4.0]),
        "wind__null": torch.tensor([0.0, 1.0, 0.0]),
        "hour_sin": torch.sin(torch.tensor([0.0, 6.0, 23.0]) * 2 * torch.pi / 24),
        "hour_cos": torch.cos(torch.tensor([0.0, 6.0, 23.0]) * 2 * torch.pi / 24),
    }
    with torch.no_grad():
        expected = torch.sigmoid(predictor.model(columns).double()).numpy()
    assert predictor.predict(RAW)["prediction"].to_numpy() == pytest.approx(expected, rel=1e-6)
    assert len(set(expected.round(6))) == 3
    assert len(predictor.predict(RAW.iloc[:0])) == 0
    with pytest.raises(KeyError, match=r"'hour' needs the column 'hour'"):
        predictor.predict(RAW.drop(columns="hour"))
    # Nulls of `wind` were learned, so the column may be missing.
    without = predictor.predict(RAW.drop(columns="wind"))
    assert without.equals(predictor.predict(RAW.assign(wind=None))) and not without.equals(predictor.predict(RAW))


def test_text_where_a_number_must_be_is_refused_by_column(folder: Path) -> None:
    for given in (["1", 2.0, 3.0], ["1", None, 3.0], pd.Series(["1", "2", "3"])):
        with pytest.raises(ValueError, match=r"column 'wind': '1' is text where a number must be"):
            _load_pyfunc(str(folder)).predict(RAW.assign(wind=given))


def test_rows_without_a_finite_prediction_are_an_error_that_names_the_value(folder: Path) -> None:
    message = "1 of 3 rows have no finite prediction; the first is row 1 with wind = inf"
    with pytest.raises(ValueError, match=message):
        _load_pyfunc(str(folder)).predict(RAW.assign(wind=[1.0, float("inf"), None]))


def test_only_what_the_model_reads_is_needed(tmp_path: Path) -> None:
    """Of a recipe whose `model.inputs` names few of the dataset's features."""
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"inputs": ["carrier", "wind__null"]})})
    assert [column["name"] for column in signature_inputs(config, manifest())] == ["carrier", "wind"]


def test_rows_in_arrow_or_of_mixed_types_have_the_same_bits(folder: Path) -> None:
    """Over several batches; a list with a bool among numbers is no Arrow array, and is read value by value."""
    predictor, rows = _load_pyfunc(str(folder)), random_rows(2 * BATCH_ROWS + 3)
    one_by_one = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in rows.items()})
    expected = predictor.predict(one_by_one)["prediction"].to_numpy()
    assert len(np.unique(expected)) > 10
    typed = {name: [None if v is None else float(v) for v in rows[name]] for name in ("month", "wind", "hour")}
    columns = {"carrier": pa.array(rows["carrier"])} | {name: pa.array(values) for name, values in typed.items()}
    assert predictor.scores(columns, len(expected)).tobytes() == expected.tobytes()
    assert predictor.predict(pa.table(columns).to_pandas())["prediction"].to_numpy().tobytes() == expected.tobytes()
    whole = columns | {name: columns[name].cast(pa.int64()) for name in ("month", "hour")}
    assert predictor.scores(whole, len(expected)).tobytes() == expected.tobytes()
    predictor.tensor_rows = BATCH_ROWS  # tensors are made of so many rows at a time, not of all
    assert predictor.scores(whole, len(expected)).tobytes() == expected.tobytes()


def test_a_datasets_stored_rows_have_the_scores_of_the_raw_ones(folder: Path) -> None:
    predictor, rows = _load_pyfunc(str(folder)), random_rows(500)
    rows["wind"] = [None if v is None else float(v) for v in rows["wind"]]
    month = pa.array([None if v is None else int(v) for v in rows["month"]], pa.int32())
    columns = {"carrier": pa.array(rows["carrier"]), "month": month, "wind": pa.array(rows["wind"])}
    columns["hour"] = pa.array(rows["hour"], pa.int32())
    stored = pa.table(columns | {"carrier": columns["carrier"].dictionary_encode(), "other": month})
    assert sorted(predictor.stored_columns) == sorted(columns) == sorted(predictor.raw_columns)
    assert predictor.scores_of_stored(stored).tobytes() == predictor.scores(columns, 500).tobytes()
    assert len(predictor.scores_of_stored(stored.slice(0, 0))) == 0


def test_a_model_of_an_older_sparkring_serves_as_it_did(folder: Path) -> None:
    expected = _load_pyfunc(str(folder)).predict(RAW)
    (folder / "manifest.json").write_text(manifest(1).to_json())
    assert _load_pyfunc(str(folder)).predict(RAW).equals(expected)


def test_a_language_model_continues_prompts(tmp_path: Path) -> None:
    config, described = text_folder(tmp_path)
    writer = _load_pyfunc(str(tmp_path))
    rows = pd.DataFrame({"prompt": ["def f(", "def f(", "\u00e9", ""], "tokens": [5, 9, 40, None]})
    texts = writer.predict(rows)["text"].tolist()
    assert texts == writer.predict(rows)["text"].tolist()  # nothing random from call to call
    assert len({*texts}) > 1 and all(isinstance(t, str) for t in texts) and len(texts[1].encode()) >= 5
    greedy = writer.predict(rows.iloc[:2].assign(temperature=0.0))["text"].tolist()
    assert greedy[1].startswith(greedy[0].rstrip("\ufffd"))  # greedy: more tokens only lengthen it
    with pytest.raises(KeyError, match="'prompt'"):
        writer.predict(pd.DataFrame({"text": ["x"]}))
    assert [c["name"] for c in signature_inputs(config, described)] == ["prompt", "tokens", "temperature"]
    assert signature_outputs("language_model")[0]["name"] == "text"


def test_signature_says_what_raw_columns_are_needed() -> None:
    columns = {column["name"]: (column["type"], column["required"]) for column in signature_inputs(CONFIG, manifest())}
    assert columns == {
        "carrier": ("string", True),
        "month": ("any", True),
        "wind": ("any", False),  # nulls were learned
        "hour": ("any", True),
    }
    assert [each["name"] for each in signature_outputs("multilabel", [], ["a", "b"])] == ["label_a", "label_b"]
    assert signature_outputs("binary")[0]["name"] == "prediction" and signature_outputs("multiclass") == []


def test_the_registered_model_predicts_from_raw_rows_in_a_fresh_process(folder: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "mlflow")
    settings = TrackingConfig(experiment="serving", root=root, flush_every_s=0.05, system_metrics=False)
    info = ModelInfo(
        name="final", step=10, sha256="0" * 64, loader_module="sparkring.pipelines.serving", registered_model="flights",
        inputs=signature_inputs(CONFIG, manifest()), outputs=signature_outputs("binary"), alias="champion",
    )  # fmt: skip
    with Tracker(settings, job="j", name="flights") as tracker:
        tracker.model("job", folder, info)
        assert tracker.flush(180)
    expected = _load_pyfunc(str(folder)).predict(RAW)["prediction"].tolist()
    RAW.to_parquet(tmp_path / "raw.parquet")
    code = (
        "import json, mlflow, pandas, sys; mlflow.set_tracking_uri(sys.argv[1]);"
        "model = mlflow.pyfunc.load_model('models:/flights@champion');"
        "print(json.dumps(model.predict(pandas.read_parquet(sys.argv[2]))['prediction'].tolist()))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, settings.store_uri, str(tmp_path / "raw.parquet")],
        capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-6)


def export_model(folder: Path) -> None:
    export(str(folder), None, folder / "out", TrackingConfig(), lambda line: None)


def start_training(folder: Path) -> None:
    start = WarmStartConfig(model=str(folder))
    start_from(InitialModel(torch.nn.Module(), {}, {}), CONFIG, start, manifest(), rank=0)


def copy_weights_of(folder: Path) -> None:
    start = StartConfig(weights=str(folder))
    copy_weights(CONFIG, start, manifest(), open_storage(str(folder / "run")))


def read_as_champion(folder: Path) -> None:
    version = Version("m", "1", 0)
    read_champion(version, open_storage(str(folder)), CONFIG)


def score_by(folder: Path) -> None:
    block = PredictConfig.model_validate({"rows": "rows", "model": str(folder), "to": str(folder / "scored")})
    get_model(CONFIG, block, folder / "scratch")


@pytest.mark.parametrize(
    "reader",
    [
        *(lambda folder: _load_pyfunc(str(folder)), lambda folder: make_predictor(open_storage(str(folder)))),
        *(export_model, start_training, copy_weights_of, read_as_champion, score_by),
    ],
    ids=["pyfunc", "predictor", "export", "warm start", "model.start", "champion", "predict"],
)
@pytest.mark.parametrize("made", [model_folder, trees_folder])
@pytest.mark.parametrize("damaged", ["weights", "config.json", "manifest.json"])
def test_every_reader_refuses_a_model_with_one_changed_bit(
    tmp_path: Path, made: Callable[[Path], Storage], damaged: str, reader: Callable[[Path], object]
) -> None:
    model = made(tmp_path / "model")
    if made is trees_folder and reader in (start_training, copy_weights_of):
        pytest.skip("trees are no start of a training")
    write_digests(model)
    name = weight_files(model)[0] if damaged == "weights" else damaged
    data = bytearray(model.read_bytes(name))
    data[-5] ^= 1  # in the last tensor; of JSON in a number, a name or a blank
    model.put_atomic(name, bytes(data))
    with pytest.raises((StoredError, ConfigError, NotComparable)) as found:
        reader(tmp_path / "model")
    assert name in str(found.value), found.value


def test_a_model_without_a_record_of_its_files_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_folder(tmp_path / "model")
    _load_pyfunc(str(tmp_path / "model"))
    assert "has no sha256.json, as models of an older sparkring" in caplog.text
    write_digests(model)
    caplog.clear()
    _load_pyfunc(str(tmp_path / "model"))
    assert not caplog.text
