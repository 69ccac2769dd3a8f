"""The recipe's schema: one class per block, RunConfig last. Units: names in `_s` are seconds, in `_bytes` bytes."""

from __future__ import annotations

import re
from datetime import date
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from sparkring.conf.housekeeping import NotifyConfig, RetentionConfig
from sparkring.conf.predict import PredictConfig
from sparkring.conf.promotion import DriftConfig, PromoteConfig, WarmStartConfig
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schema import Name, Strict, TimeZone, check_case
from sparkring.conf.secrets import is_secret_name, redact
from sparkring.conf.sources import FilesSource, Source, as_text

MLFLOW_SCHEMES = {  # of its own stores; plug-ins add others
    "http", "https", "file", "sqlite", "mysql", "postgresql", "mssql", "databricks", "databricks-uc", "uc",
}  # fmt: skip
SPARK_REDACTS = "(?i)secret|password|token|access[.]?key"  # Spark's default of spark.redaction.regex
Reference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _plain(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def _as_spark_writes(value: Any) -> Any:
    """Make a text of a number or a bool of YAML's."""
    return str(value).lower() if isinstance(value, int | float) else value


class StorageConfig(Strict):
    """Where datasets and run folders live: a local path or any URI pyarrow or fsspec knows."""

    datasets: str = "data/datasets"
    runs: str = "data/runs"


class SparkConfig(Strict):
    """The Spark session, where the job makes it itself; under spark-submit the submitted settings win."""

    master: str | None = Field(None, description="None: what spark-submit says, else local[<launch.world>]")
    app_name: str | None = None
    log: Literal["file", "console"] = Field(
        "file",
        description="where Spark's log goes, where the job starts Spark itself: to a file, or to stderr",
    )
    conf: dict[str, Annotated[str | SecretStr, BeforeValidator(_as_spark_writes)]] = Field(
        {},
        description="settings of Spark; those it redacts itself (spark.redaction.regex), and others that hold secrets, "
        "reach the session and nothing else",
    )

    @field_validator("conf")
    @classmethod
    def _hide(cls, conf: dict[str, str | SecretStr]) -> dict[str, str | SecretStr]:
        rule = _plain(conf.get("spark.redaction.regex", SPARK_REDACTS))
        try:
            hides = re.compile(rule)
        except re.error as error:
            raise ValueError(f"spark.redaction.regex is no regular expression: {error}") from None

        def is_secret(key: str, value: str) -> bool:
            spark_hides = hides.search(key) or hides.search(value)
            return bool(spark_hides) or is_secret_name(key) or redact(value) != value

        return {
            key: SecretStr(_plain(value))
            if key != "spark.redaction.regex" and is_secret(key, _plain(value))
            else _plain(value)
            for key, value in conf.items()
        }

    def settings(self) -> dict[str, str]:
        """`conf` with its secrets, for the session alone."""
        return {key: _plain(value) for key, value in self.conf.items()}


# --- etl: raw tables -> views -> checks -> split -> features, or packed text -> shards


RESERVED = "sparkring_"  # of columns that shards and batches have beside the declared ones
Share = Annotated[float, Field(ge=0, le=1)]
SplitName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


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


def _by_split(value: Any) -> Any:
    if isinstance(value, int):
        raise ValueError(f"must say how many files each split has, such as {{train: {value}, valid: 1}}")
    return value


class ShardConfig(Strict):
    """How the rows are cut into files. None: from the number of rows and the width of a row, never from the machine."""

    shards: Annotated[dict[SplitName, PositiveInt] | None, BeforeValidator(_by_split)] = Field(
        None, description="files per split"
    )
    row_group: PositiveInt | None = Field(None, description="rows per row group; only a file's last may be smaller")
    target_bytes: PositiveInt = Field(64 << 20, description="size of a file, uncompressed, when `shards` is None")
    seed: int = Field(0, description="of the hash that decides the stored order")
    compression: Literal["snappy", "zstd", "none"] = "snappy"


Day = Annotated[str, BeforeValidator(as_text), AfterValidator(lambda text: date.fromisoformat(text).isoformat())]


class IntervalConfig(Strict):
    """Rows are written in parts, one per interval, which several datasets share: each is a window of intervals.

    A part is made of what the sources hold of its interval, and of sources that are read whole: it does not depend on
    the window. An interval is named by its first day.
    """

    column: str = Field(
        description="column of `rows` (date, timestamp or timestamp_ntz) that says to which interval a row belongs"
    )
    every: Literal["day", "week", "month"] = Field("day", description="a week begins on Monday")
    time_zone: TimeZone = Field(
        "UTC", description="whose days they are; where clocks are changed, a day has 23 or 25 hours"
    )
    sources: dict[Name, str] = Field(
        {},
        description="source -> its partition column of type date: only files of the interval are opened. Other sources "
        "are read whole, and a change in one of them is a change in every part",
    )
    look_back: NonNegativeInt = Field(
        0, description="intervals before its own that a part's `sources` are read from, for views that look back"
    )
    last: Day = Field(description="first day of the last interval of the window")
    window: PositiveInt = Field(description="intervals in the dataset")
    missing: Literal["fail", "skip"] = Field(
        "fail", description="an interval of which a source has no file: fail names it, skip leaves its part out"
    )


class EtlConfig(Strict):
    """Raw tables to one dataset."""

    kind: Literal["table", "text"] = "table"
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    views: dict[Name, str] = Field({}, description="name -> Spark SQL over sources and earlier views, in order")
    rows: str = Field(
        description="the view, source or `module:function(tables) -> DataFrame` that gives the dataset's rows"
    )
    one_per: str | None = Field(None, description="source of which every row must be exactly one row of `rows`")
    key: list[str] = Field([], description="columns that identify a row; decide its place. []: all columns together")
    checks: list[CheckConfig] = []
    split: SplitConfig = SplitConfig()
    features: dict[Name, Feature] = {}
    label: str | None = Field(None, description="column of `rows`, stored as it is; texts are classes")
    classes: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="of a label of texts: its classes, in the order of the model's outputs; a binary model predicts "
        "the last one. None: the texts of the rows, sorted",
    )
    keep: list[str] = Field([], description="columns stored as they are that no model sees (role meta)")
    text: TextConfig | None = None
    shard: ShardConfig = ShardConfig()
    interval: IntervalConfig | None = None
    limit_rows: PositiveInt | None = Field(
        None,
        description="about so many rows, by the hash of their key: for a trial (`sparkring run RECIPE --limit-rows N`)",
    )

    @model_validator(mode="after")
    def _kinds_agree(self) -> EtlConfig:
        if (self.kind == "text") != (self.text is not None):
            raise ValueError("`kind: text` and the `text` block come together")
        if self.kind == "text" and (self.features or self.label or self.keep):
            raise ValueError("a text dataset has no features, label or keep")
        if self.limit_rows is not None and self.one_per is not None:
            raise ValueError("limit_rows: with one_per every row is counted; set one_per to null in a trial")
        if self.classes is not None and (self.label is None or len(set(self.classes)) < len(self.classes)):
            raise ValueError("classes: there is no label" if self.label is None else "classes: one is listed twice")
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
            which = "the label" if clash[0] == self.label else "in keep"
            raise ValueError(f"features.{clash[0]}: is {which} too; a column has one role: remove it from one of them")
        check_case("features, label and keep", [*self.features, *outputs])
        if reserved := [n for n in (*self.features, *outputs) if n.lower().startswith(RESERVED)]:
            raise ValueError(
                f"features, label or keep: {reserved}: names that begin with {RESERVED!r} are ours; rename"
            )
        if reads := [name for name, f in self.features.items() if self.label and f.column == self.label]:
            raise ValueError(
                f"features.{reads[0]}: reads the label {self.label!r}, so a model would be shown what it must predict; "
                "remove this feature, or name another label"
            )
        for index, check in enumerate(self.checks):
            if check.to and check.to.split(".")[0] not in self.sources.keys() | self.views.keys():
                raise ValueError(f"checks.{index}.to = {check.to!r}: no such source or view")
        return self

    @model_validator(mode="after")
    def _parts_possible(self) -> EtlConfig:
        if self.interval is not None and (problem := parts_problem(self, self.interval)):
            raise ValueError(problem)
        return self


def parts_problem(etl: EtlConfig, interval: IntervalConfig) -> str | None:
    """Say why the dataset cannot be made of parts that do not depend on each other; None where it can."""
    if etl.kind == "text":
        return "interval: text is packed across documents, so there are no parts of it; remove `interval`"
    if etl.limit_rows is not None:
        return "limit_rows: which rows are kept would depend on the window; remove `interval` or limit_rows"
    if unknown := sorted(interval.sources.keys() - etl.sources.keys()):
        return f"interval.sources: {unknown[0]!r} is no source; there are {sorted(etl.sources)}"
    for name, column in interval.sources.items():
        source = etl.sources[name]
        if "where" not in type(source).model_fields:
            return f"interval.sources.{name}: a jdbc source is read whole; leave it out, and it is read for every part"
        kind = source.partitions.get(column) if isinstance(source, FilesSource) else "date"
        if kind != "date":
            return (
                f"interval.sources.{name} = {column!r}: must be a partition column of type date, and it is "
                f"{'none' if kind is None else kind}; declare it in etl.sources.{name}.partitions"
            )
    if etl.one_per is not None and etl.one_per not in interval.sources:
        return f"one_per = {etl.one_per!r}: must be one of interval.sources, as its rows are counted in every interval"
    if interval.look_back and etl.one_per is None:
        return (
            "interval.look_back: needs `one_per`; rows of other intervals are read too, and only a count shows that "
            "none is lost between two parts"
        )
    if etl.split.kind == "time" and etl.split.column != interval.column:
        return (
            f"split.column = {etl.split.column!r}: must be interval.column, {interval.column!r}: a split by time takes "
            "whole intervals"
        )
    if etl.shard.shards is not None:
        return "shard.shards: every part has files of its own, by its rows; remove it, or set shard.target_bytes"
    for check in etl.checks:
        if check.kind == "unique" and check.level == "row" and interval.column not in check.columns:
            return (
                f"checks: {check.name!r}: which of equal rows is kept must not depend on other parts; add "
                f"{interval.column!r} to its columns, or set level to dataset"
            )
    return None


# --- data: the order of rows, what reads them, bad files and slow storage


MIB = 1 << 20


def _comparable(condition: tuple[str, str, Any]) -> tuple[str, str, Any]:
    column, operator, value = condition
    if operator in ("in", "not in"):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{operator!r} wants a list of values: [{column}, {operator}, [a, b]]")
    elif value is None or isinstance(value, (list, dict)):
        raise ValueError(f"{operator!r} wants one value; for several use 'in', and a null row is never kept")
    return condition


Condition = Annotated[
    tuple[str, Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"], Any], AfterValidator(_comparable)
]


class CacheConfig(Strict):
    """Copies of remote files on a local disk."""

    files: str | None = Field(
        default=None, description="local folder for copies of the dataset's files; None: read where they are"
    )
    files_max_bytes: PositiveInt = 64 * 1024 * MIB


class MixPart(Strict):
    dataset: str = Field(description="dataset folder, any storage URI")
    split: str = "train"
    weight: PositiveFloat = Field(1.0, description="share of every batch, relative to the other parts")


class MixConfig(Strict):
    """Several datasets in every batch, by weight, instead of the job's own. All need the columns that are read."""

    parts: Annotated[list[MixPart], Field(min_length=2)]
    stop: Literal["first_exhausted", "all_exhausted", "forever"] = Field(
        "first_exhausted",
        description="an epoch ends when the first dataset is used up, when every one has been (small ones repeat), "
        "or never: then `epoch_samples` is what is called one",
    )
    epoch_samples: PositiveInt | None = Field(
        default=None, description="for stop: forever; None: the rows of all parts together"
    )


class PetastormConfig(Strict):
    """Keys of `reader: petastorm`, for training only: evaluation stays native, and `lanes`, `threads`, `max_bytes`,
    `chunk_bytes`, `ahead` and `verify` are then of evaluation alone. Its schemas are pickles: only for datasets
    you trust."""

    url: str | None = Field(
        default=None, description="a dataset, plain or Petastorm's (file:///..., hdfs://...); None: the job's own"
    )
    pool: Literal["thread", "process", "dummy"] = "thread"
    workers: PositiveInt = 2
    shuffle_rows: NonNegativeInt = Field(
        default=0,
        description="rows permuted together, beyond the order of row groups and of rows in each; 0: no more than that",
    )


class DataConfig(Strict):
    reader: Literal["native", "petastorm"] = "native"
    filters: list[Condition] = Field(
        [],
        description="stored values to keep, all must hold: [[distance, '>', 100]]; decided before the plan",
    )
    lanes: PositiveInt = Field(
        64,
        description="streams of rows from which a global batch is taken in turn; belongs to the run, not to the world; "
        "reading is fastest where a global batch is a multiple of 16 times as many",
    )
    window_row_groups: PositiveInt | None = Field(
        default=None,
        description="row groups rows are permuted across inside a lane; None: a batch draws from about 64 in all",
    )
    block_rows: PositiveInt | None = Field(
        default=None,
        description="rows a lane gives in its turn; None: 16, or fewer so that a global batch is whole rounds; "
        "with the checkpoint's value, a run that goes on with another global batch keeps its order of rows",
    )
    seed: NonNegativeInt = Field(default=0, description="of the order of rows")
    shuffle: bool = True
    tail: Literal["drop", "pad", "error"] = Field("drop", description="the rows an epoch has beyond whole batches")
    threads: PositiveInt | None = Field(
        default=None,
        description="per rank, to decode row groups and images; None: 2 where images are decoded, else 1: a second one "
        "costs a fifth more CPU time, and hides slow storage",
    )
    max_bytes: PositiveInt = Field(2048 * MIB, description="decoded rows a rank may hold")
    chunk_bytes: PositiveInt = Field(4 * MIB, description="rows gathered at once and cut into batches")
    ahead: PositiveInt | None = Field(
        default=None, description="windows decoded before they are needed; None: as many as threads"
    )
    verify: Literal["hash", "size", "off"] = Field("hash", description="check of every file before the first epoch")
    on_corrupt: Literal["fail", "quarantine"] = Field(
        "fail", description="quarantine: damaged files are left out by all ranks before the plan, counted and logged"
    )
    audit: bool = Field(False, description="record the ids every rank consumed, for `sparkring audit`")
    decoders: dict[str, Literal["image"]] = Field({}, description="binary column -> what its bytes are")
    cache: CacheConfig = CacheConfig()
    mix: MixConfig | None = None
    petastorm: PetastormConfig = PetastormConfig()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.reader == "petastorm":
            native = {"filters": self.filters, "mix": self.mix, "audit": self.audit, "decoders": self.decoders}
            if given := [name for name, value in native.items() if value]:
                raise ValueError(f"{', '.join(given)}: only reader native has this; remove it or set reader to native")
        elif self.petastorm.url is not None:
            raise ValueError("petastorm.url is given but reader is native; set reader to petastorm or remove it")
        if self.verify == "off" and self.on_corrupt == "quarantine":
            raise ValueError("on_corrupt: quarantine finds damaged files by their hash; verify may not be off")
        return self


# --- model, optim, train


class ModelConfig(Strict):
    """`factory` is `module:Class` of a torch module. Where it has `from_manifest(manifest, **args)` that builds it
    (sizes of vocabularies come from the dataset), else `Class(**args)`."""

    factory: Reference = "sparkring.training.models.tabular:Tabular"
    args: dict[str, Any] = {}
    task: Literal["binary", "regression", "multiclass", "language_model"] | Reference = "binary"
    inputs: list[str] | None = Field(
        None,
        description="columns, or masks of columns (`<name>__valid`), given to forward as positional tensors; "
        "None: one dict of all feature columns and their masks",
    )
    label: str | None = Field(None, description="label column; None: the dataset's only column with role label")


class ParameterGroup(Strict):
    """Parameters that are trained in a way of their own. A parameter is of the first group that matches its name."""

    match: str = Field(description="regular expression of the whole name, as in the model's named_parameters()")
    lr_scale: NonNegativeFloat = Field(1.0, description="times the learning rate of the step")
    weight_decay: NonNegativeFloat | None = Field(None, description="also of vectors; None: as without a group")
    frozen: bool = Field(False, description="stays as it starts")

    @field_validator("match")
    @classmethod
    def _compiles(cls, match: str) -> str:
        try:
            re.compile(match)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return match

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        # By value: a stored configuration sets every field.
        is_trained_otherwise = self.lr_scale != 1.0 or self.weight_decay is not None
        if not self.frozen and not is_trained_otherwise:
            raise ValueError("says nothing of its parameters: give lr_scale, weight_decay or frozen")
        if self.frozen and is_trained_otherwise:
            raise ValueError("frozen parameters have no learning rate: leave lr_scale and weight_decay out")
        return self


class OptimConfig(Strict):
    name: Literal["adamw", "sgd", "lamb", "lars"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    momentum: Decay = 0.9
    weight_decay: NonNegativeFloat = 0.01
    clip_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="lr at the end / lr after warm-up")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr with global_batch / reference_batch (Goyal 2017; Krizhevsky 2014)"
    )
    reference_batch: PositiveInt = 256
    groups: list[ParameterGroup] = Field([], description="parameters, by name, that are trained in a way of their own")


class EarlyStopping(Strict):
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = Field(3, description="evaluations without improvement before training stops")
    min_delta: NonNegativeFloat = 0.0


class TrainConfig(Strict):
    epochs: PositiveInt | None = 1
    steps: PositiveInt | None = Field(None, description="stop after this many steps; wins over epochs")
    global_batch: PositiveInt = 1024
    eval_batch: PositiveInt = 8192
    eval_every_steps: PositiveInt | None = Field(None, description="None: at the end of every epoch")
    valid_split: str = "valid"
    test_split: str | None = "test"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: PositiveInt | None = Field(
        default=None,
        description="torch CPU threads; None: cores / ranks on the fullest host when the run begins, then as it began",
    )
    early_stopping: EarlyStopping | None = None
    best_metric: str = Field(
        "loss",
        description="validation metric: loss, those of the task that are means over rows (accuracy, abs_error), or of "
        "all rows together (binary: auc, average_precision, f1; multiclass: macro_f1; regression: rmse, r2), exact "
        "over ranks; the latter are gathered to every rank where they are named here or in early_stopping",
    )
    best_mode: Literal["min", "max"] = "min"
    export: Literal["best", "last"] = Field(
        "best",
        description="the step whose weights become the model: the best by best_metric, or the last, the steadier one "
        "where the schedule ends near zero",
    )
    log_every_steps: PositiveInt = 10
    max_skipped_steps: Annotated[int, Field(ge=0)] = Field(
        20, description="consecutive steps with a gradient that is not finite before training gives up"
    )
    compile: bool = Field(False, description="torch.compile the model")
    dtype: Literal["float32", "float64"] = Field("float32", description="type of the master parameters")


# --- parallel: how one step is spread over ranks; what goes with what is in rules.py


Axis = Annotated[int, Field(ge=-1)]


class ParallelConfig(Strict):
    """Sizes of the mesh's axes multiply to launch.world; -1 stands once for the rest."""

    dp: Axis = Field(-1, description="data ranks: each reads its own rows")
    cp: Axis = Field(1, description="context ranks: each holds a part of every sequence (all-to-all attention)")
    pp: Axis = Field(1, description="pipeline ranks: each holds consecutive blocks of the model")
    tp: Axis = Field(1, description="tensor ranks: each holds a part of every matrix")
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="shard over data ranks: 1 optimizer state, 2 and gradients, 3 and parameters"
    )
    shard: Annotated[int, Field(ge=0)] = Field(
        0, description="ranks per ZeRO shard group (hybrid sharding); 0: all data ranks are one group"
    )
    engine: Literal["auto", "horovod", "torch"] = Field(
        "auto", description="what carries the gradients; auto: Horovod where it can and is there, else torch"
    )
    schedule: str = Field("1f1b", description="pipeline schedule: gpipe, 1f1b, interleaved, zero-bubble")
    stages_per_rank: PositiveInt = Field(1, description="pipeline stages per rank, of the schedules that interleave")
    balance: Literal["estimated", "measured"] = Field(
        "estimated", description="cost of a block by which stages are cut: its weights, or its time on a first batch"
    )
    micro_batches: PositiveInt = Field(1, description="parts a pipeline cuts each pass into")
    accumulate: PositiveInt = Field(1, description="passes per step; gradients are communicated once per step")
    offload: bool = Field(False, description="keep shards and optimizer state in host memory (needs zero >= 1)")
    activation_checkpointing: bool = Field(False, description="recompute each block's activations in backward")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="dtype of compute; fp32 is the model's own dtype; fp16 scales the loss"
    )
    sequence_parallel: bool = Field(False, description="also cut norms and residuals along the sequence (needs tp > 1)")
    bucket_bytes: PositiveInt = Field(25 * 2**20, description="gradients are sent in buckets of at most this size")


# --- launch: how many ranks, how they are started, what happens when one fails


Seconds = Annotated[float, Field(gt=0)]


class LaunchConfig(Strict):
    world: PositiveInt = Field(2, description="ranks, one per Spark task slot")
    min_world: PositiveInt | None = Field(None, description="smallest world to go on with; None: never shrink")
    max_attempts: PositiveInt = Field(3, description="failed launches in a row, without a new checkpoint between")
    backoff_s: Annotated[float, Field(ge=0)] = Field(
        1.0, description="wait before attempt 2; doubles with each failure"
    )
    max_backoff_s: Seconds = 60.0
    start_timeout_s: Seconds = Field(120.0, description="for all ranks to be started by their agents")
    collective_timeout_s: Seconds = Field(300.0, description="Gloo, NCCL and store timeout given to the workers")
    hang_timeout_s: Seconds | None = Field(300.0, description="no progress of a rank's step for this long is a hang")
    silence_timeout_s: Seconds = Field(20.0, description="an agent not heard of for this long is lost")
    grace_s: Seconds = Field(10.0, description="for a last checkpoint on Ctrl-C, SIGTERM or decommissioning")
    interface: str | None = Field(
        None, description="network interface of the ring; None: the one that reaches the driver"
    )
    log_lines_per_s: PositiveFloat | None = Field(
        200.0,
        description="per rank; more are counted, not sent; None: all, and who prints waits for the driver",
    )
    cpus_per_rank: PositiveInt | None = Field(
        None, description="cores each rank asks of Spark, as a stage-level profile; None: spark.task.cpus"
    )
    gpus_per_rank: Annotated[int, Field(ge=0)] = Field(
        0, description="GPUs each rank asks of Spark, as a stage-level profile; 0: spark.task.resource.gpu.amount"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_world is not None and self.min_world > self.world:
            raise ValueError(f"min_world = {self.min_world}: must not be above world = {self.world}")
        return self


# --- checkpoint: when checkpoints are written, how, and which are kept


class CheckpointConfig(Strict):
    """Triggers add up: a checkpoint is written when any of them is due, when training ends, and on SIGTERM."""

    every_steps: PositiveInt | None = None
    every_s: PositiveFloat | None = Field(300.0, description="seconds of training between checkpoints")
    on_improvement: bool = Field(True, description="also when train.best_metric improves at an evaluation")
    keep_last: PositiveInt = 2
    keep_best: Annotated[int, Field(ge=0)] = Field(1, description="by train.best_metric and train.best_mode")
    keep_every: PositiveInt | None = Field(None, description="keep for ever those whose step is a multiple of this")
    asynchronous: bool = Field(True, description="write behind training, which stalls only for the copy to host memory")
    verify: bool = Field(True, description="check the hash of every file before loading")
    resume: bool = Field(
        True,
        description="continue the newest unfinished run of the same training; false: begin a run folder of its own, in "
        "which a failed attempt is still followed by one from its last checkpoint",
    )
    allow_other_order: bool = Field(
        False, description="resume although the dataset or a setting that decides the order of samples has changed"
    )
    timeout_s: PositiveFloat = Field(600.0, description="how long a rank waits for the others to write their parts")


# --- tracking: where runs, metrics, checkpoints and models are recorded (MLflow)


def _free_alias(alias: str) -> str:
    if alias == "latest" or re.fullmatch(r"v\d+", alias):
        raise ValueError("`latest` and `v<number>` are MLflow's own aliases; take another name, such as champion")
    return alias


def experiment_problem(experiment: str, uri: str | None) -> str | None:
    """The embedded store keeps its artifacts in a folder of this name; servers may have paths as names."""
    if uri is not None or re.fullmatch(r"[\w][\w .-]*", experiment):
        return None
    return f"experiment = {experiment!r}: names a folder below root; use letters, digits, ` `, `.`, `-`, `_`"


class TrackingConfig(Strict):
    """Without `uri`, a sqlite store and an artifact folder below `root`; with it, a tracking server."""

    enabled: bool = True
    uri: str | None = Field(None, description="http://host:port, or any URI MLflow knows; None: embedded sqlite")
    root: str = Field("data/mlflow", description="folder of the embedded store, its artifacts, and the offline buffer")
    experiment: str | None = Field(None, description="None: the name of the recipe")
    registered_model: str | None = Field(None, description="None: the name of the recipe")
    alias: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$"), AfterValidator(_free_alias)] = Field(
        "champion", description="alias the new model version gets in the registry"
    )
    sample_rows: Annotated[int, Field(ge=0, le=1000)] = Field(
        16,
        description="raw rows of the test split that the registered model holds with their predictions, for "
        "`sparkring serve-check`; 0: none, where rows may not leave the dataset",
    )
    tags: dict[str, str] = Field({}, description="added to every run")
    system_metrics: bool = True
    system_metrics_every_s: PositiveFloat = 10.0
    flush_every_s: PositiveFloat = Field(2.0, description="seconds between two batches of metrics sent to the store")
    request_timeout_s: PositiveInt = Field(10, description="seconds until a request to the server counts as failed")
    request_retries: Annotated[int, Field(ge=0)] = 1
    openlineage: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")] | None = Field(
        None,
        description="namespace of the job in OpenLineage events, which go where the settings of OpenLineage's own "
        "client say (OPENLINEAGE_URL, openlineage.yml); None: none are sent",
    )

    @property
    def store_uri(self) -> str:
        return self.uri or f"sqlite:///{Path(self.root).resolve()}/mlflow.db"

    @property
    def unknown_store(self) -> str | None:
        """The scheme of `uri` where MLflow has no store for it; plug-ins of MLflow's add stores."""
        if self.uri is None or redact(self.uri) != self.uri:  # a secret is refused for that alone
            return None
        scheme, colon, _ = self.uri.partition(":")
        if not colon or scheme.partition("+")[0] in MLFLOW_SCHEMES:
            return None
        return None if entry_points(group="mlflow.tracking_store", name=scheme) else scheme

    def named(self, recipe: str) -> Self:
        """With `experiment` and `registered_model` filled in: the name of the recipe where they are not set."""
        names = {"experiment": self.experiment or recipe, "registered_model": self.registered_model or recipe}
        return self.model_copy(update=names)

    @model_validator(mode="after")
    def _experiment_is_a_folder(self) -> Self:
        if self.experiment is not None and (problem := experiment_problem(self.experiment, self.uri)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _events_come_from_the_journal(self) -> Self:
        if self.openlineage is not None and not self.enabled:
            raise ValueError(
                f"openlineage = {self.openlineage!r} and enabled = false: events are made of what is tracked; set "
                "enabled = true, or openlineage = null"
            )
        return self


# --- report, and the whole recipe


class ReportConfig(Strict):
    share_by: list[str] = Field(
        [], description="stored scalar columns of the dataset by which the report shows the positive share"
    )
    baselines: bool = Field(
        True,
        description="also fit a constant guess (binary: the majority rate; multiclass: the classes' rates; regression: "
        "the mean) and, where there are scalar features, a linear model of Spark (logistic, multinomial, linear "
        "regression) on the same rows; one that fails is a warning",
    )
    must_beat: list[Literal["loss", "auc", "accuracy", "macro_f1", "rmse", "abs_error", "r2", "perplexity"]] = Field(
        [],
        description="test metrics in which the model must beat every baseline; else, and where a baseline "
        "cannot be computed, it is registered without tracking.alias and the job's exit code is 6",
    )
    sample_prompt: str = Field("", description="language_model: text the sample in the report begins with")
    sample_tokens: PositiveInt = 200


class RunConfig(Strict):
    """One complete run, from raw tables to a registered model."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    description: str = ""
    storage: StorageConfig = StorageConfig()
    schedule: ScheduleConfig | None = Field(None, description="None: the recipe has no dates")
    spark: SparkConfig = SparkConfig()
    etl: EtlConfig | None = None
    dataset: str | None = Field(None, description="URI of a finished dataset to train on, instead of etl")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig | None = Field(None, description="None: train from scratch")
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    report: ReportConfig = ReportConfig()
    retention: RetentionConfig = RetentionConfig()
    notify: NotifyConfig = NotifyConfig()
    predict: PredictConfig | None = Field(None, description="None: the recipe scores no rows")
    promote: PromoteConfig | None = Field(
        None, description="None: the alias moves to each model, unless report.must_beat says otherwise"
    )
    drift: DriftConfig | None = None
