"""Baselines on tables as they come: nulls, NaN, filters, damaged files, nothing to fit on. Real Spark, small files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import DataConfig, RunConfig
from sparkring.conf.manifest import ROW_NUMBER, Accounting, Column, DataFile, DatasetManifest, Lineage, SplitInfo
from sparkring.conf.storage import open_storage
from sparkring.pipelines.baseline import LOGISTIC, MAJORITY, Baselines, attempted, constant_scores, fit_baselines
from sparkring.pipelines.etl_step import Dataset
from sparkring.pipelines.evaluate import evaluate
from sparkring.pipelines.split_rows import split_rows
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest
from sparkring.training.worker import left_out
from tests.pipelines.results import rank_result, train_result

SIZES = {"train": 240, "test": 120}
LABEL = Column(name="late", dtype="int8", role="label")


def write_table(folder: Path, columns: tuple[Column, ...], make: Callable[[int], dict[str, Any]]) -> Dataset:
    """Two files of one row group for each split; `make(seed)`: the columns of 120 or 60 rows."""
    files = []
    for number, (split, rows) in enumerate(SIZES.items()):
        for part in range(2):
            path = folder / f"data/{split}-{part}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers = pa.array(range(part * rows // 2, (part + 1) * rows // 2), pa.int64())
            stored = pa.table(make(10 * number + part)).slice(0, rows // 2).append_column(ROW_NUMBER, numbers)
            pq.write_table(stored, path, write_page_checksum=True)
            data = path.read_bytes()
            found = hashlib.sha256(data).hexdigest()
            files.append(
                DataFile(path=f"data/{path.name}", split=split, rows=rows // 2, bytes=len(data), sha256=found,
                         row_groups=(rows // 2,))
            )  # fmt: skip
    manifest = DatasetManifest(
        name="b", fingerprint="a" * 64, created_at="", columns=columns, files=tuple(files),
        splits={split: SplitInfo(rows=rows, files=2) for split, rows in SIZES.items()},
        accounting=Accounting(rows_in=360, rows_out=360), lineage=Lineage(sources={}),
    )  # fmt: skip
    return Dataset(manifest, open_storage(str(folder)))


def learnable(seed: int) -> dict[str, Any]:
    """`gaps` decides the label where it is; a third of it is null, some is NaN."""
    random = np.random.default_rng(seed)
    gaps = random.normal(size=120)
    late = (gaps + random.normal(scale=0.3, size=120) > 0).astype(np.int8)
    values = [None if i % 3 == 0 else math.nan if i % 7 == 1 else float(v) for i, v in enumerate(gaps)]
    return {
        "gaps": pa.array(values, pa.float64()),
        "code": random.integers(0, 4, 120).astype(np.int32),
        "month": np.arange(120) % 12,
        "late": late,
    }


GAPS = Column(name="gaps", dtype="float64", nulls="mask")
COLUMNS = (GAPS, Column(name="code", dtype="int32", cardinality=4), Column(name="month", dtype="int64"), LABEL)


def fitted(spark: Any, dataset: Dataset, data: DataConfig | None = None) -> Baselines:
    train, test = (split_rows(dataset, split, data or DataConfig(), []) for split in ("train", "test"))
    return fit_baselines(spark, train, test, dataset.manifest.columns, LABEL)


@pytest.mark.spark
@pytest.mark.parametrize("nulls", ["mask", "fill"])
def test_nulls_and_nan_are_filled_as_the_reader_does(spark: Any, tmp_path: Path, nulls: Any) -> None:
    gaps = GAPS.model_copy(update={"nulls": nulls, "fill": 0.5 if nulls == "fill" else None})
    found = fitted(spark, write_table(tmp_path, (gaps, *COLUMNS[1:]), learnable))
    assert found.missing == {}
    assert found.scores[LOGISTIC]["auc"] > 0.7 and found.scores[LOGISTIC]["loss"] < found.scores[MAJORITY]["loss"]


@pytest.mark.spark
def test_without_scalar_features_there_is_the_majority_rate(spark: Any, tmp_path: Path) -> None:
    vector = Column(name="v", dtype="float64", layout="vector", shape=(2,))
    dataset = write_table(
        tmp_path, (vector, LABEL), lambda seed: {"v": [[1.0, 2.0]] * 120, "late": learnable(seed)["late"]}
    )
    found = fitted(spark, dataset)
    assert list(found.scores) == [MAJORITY] and found.missing == {}


@pytest.mark.spark
def test_all_is_compared_on_the_rows_the_ranks_read(spark: Any, tmp_path: Path) -> None:
    """Filters and a damaged test file: predictions, groups and baselines are of the same rows."""
    dataset = write_table(tmp_path, COLUMNS, learnable)
    spoiled = tmp_path / "data/test-0.parquet"
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"x")
    data = {"filters": [["month", "<", 5], ["gaps", ">", -1.0]], "on_corrupt": "quarantine", "tail": "pad"}
    config = RunConfig.model_validate(
        {"name": "b", "dataset": str(tmp_path), "data": data, "report": {"share_by": ["month"]}}
    )
    request = ReadRequest(dataset.folder, dataset.manifest, "test", ["month", "late"], 16)
    reader = make_reader(config.data, request, evaluation=True)
    batches = [(batch, batch.row_weights() > 0) for batch in reader.batches(0)]
    left: dict[str, Any] = {"test_left_out": left_out(reader), "train_left_out": []}
    reader.close()
    assert left["test_left_out"] == ["data/test-0.parquet"]
    scored = {
        "id": np.concatenate([b.ids[real].numpy() for b, real in batches]),
        "label": np.concatenate([b.columns["late"][real].numpy() for b, real in batches]),
        "prediction": np.concatenate([b.columns["month"][real].numpy() / 12 for b, real in batches]),
    }
    run = open_storage(str(tmp_path / "run"))
    run.put_atomic("p.parquet", b"")
    pq.write_table(pa.table(scored), tmp_path / "run/p.parquet")
    trained = train_result(train=rank_result(test={}, **left), predictions=["p.parquet"], scores={})
    job: Any = SimpleNamespace(spark=spark, config=config, dataset=dataset, folder=run)
    found, held_out = evaluate(job, trained)
    assert held_out is not None and found.missing == {} and list(found.scores) == ["this model", MAJORITY, LOGISTIC]
    assert held_out.groups["month"].astype(int).tolist() == (held_out.scores * 12).round().astype(int).tolist()
    kept = pq.read_table(tmp_path / "data/test-1.parquet").to_pandas().query("month < 5 and gaps > -1")
    assert len(kept) == len(held_out.labels) and held_out.labels.tolist() == kept["late"].tolist()
    test, train = (split_rows(dataset, s, config.data, left["test_left_out"]) for s in ("test", "train"))
    assert test.frame(spark, ["late"]).count() == len(kept)
    share = np.mean(train.column("late").to_pylist())
    assert found.scores[MAJORITY] == pytest.approx(constant_scores(float(share), float(kept["late"].mean())))
    unfiltered = config.model_copy(update={"data": config.data.model_copy(update={"filters": []})})
    job.config = unfiltered
    for left_out_files, rows in ((left["test_left_out"], 60), ([], 120)):
        trained = replace(trained, train=rank_result(test={}, test_left_out=left_out_files))
        with pytest.raises(RuntimeError, match=f"for {rows} test rows"):
            evaluate(job, trained)


def test_a_baseline_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> dict[str, float]:
        raise RuntimeError("out of memory\n and more")

    found = attempted({"a": fails, "b": lambda: {"loss": math.nan, "auc": 0.5}, "c": lambda: {"loss": 0.5}})
    assert found.scores == {"c": {"loss": 0.5}}
    assert found.missing == {"a": "RuntimeError: out of memory", "b": "ValueError: loss: not a finite number"}
    assert len(caplog.records) == 2 and "baseline a: RuntimeError: out of memory" in caplog.text


def test_the_majority_guess_is_wrong_where_classes_flip() -> None:
    assert constant_scores(0.4, 0.6)["accuracy"] == pytest.approx(0.4)
    assert constant_scores(0.7, 0.6)["accuracy"] == 0.6
    assert constant_scores(0.4, 0.3)["accuracy"] == 0.7
