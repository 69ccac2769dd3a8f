"""The recipe's `warm_start` block: the model of an earlier run that training starts from."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sparkring.conf.schema import Strict


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
