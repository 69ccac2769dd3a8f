"""How predictions are written."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column
from sparkring.pipelines.predict.score import About, Counts, ScoreTask, _flush, map_column, parts_of, score_batch
from sparkring.pipelines.serving import Predictor
from sparkring.training.model.recipe_model import build_model
from tests.helpers.datasets import manifest_of


def test_texts_alone_are_written_with_a_dictionary() -> None:
    sink = pa.BufferOutputStream()
    made = pa.table({"carrier": ["UA", "AA"] * 50, "prediction": [n / 100 for n in range(100)]})
    waiting = [made.slice(0, 40), made.slice(40)]
    _flush(None, sink, waiting).close()
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    assert file.read().equals(made) and waiting == []
    columns = [file.metadata.row_group(0).column(n) for n in (0, 1)]
    assert [column.dictionary_page_offset is not None for column in columns] == [True, False]


def test_keys_of_maps_have_a_dictionary_too_and_their_values_none() -> None:
    names = np.array(["wind", "hour"], object)
    inner = map_column(names, np.arange(400.0))
    outer = map_column(np.array(["late", "lost"], object), inner)
    sink = pa.BufferOutputStream()
    _flush(None, sink, [pa.table({"one": inner, "several": pa.concat_arrays([outer, outer])})]).close()
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    group = file.metadata.row_group(0)
    found = {group.column(n).path_in_schema: group.column(n).dictionary_page_offset is not None for n in range(5)}
    assert found == {
        "one.key_value.key": True, "one.key_value.value": False, "several.key_value.key": True,
        "several.key_value.value.key_value.key": True, "several.key_value.value.key_value.value": False,
    }  # fmt: skip
    assert dict(file.read()["several"][1].as_py())["lost"] == [("wind", 6.0), ("hour", 7.0)]


def test_rows_with_contributions_are_scored_some_at_a_time() -> None:
    batch = pa.record_batch({"id": np.arange(10_000)})
    task = ScoreTask("", "", "v", (), About("m", "1", datetime(2026, 1, 1, tzinfo=UTC), None))
    assert parts_of(batch, task) == [batch]
    parts = parts_of(batch, replace(task, contributions=True))
    assert [part.num_rows for part in parts] == [4096, 4096, 1808] and pa.Table.from_batches(parts) == (
        pa.Table.from_batches([batch])
    )
    assert len(parts_of(batch.slice(0, 0), replace(task, contributions=True))) == 1


def test_a_score_does_not_depend_on_the_batch_that_its_row_came_in() -> None:
    columns = [Column(name=f"x{n}", dtype="float32") for n in range(5)]
    manifest = manifest_of([*columns, Column(name="late", dtype="int8", role="label")], [], name="p")
    config = RunConfig.model_validate({"name": "p", "dataset": "somewhere"})
    torch.manual_seed(0)
    predictor = Predictor(config, manifest, build_model(config, manifest).eval())
    draw, threads = np.random.default_rng(0), torch.get_num_threads()
    rows = pa.record_batch({column.name: draw.normal(size=2000).astype("f") for column in columns})
    torch.set_num_threads(1)  # as a worker of Spark does
    try:
        for _ in range(20):
            cuts = [0, *np.sort(draw.integers(0, 2000, 9)).tolist(), 2000, 2000]  # an empty one too
            parts = [scores_of(predictor, rows.slice(a, b - a)) for a, b in pairwise(cuts)]
            assert np.array_equal(np.concatenate(parts), scores_of(predictor, rows))
    finally:
        torch.set_num_threads(threads)


def scores_of(predictor: Predictor, rows: pa.RecordBatch) -> np.ndarray:
    task = ScoreTask("", "", "v", (), About("m", "1", datetime(2026, 1, 1, tzinfo=UTC), None))
    return score_batch(predictor, task, rows, Counts())["prediction"].to_numpy()


@pytest.mark.parametrize(("positive", "wanted"), [("churn", ["churn", "churn"]), ("", None)])
def test_the_positive_class_of_texts_stands_beside_each_prediction(positive: str, wanted: list[str] | None) -> None:
    """Whose probability it was could be seen in the recipe alone."""
    columns = About("m", "1", datetime(2026, 1, 1, tzinfo=UTC), None, positive).columns(2)
    assert (columns["positive_class"].to_pylist() if "positive_class" in columns else None) == wanted
