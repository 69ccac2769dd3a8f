"""The recipe's `optim` block: optimizer, learning rate and its schedule."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from sparkring.conf.schema import NonNegativeFloat, Reference, Strict

Decay = Annotated[float, Field(ge=0, lt=1)]


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


class PlateauConfig(Strict):
    """When the schedule `plateau` lowers the rate: by the metric of train.early_stopping, else by train.best_metric."""

    factor: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="times the rate")
    patience: PositiveInt = Field(2, description="evaluations without improvement before the rate is lowered")


class OptimConfig(Strict):
    """Optimizer, learning rate and its schedule."""

    name: Literal["adamw", "sgd", "lamb", "lars"] | Reference = Field(
        "adamw", description="or module:Class of a torch.optim.Optimizer, made as Class(groups, lr=.., **args)"
    )
    args: dict[str, Any] = Field({}, description="of an optimizer by module:Class")
    lr: PositiveFloat = Field(1e-3, description="learning rate after warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="of adamw and lamb: decay of the two moments")
    eps: PositiveFloat = Field(1e-8, description="of adamw and lamb: added to the denominator")
    momentum: Decay = Field(0.9, description="of sgd and lars")
    weight_decay: NonNegativeFloat = Field(0.01, description="of matrices; vectors (biases, norms) have none")
    clip_norm: PositiveFloat | None = Field(
        1.0, description="largest norm of a step's gradient over all ranks; None: no clipping"
    )
    schedule: Literal["constant", "linear", "cosine", "one_cycle", "plateau"] | Reference = Field(
        "cosine", description="or module:function, called as (step, total_steps, **schedule_args): share of the rate"
    )
    schedule_args: dict[str, Any] = Field({}, description="of a schedule by module:function")
    plateau: PlateauConfig = PlateauConfig()
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="steps of rising rate; of `one_cycle` 0 means 30 % of all steps"
    )
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="lr at the end / lr after warm-up; of `plateau`: the least it is lowered to"
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr with global_batch / reference_batch (Goyal 2017; Krizhevsky 2014)"
    )
    reference_batch: PositiveInt = Field(256, description="of `scale_lr`: global batch for which `lr` was chosen")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="average the weights over steps, each step's share falling by this factor with its age; what is "
        "evaluated and exported are the averages. 0.999: about the last 1,000 steps",
    )
    groups: list[ParameterGroup] = Field([], description="parameters, by name, that are trained in a way of their own")

    @property
    def has_own_optimizer(self) -> bool:
        return ":" in self.name

    @property
    def has_own_schedule(self) -> bool:
        return ":" in self.schedule
