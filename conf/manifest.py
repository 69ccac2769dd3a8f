"""The manifest, `_manifest.json`: the one contract between `etl` and `training`.

A dataset is a folder of plain Parquet files and one `_manifest.json`, written last. A folder without a manifest is not
a dataset; a Parquet file the manifest does not list is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from sparkring.conf.storage import Storage
from sparkring.conf.stored import (
    OPEN,
    CheckedAs,
    Count,
    Finite,
    FolderName,
    Label,
    RelativePath,
    Sha256,
    Stored,
    StoredError,
    parse,
    read,
    up_to,
)

FORMAT_VERSION = 1
MANIFEST_NAME = "_manifest.json"
ROW_NUMBER = "sparkring_row"
"""int64 column of every shard, beside the manifest's: the row's place in its split, from 0 in stored order. It is
decoded with the values, so it says which rows those are; audits and evaluation read it. Under 0.1 byte a row."""

Layout = Literal["scalar", "vector", "ragged", "nested", "binary"]
Dtype = Literal["bool", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "binary"]
Role = Literal["feature", "label", "id", "meta"]
Nulls = Literal["refuse", "mask", "fill"]


class ManifestError(StoredError):
    """The folder is not a dataset this version can read; the message says which file, what is wrong, what to do."""


class Column(Stored):
    """One stored column and the tensor it becomes.

    `dtype` is the tensor's element type by its numpy name (`bool`, `int8`..`int64`, `float16`, `float32`, `float64`),
    or `binary` for undecoded bytes. `layout` says how rows become tensors: `scalar` -> (B,); `vector` -> (B, *shape);
    `ragged` -> values (N, *shape) + offsets (B + 1,); `nested` -> values + one offsets tensor per level;
    `binary` -> a list of B byte strings, or what the reader's decoder makes of them.
    """

    name: Label
    dtype: Dtype
    layout: Layout = "scalar"
    shape: tuple[Count, ...] = ()
    role: Role = "feature"
    logical: str = Field(default="", description="the Spark type it came from, as DDL: `decimal(10,2)`, `date`")
    nulls: Nulls = Field(
        default="refuse",
        description="refuse: a null is an error; mask: also a bool tensor `<name>__valid`; fill: replaced by `fill`",
    )
    fill: Finite | int | bool | str | None = None
    cardinality: Annotated[int, Field(strict=True, ge=0, lt=1 << 31)] | None = Field(
        default=None, description="number of codes (int32) of a dictionary-coded column"
    )

    @property
    def mask(self) -> str | None:
        """Name of the bool tensor (B,) that is true where the row is not null; None if nulls are not masked."""
        return f"{self.name}__valid" if self.nulls == "mask" else None


class DataFile(Stored):
    """One Parquet file. `path` is relative to the dataset folder; `row_groups` are row counts in stored order."""

    path: RelativePath
    split: FolderName
    rows: Count
    bytes: Count
    sha256: Sha256
    row_groups: tuple[Count, ...]

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        if sum(self.row_groups) != self.rows:
            raise ValueError(f"row groups sum to {sum(self.row_groups)}, rows={self.rows}")
        return self


class SplitInfo(Stored):
    rows: Count
    files: Count


class Lineage(Stored):
    """Where the rows came from: enough to build them again, or to say why that is not possible."""

    sources: dict[str, Any]
    logical_plan: str = ""
    code_commit: str = ""
    code_digest: str = ""
    config_digest: str = ""
    application_id: str = ""


class Accounting(Stored):
    """rows in = rows out + quarantined, always."""

    rows_in: Count
    rows_out: Count
    quarantined: dict[str, Count] = {}

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        if self.rows_in != self.rows_out + sum(self.quarantined.values()):
            raise ValueError("rows in != rows out + quarantined")
        return self


class _Feature(TypedDict):
    name: Label
    column: Label


@OPEN
class NumericState(_Feature):
    kind: Literal["numeric"]
    transform: Literal["none", "log1p"]
    mean: Finite
    std: Annotated[Finite, Field(gt=0)]
    fill: Finite
    indicator: bool


@OPEN
class CategoricalState(_Feature):
    kind: Literal["categorical"]
    values: list[str]


@OPEN
class CyclicState(_Feature):
    kind: Literal["cyclic"]
    period: Annotated[Finite, Field(gt=0)]


@OPEN
class PassthroughState(_Feature):
    kind: Literal["passthrough"]
    dtype: Literal["float16"] | None
    shape: list[Annotated[Count, Field(gt=0)]] | None
    nulls: Nulls
    fill: Finite | int | bool | str | None


@OPEN
class FeatureState(TypedDict):
    """What etl/features.py fits and applies. `inputs`: raw column -> Spark type."""

    version: Count
    inputs: dict[str, str]
    features: list[
        Annotated[NumericState | CategoricalState | CyclicState | PassthroughState, Field(discriminator="kind")]
    ]


def _inputs_known(state: FeatureState) -> FeatureState:
    for feature in state["features"]:
        if feature["column"] not in state["inputs"]:
            raise ValueError(f"{feature['name']!r}: its column {feature['column']!r} is not among the inputs")
    return state


@OPEN
class TextSplit(TypedDict):
    unigram_entropy_nats: Finite


@OPEN
class TextState(TypedDict):
    """State of packed text, by etl/text.py. `size`: ids of the tokenizer without end and padding."""

    tokenizer_json: str
    size: Count
    pad_id: Count
    seq_len: Annotated[Count, Field(ge=2)]
    splits: dict[FolderName, TextSplit]


@OPEN
class CheckResult(TypedDict):
    """What etl/checks.py found."""

    name: str
    level: str
    rule: str
    failing: Count
    passed: bool


class DatasetManifest(Stored):
    format_version: Annotated[int, up_to(FORMAT_VERSION)] = FORMAT_VERSION
    name: Label
    fingerprint: Sha256
    created_at: str
    columns: tuple[Column, ...]
    files: tuple[DataFile, ...]
    splits: dict[FolderName, SplitInfo]
    accounting: Accounting
    features: Annotated[dict[str, Any], CheckedAs(Annotated[FeatureState, AfterValidator(_inputs_known)])] = {}
    checks: Annotated[list[dict[str, Any]], CheckedAs(list[CheckResult])] = []
    text: Annotated[dict[str, Any], CheckedAs(TextState)] = {}
    lineage: Lineage

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, names in (("files", [f.path for f in self.files]), ("columns", [c.name for c in self.columns])):
            if twice := sorted(name for name, times in Counter(names).items() if times > 1):
                raise ValueError(f"{what}: {twice[0]!r} is listed twice")
        if unknown := sorted({f.split for f in self.files} - self.splits.keys()):
            raise ValueError(f"files are of the split {unknown[0]!r}, which is not listed")
        for split, info in self.splits.items():
            found = self.files_of(split)
            rows = sum(f.rows for f in found)
            if (info.rows, info.files) != (rows, len(found)):
                raise ValueError(
                    f"split {split!r} says {info.rows} rows in {info.files} files, it has {rows} in {len(found)}"
                )
        return self

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
    def from_json(cls, text: str | bytes, where: str) -> DatasetManifest:
        """Parse and check. Raises ManifestError naming `where` for a newer format, bad JSON or inconsistent counts."""
        return parse(cls, text, where, ManifestError)


def read_manifest(folder: Storage) -> DatasetManifest:
    """Read the dataset in `folder`. Raises ManifestError if it is not one that this version can read."""
    if not folder.exists(MANIFEST_NAME):
        found = "the folder does not exist" if not folder.exists() else f"the folder has no {MANIFEST_NAME}"
        raise ManifestError(
            f"{folder.uri}: not a dataset: {found}; it was never finished or is not one of ours. "
            "Run `sparkring etl` to build it, or correct the `dataset` key"
        )
    return read(DatasetManifest, folder, MANIFEST_NAME, ManifestError)


def digest(value: Any) -> str:
    """sha256 (hex) of a JSON-able value in canonical form; the one way anything here is fingerprinted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
