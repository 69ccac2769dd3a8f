"""The values of a label, as the footers of the dataset's files have them, against the task."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DataFile, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.validate.labels import label_range_problems, value_range

LABELS: dict[str, list[list[Any]]] = {  # by file
    "price": [[0.0, 1.0], [1.0, 1999.5]],
    "flag": [[0, 1], [1, None]],
    "late": [[True, False], [False, True]],
    "day": [[date(2024, 1, 1)] * 2, [date(2024, 1, 2)] * 2],
}


def write(folder: Path, label: str) -> DatasetManifest:
    """Two files of two rows, beside a column of lists, whose leaf has another name."""
    files = []
    for number, values in enumerate(LABELS[label]):
        pq.write_table(pa.table({"tags": [["a"], ["b", "c"]], label: values}), folder / f"{number}.parquet")
        files.append(DataFile.model_construct(path=f"{number}.parquet", split="train", rows=2))
    dtype = {"price": "float64", "flag": "int64", "late": "bool", "day": "int32"}[label]
    column = Column(name=label, dtype=dtype, role="label")
    return DatasetManifest.model_construct(columns=(column,), files=tuple(files), parts=())


def recipe(task: str, **blocks: Any) -> RunConfig:
    model = {"task": task, "factory": "mine:Net"}
    return RunConfig.model_validate({"name": "mine", "dataset": "d", "model": model} | blocks)


@pytest.mark.parametrize(
    ("task", "label", "expected"),
    [
        ("binary", "price", "the label 'price' has values from 0 to 1999.5, and binary has 0 and 1"),
        ("multiclass", "price", "classes are whole numbers from 0"),
        ("regression", "price", ""),
        ("binary", "flag", ""),
        ("binary", "late", ""),
        ("binary", "day", "the label 'day' has values from 19723 to 19724"),
    ],
)
def test_a_label_that_the_task_cannot_learn_is_found_before_training(
    tmp_path: Path, task: str, label: str, expected: str
) -> None:
    found = label_range_problems(recipe(task), write(tmp_path, label), open_storage(str(tmp_path)))
    assert len(found) == bool(expected) and expected in "".join(found)


def test_files_without_statistics_say_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [5.0]}), tmp_path / "y.parquet", write_statistics=False)
    assert value_range(open_storage(str(tmp_path)), ["y.parquet"], "y") is None


def test_a_file_that_cannot_be_read_is_left_to_the_readers(tmp_path: Path) -> None:
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"y": [5.0, 7.0]}), tmp_path / "y.parquet")
    files = ["gone.parquet", "cut.parquet", "y.parquet"]
    assert value_range(open_storage(str(tmp_path)), files, "y") == (5.0, 7.0)
