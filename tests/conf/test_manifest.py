"""What is a dataset and what is not; counts that do not add up are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.digest import digest
from sparkring.conf.manifest import DatasetManifest, ManifestError, read_manifest
from sparkring.conf.storage import open_storage


def test_a_folder_without_a_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "part-0.parquet").write_bytes(b"PAR1")
    with pytest.raises(ManifestError, match=r"not a dataset: the folder has no _manifest\.json"):
        read_manifest(open_storage(str(tmp_path)))


def test_a_manifest_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(ManifestError, match=r"format_version = 99.*upgrade sparkring"):
        read_manifest(open_storage(str(tmp_path)))


FILE = {"path": "d/a.parquet", "split": "train", "rows": 3, "bytes": 9, "sha256": "0" * 64, "row_groups": [2, 1]}


def manifest(**changes: Any) -> str:
    content: dict[str, Any] = {
        "name": "t",
        "fingerprint": "0" * 64,
        "created_at": "",
        "columns": [{"name": "x", "dtype": "int32"}],
        "files": [FILE],
        "splits": {"train": {"rows": 3, "files": 1}},
        "accounting": {"rows_in": 4, "rows_out": 3, "quarantined": {"odd": 1}},
        "lineage": {"sources": {}},
    }
    return json.dumps(content | changes)


def test_a_manifest_comes_back_as_it_was_written() -> None:
    read = DatasetManifest.from_json(manifest(), "m")
    assert DatasetManifest.from_json(read.to_json(), "m") == read
    assert read.column("x").dtype == "int32" and [f.path for f in read.files_of("train")] == ["d/a.parquet"]
    with pytest.raises(KeyError, match="has no column 'y'; it has"):
        read.column("y")
    with pytest.raises(ManifestError, match="no split 'test'; it has"):
        read.files_of("test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accounting": {"rows_in": 5, "rows_out": 3, "quarantined": {"odd": 1}}}, "rows in != rows out"),
        ({"files": [FILE | {"row_groups": [2, 2]}]}, "row groups sum to 4, rows=3"),
        ({"files": [FILE, FILE]}, "'d/a.parquet' is listed twice"),
        ({"splits": {"train": {"rows": 4, "files": 1}}}, "says 4 rows in 1 file, it has 3 in 1"),
        ({"splits": {}}, "files are of the split 'train', which is not listed"),
        ({"files": [FILE | {"path": "../a.parquet"}]}, "must stay below its folder"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=f"^m: .*{words}"):
        DatasetManifest.from_json(manifest(**changes), "m")


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})


def test_files_of_parts_are_below_the_folder_above() -> None:
    folder = open_storage("/d/sets/flights-1")
    part = {"interval": "2013-03-28", "fingerprint": "0" * 64, "folder": "parts/t/2013-03-28/0", "rows": 3}
    alone, shared = (DatasetManifest.from_json(manifest(parts=parts), "m") for parts in ([], [part]))
    assert alone.files_folder(folder) == folder and shared.files_folder(folder).root == "/d/sets"
