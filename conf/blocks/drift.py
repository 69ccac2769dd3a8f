"""The recipe's `drift` block: how far today's data may be from what is normal."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sparkring.conf.schema import Strict

PREDICTION = "prediction"  # among the columns of a drift rule: what the models predict for the test rows


class DriftDataset(Strict):
    """A finished dataset that stands for what is normal."""

    dataset: str = Field(description="URI of its folder; it must be one over parts (etl.interval)")


class DriftRule(Strict):
    """How far a column's distribution may be from the reference's."""

    columns: Literal["all"] | Annotated[list[str], Field(min_length=1)] = Field(
        description="columns that numeric and categorical features are made of, `prediction`, or all: every such column"
    )
    measure: Literal["jensen_shannon_divergence", "psi", "infinity_norm"] = Field(
        description="jensen_shannon_divergence: 0 to 1; psi: population stability index, 0.2 is usually called large; "
        "infinity_norm: largest difference of a value's share, 0 to 1"
    )
    max: Annotated[float, Field(ge=0)] = Field(description="largest value of the measure that passes")
    action: Literal["warn", "hold", "stop"] = Field(
        "warn",
        description="where it is more: warn in log, report and tags; hold: train, and leave the alias where it is; "
        "stop: do not train (exit code 3)",
    )

    @model_validator(mode="after")
    def _predictions_come_last(self) -> Self:
        if self.predicts and self.action == "stop":
            raise ValueError("predictions are known after training, which `stop` would prevent; use hold")
        return self

    @property
    def predicts(self) -> bool:
        """Whether predictions are among the columns."""
        return PREDICTION in self.columns and self.columns != "all"

    @property
    def inputs(self) -> list[str] | Literal["all"]:
        """The columns of the dataset."""
        return "all" if self.columns == "all" else [name for name in self.columns if name != PREDICTION]


class DriftConfig(Strict):
    """Distributions of this run's data and predictions against a reference, by what the day partitions have counted."""

    against: Literal["champion", "previous"] | DriftDataset = Field(
        "champion",
        description="the dataset and model of the version with tracking.alias, or of the last finished run; or "
        "{dataset: URI}",
    )
    parts: Literal["last", "new", "all"] = Field(
        "last",
        description="which parts of this run's dataset are compared: of those that the reference does not have the "
        "one of the last interval, so that a bad day does not hide among good ones; or all of these; or all parts",
    )
    rules: Annotated[list[DriftRule], Field(min_length=1)]
