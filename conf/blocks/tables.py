"""The recipe's `tables` block: how the rows of hashed ids are held and trained."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from sparkring.conf.blocks.optim import Decay
from sparkring.conf.schema import NonNegativeFloat, Strict

BUCKETS = 1024


class TablesConfig(Strict):
    """Of every SparseEmbedding of the model. The rate follows optim's schedule, from a peak of its own."""

    place: Literal["shard", "replicate"] = Field(
        "shard", description="shard: each row is on one rank; replicate: every rank holds all rows"
    )
    optimizer: Literal["sgd", "rowwise_adagrad", "adam"] = Field(
        "rowwise_adagrad", description="a row that no batch touches does not change; adam counts steps for each row"
    )
    lr: PositiveFloat = Field(0.05, description="where optim.lr is the dense parameters'; scheduled alike")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="of adam")
    eps: PositiveFloat = Field(1e-8, description="of rowwise_adagrad and adam: added to the denominator")
    wire: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: rows and gradients are rounded before they are sent; fp32: sent as they are"
    )
    lag: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="steps whose gradients the rows of a batch may lack, so that they are sent while ranks compute"
    )
    max_rows: Annotated[int, Field(ge=BUCKETS)] | None = Field(
        None,
        description="rows per table at most, an equal share for each of 1,024 buckets; the longest untouched are "
        "evicted, and begin anew if their id comes back. None: no limit",
    )
    admit_after: PositiveInt = Field(1, description="steps that must have an id before its row is stored")

    weight_decay: NonNegativeFloat = Field(0.0, description="none but 0: rows that no batch touches would not decay")

    @field_validator("weight_decay")
    @classmethod
    def _no_decay(cls, decay: float) -> float:
        if decay:
            raise ValueError(
                "rows that no batch touches would not decay, and the others by how often they are seen; remove it "
                "(optim.weight_decay is of the dense parameters)"
            )
        return decay
