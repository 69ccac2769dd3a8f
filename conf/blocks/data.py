"""The recipe's `data` block: the order of rows, what reads them, bad files and slow storage."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from sparkring.conf.schema import NonNegativeInt, Reference, Strict

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
    files_max_bytes: PositiveInt = Field(
        64 * 1024 * MIB, description="size of all copies; only other datasets' unused ones are deleted to make room"
    )


class MixPart(Strict):
    """One dataset of a mix."""

    dataset: str = Field(description="dataset folder, any storage URI")
    split: str = Field("train", description="split of that dataset")
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
    """Keys of `reader: petastorm`, for training only; evaluation stays native.

    `lanes`, `threads`, `max_bytes`, `chunk_bytes`, `ahead` and `verify` then apply to evaluation alone. Schemas are
    pickles: only for datasets you trust.
    """

    url: str | None = Field(
        default=None, description="a dataset, plain or Petastorm's (file:///..., hdfs://...); None: the job's own"
    )
    pool: Literal["thread", "process", "dummy"] = Field(
        "thread", description="what petastorm decodes with: threads, processes, or the reading thread itself (dummy)"
    )
    workers: PositiveInt = Field(2, description="threads or processes of the pool")
    shuffle_rows: NonNegativeInt = Field(
        default=0,
        description="rows permuted together, beyond the order of row groups and of rows in each; 0: no more than that",
    )


class DataConfig(Strict):
    """How rows become batches: their order, what reads them, bad files and slow storage."""

    reader: Literal["native", "petastorm"] = Field("native", description="what reads training batches")
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
    shuffle: bool = Field(
        True,
        description="whether every epoch has an order of its own; false: each lane gives its rows as they are stored",
    )
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
    decoders: dict[str, Literal["image"] | Reference] = Field(
        {},
        description="binary column -> what decodes its cells: image (Pillow; a feature of kind image needs no entry), "
        "or your own `module:function(cell: bytes)`, which gives a uint8 array, of the feature's `shape` if it has one",
    )
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
