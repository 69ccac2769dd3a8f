"""Stored files that are damaged, of a newer version, or made to do harm: one error that names file, key and rule."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.manifest import ManifestError, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError, parse

FILE = {"path": "d/a.parquet", "split": "train", "rows": 3, "bytes": 9, "sha256": "0" * 64, "row_groups": [2, 1]}
MANIFEST: dict[str, Any] = {
    "format_version": 2, "name": "flights", "fingerprint": "a" * 64, "created_at": "2026-11-22T00:00:00+00:00",
    "columns": [{"name": "x", "dtype": "float32", "role": "input"}, {"name": "y", "dtype": "int8", "role": "label"}],
    "files": [FILE], "splits": {"train": {"rows": 3, "files": 1}},
    "accounting": {"rows_in": 4, "rows_out": 3, "quarantined": {"rule": 1}},
    "features": {
        "version": 1, "inputs": {"x": "double"},
        "features": [{"name": "x", "kind": "numeric", "column": "x", "transform": "none", "mean": 1.0, "std": 2.0,
                      "fill": 1.0, "indicator": False, "train_nulls": 0}],
    },
    "lineage": {"sources": {}},
}  # fmt: skip
Change = Callable[[dict[str, Any]], Any]


def file(**changes: Any) -> Change:
    return lambda m: m["files"][0].update(changes)


def top(**changes: Any) -> Change:
    return lambda m: m.update(changes)


def feature(**changes: Any) -> Change:
    return lambda m: m["features"]["features"][0].update(changes)


def coded(spark_type: str, values: list[str]) -> Change:
    """A categorical feature of a column that is stored as int32."""

    def change(m: dict[str, Any]) -> None:
        m["columns"] = [{"name": "x", "dtype": "int32", "role": "input", "logical": spark_type}]
        m["features"]["inputs"] = {"x": spark_type}
        m["features"]["features"] = [{"name": "x", "kind": "categorical", "column": "x", "values": values}]

    return change


def retyped(spark_type: str, value: str) -> Change:
    """A state of another dataset, whose column of that name is of `spark_type`, over a column of whole numbers."""

    def change(m: dict[str, Any]) -> None:
        coded(spark_type, [value])(m)
        m["columns"][0]["logical"] = "int"

    return change


def passed(m: dict[str, Any]) -> None:
    state = {"name": "x", "kind": "passthrough", "column": "x", "dtype": None, "shape": None, "nulls": "refuse"}
    m["columns"], m["features"]["features"] = m["columns"][1:], [state | {"fill": None}]


def passed_twice(m: dict[str, Any]) -> None:
    columns = m["columns"]
    passed(m)
    m["columns"], m["features"]["features"] = columns, m["features"]["features"] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (file(sha256="/home/somebody/.ssh/id_rsa"), r"files\.0\.sha256 = '/home/"),
        (file(sha256="0" * 63 + "\n"), "sha256"),
        (file(sha256="0" * 63), "at least 64 characters"),
        (file(sha256="0" * 65), "at most 64 characters"),
        (file(split="s" * 256), "at most 255 characters"),
        (file(path=""), "path"),
        (file(path="p" * 1001), "at most 1000 characters"),
        (file(path="../../elsewhere.parquet"), r"files\.0\.path.*must stay below its folder"),
        (file(path="/etc/passwd"), "must stay below its folder"),
        (file(path="a\x1b[2J"), "path"),
        (file(rows=-3, row_groups=[-3]), "rows = -3"),
        (file(rows=4), "row groups sum to 3, rows=4"),
        (file(rows="3"), "rows = '3'"),
        (file(rows=3.0), r"rows = 3\.0"),
        (file(rows=True), "rows = True"),
        (file(bytes=2**63), "bytes"),
        (file(split="../x"), "split"),
        (file(split="test"), "'test', which is not listed"),
        (top(files=[FILE, FILE], splits={"train": {"rows": 6, "files": 2}}), "'d/a.parquet' is listed twice"),
        (top(splits={"train": {"rows": 4, "files": 1}}), "says 4 rows in 1 file, it has 3 in 1"),
        (top(splits={"train": {"rows": 3, "files": 2}}), "says 3 rows in 2 files"),
        (top(accounting={"rows_in": 9, "rows_out": 3}), "rows in != rows out"),
        (top(accounting={"rows_in": 3, "rows_out": 4, "quarantined": {"r": -1}}), "quarantined"),
        (top(columns=[{"name": "x", "dtype": "object"}]), r"columns\.0\.dtype = 'object'"),
        (top(columns=[{"name": "x", "dtype": "int8"}] * 2), "columns: 'x' is listed twice"),
        (top(columns=[{"name": "x", "dtype": "int8", "shape": [-1]}]), "shape"),
        (top(format_version=3, news=1), "format_version = 3: this sparkring reads 1 to 2; upgrade sparkring"),
        (top(format_version=None), "format_version = None"),
        (top(features={"features": []}), r"features\.version: field required"),
        (feature(kind="subprocess"), "features"),
        (feature(std=0.0), "std"),
        (feature(column="z"), "'z' is not among the inputs"),
        (top(features=-0.0), "features"),
        (top(columns=MANIFEST["columns"][1:]), "'x': its column 'x' is not among the stored columns"),
        (top(columns=[{"name": "x", "dtype": "string"}]), "numeric feature of double is not made of .* scalar string"),
        (feature(name="Y"), "two tensors would be called 'Y' and 'y'"),
        (feature(kind="categorical", values=["a"]), "categorical feature of double is not made of .* scalar float32"),
        (coded("int", ["1", "one"]), "the category 'one' is no int: invalid literal"),
        (coded("int", ["007"]), "the category '007' is no int"),
        (coded("int", ["1", "1"]), "'x': a category occurs twice"),
        (coded("date", ["2013-02-30"]), "the category '2013-02-30' is no date: "),
        (coded("string", ["a"]), "categorical feature of string is not made of .* scalar int32"),
        (retyped("date", "2013-01-31"), "categorical feature of date is not made of .* scalar int32 of int"),
        (retyped("boolean", "true"), "categorical feature of boolean is not made of .* scalar int32 of int"),
        (passed, "'x' is passed through, and is not among the stored columns"),
        (passed_twice, "features: 'x' is listed twice"),
        (top(format_version=1), "format_version = 1: .* files hold codes .* run `sparkring etl` to build it again"),
        (top(checks={}), "checks"),
        (top(text={"tokenizer_json": 3}), "tokenizer_json"),
        (top(checks=[{"name": "r"}]), r"checks\.0"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    content = copy.deepcopy(MANIFEST)
    (tmp_path / "_manifest.json").write_text(json.dumps(content))
    read_manifest(open_storage(str(tmp_path)))
    change(content)
    (tmp_path / "_manifest.json").write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=rf"(?s){tmp_path}/_manifest\.json: .*{words}"):
        read_manifest(open_storage(str(tmp_path)))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[" * 1_000_000, b'{"a":' * 100_000, b'"\\ud800"', b"9" * 10_000, b"[]", b"NaN", b'{"name": 1'],
)
def test_bytes_that_are_no_json_are_one_short_error(data: bytes) -> None:
    with pytest.raises(StoredError, match=r"here/run\.json: ") as caught:
        parse(dict[str, int], data, "here/run.json")
    assert len(str(caught.value)) < 300


def test_an_error_is_short_however_much_is_wrong() -> None:
    with pytest.raises(StoredError, match="and 9997 more") as caught:
        parse(list[int], json.dumps(["x" * 1000] * 10_000), "f")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a/\0b"])
def test_no_path_of_a_stored_file_leaves_its_folder(tmp_path: Path, path: str) -> None:
    folder = open_storage(str(tmp_path / "inside"))
    for act in (folder.read_bytes, folder.delete, folder.size_bytes, folder.at, folder.list_files):
        with pytest.raises(ValueError, match="must stay below its folder"):
            act(path)
    with pytest.raises(ValueError, match="must stay below its folder"):
        folder.put_atomic(path, b"")
