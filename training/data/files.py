"""The files of a dataset: opened, and checked against the manifest."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.manifest import DataFile
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.training.data.decoding.columns import DataError, StorageFailure


class FileOpener:
    """Opens and checks listed files in their storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def open(self, file: DataFile) -> pa.NativeFile:
        return self.storage.fs.open_input_file(self.storage.path(file.path))

    def check(self, file: DataFile, content: bool) -> None:
        """Raise DataError if the file's length, or its hash (content), is another."""
        self._check_size(file)
        if content:
            self._check_hash(file)

    def take_counts(self) -> dict[str, int]:
        """Return counts since the last call, for the meter."""
        return {}

    def _check_size(self, file: DataFile) -> None:
        """Check existence and size by one cheap request, before the hash is computed."""
        try:
            size = self.storage.size_bytes(file.path)
        except OSError as error:
            raise StorageFailure(f"{file.path}: cannot be looked up in {self.storage.uri} ({error})") from error
        if size is None:
            raise DataError(f"{missing(file, self.storage)} or restore the file")
        if size != file.bytes:
            raise DataError(
                f"{file.path}: {count_of(size, 'byte')}, the manifest says {file.bytes}; the file was truncated or "
                "replaced: rebuild the dataset"
            )

    def _check_hash(self, file: DataFile) -> None:
        try:
            found = self.storage.sha256(file.path)
        except OSError as error:
            raise unreadable(file, self.storage, error) from error
        if found != file.sha256:
            group = self._first_damaged_group(file)
            raise other_content(file, found, "" if group is None else f", row group {group} does not decode")

    def _first_damaged_group(self, file: DataFile) -> int | None:
        """Find the first row group that fails to decode, by index; None if all decode."""
        for group in range(len(file.row_groups)):
            try:
                with FileOpener.open(self, file) as handle:
                    pq.ParquetFile(handle, page_checksum_verification=True).read_row_group(group)
            except (OSError, pa.ArrowException):
                return group
        return None


def missing(file: DataFile, storage: Storage) -> str:
    return f"{file.path}: listed in the manifest, missing in {storage.uri}; rebuild the dataset"


def unreadable(file: DataFile, storage: Storage, error: Exception) -> StorageFailure:
    return StorageFailure(f"{file.path}: cannot be read from {storage.uri} ({error})")


def other_content(file: DataFile, found: str, where: str = "") -> DataError:
    return DataError(
        f"{file.path}{where}: sha256 is {found[:12]}..., the manifest says {file.sha256[:12]}...; "
        "rebuild the dataset, or set on_corrupt to quarantine to train without this file"
    )


def unlisted_files(storage: Storage, files: Sequence[DataFile]) -> list[str]:
    """List Parquet files of the folder that are not in the manifest.

    Rows that the build quarantined are stored next to the shards on purpose, and are left out here.
    """
    listed = {f.path for f in files}
    quarantine = {p.split("/")[0] + "/quarantine" for p in listed}
    found = [p for p in storage.list_files() if p.endswith(".parquet") and p not in listed]
    return [p for p in found if "/".join(p.split("/")[:2]) not in quarantine]
