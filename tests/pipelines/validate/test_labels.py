"""The values of a label, as the footers of the dataset's files have them, against the task."""

from __future__ import annotations

import logging
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DataFile, DatasetManifest, SplitInfo
from sparkring.conf.storage import open_storage
from sparkring.etl.classes import label_state
from sparkring.pipelines.validate.labels import (
    constant_labels,
    label_range_problems,
    one_label_problems,
    value_range,
    warn_of_labels,
)

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


def table(folder: Path, splits: dict[str, dict[str, list[Any]]], files: int = 1) -> DatasetManifest:
    """Write the labels of each split, in so many files; those of texts are counted in the manifest as the ETL does."""
    columns, written = list[Column](), list[DataFile]()
    for split, values in splits.items():
        rows = pa.table(values)
        columns = [
            Column(
                name=field.name,
                dtype="string" if pa.types.is_list(field.type) else str(field.type).replace("double", "float64"),
                layout="ragged" if pa.types.is_list(field.type) else "scalar",
                role="label",
            )
            for field in rows.schema
        ]
        for number in range(files):
            part = rows.slice(
                number * len(rows) // files, (number + 1) * len(rows) // files - number * len(rows) // files
            )
            pq.write_table(part, folder / f"{split}{number}.parquet")
            written.append(DataFile.model_construct(path=f"{split}{number}.parquet", split=split, rows=len(part)))
    features = {}
    if columns[0].dtype == "string":
        counts = {
            split: Counter(each for row in values[columns[0].name] for each in ([row] if isinstance(row, str) else row))
            for split, values in splits.items()
        }
        kind, names = "classes" if columns[0].layout == "scalar" else "tags", sorted(set().union(*counts.values()))
        state = label_state(columns[0], counts, None)
        assert (state["kind"], state["values"]) == (kind, names)
        features = {"labels": [state]}
    infos = {split: SplitInfo(rows=len(next(iter(values.values()))), files=files) for split, values in splits.items()}
    return DatasetManifest.model_construct(
        columns=tuple(columns), files=tuple(written), parts=(), splits=infos, features=features
    )


NOTHING = "in every training row: there is nothing to learn, and its model will not be promoted; see etl.split"


@pytest.mark.parametrize(
    ("task", "train", "test", "line"),
    [
        ("binary", {"y": [0, 0, 0]}, {"y": [0, 1]}, f"etl.label: 'y' is 0 {NOTHING}"),
        ("binary", {"y": [True, True, True]}, {"y": [True, False]}, f"etl.label: 'y' is 1 {NOTHING}"),
        ("binary", {"y": ["no", "no", "no"]}, {"y": ["no", "yes"]}, f"etl.label: 'y' is 'no' {NOTHING}"),
        ("multiclass", {"y": [2, 2, 2]}, {"y": [1, 0]}, f"etl.label: 'y' is 2 {NOTHING}"),
        ("regression", {"y": [2.5, 2.5, 2.5]}, {"y": [2.5, 7]}, f"etl.label: 'y' is 2.5 {NOTHING}"),
        ("poisson", {"y": [0.0, -0.0, 0.0]}, {"y": [2.5, 7]}, f"etl.label: 'y' is 0 {NOTHING}"),
        ("multilabel", {"a": [1, 1], "b": [0, 0]}, {"a": [0], "b": [0]}, f"etl.label: 'a' is 1, 'b' is 0 {NOTHING}"),
        ("multilabel", {"y": [["k"], ["k"]]}, {"y": [["m"]]}, f"etl.label: 'k' is 1, 'm' is 0 {NOTHING}"),
        (
            "multilabel",
            {"a": [1, 1], "b": [0, 1]},
            {"a": [0], "b": [0]},
            "etl.label: 'a' is 1 in every training row: there is nothing to learn of it",
        ),
        (
            "multilabel",
            {"y": [["k"], ["k", "l"]]},
            {"y": [["m"]]},
            "etl.label: 'k' is 1, 'm' is 0 in every training row: there is nothing to learn of it",
        ),
        ("multiclass", {"y": ["a", "b"]}, {"y": ["c"]}, "etl.label = 'y': no training row is of the classes c"),
        ("binary", {"y": [0, 0, 1]}, {"y": [0, 0]}, ""),
        ("binary", {"y": ["no", "yes", "no"]}, {"y": ["no"]}, ""),
        ("regression", {"y": [2.5, 2.5, 2.6]}, {"y": [2.5]}, ""),
        ("mine:Task", {"y": [0, 0, 0]}, {"y": [0, 0]}, ""),
    ],
)
@pytest.mark.parametrize("files", [1, 3])
def test_a_label_with_nothing_to_learn_is_said_before_training(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    task: str,
    train: dict[str, list[Any]],
    test: dict[str, list[Any]],
    line: str,
    files: int,
) -> None:
    found, folder = table(tmp_path, {"train": train, "test": test}, files), open_storage(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        warn_of_labels(recipe(task), found, folder)
    assert "\n".join(record.getMessage() for record in caplog.records) == line
    assert one_label_problems(recipe(task), found, folder) == []


@pytest.mark.parametrize(
    ("task", "values", "shown"),
    [
        ("binary", {"y": [0, 0, 0]}, "'y' is 0"),
        ("binary", {"y": ["no", "no", "no"]}, "'y' is 'no'"),
        ("regression", {"y": [2.5, 2.5, 2.5]}, "'y' is 2.5"),
        ("multilabel", {"a": [1, 1], "b": [0, 0]}, "'a' is 1, 'b' is 0"),
        ("multilabel", {"y": [["k"], ["k"]]}, "'k' is 1"),
    ],
)
def test_a_dataset_of_one_label_is_refused(tmp_path: Path, task: str, values: dict[str, list[Any]], shown: str) -> None:
    found, folder = table(tmp_path, {"train": values, "test": values}), open_storage(str(tmp_path))
    (line,) = one_label_problems(recipe(task), found, folder)
    assert line.startswith(f"etl.label: {shown} in every row of the dataset, so there is nothing to learn")
    assert one_label_problems(recipe(task, report={"must_beat_guess": False}), found, folder) == []


def test_files_that_do_not_tell_their_values_are_not_said_to_have_one(tmp_path: Path) -> None:
    found = table(tmp_path, {"train": {"y": [5, 5, 5, 5]}}, 2)
    pq.write_table(pa.table({"y": [5, 6]}), tmp_path / "train1.parquet", write_statistics=False)
    assert constant_labels(found.columns, found, open_storage(str(tmp_path)), ["train"]) == {}
