"""What a model must show before an alias moves to it: the blocks `promote` and `drift`, and `warm_start`."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from sparkring.conf.schema import Strict

PREDICTION = "prediction"  # among the columns of a drift rule: what the models predict for the test rows
MODEL = "this model"  # its name among the scores

Fraction = Annotated[float, Field(ge=0, le=1)]


class MetricRule(Strict):
    """What a held-out metric must reach; the words and their meaning are those of MLflow's MetricThreshold."""

    metric: Annotated[str, Field(min_length=1)]
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
    max: Annotated[float, Field(ge=0)]
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
    """Distributions of this run's data and predictions against a reference, by what the parts have counted."""

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


class WarmStartConfig(Strict):
    """Weights to start from instead of initial ones, fitted to tonight's features by value."""

    model: str | None = Field(None, description="URI of a finished run's `model` folder, or of a copy")
    from_alias: Literal["champion"] | None = Field(
        None,
        alias="from",
        description="champion: the version with tracking.alias when the run begins; the run keeps a copy, from which "
        "it also goes on after a crash. Without one, and where it does not fit the recipe, training is from scratch",
    )
    retrain_every: Annotated[int, Field(ge=1)] | None = Field(
        None, description="of every so many dates one is trained from scratch; None: only where it must be"
    )
    after_correction: Literal["scratch", "warm"] = Field(
        "scratch",
        description="where an interval that the champion was trained on has been written anew since: scratch leaves "
        "what it has learnt from the wrong rows behind",
    )
    new_values: Literal["mean", "initial"] = Field(
        "mean", description="row of a category that the model has not seen: mean of the others, or as initialized"
    )

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.model is None) == (self.from_alias is None):
            raise ValueError("give either `model`, the URI of a model folder, or `from: champion`")
        return self
