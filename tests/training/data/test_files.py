"""The files of a dataset against its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.decoding.columns import DataError, StorageFailure
from sparkring.training.data.files import FileOpener, unlisted_files

MakeDataset = Callable[..., DatasetManifest]


def test_a_damaged_file_is_named_with_the_row_group_that_does_not_decode(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    manifest = make_dataset(tmp_path, [[2000, 2000]], compression="none")
    path = tmp_path / manifest.files[0].path
    data = bytearray(path.read_bytes())
    data[60] ^= 255
    path.write_bytes(data)
    opener = FileOpener(open_storage(str(tmp_path)))
    opener.check(manifest.files[0], content=False)  # its length is right
    with pytest.raises(DataError, match=r"train-00000.parquet, row group 0 does not decode: sha256 is"):
        opener.check(manifest.files[0], content=True)
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"truncated or replaced: rebuild the dataset"):
        opener.check(manifest.files[0], content=True)
    path.unlink()
    with pytest.raises(
        DataError, match=r"listed in the manifest, missing in .*; rebuild the dataset or restore the file"
    ):
        opener.check(manifest.files[0], content=False)


def test_a_failing_storage_is_told_apart_from_a_damaged_file(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_dataset(tmp_path, [[20]])

    def refuse(*_: object) -> None:
        raise OSError("no route to host")

    for name, message in (("sha256", "cannot be read from"), ("size_bytes", "cannot be looked up in")):
        monkeypatch.setattr(f"sparkring.conf.storage.Storage.{name}", refuse)
        with pytest.raises(StorageFailure, match=message):
            FileOpener(open_storage(str(tmp_path))).check(manifest.files[0], content=True)


def test_quarantined_rows_of_the_build_are_no_unlisted_files(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[20]])
    for name in ("data-test/quarantine/rule.parquet", "data-test/other.parquet", "data-test/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert unlisted_files(open_storage(str(tmp_path)), manifest.files) == ["data-test/other.parquet"]
