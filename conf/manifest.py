"""The one contract between `etl` and `training`: what `_manifest.json` says of a dataset.

A dataset is a folder of plain Parquet files and one `_manifest.json`, written last. A folder without a manifest is not
a dataset; a Parquet file the manifest does not list is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from conf.storage import Storage

FORMAT_VERSION = 1
MANIFEST_NAME = "_manifest.json"

Layout = Literal["scalar", "vector", "ragged", "nested", "binary"]
Role = Literal["feature", "label", "id", "meta"]
Nulls = Literal["refuse", "mask", "fill"]


class ManifestError(ValueError):
    """The folder is not a dataset this version can read; the message says which file, what is wrong, what to do."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Column(_Strict):
    """One stored column and the tensor it becomes.

    `dtype` is the tensor's element type by its numpy name (`bool`, `int8`..`int64`, `float16`, `float32`, `float64`),
    or `binary` for undecoded bytes. `layout` says how rows become tensors: `scalar` -> (B,); `vector` -> (B, *shape);
    `ragged` -> values (N, *shape) + offsets (B + 1,); `nested` -> values + one offsets tensor per level;
    `binary` -> a list of B byte strings, or what the reader's decoder makes of them.
    """

    name: str
    dtype: str
    layout: Layout = "scalar"
    shape: tuple[int, ...] = ()
    role: Role = "feature"
    logical: str = Field(default="", description="the Spark type it came from, as DDL: `decimal(10,2)`, `date`")
    nulls: Nulls = Field(
        default="refuse",
        description="refuse: a null is an error; mask: also a bool tensor `<name>__valid`; fill: replaced by `fill`",
    )
    fill: float | int | bool | str | None = None
    cardinality: int | None = Field(default=None, description="number of codes of a dictionary-coded column")

    @property
    def mask(self) -> str | None:
        """Name of the bool tensor (B,) beside it that says which rows are not null; None where there is none."""
        return f"{self.name}__valid" if self.nulls == "mask" else None


class DataFile(_Strict):
    """One Parquet file. `path` is relative to the dataset folder; `row_groups` are row counts in stored order."""

    path: str
    split: str
    rows: int
    bytes: int
    sha256: str
    row_groups: tuple[int, ...]


class SplitInfo(_Strict):
    rows: int
    files: int


class Lineage(_Strict):
    """Where the rows came from: enough to build them again, or to say why that is not possible."""

    sources: dict[str, Any]
    logical_plan: str = ""
    code_commit: str = ""
    code_digest: str = ""
    config_digest: str = ""
    application_id: str = ""


class Accounting(_Strict):
    """rows in = rows out + quarantined, always."""

    rows_in: int
    rows_out: int
    quarantined: dict[str, int] = {}


class DatasetManifest(_Strict):
    format_version: int = FORMAT_VERSION
    name: str
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: str
    columns: tuple[Column, ...]
    files: tuple[DataFile, ...]
    splits: dict[str, SplitInfo]
    accounting: Accounting
    features: dict[str, Any] = Field(default={}, description="fitted feature state; see etl/features.py")
    checks: list[dict[str, Any]] = []
    text: dict[str, Any] = Field(default={}, description="tokenizer, sequence length and token counts; see etl/text.py")
    lineage: Lineage

    def column(self, name: str) -> Column:
        """The column of that name; KeyError names what there is."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"dataset {self.name!r} has no column {name!r}; it has {[c.name for c in self.columns]}")

    def files_of(self, split: str) -> tuple[DataFile, ...]:
        """The files of a split in their stored order; ManifestError names the splits there are."""
        if split not in self.splits:
            raise ManifestError(f"dataset {self.name!r} has no split {split!r}; it has {sorted(self.splits)}")
        return tuple(f for f in self.files if f.split == split)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> DatasetManifest:
        """Parse and check. Raises ManifestError naming `where` for a newer format, bad JSON or inconsistent counts."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ManifestError(f"{where}: not JSON ({error}); the dataset must be rebuilt") from error
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ManifestError(
                f"{where}: format_version is {version!r}, this sparkring reads up to {FORMAT_VERSION}; "
                "upgrade sparkring or rebuild the dataset"
            )
        try:
            manifest = cls.model_validate(raw)
        except ValidationError as error:
            raise ManifestError(f"{where}: not a dataset manifest: {error}") from error
        manifest._check_counts(where)
        return manifest

    def _check_counts(self, where: str) -> None:
        for file in self.files:
            if sum(file.row_groups) != file.rows:
                raise ManifestError(f"{where}: {file.path}: row groups sum to {sum(file.row_groups)}, rows={file.rows}")
        for split, info in self.splits.items():
            rows = sum(f.rows for f in self.files if f.split == split)
            if rows != info.rows:
                raise ManifestError(f"{where}: split {split!r} says {info.rows} rows, its files hold {rows}")
        accounting = self.accounting
        if accounting.rows_in != accounting.rows_out + sum(accounting.quarantined.values()):
            raise ManifestError(f"{where}: rows in != rows out + quarantined: {accounting}")


def read_manifest(folder: Storage) -> DatasetManifest:
    """The dataset in `folder`. Raises ManifestError where there is none, or none this version can read."""
    if not folder.exists(MANIFEST_NAME):
        found = "the folder does not exist" if not folder.exists() else f"the folder has no {MANIFEST_NAME}"
        raise ManifestError(
            f"{folder.uri}: not a dataset: {found}; it was never finished or is not one of ours. "
            "Run `sparkring etl` to build it, or correct the `dataset` key"
        )
    return DatasetManifest.from_json(folder.read_bytes(MANIFEST_NAME).decode(), f"{folder.uri}/{MANIFEST_NAME}")


def digest(value: Any) -> str:
    """sha256 (hex) of a JSON-able value in canonical form; the one way anything here is fingerprinted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
