"""A champion scores the rows of another night by its own vocabulary and scale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.storage import open_storage
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.pipelines.promotion.champion import Champion, NotComparable, predict_test_rows, read_champion
from sparkring.pipelines.serving import _load_pyfunc
from sparkring.pipelines.tracking.alias import Version
from tests.pipelines.promotion import nights

VERSION = Version("nightly", "3", at_ms=1, date="2024-03-03")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The champion's model folder, and tonight's dataset, whose codes and scale are others."""
    folder = tmp_path_factory.mktemp("nights")
    before = nights.write_dataset(folder / "before", ["a", "b", "c", "gone"], mean=5.0)
    now = nights.write_dataset(folder / "now", ["new", "c", "a", "b"], mean=9.0, seed=7)
    return nights.write_model(folder / "model", nights.config(), before.manifest), now


def read(folder: Path, config: RunConfig | None = None) -> Champion:
    return read_champion(VERSION, open_storage(str(folder)), config or nights.config())


def test_it_predicts_as_it_serves(both: Any) -> None:
    model, now = both
    config = nights.config()
    rows = split_rows(now, "test", config.data, [])
    found = predict_test_rows(read(model), config, now, rows)
    served = _load_pyfunc(str(model)).predict(pq.read_table(now.folder.path("data/test.parquet")).to_pandas())
    assert np.abs(found - served["prediction"].to_numpy()).max() < 1e-6 and found.std() > 0.01
    own = predict_test_rows(read(nights.write_model(model.with_name("own"), config, now.manifest)), config, now, rows)
    assert np.abs(found - own).max() > 0.01, "tonight's codes would give the same weights another meaning"


def test_rows_are_those_that_the_ranks_have_read(both: Any) -> None:
    model, now = both
    config = nights.config(data={"filters": [["shop", "in", ["a", "b"]]]})
    rows = split_rows(now, "test", config.data, [])
    everything = predict_test_rows(read(model), nights.config(), now, split_rows(now, "test", nights.config().data, []))
    found = predict_test_rows(read(model), config, now, rows)
    assert 0 < len(found) < len(everything)
    assert np.abs(found - everything[rows.row_numbers()]).max() < 1e-6


def changed(folder: Path, model: Path, name: str, change: Any) -> Path:
    """A copy of the model folder with one of its JSON files changed."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def test_what_cannot_be_read_or_scored_is_named(both: Any, tmp_path: Path) -> None:
    model, now = both
    config = nights.config()
    rows = split_rows(now, "test", config.data, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotComparable, match=r"version 3 of 'nightly' cannot be read: .* no model: it has no config"):
        read(tmp_path / "empty")
    newer = changed(tmp_path / "newer", model, "manifest.json", lambda m: m.update(format_version=99))
    with pytest.raises(NotComparable, match="this sparkring reads 1 to 2; upgrade"):
        read(newer)
    unknown = changed(tmp_path / "unknown", model, "config.json", lambda c: c["data"].update(gone_key=1))
    with pytest.raises(NotComparable, match="gone_key"):
        read(unknown)
    foreign = changed(tmp_path / "foreign", model, "config.json", lambda c: c["model"].update(factory="evil:Model"))
    with pytest.raises(NotComparable, match="a stored file may name code of"):
        read(foreign)

    def of_codes(m: dict[str, Any]) -> None:  # format 1: the files held codes, and columns were the tensors
        shop = {"name": "shop", "dtype": "int32", "cardinality": 6}
        numbers = [{"name": name, "dtype": "float32"} for name in ("x", "x__null")]
        m.update(format_version=1, columns=[shop, *numbers, {"name": "late", "dtype": "bool", "role": "label"}])

    older = changed(tmp_path / "older", model, "manifest.json", of_codes)
    by_values = predict_test_rows(read(model), config, now, rows)
    assert np.array_equal(predict_test_rows(read(older), config, now, rows), by_values), "its state is what is applied"

    def of_numbers(m: dict[str, Any]) -> None:  # shops were numbers then
        of_codes(m)
        m["features"]["inputs"]["shop"] = "bigint"
        m["features"]["features"][0]["values"] = ["1"]

    without = changed(tmp_path / "without", model, "manifest.json", of_numbers)
    with pytest.raises(NotComparable, match=r"version 3 of 'nightly' cannot score the test rows: .*shop"):
        predict_test_rows(read(without), config, now, rows)

    champion, label = read(model), {"name": "late", "kind": "classes", "values": ["no", "yes"]}
    named = champion.model.manifest.model_copy(update={"features": now.manifest.features | {"labels": [label]}})
    other = replace(champion, model=replace(champion.model, manifest=named))
    with pytest.raises(NotComparable, match=r"its classes are \['no', 'yes'\], this dataset's \[\]"):
        predict_test_rows(other, config, now, rows)
    regression = nights.config(model={"task": "regression"} | nights.RECIPE["model"])
    with pytest.raises(NotComparable, match="its task is 'binary', this recipe's is 'regression'"):
        predict_test_rows(read(model, regression), regression, now, rows)


def test_a_champion_of_weighted_rows_scores_rows_without_weights(both: Any, tmp_path: Path) -> None:
    model, now = both
    rows = split_rows(now, "test", nights.config().data, [])

    def weighted(m: dict[str, Any]) -> None:
        m["columns"].append({"name": "trust", "dtype": "float64", "role": "weight"})
        m["features"]["weight"] = {"column": "trust", "mean": 2.0}

    found = predict_test_rows(
        read(changed(tmp_path / "w", model, "manifest.json", weighted)), nights.config(), now, rows
    )
    assert np.array_equal(found, predict_test_rows(read(model), nights.config(), now, rows))
