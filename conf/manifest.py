"""The manifest, `_manifest.json`: the one contract between `etl` and `training`.

A dataset is a folder of plain Parquet files and one `_manifest.json`, written last. A folder without a manifest is not
a dataset; a Parquet file the manifest does not list is not part of it.

Files hold values; `DatasetManifest.tensors` are what a model is given, by the feature state.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from sparkring.conf.features import EXACT_DTYPES, STORED_FOR, Output, State, outputs, whole_number
from sparkring.conf.plain_text import count_of
from sparkring.conf.schema import same_but_for_case
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
    named,
    parse,
    read,
    up_to,
)

FORMAT_VERSION = 2
# Part of every fingerprint in place of Spark's version: raised by hand when a supported Spark is found to make other
# rows than before.
SPARK_SEMANTICS = 1
VALUES_SINCE = 2
"""Since this format shards hold values; before, they held what features made of them, codes and scaled numbers."""
MANIFEST_NAME = "_manifest.json"
PART_NAME = "_part.json"  # next to the files of one interval, of which windows are made
ROW_NUMBER = "sparkring_row"
"""int64 column of every shard, beside the manifest's: the row's place in its split, from 0 in stored order. It is
decoded with the values, so it says which rows those are; audits and evaluation read it. Under 0.1 byte a row."""

Layout = Literal["scalar", "vector", "ragged", "nested", "binary"]
Dtype = Literal["bool", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "string", "binary"]
Role = Literal["feature", "label", "weight", "id", "meta", "input"]
Nulls = Literal["refuse", "mask", "fill", "keep"]


class ManifestError(StoredError):
    """The folder is not a dataset this version can read; the message says which file, what is wrong, what to do."""


class Column(Stored):
    """One stored column and the tensor it becomes; or a tensor that a feature makes of one.

    `dtype` is the tensor's element type by its numpy name (`bool`, `int8`..`int64`, `float16`, `float32`, `float64`),
    `binary` for undecoded bytes, or `string`, which only features and people read. `role` `input`: values that features
    are made of, no tensor. `layout` says how rows become tensors: `scalar` -> (B,); `vector` -> (B, *shape);
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
        description="refuse: a null is an error; mask: also a bool tensor `<name>__valid`; fill: replaced by `fill`; "
        "keep: stored, and the state of a feature decides what a model sees of it",
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
    """One Parquet file; `path` is relative to `DatasetManifest.files_folder`.

    `row_groups` are row counts in stored order. `row_offset`: rows of the split in earlier day partitions, which a
    reader adds to the file's row numbers.
    """

    path: RelativePath
    split: FolderName
    rows: Count
    bytes: Count
    sha256: Sha256
    row_groups: tuple[Count, ...]
    row_offset: Count = 0

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        if sum(self.row_groups) != self.rows:
            raise ValueError(f"row groups sum to {sum(self.row_groups)}, rows={self.rows}")
        return self


class SplitInfo(Stored):
    rows: Count
    files: Count


class Lineage(Stored):
    """Where the rows came from: enough to build them again, or to say why that is not possible.

    `made_of`: what decided the fingerprint, each by its name with a short hash. `spark_version`: of the session that
    built it; it decides nothing.
    """

    sources: dict[str, Any]
    logical_plan: str = ""
    code_commit: str = ""
    code_digest: str = ""
    config_digest: str = ""
    application_id: str = ""
    spark_version: str = ""
    made_of: dict[str, str] = {}


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
    train_nulls: NotRequired[Count]


@OPEN
class CategoricalState(_Feature):
    kind: Literal["categorical"]
    values: list[str]
    train_nulls: NotRequired[Count]


@OPEN
class HashedState(_Feature):
    """Ids by xxhash64, of any number of values; nothing is fitted."""

    kind: Literal["hashed"]


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
    fit: NotRequired[Literal["resize", "crop", "exact"]]  # of images, which are decoded to `shape`


@OPEN
class FeatureState(TypedDict):
    """What etl/columns/fit.py fits and training/data/features/transform.py applies. `inputs`: raw column -> Spark type.

    `labels`: of texts; no model sees them. `flags`: of several label columns. `weight`: of rows.
    """

    version: Count
    inputs: dict[str, str]
    features: list[
        Annotated[
            NumericState | CategoricalState | HashedState | CyclicState | PassthroughState,
            Field(discriminator="kind"),
        ]
    ]
    labels: NotRequired[list[ClassesState]]
    flags: NotRequired[FlagsState]
    weight: NotRequired[WeightState]


@OPEN
class ClassesState(_Feature):
    """A label of texts. A class's place in `values` is what a model learns; `counts`: rows by split, in that order.

    Of `tags` a row has an array, and a model learns a 0 or 1 for each of `values`.
    """

    kind: Literal["classes", "tags"]
    values: list[str]
    counts: dict[FolderName, list[Count]]


@OPEN
class FlagsState(TypedDict):
    """Several label columns. `counts`: rows of 1 by split, in the order of `values`, the columns' names.

    `odd`: column -> rows that are neither 0 nor 1; such columns are for tasks of the user.
    """

    values: list[str]
    counts: dict[FolderName, list[Count]]
    odd: dict[str, Count]


@OPEN
class WeightState(TypedDict):
    """The column of the rows' weights, and their mean over the training rows, by which the loss divides them."""

    column: Label
    mean: Annotated[Finite, Field(gt=0)]


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
    """State of packed text, by etl/text/sequences.py. `size`: ids of the tokenizer without end and padding."""

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


class WindowPart(Stored):
    """A day partition that datasets share: `folder`, below `files_folder`, has its `_part.json`."""

    interval: FolderName
    fingerprint: Sha256
    folder: RelativePath
    rows: Count


class DatasetManifest(Stored):
    """What a dataset is. One over day partitions has no other files: it lists theirs, in the order of intervals.

    `missing`: intervals of the window without a day partition, as the recipe allowed.
    """

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
    parts: tuple[WindowPart, ...] = ()
    missing: tuple[FolderName, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        passed = [s["name"] for s in self.features.get("features", []) if s["kind"] == "passthrough"]
        listed = {"files": [f.path for f in self.files], "columns": [c.name for c in self.columns], "features": passed}
        for what, names in listed.items():
            if twice := sorted(name for name, times in Counter(names).items() if times > 1):
                raise ValueError(f"{what}: {twice[0]!r} is listed twice")
        stored = {column.name: column for column in self.columns}
        for state in self.fitted:
            check_input(state, stored.get(state["column"]), self.features["inputs"].get(state["column"], "string"))
        for state in self.features.get("labels", []):
            if len(set(state["values"])) < len(state["values"]):
                raise ValueError(f"labels: {state['name']!r}: a class occurs twice")
        for name in self.features.get("flags", {}).get("values", []):
            if name not in stored or stored[name].role != "label":
                raise ValueError(f"features: the label {name!r} is no stored column with role label")
        for state in self.features.get("features", []):
            if state["kind"] == "categorical":
                check_categories(state, self.features["inputs"][state["column"]])
            elif state["kind"] == "passthrough" and state["name"] not in stored:
                raise ValueError(f"features: {state['name']!r} is passed through, and is not among the stored columns")
        if self.weight is not None:
            weight = stored.get(self.weight["column"])
            if weight is None or weight.layout != "scalar" or weight.dtype in ("string", "bool"):
                raise ValueError(f"features: the weight {self.weight['column']!r} is no stored column of numbers")
        if alike := same_but_for_case(tensor.name for tensor in self.tensors):
            raise ValueError(f"features: two tensors would be called {alike[0]!r} and {alike[1]!r}")
        if unknown := sorted({f.split for f in self.files} - self.splits.keys()):
            raise ValueError(f"files are of the split {unknown[0]!r}, which is not listed")
        for split, info in self.splits.items():
            found = self.files_of(split)
            rows = sum(f.rows for f in found)
            if (info.rows, info.files) != (rows, len(found)):
                raise ValueError(
                    f"split {split!r} says {count_of(info.rows, 'row')} in {count_of(info.files, 'file')}, it has "
                    f"{rows} in {len(found)}"
                )
        return self

    def files_folder(self, folder: Storage) -> Storage:
        """Return the folder that file paths are relative to: the dataset's, or its parent for windows."""
        return folder.parent if self.parts else folder

    @property
    def fitted(self) -> list[State]:
        """The states that a reader applies to stored columns."""
        states: list[State] = self.features.get("features", []) if self.format_version >= VALUES_SINCE else []
        return [*(state for state in states if state["kind"] != "passthrough"), *self.features.get("labels", [])]

    @property
    def classes(self) -> list[str]:
        """The names of the label's classes, in the order of a model's outputs; [] where the label is no text."""
        state = self._named_label
        return state["values"] if state.get("kind") == "classes" else []

    @property
    def label_names(self) -> list[str]:
        """Label names of a multilabel dataset, in output order: tags, or columns of 0 and 1; [] otherwise."""
        state = self._named_label
        return [] if state.get("kind") == "classes" or any(state.get("odd", {}).values()) else state.get("values", [])

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """Split -> rows of each of `classes`, or of `label_names`."""
        counts: dict[str, list[int]] = self._named_label.get("counts", {})
        return counts

    @property
    def _named_label(self) -> State:
        """The state of the label's classes or tags, or of several label columns; {} of another label."""
        return next(iter(self.features.get("labels", [])), self.features.get("flags", {}))

    @property
    def weight(self) -> State | None:
        """Column and training mean of the rows' weights; None where all rows count equally."""
        return self.features.get("weight")

    @property
    def hashed(self) -> list[str]:
        """The tensors that are 64-bit ids of values: no numbers to compute with, and no codes below a cardinality."""
        return [state["name"] for state in self.features.get("features", []) if state["kind"] == "hashed"]

    @property
    def images(self) -> list[str]:
        """The features of encoded images, which readers decode to their shape."""
        return [state["name"] for state in self.features.get("features", []) if "fit" in state]

    @property
    def tensors(self) -> tuple[Column, ...]:
        """What a reader serves: columns made by features, in their order, then others that are stored as tensors."""
        return self.columns if self.format_version < VALUES_SINCE else tensor_columns(self.columns, self.features)

    def column(self, name: str) -> Column:
        """Return the stored column of that name; the KeyError lists the columns."""
        return _named(name, self.columns, f"dataset {self.name!r} has no column")

    def tensor(self, name: str) -> Column:
        """Return the tensor of that name; the KeyError lists the tensors."""
        return _named(name, self.tensors, f"dataset {self.name!r} has no column")

    def files_of(self, split: str) -> tuple[DataFile, ...]:
        """List the files of a split in stored order; the ManifestError lists the splits."""
        if split not in self.splits:
            raise ManifestError(f"dataset {self.name!r} has no split {split!r}; it has {sorted(self.splits)}")
        return tuple(f for f in self.files if f.split == split)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> DatasetManifest:
        """Parse and check. Raises ManifestError naming `where` for a newer format, bad JSON or inconsistent counts."""
        return parse(cls, text, where, ManifestError)


def with_features(manifest: DatasetManifest, features: State) -> DatasetManifest:
    """Return the dataset with another dataset's feature state. ManifestError if columns do not fit."""
    if not features or features == manifest.features:
        return manifest
    with named(f"dataset {manifest.name!r}, read with the feature state of another", ManifestError):
        return DatasetManifest.model_validate(dict(manifest) | {"features": features})


def tensor_columns(columns: Sequence[Column], features: State) -> tuple[Column, ...]:
    """List the tensors of stored `columns`: what the feature state makes of them, then others that are tensors."""
    stored, tensors = {column.name: column for column in columns}, list[Column]()
    for state in features.get("features", []):
        if state["kind"] == "passthrough":
            tensors.append(stored.pop(state["name"]))
            continue
        made = outputs(state)
        logical = features["inputs"][state["column"]]
        tensors += [Column(name=o.name, dtype=o.dtype, logical=logical, cardinality=o.cardinality) for o in made]
    plain = [c for c in stored.values() if c.role != "input" and c.dtype != "string"]
    for state in features.get("labels", []):
        (made_of_it,) = outputs(state)
        plain.append(_label_tensor(made_of_it))
    return (*tensors, *plain)


def _label_tensor(made: Output) -> Column:
    """Return the tensor of a string label: a class number, or a vector with 0 or 1 per tag."""
    layout: Layout = "vector" if made.shape else "scalar"
    kinds = {"logical": "array<string>" if made.shape else "string", "cardinality": made.cardinality}
    return Column(name=made.name, dtype=made.dtype, layout=layout, shape=made.shape, role="label", **kinds)


def check_input(state: State, stored: Column | None, spark_type: str) -> None:
    """Raise ValueError unless the stored column, whose Spark type is given, is one that the feature can be made of."""
    name, kind = state["name"], state["kind"]
    if stored is None:
        raise ValueError(f"features: {name!r}: its column {state['column']!r} is not among the stored columns")
    is_text = spark_type not in EXACT_DTYPES and not spark_type.startswith("decimal")
    layout = "ragged" if kind == "tags" else "scalar"
    fits = stored.layout == layout and stored.dtype in STORED_FOR[kind] and is_text == (stored.dtype == "string")
    if kind == "categorical":  # looked up by the number behind a value: other types give their numbers other meanings
        is_date, is_boolean = spark_type == "date", spark_type == "boolean"
        fits = fits and is_date == (stored.logical == "date") and is_boolean == (stored.dtype == "bool")
    if not fits:
        raise ValueError(
            f"features: {name!r}: a {kind} feature of {spark_type} is not made of a column that is stored as "
            f"{stored.layout} {stored.dtype}" + (f" of {stored.logical}" if stored.logical else "")
        )


def check_categories(state: State, spark_type: str) -> None:
    """Raise ValueError for a category that occurs twice, or is no value of the column's Spark type."""
    values = state["values"]
    if len(set(values)) < len(values):
        raise ValueError(f"features: {state['name']!r}: a category occurs twice")
    for text in values if spark_type in EXACT_DTYPES else ():
        try:
            whole_number(text, spark_type)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"features: {state['name']!r}: the category {text!r} is no {spark_type}: {error}"
            ) from None


def _named(name: str, columns: Sequence[Column], missing: str) -> Column:
    for column in columns:
        if column.name == name:
            return column
    raise KeyError(f"{missing} {name!r}; it has {[c.name for c in columns]}")


def read_manifest(folder: Storage) -> DatasetManifest:
    """Read the dataset in `folder`. Raises ManifestError if it is not one that this version can read."""
    if not folder.exists(MANIFEST_NAME):
        found = "the folder does not exist" if not folder.exists() else f"the folder has no {MANIFEST_NAME}"
        raise ManifestError(
            f"{folder.uri}: not a dataset: {found}; it was never finished or is not one of ours. "
            "Run `sparkring etl` to build it, or correct the `dataset` key"
        )
    manifest = read(DatasetManifest, folder, MANIFEST_NAME, ManifestError)
    if manifest.format_version < VALUES_SINCE and manifest.features:
        raise ManifestError(
            f"{folder.uri}/{MANIFEST_NAME}: format_version = {manifest.format_version}: the dataset is of an older "
            f"sparkring, its files hold codes where this one reads values (format {VALUES_SINCE}); run `sparkring etl` "
            "to build it again"
        )
    return manifest
