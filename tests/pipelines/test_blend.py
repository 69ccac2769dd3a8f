"""The model is a blend of a network and trees unless one of them is better alone by more than a standard error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xgboost

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION, TaskKind, task_kind
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.pipelines.job import blend
from sparkring.pipelines.job.blend import (
    FEWEST,
    PairedRows,
    better_blend,
    fit_share,
    is_behind,
    read_pairs,
)
from sparkring.pipelines.job.families import choose
from sparkring.pipelines.model.export import export
from sparkring.pipelines.model.model_start import start_problems
from sparkring.pipelines.model.sources import model_sources, requirements
from sparkring.pipelines.predict.model import load, pack
from sparkring.pipelines.promotion.champion import predict_test_rows, read_champion
from sparkring.pipelines.run.problems import Problems
from sparkring.pipelines.serving import BlendedPredictor, Predictor
from sparkring.pipelines.tracking.alias import Version
from sparkring.training.metrics import Rows, row_values
from sparkring.training.model.blend import Blend, after_link, before_link, read_blend
from sparkring.training.model.calibration import Calibration
from sparkring.training.model.folder import describe_model, model_files, read_model_folder, weights_sha256
from sparkring.training.model.recipe_model import build_model, pick_columns
from sparkring.training.model.starting import starting_model
from sparkring.training.trees.columns import TreeColumns, seen_by
from sparkring.training.trees.model import write_trees
from sparkring.training.worker.result import FamilyChoice, SplitScores, Trained
from tests.helpers.datasets import write_manifest
from tests.pipelines import served
from tests.pipelines.results import rank_result
from tests.training.trees.tables import homes, write_homes

ROWS = 4000
SHARES = [n / 20 for n in range(21)]
KINDS = (BINARY, MULTICLASS, MULTILABEL, REGRESSION, POISSON)


def paired(kind: TaskKind, rows: int = ROWS, net: float = 1.0, trees: float = 1.0, seed: int = 0) -> PairedRows:
    """Two models, each of which is off by an error of its own. net, trees: the errors' standard deviations."""
    draw = np.random.default_rng(seed)
    shape = {MULTICLASS: (rows, 3), MULTILABEL: (rows, 2)}.get(kind, (rows,))
    true = draw.normal(0, 1.5, shape)
    seen = [after_link(kind, true + draw.normal(0, each, shape)) for each in (net, trees)]
    chance, at = after_link(kind, true), draw.random((rows, 1))
    if kind is MULTICLASS:
        labels = (at > chance.cumsum(axis=1)).sum(axis=1).astype(float)
    elif kind is REGRESSION:
        labels = true + draw.normal(size=rows)
    else:
        labels = draw.poisson(chance).astype(float) if kind is POISSON else (draw.random(shape) < chance).astype(float)
    return PairedRows(kind, np.arange(rows), labels, *seen)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_predictions_are_mixed_before_the_link_function(kind: TaskKind) -> None:
    rows = paired(kind, 50)
    np.testing.assert_allclose(after_link(kind, before_link(kind, rows.net)), rows.net, rtol=1e-12)
    found = Blend(share=0.25).of(kind, rows.net, rows.trees)
    by_hand = {
        REGRESSION: lambda a, b: 0.25 * a + 0.75 * b,
        POISSON: lambda a, b: a**0.25 * b**0.75,
        MULTICLASS: lambda a, b: (p := a**0.25 * b**0.75) / p.sum(axis=1, keepdims=True),
    }.get(kind, lambda a, b: (p := a**0.25 * b**0.75) / (p + (1 - a) ** 0.25 * (1 - b) ** 0.75))
    np.testing.assert_allclose(found, by_hand(rows.net, rows.trees), rtol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not REGRESSION], ids=lambda kind: kind.name)
def test_probabilities_of_0_and_1_and_counts_of_0_are_mixed_to_numbers(kind: TaskKind) -> None:
    certain = np.array([[0.0, 1.0]] * 2) if kind in (MULTICLASS, MULTILABEL) else np.array([0.0, 1.0])
    found = Blend(share=0.5).of(kind, certain, certain[..., ::-1])
    assert np.isfinite(found).all() and (found >= 0).all()
    assert np.isnan(Blend(share=0.5).of(kind, certain * np.nan, certain)).all(), "no number is made of none"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_share_is_the_nearest_to_one_half_within_a_standard_error_of_the_least_loss(
    kind: TaskKind, swapped: bool
) -> None:
    rows = paired(kind, net=1.2 if swapped else 0.6, trees=0.6 if swapped else 1.2)
    loss = kind.metric("loss")
    values = [row_values(loss, Rows(kind.form, rows.labels, rows.blended(share))) for share in SHARES]
    best = min(range(21), key=lambda n: float(values[n].mean()))
    near = [
        share
        for share, each in zip(SHARES, values, strict=True)
        if (each - values[best]).mean() <= (each - values[best]).std() / ROWS**0.5
    ]
    found = fit_share(rows)
    assert found == min(near, key=lambda share: abs(share - 0.5)) and 0 < abs(found - 0.5) <= abs(SHARES[best] - 0.5)


def test_few_rows_leave_the_share_at_one_half_and_many_do_not() -> None:
    few, many = paired(BINARY, 150, net=0.6), paired(BINARY, 40_000, net=0.6)
    assert few.scores(few.net)["loss"] != few.scores(few.trees)["loss"] and fit_share(few) == 0.5
    assert fit_share(many) > 0.6


def test_predictions_that_are_no_numbers_make_no_blend() -> None:
    rows = paired(REGRESSION, 200)
    with pytest.raises(ValueError, match="no number"):
        fit_share(replace(rows, net=np.where(np.arange(200) == 7, np.nan, rows.net)))


@pytest.mark.parametrize(
    ("metric", "value", "best", "half_width", "behind"),
    [
        ("loss", 0.5, 0.6, None, False),
        ("loss", 0.6, 0.5, None, True),
        ("auc", 0.6, 0.5, None, False),
        ("auc", 0.5, 0.5, None, False),
        ("loss", 0.6, 0.5, 0.2, False),  # a standard error of 0.102
        ("loss", 0.6, 0.5, 0.19, True),
        ("auc", 0.5, 0.6, 0.19, True),
        ("auc", float("nan"), 0.6, 1.0, True),
    ],
)
def test_a_blend_is_behind_by_more_than_a_standard_error(
    metric: str, value: float, best: float, half_width: float | None, behind: bool
) -> None:
    assert is_behind(metric, value, best, half_width) == behind


def test_rows_count_by_their_weights_and_too_few_say_too_little() -> None:
    rows = paired(BINARY, net=0.3, trees=2.0)
    other = paired(BINARY, net=2.0, trees=0.3, seed=1)
    both = PairedRows(
        BINARY,
        np.arange(2 * ROWS),
        *(np.concatenate([getattr(each, name) for each in (rows, other)]) for name in ("labels", "net", "trees")),
    )
    of_first = replace(both, weights=np.repeat([1.0, 0.0], ROWS))
    assert fit_share(of_first) == fit_share(rows) > fit_share(both) > fit_share(other)
    assert fit_share(replace(rows, weights=np.full(ROWS, 7.0))) == fit_share(rows), "whatever weighs all rows alike"
    few = replace(rows, weights=(np.arange(ROWS) < FEWEST - 1) * 2.0)
    with pytest.raises(ValueError, match=f"{FEWEST - 1} validation rows are too few"):
        fit_share(few)
    fit_share(replace(rows, weights=(np.arange(ROWS) < FEWEST) * 2.0))
    for huge in (1e6, 1e200):
        with pytest.raises(ValueError, match="2 validation rows are too few, by their weights"):
            fit_share(replace(rows, weights=np.where(np.arange(ROWS) < 2, huge, 1.0)))


def test_one_row_has_no_interval() -> None:
    rows = paired(BINARY, 50, net=0.3, trees=2.0)
    assert rows.half_width("loss", rows.net, rows.trees)
    for weights in (np.eye(1, 50)[0], np.zeros(50)):
        assert replace(rows, weights=weights).half_width("loss", rows.net, rows.trees) is None
    one = PairedRows(BINARY, rows.ids[:1], rows.labels[:1], rows.net[:1], rows.trees[:1])
    assert one.half_width("loss", one.net, one.trees) is None, "its resamples are all alike"


def write_rows(folder: Storage, file: str, rows: PairedRows, predictions: np.ndarray) -> str:
    """As two ranks write them, in their own order."""
    order = np.random.default_rng(1).permutation(len(rows.ids))
    columns = {"id": rows.ids, "prediction": predictions, "label": rows.labels}
    columns |= {} if rows.weights is None else {"weight": rows.weights}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: pa.array(values[order]) for name, values in columns.items()}), sink)
    folder.put_atomic(file, sink.getvalue().to_pybytes())
    return file


def test_both_families_must_have_scored_the_same_rows(tmp_path: Path) -> None:
    folder, rows = open_storage(str(tmp_path)), replace(paired(BINARY, 200), weights=np.arange(200.0))
    net, trees = (
        write_rows(folder, "net.parquet", rows, rows.net),
        write_rows(folder, "trees.parquet", rows, rows.trees),
    )
    found = read_pairs(folder, BINARY, [net], [trees])
    assert found is not None
    for name in ("ids", "labels", "net", "trees", "weights"):
        np.testing.assert_array_equal(getattr(found, name), getattr(rows, name))
    fewer = replace(rows, ids=rows.ids[:-1], labels=rows.labels[:-1], weights=rows.weights[:-1])  # type: ignore[index]
    less = write_rows(folder, "less.parquet", fewer, rows.trees[:-1])
    assert read_pairs(folder, BINARY, [net], [less]) is None and read_pairs(folder, BINARY, [], [trees]) is None


NET_ARGS = {"width": 16, "blocks": 1}


def write_blend(run: Storage, table: Path, share: float = 0.25, task: str = "binary") -> Storage:
    """Models of both families of homes as their trainings leave them, in net/ and trees/, and a blend in model/."""
    manifest = read_manifest(open_storage(str(table)))
    config = RunConfig.model_validate(
        {"name": "homes", "dataset": str(table), "model": {"family": "both", "args": NET_ARGS, "task": task}}
    )
    torch.manual_seed(0)
    of_net = config.model_copy(update={"model": config.model.model_copy(update={"family": "net"})})
    of_trees = config.model_copy(update={"model": config.model.model_copy(update={"family": "trees"})})
    model = build_model(of_net, manifest)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    net = served.export(Path(run.at("net/model").root), model)
    describe_model(net, of_net, manifest)
    seen = seen_by(of_trees.model, manifest)
    columns = TreeColumns.of(seen, pick_columns(seen, of_trees.model).features)
    rows = pd.DataFrame({k: v.to_pandas() for k, v in homes(600, 3, task).items()})
    city = rows["city"].map({"Oslo": 2, "Rome": 3, "Lima": 4}).fillna(1).where(rows["city"].notna())
    matrix = np.column_stack([rows["price"], city, rows["area"]]).astype(np.float32)
    data = xgboost.QuantileDMatrix(
        matrix, rows["label"], feature_names=columns.names, feature_types=columns.types, enable_categorical=True
    )
    objective = {"binary": "binary:logistic", "poisson": "count:poisson", "regression": "reg:squarederror"}[task]
    trees = run.at("trees/model")
    write_trees(trees, xgboost.train({"objective": objective, "nthread": 1}, data, 8))
    describe_model(trees, of_trees, manifest)
    folder = run.at("model")
    for source, name in ((net, "weights.safetensors"), (trees, "trees.ubj")):
        folder.put_atomic(name, source.read_bytes(name))
    Blend(share=share).write(folder)
    describe_model(folder, config, manifest)
    return folder


def raw_rows(folder: Path) -> pd.DataFrame:
    return pq.read_table(folder / "test.parquet", columns=["price", "city", "area"]).to_pandas()


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


def write_table(folder: Path) -> Path:
    """Homes without the column that the built-in network cannot take."""
    manifest = read_manifest(open_storage(str(write_homes(folder))))
    states = [state for state in manifest.features["features"] if state["name"] != "place"]
    columns = tuple(column for column in manifest.columns if column.name != "place")
    changed = {"columns": columns, "features": manifest.features | {"features": states}}
    write_manifest(folder, manifest.model_copy(update=changed))
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table")


def parts_of(run: Storage) -> tuple[Any, Any]:
    return load(Path(run.at("net/model").root)), load(Path(run.at("trees/model").root))


@pytest.mark.parametrize("task", ["binary", "regression", "poisson"])
def test_a_blend_predicts_the_mix_of_what_its_parts_predict(task: str, run: Storage, table: Path) -> None:
    folder = write_blend(run, table, 0.25, task)
    found, (net, trees) = load(Path(folder.root)), parts_of(run)
    assert isinstance(found, BlendedPredictor) and isinstance(net, Predictor)
    rows = raw_rows(table).assign(city=["Bern", None, "Atlantis", "Rome"] * 50)
    expected = Blend(share=0.25).of(task_kind(task), *(each.predict(rows)["prediction"] for each in (net, trees)))
    served_rows = found.predict(rows)["prediction"].to_numpy()
    np.testing.assert_array_equal(served_rows, expected)
    assert found.raw_columns == ["price", "city", "area"] and not found.refuses_null
    stored = pq.read_table(table / "test.parquet", columns=found.stored_columns)
    by_rows = found.predict(raw_rows(table))["prediction"].to_numpy()
    np.testing.assert_array_equal(found.scores_of_stored(stored), by_rows)


@pytest.mark.parametrize("task", ["binary", "regression", "poisson"])
def test_contributions_of_a_blend_sum_to_its_raw_prediction(task: str, run: Storage, table: Path) -> None:
    folder = write_blend(run, table, 0.25, task)
    if task == "binary":
        Calibration(scale=0.5, shift=-0.7).write(folder)
    found, (net, trees), rows = load(Path(folder.root)), parts_of(run), raw_rows(table)
    made = found.contributions(found.raw_arrays(rows), len(rows))
    assert not made.misses().any()
    raw = before_link(task_kind(task), found.predict(rows)["prediction"].to_numpy())
    np.testing.assert_allclose((made.base + made.values.sum(axis=1))[:, 0], raw, rtol=1e-4, atol=1e-4)
    ours, theirs = (each.contributions(each.raw_arrays(rows), len(rows)) for each in (net, trees))
    scale = 0.5 if task == "binary" else 1.0
    np.testing.assert_allclose(made.values, scale * (0.25 * ours.values + 0.75 * theirs.values), rtol=1e-9, atol=1e-12)


def test_features_of_parts_that_have_another_order_are_matched_by_name(run: Storage, table: Path) -> None:
    _, trees = parts_of(run) if write_blend(run, table) else (None, None)
    rows = raw_rows(table)
    found = trees.contributions(trees.raw_arrays(rows), len(rows))
    other = found.of_features(["price", "city", "area"], ["area", "price", "city"])
    np.testing.assert_array_equal(other.values, found.values[:, [2, 0, 1]])
    assert other.base is found.base and not other.misses().any()


def test_a_blend_is_calibrated_after_it_is_mixed(run: Storage, table: Path) -> None:
    folder, rows = write_blend(run, table), raw_rows(table)
    before = load(Path(folder.root)).predict(rows)["prediction"].to_numpy()
    Calibration(scale=0.5, shift=-0.7).write(folder)
    after = load(Path(folder.root)).predict(rows)["prediction"].to_numpy()
    np.testing.assert_allclose(after, Calibration(scale=0.5, shift=-0.7).of(before), rtol=1e-12)


def test_a_blend_travels_with_both_models_and_its_hash_is_of_all(run: Storage, table: Path, tmp_path: Path) -> None:
    folder = write_blend(run, table)
    assert model_files(folder) == ["config.json", "manifest.json", "weights.safetensors", "trees.ubj", "blend.json"]
    before = weights_sha256(folder)
    Blend(share=0.5).write(folder)
    assert weights_sha256(folder) != before
    archive = pack(Path(folder.root), tmp_path)
    Blend(share=0.25).write(folder)
    assert weights_sha256(folder) == before and pack(Path(folder.root), tmp_path) != archive
    sources = model_sources(read_model_folder(folder).config)
    assert {"xgboost", "torch"} <= sources.packages and "sparkring/training/model/blend.py" in sources.files
    assert any(line.startswith("xgboost") for line in requirements(sources.packages))


@pytest.mark.parametrize("lost", ["blend.json", "weights.safetensors", "trees.ubj"])
def test_a_blend_that_lacks_a_file_is_refused(lost: str, run: Storage, table: Path) -> None:
    folder = write_blend(run, table)
    folder.delete(lost)
    with pytest.raises(StoredError, match=lost):
        load(Path(folder.root))


@pytest.mark.parametrize("text", ["{}", '{"share": 0}', '{"share": 1.5}', '{"share": 0.5, "of": "x"}', "{"])
def test_a_damaged_blend_is_refused(text: str, run: Storage, table: Path) -> None:
    folder = write_blend(run, table)
    folder.put_atomic("blend.json", text.encode())
    with pytest.raises(StoredError, match=r"blend\.json"):
        load(Path(folder.root))


def test_a_blend_beside_a_model_of_one_family_is_refused(run: Storage, table: Path) -> None:
    write_blend(run, table)
    net = run.at("net/model")
    for name in ("trees.ubj", "blend.json"):
        net.put_atomic(name, run.at("model").read_bytes(name))
    with pytest.raises(StoredError, match=r"model\.family = 'net', and there is a blend\.json"):
        load(Path(net.root))
    assert read_blend(run.at("trees/model")) is None


def test_a_champion_that_is_a_blend_scores_the_rows_of_another_dataset(
    run: Storage, table: Path, tmp_path: Path
) -> None:
    """By its own codes, calibrated; whatever family is trained today."""
    folder = write_blend(run, table)
    Calibration(scale=0.5, shift=-0.7).write(folder)
    storage = open_storage(str(write_table(tmp_path / "now")))
    manifest = read_manifest(storage)
    states = [dict(state) for state in manifest.features["features"]]
    states[1]["values"] = ["Bern", "Lima", "Rome", "Oslo"]
    now = Dataset(manifest.model_copy(update={"features": manifest.features | {"features": states}}), storage)
    today = RunConfig.model_validate({"name": "homes", "dataset": "somewhere"})
    champion = read_champion(Version("homes", "1", at_ms=1), folder, today)
    found = predict_test_rows(champion, today, now, split_rows(now, "test", today.data, []))
    expected = load(Path(folder.root)).predict(raw_rows(tmp_path / "now"))["prediction"].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_training_starts_from_the_network_of_a_blend(run: Storage, table: Path) -> None:
    folder = write_blend(run, table)
    recipe = {"name": "homes", "dataset": str(table), "model": {"args": NET_ARGS}}
    config = RunConfig.model_validate(recipe)
    found = starting_model(config, WarmStartConfig(model=folder.uri))
    assert found.config.model.family == "net" and found.blend is None
    start = RunConfig.model_validate(recipe | {"model": {"args": NET_ARGS, "start": folder.uri}})
    assert start_problems(start) == Problems()


def test_a_blend_is_not_exported_as_one_file(run: Storage, table: Path, tmp_path: Path) -> None:
    folder = write_blend(run, table)
    with pytest.raises(ConfigError, match=r"one file cannot hold.*blend\.json.*model/calibration\.json"):
        export(folder.uri, None, tmp_path / "out.onnx", TrackingConfig(), print)
    assert export(run.at("trees/model").uri, "ubj", tmp_path / "out.ubj", TrackingConfig(), print) == 0


def trained(folder: Storage, family: str, valid: PairedRows, test: PairedRows, values: dict[str, float]) -> Trained:
    """A training whose predictions of both splits are in the run folder."""
    of_valid = write_rows(folder, f"{family}/predictions/valid.parquet", valid, getattr(valid, family))
    of_test = write_rows(folder, f"{family}/predictions/test.parquet", test, getattr(test, family))
    scored = SplitScores(metrics=values, predictions=of_valid)
    train = rank_result(weights=f"{family}/model", exported_valid=scored, predictions=of_test, test={"loss": 9.0})
    return Trained(
        train=train, attempts=1, failed_attempts=[], history={}, per_step_s={}, once_s={}, predictions=[of_test],
        valid_predictions=[of_valid],
    )  # fmt: skip


def job_of(run: Storage, **changes: Any) -> Any:
    recipe: dict[str, Any] = {"name": "homes", "dataset": "d", "model": {"family": "both"} | changes}
    return SimpleNamespace(config=RunConfig.model_validate(recipe), folder=run)


def both_trained(run: Storage, valid: PairedRows, test: PairedRows) -> dict[Any, Trained]:
    return {
        family: trained(run, family, valid, test, valid.scores(getattr(valid, family))) for family in ("trees", "net")
    }


def test_the_blend_is_the_model_where_no_family_is_better_alone(run: Storage, table: Path) -> None:
    write_blend(run, table)
    run.at("model").delete("blend.json")
    valid, test = paired(BINARY, net=0.8), paired(BINARY, 500, net=0.8, seed=5)
    best, choice = choose(job_of(run), both_trained(run, valid, test))
    share = fit_share(valid)
    assert choice.winner == "both" and choice.share == share and read_blend(run.at("model")) == Blend(share=share)
    value = valid.scores(valid.blended(share))["loss"]
    assert choice.values == {family: valid.scores(getattr(valid, family))["loss"] for family in ("trees", "net")} | {
        "both": value
    }
    assert choice.half_width == valid.half_width("loss", valid.blended(share), valid.net)
    made_of = f"{share:.0%} the network of step 10, {1 - share:.0%} trees of round 10"
    shown = f"a blend ({made_of}) by valid loss {value:.5g} against "
    assert choice.describe().startswith(shown) and choice.describe().index("of the network") < choice.describe().index(
        "of trees"
    )
    assert best.train.weights == "model" and best.train.test == test.scores(test.blended(share))
    assert best.model_valid() == valid.scores(valid.blended(share))
    for files, rows in ((best.predictions, test), (best.valid_predictions, valid)):
        found = pq.read_table(run.path(files[0]), filesystem=run.fs)
        np.testing.assert_array_equal(found["prediction"], rows.blended(share))
        np.testing.assert_array_equal(found["id"], rows.ids)
        np.testing.assert_array_equal(found["label"], rows.labels)
    assert json.loads(run.read_bytes("model/blend.json"))["share"] == share


def test_a_blend_has_the_metrics_that_are_of_the_rows_alone(run: Storage, table: Path) -> None:
    write_blend(run, table)
    valid = paired(BINARY, net=0.8)
    both = both_trained(run, valid, valid)
    of_net = {"positive_share": 0.25, "loss": 9.0, "auc": 0.1}
    both["net"] = replace(both["net"], train=replace(both["net"].train, test=of_net))
    best, choice = choose(job_of(run), both)
    assert choice.winner == "both" and best.train.test["positive_share"] == 0.25 and best.train.test["loss"] < 9.0
    assert list(best.train.test)[:3] == ["positive_share", "loss", "auc"], "in the order of the network's"


def test_a_blend_does_not_take_over_the_calibration_of_a_part(run: Storage, table: Path) -> None:
    """A command that wanted no blend may have left one before it was killed."""
    write_blend(run, table)
    run.at("model").delete("blend.json")
    Calibration(scale=0.5, shift=-1.0).write(run.at("net/model"))
    valid = paired(BINARY, net=0.8)
    _, choice = choose(job_of(run), both_trained(run, valid, valid))
    assert choice.winner == "both" and not run.exists("model/calibration.json")


def test_one_family_is_the_model_where_it_is_better_alone_or_no_blend_is_wanted(run: Storage, table: Path) -> None:
    write_blend(run, table)
    run.at("model").delete("blend.json")
    valid, test = paired(BINARY, net=0.0, trees=3.0), paired(BINARY, 500, seed=5)
    best, choice = choose(job_of(run), both_trained(run, valid, test))
    assert choice.winner == "net" and choice.share is None and "both" not in choice.values
    assert best.train.weights == "net/model" and read_blend(run.at("model")) is None
    assert choice.half_width == valid.half_width("loss", valid.net, valid.trees)
    valid = paired(BINARY, net=0.8)
    _, choice = choose(job_of(run, blend="none"), both_trained(run, valid, test))
    assert choice.winner == "net" and choice.share is None and "both" not in choice.values
    few = paired(BINARY, FEWEST - 1, net=0.8)
    _, choice = choose(job_of(run), both_trained(run, few, test))
    assert choice.share is None, "too few rows say which blend is better"


def test_a_blend_may_not_be_behind_by_the_metric_that_picks_the_best_step(run: Storage, table: Path) -> None:
    """The share is fitted by the loss; accuracy, say, may not gain."""
    write_blend(run, table)
    valid = paired(BINARY, net=0.8)
    job, both = job_of(run), both_trained(run, valid, valid)
    choice = FamilyChoice(metric="auc", winner="net", values={"net": 0.7, "trees": 0.6}, half_width=None, train_s={})
    assert better_blend(job, both, choice, valid)[0] is not None
    worse = replace(valid, net=valid.labels * 0.2 + 0.4)  # it orders all rows rightly, and is not certain enough
    found, tried = better_blend(job, both, choice, worse)
    assert 0 < fit_share(worse) < 1 and found is None
    assert tried.describe().endswith(f"; a blend: {worse.scores(worse.blended(fit_share(worse)))['auc']:.5g}")


def test_a_share_of_all_rows_that_leaves_one_family_out_is_no_blend(
    run: Storage, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blend(run, table)
    valid = paired(BINARY, net=0.8)
    choice = FamilyChoice(metric="loss", winner="net", values={"net": 0.7, "trees": 0.6}, half_width=None, train_s={})
    both = both_trained(run, valid, valid)
    for share, is_blend in ((0.0, False), (1.0, False), (0.75, True)):
        monkeypatch.setattr(blend, "fit_share", lambda rows, share=share: share)
        found, described = better_blend(job_of(run), both, choice, valid)
        assert (found is not None) == ("both" in described.values) == is_blend, "no value of a blend that is none"


def test_families_that_scored_other_rows_are_compared_without_blend_or_interval(run: Storage, table: Path) -> None:
    write_blend(run, table)
    run.at("model").delete("blend.json")
    valid, test = paired(BINARY, net=0.8), paired(BINARY, 500, seed=5)
    both = both_trained(run, valid, test)
    fewer = PairedRows(BINARY, valid.ids[1:], valid.labels[1:], valid.net[1:], valid.trees[1:])
    part = write_rows(run, "trees/predictions/part.parquet", fewer, fewer.trees)
    found, choice = choose(job_of(run), both | {"trees": replace(both["trees"], valid_predictions=[part])})
    assert choice.winner == "net" and choice.half_width is None and found.train.weights == "net/model"


def test_a_blend_without_test_rows_of_both_has_no_test_predictions(run: Storage, table: Path) -> None:
    write_blend(run, table)
    valid = paired(BINARY, net=0.8)
    both = {family: replace(each, predictions=[]) for family, each in both_trained(run, valid, valid).items()}
    best, choice = choose(job_of(run), both)
    assert choice.winner == "both" and best.predictions == [] and best.train.test == {}
