"""A model of trees predicts from raw rows what its training saw, and is written as XGBoost's own file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import xgboost

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.pipelines.model import model_start
from sparkring.pipelines.model.export import export
from sparkring.pipelines.model.model_start import OF_TREES, resolve_model_start, start_problems
from sparkring.pipelines.model.sources import model_sources, requirements
from sparkring.pipelines.promotion.champion import predict_test_rows, read_champion
from sparkring.pipelines.serving import Predictor, load_trusted
from sparkring.pipelines.tracking.alias import Version
from sparkring.pipelines.tracking.store.fetch import RegisteredModel
from sparkring.pipelines.validate import recipe as recipe_module
from sparkring.training.data.features.transform import apply_numpy
from sparkring.training.model.calibration import Calibration
from sparkring.training.model.folder import describe_model, model_files, weights_sha256
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.model.starting import starting_model
from sparkring.training.models.warm_start import WarmStartError
from sparkring.training.trees.columns import TreeColumns, seen_by
from sparkring.training.trees.model import write_trees
from tests.pipelines import served
from tests.training.trees.tables import write_homes

CONFIG = RunConfig.model_validate({"name": "homes", "dataset": "somewhere", "model": {"family": "trees"}})
CODES = {None: np.nan, "Bern": 1, "Oslo": 2, "Rome": 3, "Lima": 4}


def raw_rows(folder: Path) -> pd.DataFrame:
    return pq.read_table(folder / "test.parquet", columns=["price", "city", "area", "place"]).to_pandas()


def matrix(rows: pd.DataFrame) -> np.ndarray:
    """The rows as a person would give them to the library."""
    city = [CODES.get(None if pd.isna(name) else name, 1) for name in rows["city"]]
    return np.column_stack([rows["price"], city, rows["area"], np.stack(rows["place"])]).astype(np.float32)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_homes(tmp_path / "table")


@pytest.fixture
def model(tmp_path: Path, table: Path) -> Storage:
    """A model folder as training leaves it."""
    manifest, folder = read_manifest(open_storage(str(table))), open_storage(str(tmp_path / "model"))
    seen = seen_by(CONFIG.model, manifest)
    columns = TreeColumns.of(seen, pick_columns(seen, CONFIG.model).features)
    rows, labels = matrix(raw_rows(table)), pq.read_table(table / "test.parquet")["label"].to_numpy()
    data = xgboost.QuantileDMatrix(
        rows, labels, feature_names=columns.names, feature_types=columns.types, enable_categorical=True
    )
    write_trees(folder, xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 20))
    describe_model(folder, CONFIG, manifest)
    return folder


def predictor(model: Storage) -> Predictor:
    found = load_trusted(model.uri)
    assert isinstance(found, Predictor)
    return found


def test_raw_rows_are_predicted_as_by_the_library_alone(model: Storage, table: Path) -> None:
    rows, trees = raw_rows(table), predictor(model)
    alone = xgboost.Booster(model_file=f"{model.uri}/trees.ubj").inplace_predict(matrix(rows))
    found = trees.predict(rows)["prediction"].to_numpy()
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert len(np.unique(found)) > 50
    stored = trees.scores_of_stored(pq.read_table(table / "test.parquet", columns=trees.stored_columns))
    assert found.tobytes() == stored.tobytes(), "a raw row is to the model what a stored one is"


def test_a_null_is_missing_and_a_category_never_seen_is_one_outside_the_list(model: Storage) -> None:
    trees, place = predictor(model), [0.0, 0.0]
    odd = pd.DataFrame({"price": [None, 3.0], "city": ["Atlantis", None], "area": [None, 1.0], "place": [place, place]})
    bern = odd.assign(city=["Bern", None])
    found = trees.predict(odd)["prediction"].to_numpy()
    assert np.isfinite(found).all() and found.tobytes() == trees.predict(bern)["prediction"].to_numpy().tobytes()
    np.testing.assert_allclose(
        found, xgboost.Booster(model_file=f"{model.uri}/trees.ubj").inplace_predict(matrix(odd)), rtol=1e-6
    )


def test_nulls_of_numbers_and_of_cyclic_features_are_missing_and_others_unscaled() -> None:
    features = seen_by(CONFIG.model, served.manifest()).features
    found = apply_numpy(features, {"carrier": ["UA"] * 2, "month": [1] * 2, "wind": [7.5, None], "hour": [6.0, None]})
    np.testing.assert_array_equal(found["wind"], np.array([7.5, np.nan], np.float32))
    np.testing.assert_array_equal(found["hour_sin"], np.array([1.0, np.nan], np.float32))
    assert np.isnan(found["hour_cos"]).tolist() == [False, True]


def test_a_model_has_its_own_files_and_their_hash(model: Storage) -> None:
    assert model_files(model) == ["config.json", "manifest.json", "trees.ubj"]
    assert weights_sha256(model) == model.sha256("trees.ubj")


def test_damaged_trees_are_refused(model: Storage) -> None:
    data = model.read_bytes("trees.ubj")
    model.put_atomic("trees.ubj", data[: len(data) // 2])
    with pytest.raises(StoredError, match=r"trees\.ubj: no trees of XGBoost"):
        load_trusted(model.uri)
    model.delete("trees.ubj")
    with pytest.raises(StoredError, match="it has no"):
        load_trusted(model.uri)


def test_trees_of_other_columns_are_refused(model: Storage) -> None:
    other = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"inputs": ["area"]})})
    model.put_atomic("config.json", json.dumps(other.model_dump(mode="json")).encode())
    with pytest.raises(StoredError, match=r"its columns are \['price', .* those of the folder's manifest \['area'\]"):
        load_trusted(model.uri)


def test_trees_of_another_task_are_refused(model: Storage) -> None:
    other = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"task": "regression"})})
    model.put_atomic("config.json", json.dumps(other.model_dump(mode="json")).encode())
    with pytest.raises(StoredError, match=r"objective binary:logistic; model\.task = 'regression' .* reg:squarederror"):
        load_trusted(model.uri)


@pytest.mark.parametrize("form", [None, "ubj", "json"])
def test_the_exported_file_is_the_librarys_own(model: Storage, table: Path, tmp_path: Path, form: str | None) -> None:
    out, said = tmp_path / f"out.{form or 'ubj'}", list[str]()
    assert export(model.uri, form, out, TrackingConfig(), said.append) == 0  # type: ignore[arg-type]
    assert said == [f"{model.uri}: {out}: 20 rounds over 5 columns, as XGBoost's own file"]
    booster = xgboost.Booster(model_file=out)
    rows = raw_rows(table)
    np.testing.assert_allclose(
        booster.inplace_predict(matrix(rows)), predictor(model).predict(rows)["prediction"], rtol=1e-6
    )
    about = json.loads(booster.attr("sparkring") or "")
    assert about["features"][1]["values"] == ["Oslo", "Rome", "Lima"] and about["task"] == "binary"


def test_an_exported_file_says_that_it_is_not_calibrated_and_how_to_do_it(model: Storage, tmp_path: Path) -> None:
    Calibration(scale=0.5, shift=-1.0).write(model)
    out, said = tmp_path / "out.ubj", list[str]()
    assert export(model.uri, None, out, TrackingConfig(), said.append) == 0
    assert said[0].endswith("own file, without the calibration, which its attribute `sparkring` describes")
    rows = pd.DataFrame({"price": [3.0], "city": ["Oslo"], "area": [1.0], "place": [[0.0, 0.0]]})
    booster = xgboost.Booster(model_file=out)
    told = json.loads(booster.attr("sparkring") or "")["calibration"]
    odds = booster.inplace_predict(matrix(rows), predict_type="margin")
    by_hand = 1 / (1 + np.exp(-(told["scale"] * odds + told["shift"])))
    np.testing.assert_allclose(predictor(model).predict(rows)["prediction"], by_hand, rtol=1e-6)


def test_a_format_of_networks_is_refused(model: Storage, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--format pt2: a model of family trees is written as ubj or json"):
        export(model.uri, "pt2", tmp_path / "x.pt2", TrackingConfig(), print)


def test_what_it_takes_to_load_the_model_travels_with_it() -> None:
    sources = model_sources(CONFIG)
    assert "sparkring/training/trees/model.py" in sources.files
    assert any(line.startswith("xgboost") for line in requirements(sources.packages))
    assert "xgboost" not in model_sources(CONFIG.model_copy(update={"model": CONFIG.model.model_copy(
        update={"family": "net"})})).packages  # fmt: skip


def test_a_network_does_not_start_with_trees(model: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the registry are known by their engine, before their files are fetched."""
    net = RunConfig.model_validate({"name": "n", "dataset": "d", "model": {"start": model.uri}})
    (problem,) = start_problems(net).recipe
    assert problem.startswith(f"model.start.weights = {model.uri!r}: is of family trees")
    with pytest.raises(ConfigError, match="is of family trees, whose file has no tensors"):
        resolve_model_start(Resolved(net, {}), served.manifest(), open_storage(str(tmp_path / "run")))
    uri = "models:/houses@champion"
    for engine, is_refused in (("xgboost", True), ("horovod", False)):
        found = RegisteredModel("models:/houses/1", "houses", "1", "r", "", (), {"sparkring.engine": engine}, 0)
        monkeypatch.setattr(model_start, "_find", lambda config, start, found=found: found)
        registered = RunConfig.model_validate({"name": "n", "dataset": "d", "model": {"start": uri}})
        problems = start_problems(registered).recipe
        assert problems == [f"model.start.weights = {uri!r}: {OF_TREES}"] * is_refused


def test_a_network_does_not_follow_a_champion_of_trees(model: Storage) -> None:
    start = WarmStartConfig(model=model.uri)
    net = RunConfig.model_validate({"name": "n", "dataset": "d"})
    with pytest.raises(WarmStartError, match=r"trained with model.family = 'trees', the recipe says 'net'"):
        starting_model(net, start)


def test_trees_without_their_package_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "is_installed", lambda name: False)
    problems = recipe_module.recipe_problems(CONFIG)
    (problem,) = problems.recipe
    assert problem == "model.family = 'trees': needs XGBoost, which is not installed: pip install 'sparkring[trees]'"


@pytest.mark.parametrize("part", ["package", "library"])
def test_trees_whose_package_does_not_load_are_refused_by_name(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "xgboost"
    broken.mkdir()
    fails = "raise OSError('libgomp.so.1: cannot open shared object file')\n"
    (broken / "__init__.py").write_text(fails if part == "package" else "")
    if part == "library":
        (broken / "lib").mkdir()
        (broken / "lib/libxgboost.so").write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.split(".")[0] == "xgboost"]:
        monkeypatch.delitem(sys.modules, name)
    (problem,) = recipe_module.trees_problems(CONFIG)
    why = "libgomp.so.1: cannot open shared object file" if part == "package" else f"{broken}/lib/libxgboost.so: "
    assert problem.startswith(f"model.family = 'trees': XGBoost's import fails: OSError: {why}")
    assert problem.endswith("; pip install --force-reinstall 'sparkring[trees]'")


def test_a_champion_of_trees_scores_the_rows_of_another_dataset(model: Storage, tmp_path: Path) -> None:
    """Whatever family is trained today; by the champion's own codes."""
    folder = open_storage(str(write_homes(tmp_path / "now")))
    manifest = read_manifest(folder)
    states = [dict(state) for state in manifest.features["features"]]
    states[1]["values"] = ["Bern", "Lima", "Rome", "Oslo"]
    now = Dataset(manifest.model_copy(update={"features": manifest.features | {"features": states}}), folder)
    champion = read_champion(Version("homes", "1", at_ms=1), model, CONFIG)
    net = RunConfig.model_validate({"name": "homes", "dataset": "somewhere"})
    found = predict_test_rows(champion, net, now, split_rows(now, "test", net.data, []))
    expected = predictor(model).predict(raw_rows(tmp_path / "now"))["prediction"].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
