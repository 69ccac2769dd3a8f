"""The recipe's `promote` block: what a model must show before an alias moves to it."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from sparkring.conf.schema import Strict

MODEL = "this model"  # its name among the scores
Fraction = Annotated[float, Field(ge=0, le=1)]


class MetricRule(Strict):
    """What a held-out metric must reach; the words and their meaning are those of MLflow's MetricThreshold."""

    metric: Annotated[str, Field(min_length=1)] = Field(description="name of a held-out metric")
    threshold: float | None = Field(None, description="at least this, or at most where less is better")
    min_absolute_change: Annotated[float, Field(gt=0)] | None = Field(
        None, description="better than the champion by at least this much"
    )
    min_relative_change: Fraction | None = Field(
        None,
        description="better than the champion by at least this share of the champion's value; 0: not worse",
    )
    greater_is_better: bool | None = Field(None, description="None: as the metric of that name is")
    confidence: Annotated[float, Field(gt=0.5, lt=1)] | None = Field(
        None,
        description="the change must be reached in at least this share of 1,000 paired resamples of the test rows, "
        "not only on the rows as they are",
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.threshold is None and not self.compares:
            raise ValueError("needs threshold, min_absolute_change or min_relative_change")
        if self.confidence is not None and not self.compares:
            raise ValueError("confidence is of a change: give min_relative_change (0.0: not worse), or leave it out")
        return self

    @property
    def compares(self) -> bool:
        """Whether the champion is needed."""
        return self.min_absolute_change is not None or self.min_relative_change is not None


class PromoteConfig(Strict):
    """When the alias `tracking.alias` moves to a new version. Without this block: whenever `report.must_beat` holds."""

    mode: Literal["disabled", "dry_run", "enabled"] = Field(
        "enabled",
        description="disabled: nothing is judged, and only `sparkring promote` moves the alias; dry_run: everything is "
        "judged and written down, the alias stays; enabled: the alias moves to a version that passes",
    )
    against: Literal["champion"] = Field(
        "champion", description="the version with tracking.alias, scored again on this run's test rows"
    )
    rules: list[MetricRule] = []
    slices: list[str] = Field(
        [],
        description="stored scalar columns: the model may lose to the champion on the rows of no value of these, in no "
        "metric of a rule that compares, by the paired bootstrap",
    )
    min_slice_rows: PositiveInt = Field(500, description="values with fewer test rows are not looked at")

    @model_validator(mode="after")
    def _slices_compare(self) -> Self:
        if self.slices and not any(rule.compares for rule in self.rules):
            raise ValueError(
                "slices are compared by the rules with min_absolute_change or min_relative_change, "
                "and the recipe has none"
            )
        return self
