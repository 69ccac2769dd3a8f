"""The recipe's `retention` block: which old runs and datasets are kept."""

from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sparkring.conf.schema import Strict


class KeepRule(Strict):
    """Which of one kind stay: the newest `keep`, and those younger than `days`. With both, what either keeps stays."""

    keep: PositiveInt | None = Field(None, description="as many of the newest stay")
    days: PositiveFloat | None = Field(None, description="younger ones stay")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.keep is None and self.days is None:
            raise ValueError("needs keep, days or both; remove the block to keep everything")
        return self


class RetentionConfig(Strict):
    """What `sparkring gc` may delete, by kind; of a kind without a rule, nothing.

    Whatever the rules say, it keeps: runs and datasets of models that have an alias, runs tagged `sparkring.keep`, runs
    that can still be continued and their datasets, and day partitions of a dataset that stays.
    """

    datasets: KeepRule | None = None
    parts: KeepRule | None = Field(None, description="by interval; one replaced by a newer part stays by `days` alone")
    runs: KeepRule | None = Field(None, description="run folders; what is in MLflow stays")
    predictions: KeepRule | None = Field(None, description="of test rows, in the folders of finished runs")
    checkpoints: KeepRule | None = Field(None, description="of finished runs; counted by run")

    @property
    def is_set(self) -> bool:
        return any(getattr(self, name) is not None for name in type(self).model_fields)
