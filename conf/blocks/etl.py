"""The recipe's `etl` block: raw tables, views, checks, a split, features or packed text, shards."""

from datetime import date, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from sparkring.conf.schema import Name, NonNegativeInt, Strict, TimeZone, check_case
from sparkring.conf.sources import Source
from sparkring.conf.sources.base import as_text

RESERVED = "sparkring_"  # of columns that shards and batches have besides the declared ones
MANY_DUPLICATES = 0.01  # of the rows of a table without a key; so many may be a mistake
Share = Annotated[float, Field(ge=0, le=1)]
SplitName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class CheckConfig(Strict):
    """One rule about the rows. Its failing rows are counted; `row` quarantines them, `dataset` stops the job.

    range: `min` <= column <= `max`, null passes. null_share: column is null. unique: no two rows agree in `columns`
    (at level row the first is kept). referential: column's value occurs in `to` (`source.column`), null passes.
    expression: the SQL is true; null fails.
    """

    name: Name = Field(description="name of the rule in errors, in the manifest and of the quarantine folder")
    kind: Literal["range", "null_share", "unique", "referential", "expression"] = Field(
        description="what the rule asks of a row"
    )
    level: Literal["row", "dataset"] = Field(
        "dataset", description="row: quarantine failing rows; dataset: stop the job"
    )
    column: str | None = Field(None, description="column that kinds range, null_share and referential read")
    columns: list[str] = Field([], description="of `unique`: columns in which no two rows agree")
    min: float | None = Field(None, description="of `range`: smallest value that passes; None: no lower bound")
    max: float | None = Field(None, description="of `range`: largest value that passes; None: no upper bound")
    to: Annotated[str, Field(pattern=r"^\w+\.\w+$")] | None = Field(
        None, description="of `referential`: source.column that holds the allowed values"
    )
    sql: str | None = Field(None, description="of `expression`: condition that is true for a good row")
    max_share: Share | None = Field(
        None,
        description="stop the job when a larger share of rows fails; None: 0 at level dataset, no limit at level row",
    )

    @model_validator(mode="after")
    def _keys_of_kind(self) -> Self:
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


def _in_order(boundaries: dict[str, str]) -> dict[str, str]:
    """Sort boundaries by their instants, which must differ: a stored configuration has sorted keys."""
    instants = dict[str, datetime]()
    for name, text in boundaries.items():
        try:
            instants[name] = datetime.fromisoformat(text).replace(tzinfo=None)
        except ValueError as error:
            raise ValueError(f"{name} = {text!r}: not an ISO date or timestamp ({error})") from None
    if len({*instants.values()}) < len(instants):
        raise ValueError(f"two splits begin at the same instant: {boundaries}")
    return {name: boundaries[name] for name in sorted(instants, key=instants.__getitem__)}


SPLIT_BUCKETS = 1_000_000
# Keeps the hash of the split apart from the hash of the stored order, else a split's rows would be one range of it.
SPLIT_SALT = "sparkring.split"


def share_edges(shares: list[float]) -> list[int]:
    """Return the upper bucket of each share: [0.8, 0.1, 0.1] -> [800000, 900000, 1000000]."""
    total, edges = 0.0, []
    for share in shares:
        total += share
        edges.append(round(total * SPLIT_BUCKETS))
    return edges


class SplitConfig(Strict):
    """How rows are assigned to splits.

    time: `boundaries` maps each later split to its first instant; rows before the first are `train`. hash: `shares` by
    a stable hash of `key` (None: etl.key). column: the split's name is in `column`.
    """

    kind: Literal["time", "hash", "column"] = Field("hash", description="what decides the split of a row")
    column: str | None = Field(
        None, description="of `time`: the date or timestamp; of `column`: the column that holds the split's name"
    )
    boundaries: Annotated[dict[SplitName, str], AfterValidator(_in_order)] = Field(
        {}, description="split -> ISO date or timestamp (UTC) at which it begins"
    )
    shares: dict[SplitName, PositiveFloat] = Field(
        {"train": 0.8, "valid": 0.1, "test": 0.1},
        description="of `hash`: share of the rows in each split; they sum to 1",
    )
    key: list[str] | None = Field(
        None,
        description="of `hash`: rows that agree in these columns are in one split; None: etl.key; without either, "
        "every row is assigned by itself",
    )
    seed: int = Field(0, description="of `hash`: another seed gives another assignment")

    @model_validator(mode="after")
    def _keys_of_kind(self) -> Self:
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
    min_count: PositiveInt = Field(1, description="values that fewer training rows have get the code of unseen values")
    max_size: PositiveInt = Field(65536, description="most frequent values kept")


class HashedFeature(Strict):
    """-> int64 ids: Spark's xxhash64 of a string, or of an integer as a bigint; a null has the id 42, as in Spark.

    No vocabulary: any number of values, those of tomorrow too. For SparseEmbedding.
    """

    kind: Literal["hashed"]
    column: str | None = Field(None, description="None: the feature's own name")


class NumericFeature(Strict):
    """-> float32 (x - mean) / std of the training split; null and NaN become `fill` (None: the mean) first.

    `indicator` adds `<name>__null` (0 or 1): auto adds it where the training split has nulls.
    """

    kind: Literal["numeric"]
    column: str | None = Field(None, description="None: the feature's own name")
    fill: float | None = Field(None, description="value in place of null and NaN; None: the mean")
    indicator: Literal["auto", "always", "never"] = Field(
        "auto", description="whether a second column says where a value was null"
    )
    transform: Literal["none", "log1p"] = Field(
        "none", description="log1p: log(1 + x) of x >= 0, before everything else"
    )
    scale: bool = Field(True, description="subtract the mean and divide by the standard deviation; false: neither")


class CyclicFeature(Strict):
    """-> float32 `<name>_sin`, `<name>_cos` of 2 pi x / period; null gives (0, 0), which no value does."""

    kind: Literal["cyclic"]
    column: str | None = Field(None, description="None: the feature's own name")
    period: PositiveFloat = Field(description="length of a cycle in the column's unit: 24 for hours of a day")


class PassthroughFeature(Strict):
    """The column as it is. Types without an exact tensor type are refused at write time with a remedy."""

    kind: Literal["passthrough"]
    column: str | None = Field(None, description="None: the feature's own name")
    dtype: Literal["float16"] | None = Field(
        None, description="float16: stored as float32 holding half-precision values"
    )
    shape: list[PositiveInt] | None = Field(None, description="fixed shape of an array column; None: ragged")
    nulls: Literal["refuse", "mask", "fill"] = Field(
        "refuse", description="refuse stops the job at a null, mask adds a column that marks nulls, fill replaces them"
    )
    fill: float | int | bool | str | None = Field(None, description="of `nulls: fill`: value in place of null")

    @model_validator(mode="after")
    def _fill_given(self) -> Self:
        if (self.nulls == "fill") != (self.fill is not None):
            raise ValueError("`fill` and `nulls: fill` come together")
        return self


class ImageFeature(Strict):
    """Encoded images (PNG, JPEG and what else Pillow reads) -> uint8 (height, width, channels).

    They are stored as they are, and decoded where they are read: in training and where the model serves.
    """

    kind: Literal["image"]
    column: str | None = Field(None, description="None: the feature's own name")
    shape: Annotated[list[PositiveInt], Field(min_length=3, max_length=3)] = Field(
        description="[height, width, channels]; 1 channel is gray, 3 are RGB, 4 RGBA"
    )
    fit: Literal["resize", "crop", "exact"] = Field(
        "resize",
        description="of an image of another size: resize stretches it, crop scales it to cover the shape and cuts the "
        "middle out, exact refuses it",
    )


Feature = Annotated[
    CategoricalFeature | HashedFeature | NumericFeature | CyclicFeature | PassthroughFeature | ImageFeature,
    Field(discriminator="kind"),
]


class TextConfig(Strict):
    """Documents -> rows of `seq_len` tokens. Every token of every document is in exactly one row."""

    column: str = Field("text", description="column of `rows` that holds the documents")
    tokenizer: Literal["bpe", "bytes"] = Field(
        "bpe", description="bpe: trained on the training documents; bytes: a token per byte of UTF-8"
    )
    vocab_size: Annotated[int, Field(ge=258)] = Field(4096, description="bpe only; bytes has 258: 256, end, pad")
    train_documents: PositiveInt = Field(20000, description="bpe is trained on this many training documents at most")
    seq_len: Annotated[int, Field(ge=2)] = Field(256, description="tokens per row")
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
    compression: Literal["snappy", "zstd", "none"] = Field("snappy", description="codec of the Parquet pages")


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

    kind: Literal["table", "text"] = Field(
        "table", description="table: features of rows; text: documents packed into rows of tokens"
    )
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    views: dict[Name, str] = Field({}, description="name -> Spark SQL over sources and earlier views, in order")
    rows: str = Field(
        description="the view, source or `module:function(tables) -> DataFrame` that gives the dataset's rows"
    )
    one_per: str | None = Field(None, description="source of which every row must be exactly one row of `rows`")
    key: list[str] = Field(
        [],
        description="columns that identify a row; decide its place. []: all columns together, and for duplicates how "
        "many equal rows there are before",
    )
    checks: list[CheckConfig] = []
    split: SplitConfig = SplitConfig()
    features: dict[Name, Feature] = {}
    label: str | list[str] | None = Field(
        None,
        description="column of `rows`, stored as it is: a number; a text, which is a class; or an array of texts, the "
        "tags of a row. A list names several columns of numbers or booleans: of 0 and 1 for the task multilabel, of "
        "any value for a task of your own",
    )
    classes: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="of a label of texts: its classes or tags, in the order of the model's outputs; a binary model "
        "predicts the last one. None: the texts of the rows, sorted",
    )
    weight: str | None = Field(
        None,
        description="column of `rows` that says how much a row counts in the loss, the metrics and the baselines: a "
        "number of at least 0, of which only the proportions matter. No model sees it. None: all rows count alike",
    )
    keep: list[str] = Field([], description="columns stored as they are that no model sees (role meta)")
    text: TextConfig | None = None
    shard: ShardConfig = ShardConfig()
    interval: IntervalConfig | None = None
    limit_rows: PositiveInt | None = Field(
        None,
        description="about so many rows, by the hash of their key: for a trial (`sparkring run RECIPE --limit-rows N`)",
    )

    @field_validator("label")
    @classmethod
    def _several(cls, label: str | list[str] | None) -> str | list[str] | None:
        if isinstance(label, list) and (len(label) < 2 or len(set(label)) < len(label)):
            raise ValueError(f"{label}: a list names two columns or more, each once; one label is its name alone")
        return label

    @property
    def labels(self) -> list[str]:
        """The columns that are labels."""
        return [self.label] if isinstance(self.label, str) else self.label or []

    @model_validator(mode="after")
    def _kinds_agree(self) -> Self:
        if (self.kind == "text") != (self.text is not None):
            raise ValueError("`kind: text` and the `text` block come together")
        if self.kind == "text" and (self.features or self.label or self.weight or self.keep):
            raise ValueError("a text dataset has no features, label, weight or keep")
        if self.limit_rows is not None and self.one_per is not None:
            raise ValueError("limit_rows: with one_per every row is counted; set one_per to null in a trial")
        if self.classes is not None and not isinstance(self.label, str):
            raise ValueError(
                "classes: there is no label"
                if self.label is None
                else "classes: of several labels, none is of texts; an array of texts, its tags, is one label"
            )
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            raise ValueError("classes: one is listed twice")
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
        outputs = [*self.keep, *self.labels, *([self.weight] if self.weight else [])]
        if clash := sorted(self.features.keys() & set(outputs)):
            label = "the label" if isinstance(self.label, str) else "a label"
            which = (dict.fromkeys(self.labels, label) | {self.weight: "the weight"}).get(clash[0], "in keep")
            raise ValueError(f"features.{clash[0]}: is {which} too; a column has one role: remove it from one of them")
        check_case("features, label, weight and keep", [*self.features, *outputs])
        if reserved := [n for n in (*self.features, *outputs) if n.lower().startswith(RESERVED)]:
            raise ValueError(
                f"features, label, weight or keep: {reserved}: names that begin with {RESERVED!r} are ours; rename"
            )
        if reads := [name for name, f in self.features.items() if f.column in self.labels]:
            raise ValueError(
                f"features.{reads[0]}: reads the label {self.features[reads[0]].column!r}, so a model would be shown "
                "what it must predict; remove this feature, or name another label"
            )
        if reads := [name for name, f in self.features.items() if self.weight and f.column == self.weight]:
            raise ValueError(
                f"features.{reads[0]}: reads the weight {self.weight!r}, which no model sees; remove this feature, or "
                "select the column a second time by another name in the recipe's SQL"
            )
        for index, check in enumerate(self.checks):
            if check.to and check.to.split(".")[0] not in self.sources.keys() | self.views.keys():
                raise ValueError(f"checks.{index}.to = {check.to!r}: no such source or view")
        return self

    @model_validator(mode="after")
    def _parts_possible(self) -> Self:
        if self.interval is not None and (problem := parts_problem(self, self.interval)):
            raise ValueError(problem)
        return self


def parts_problem(etl: EtlConfig, interval: IntervalConfig) -> str | None:
    """Explain why the dataset cannot be made of independent day partitions; None where it can."""
    if etl.kind == "text":
        return "interval: text is packed across documents, so there are no parts of it; remove `interval`"
    if etl.limit_rows is not None:
        return "limit_rows: which rows are kept would depend on the window; remove `interval` or limit_rows"
    if unknown := sorted(interval.sources.keys() - etl.sources.keys()):
        return f"interval.sources: {unknown[0]!r} is no source; there are {sorted(etl.sources)}"
    for name, column in interval.sources.items():
        if problem := etl.sources[name].cut_problem(name, column):
            return problem
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
