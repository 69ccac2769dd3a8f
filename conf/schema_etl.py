"""The `etl` block of a recipe: raw tables -> views -> checks -> split -> features (or packed text) -> shards."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from conf.strict import Strict

Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
RESERVED = "sparkring_"  # of columns that shards and batches have beside the declared ones
Share = Annotated[float, Field(ge=0, le=1)]
SplitName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


def same_but_for_case(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that Spark, which does not tell them apart by case, takes for one."""
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen:
            return seen[name.lower()], name
        seen[name.lower()] = name
    return None


def check_case(where: str, names: Iterable[str]) -> None:
    """ValueError where two names differ by case alone, or not at all."""
    if twice := same_but_for_case(names):
        raise ValueError(
            f"{where}: {twice[0]!r} and {twice[1]!r} are one name to Spark, which ignores case; rename one"
        )


class CsvOptions(Strict):
    """How a CSV file is written: RFC 4180. A quote within a quoted value is doubled; a backslash is a character."""

    sep: Annotated[str, Field(pattern=r"^[\t\x20-\x7e]$")] = ","
    quote: Annotated[str, Field(pattern=r"^[\x20-\x7e]?$")] = Field('"', description="'': quotes are characters")
    nullValue: str = Field("", description="what stands for null beside the empty value; quoted, both are texts")
    encoding: str = Field("utf-8", description="of Python's names: latin-1, windows-1252, utf-16")

    @field_validator("encoding")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            codecs.lookup(value)
        except LookupError as error:
            raise ValueError(f"{value!r} is no encoding Python knows") from error
        return value

    @model_validator(mode="after")
    def _differ(self) -> CsvOptions:
        if self.sep == self.quote:
            raise ValueError(f"sep and quote are both {self.sep!r}")
        return self


class SourceConfig(Strict):
    """One raw table. A file that does not match the declared columns stops the job, named with the column."""

    path: str = Field(
        description="a file, a folder (all files below it named as the format: *.csv, *.csv.gz or *.parquet; text: all "
        "there are) or a glob (`*` stays within a folder, `**` crosses them); local or any storage URI"
    )
    format: Literal["csv", "parquet", "text"] = "csv"
    columns: dict[str, str] = Field(
        {},
        description="name -> Spark type (`int`, `decimal(10,2)`). csv: the whole header; parquet: the columns to read; "
        "text: none, rows are whole files with the columns `path` and `text`",
    )
    options: CsvOptions | None = Field(None, description="csv only; None: RFC 4180, null is the empty value")
    fingerprint: Literal["content", "stat"] = Field(
        "content", description="content: sha256 of every file; stat: path, size and mtime (for lakes too large to read)"
    )

    @model_validator(mode="after")
    def _columns_given(self) -> SourceConfig:
        if (self.format == "text") != (not self.columns):
            raise ValueError("columns must be declared for csv and parquet, and may not be for text")
        check_case("columns", self.columns)
        if self.options is not None and self.format != "csv":
            raise ValueError(f"options are for csv; a {self.format} source has none")
        return self


class CheckConfig(Strict):
    """One rule about the rows. Its failing rows are counted; `row` quarantines them, `dataset` stops the job.

    range: `min` <= column <= `max`, null passes. null_share: column is null. unique: no two rows agree in `columns`
    (at level row the first is kept). referential: column's value occurs in `to` (`source.column`), null passes.
    expression: the SQL is true; null fails.
    """

    name: Name
    kind: Literal["range", "null_share", "unique", "referential", "expression"]
    level: Literal["row", "dataset"] = "dataset"
    column: str | None = None
    columns: list[str] = []
    min: float | None = None
    max: float | None = None
    to: Annotated[str, Field(pattern=r"^\w+\.\w+$")] | None = None
    sql: str | None = None
    max_share: Share | None = Field(
        None,
        description="stop the job when a larger share of rows fails; None: 0 at level dataset, no limit at level row",
    )

    @model_validator(mode="after")
    def _keys_of_kind(self) -> CheckConfig:
        wanted = {
            "range": {"column"},
            "null_share": {"column"},
            "unique": {"columns"},
            "referential": {"column", "to"},
            "expression": {"sql"},
        }[self.kind]
        bounds = {"min", "max"} if self.kind == "range" else set()
        given = {k for k in ("column", "columns", "min", "max", "to", "sql") if getattr(self, k) not in (None, [])}
        if missing := wanted - given:
            raise ValueError(f"a check of kind {self.kind} needs {sorted(missing)}")
        if extra := given - wanted - bounds:
            raise ValueError(f"a check of kind {self.kind} has no {sorted(extra)}")
        if self.kind == "range" and self.min is None and self.max is None:
            raise ValueError("a range check needs min, max or both")
        return self


class SplitConfig(Strict):
    """time: `boundaries` maps each later split to its first instant; rows before the first are `train`.
    hash: `shares` by a stable hash of `key` (None: etl.key). column: the split's name stands in `column`."""

    kind: Literal["time", "hash", "column"] = "hash"
    column: str | None = None
    boundaries: dict[SplitName, str] = Field({}, description="split -> ISO date or timestamp (UTC), in rising order")
    shares: dict[SplitName, PositiveFloat] = {"train": 0.8, "valid": 0.1, "test": 0.1}
    key: list[str] | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _keys_of_kind(self) -> SplitConfig:
        if self.kind in ("time", "column") and not self.column:
            raise ValueError(f"a split by {self.kind} needs `column`")
        if self.kind == "hash" and self.column:
            raise ValueError("a split by hash has `key`, not `column`")
        if (self.kind == "time") != bool(self.boundaries):
            raise ValueError("`boundaries` belong to a split by time, which needs at least one")
        if "train" in self.boundaries:
            raise ValueError("`train` is what lies before the first boundary and has no boundary itself")
        if "train" not in self.shares:
            raise ValueError("`shares` must have `train`: features are fitted on it")
        if abs(sum(self.shares.values()) - 1) > 1e-9:
            raise ValueError(f"shares sum to {sum(self.shares.values()):g}, not 1")
        return self


class CategoricalFeature(Strict):
    """-> int32 codes: 0 null, 1 unseen in training, 2.. values by falling count. Strings, integers, booleans, dates."""

    kind: Literal["categorical"]
    column: str | None = Field(None, description="None: the feature's own name")
    min_count: PositiveInt = 1
    max_size: PositiveInt = Field(65536, description="most frequent values kept")


class NumericFeature(Strict):
    """-> float32 (x - mean) / std of the training split; null and NaN become `fill` (None: the mean) first.

    `indicator` adds `<name>__null` (0 or 1): auto adds it where the training split has nulls.
    """

    kind: Literal["numeric"]
    column: str | None = None
    fill: float | None = None
    indicator: Literal["auto", "always", "never"] = "auto"
    transform: Literal["none", "log1p"] = Field(
        "none", description="log1p: log(1 + x) of x >= 0, before everything else"
    )
    scale: bool = True


class CyclicFeature(Strict):
    """-> float32 `<name>_sin`, `<name>_cos` of 2 pi x / period; null gives (0, 0), which no value does."""

    kind: Literal["cyclic"]
    column: str | None = None
    period: PositiveFloat


class PassthroughFeature(Strict):
    """The column as it is. Types without an exact tensor type are refused at write time with a remedy."""

    kind: Literal["passthrough"]
    column: str | None = None
    dtype: Literal["float16"] | None = Field(
        None, description="float16: stored as float32 holding half-precision values"
    )
    shape: list[PositiveInt] | None = Field(None, description="fixed shape of an array column; None: ragged")
    nulls: Literal["refuse", "mask", "fill"] = "refuse"
    fill: float | int | bool | str | None = None

    @model_validator(mode="after")
    def _fill_given(self) -> PassthroughFeature:
        if (self.nulls == "fill") != (self.fill is not None):
            raise ValueError("`fill` and `nulls: fill` come together")
        return self


Feature = Annotated[
    CategoricalFeature | NumericFeature | CyclicFeature | PassthroughFeature, Field(discriminator="kind")
]


class TextConfig(Strict):
    """Documents -> rows of `seq_len` tokens. Every token of every document is in exactly one row."""

    column: str = "text"
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    vocab_size: Annotated[int, Field(ge=258)] = Field(4096, description="bpe only; bytes has 258: 256, end, pad")
    train_documents: PositiveInt = Field(20000, description="bpe is trained on this many training documents at most")
    seq_len: Annotated[int, Field(ge=2)] = 256
    document_mask: bool = Field(
        False,
        description="also a column `document`: each token's document, numbered within its row, -1 where padded, for "
        "models of your own that keep documents apart (the built-in GPT attends across them)",
    )


class ShardConfig(Strict):
    """How the rows are cut into files. None: from the number of rows and the width of a row, never from the machine."""

    shards: dict[SplitName, PositiveInt] | None = Field(None, description="files per split")
    row_group: PositiveInt | None = Field(None, description="rows per row group; only a file's last may be smaller")
    target_bytes: PositiveInt = Field(64 << 20, description="size of a file, uncompressed, when `shards` is None")
    seed: int = Field(0, description="of the hash that decides the stored order")
    compression: Literal["snappy", "zstd", "none"] = "snappy"


class EtlConfig(Strict):
    """Raw tables to one dataset."""

    kind: Literal["table", "text"] = "table"
    sources: Annotated[dict[Name, SourceConfig], Field(min_length=1)]
    views: dict[Name, str] = Field({}, description="name -> Spark SQL over sources and earlier views, in order")
    rows: str = Field(
        description="the view, source or `module:function(tables) -> DataFrame` that gives the dataset's rows"
    )
    one_per: str | None = Field(None, description="source of which every row must be exactly one row of `rows`")
    key: list[str] = Field([], description="columns that identify a row; decide its place. []: all columns together")
    checks: list[CheckConfig] = []
    split: SplitConfig = SplitConfig()
    features: dict[Name, Feature] = {}
    label: str | None = Field(None, description="column of `rows`, stored as it is")
    keep: list[str] = Field([], description="columns stored as they are that no model sees (role meta)")
    text: TextConfig | None = None
    shard: ShardConfig = ShardConfig()

    @model_validator(mode="after")
    def _kinds_agree(self) -> EtlConfig:
        if (self.kind == "text") != (self.text is not None):
            raise ValueError("`kind: text` and the `text` block come together")
        if self.kind == "text" and (self.features or self.label or self.keep):
            raise ValueError("a text dataset has no features, label or keep")
        if self.kind == "table" and not self.features:
            raise ValueError("a table needs `features`")
        if self.one_per is not None and self.one_per not in self.sources:
            raise ValueError(f"one_per = {self.one_per!r} is no source; there are {sorted(self.sources)}")
        names = [c.name for c in self.checks]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"checks: names given twice: {twice}")
        if shadowed := sorted(self.views.keys() & self.sources.keys()):
            raise ValueError(f"views: {shadowed} are sources already")
        check_case("sources and views", [*self.sources, *self.views])
        if ":" not in self.rows and self.rows not in self.views.keys() | self.sources.keys():
            raise ValueError(f"rows = {self.rows!r} is no view or source; there are {[*self.sources, *self.views]}")
        outputs = [*self.keep, *(c for c in (self.label,) if c)]
        if clash := sorted(self.features.keys() & set(outputs)):
            raise ValueError(f"features: {clash} are label or keep too; a column has one role")
        check_case("features, label and keep", [*self.features, *outputs])
        if reserved := [n for n in (*self.features, *outputs) if n.lower().startswith(RESERVED)]:
            raise ValueError(
                f"features, label or keep: {reserved}: names that begin with {RESERVED!r} are ours; rename"
            )
        if self.label and self.label in {f.column for f in self.features.values()}:
            raise ValueError(f"features: one reads the label {self.label!r}")
        for index, check in enumerate(self.checks):
            if check.to and check.to.split(".")[0] not in self.sources.keys() | self.views.keys():
                raise ValueError(f"checks.{index}.to = {check.to!r}: no such source or view")
        return self
