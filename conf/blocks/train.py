"""The recipe's `model`, `optim`, `train` and `checkpoint` blocks."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.schema import NonNegativeFloat, Reference, Strict
from sparkring.conf.tasks import TaskKind, TaskName, task_kind

Decay = Annotated[float, Field(ge=0, lt=1)]
WEIGHTS_FILE = ".safetensors"  # ends the URI of a file of weights


class StartConfig(Strict):
    """Trained weights that a model begins with, taken over by name and shape."""

    weights: str = Field(
        description="models:/<name>@<alias>, models:/<name>/<version>, the URI of a run's `model` folder, or of a "
        ".safetensors file"
    )
    rename: dict[str, str] = Field(
        {}, description="beginning of names in the file -> beginning in the model, the longest that fits; '' fits all"
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="of the file; another one is refused. None: whatever it is; a run notes it"
    )

    @field_validator("weights")
    @classmethod
    def _known_form(cls, uri: str) -> str:
        if uri.startswith("models:") and REGISTERED.fullmatch(uri) is None:
            raise ValueError(f"{uri!r}: must be models:/<name>@<alias> or models:/<name>/<version>")
        if uri.endswith((".bin", ".pt", ".pth", ".ckpt")):
            raise ValueError(
                f"{uri!r}: such a file is a pickle, which runs code when it is read; write its tensors as "
                ".safetensors (safetensors.torch.save_file)"
            )
        return uri

    @property
    def registered(self) -> bool:
        """Whether the weights are a registered model's."""
        return self.weights.startswith("models:")


class ModelConfig(Strict):
    """`factory` is `module:Class` of a torch module. Where it has `from_manifest(manifest, **args)` that builds it
    (sizes of vocabularies come from the dataset), else `Class(**args)`."""

    factory: Reference = "sparkring.training.models.tabular:Tabular"
    args: dict[str, Any] = {}
    task: TaskName | Reference = "binary"
    task_args: dict[str, Any] = Field({}, description="of a task by module:Class")
    inputs: list[str] | None = Field(
        None,
        description="columns, or masks of columns (`<name>__valid`), given to forward as positional tensors; "
        "None: one dict of all feature columns and their masks",
    )
    label: str | None = Field(
        None,
        description="label column; None: the dataset's only column with role label, or all of them, for the task "
        "multilabel and for a task of your own",
    )
    start: StartConfig | None = Field(
        None, description="weights to begin with, as a block or its `weights` alone; None: initial values"
    )

    @field_validator("start", mode="before")
    @classmethod
    def _weights_alone(cls, start: Any) -> Any:
        return {"weights": start} if isinstance(start, str) else start

    @property
    def kind(self) -> TaskKind:
        """The task's description."""
        return task_kind(self.task)


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
    name: Literal["adamw", "sgd", "lamb", "lars"] | Reference = Field(
        "adamw", description="or module:Class of a torch.optim.Optimizer, made as Class(groups, lr=.., **args)"
    )
    args: dict[str, Any] = Field({}, description="of an optimizer by module:Class")
    lr: PositiveFloat = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    momentum: Decay = 0.9
    weight_decay: NonNegativeFloat = 0.01
    clip_norm: PositiveFloat | None = 1.0
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
    reference_batch: PositiveInt = 256
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


class EarlyStopping(Strict):
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = Field(3, description="evaluations without improvement before training stops")
    min_delta: NonNegativeFloat = 0.0


class TrainConfig(Strict):
    epochs: PositiveInt | None = 1
    steps: PositiveInt | None = Field(None, description="stop after this many steps; wins over epochs")
    global_batch: PositiveInt = 1024
    eval_batch: PositiveInt | None = Field(
        None,
        description="rows that all ranks compute at a time in evaluation; None: as many as in training, which is "
        "global_batch / parallel.accumulate",
    )
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
        "all rows together (binary: auc, average_precision, f1; multiclass: macro_f1; multilabel: macro_auc "
        "and others; regression: rmse, r2), exact over ranks; the latter are gathered to every rank where they are "
        "named here or in early_stopping",
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
    hooks: list[Reference] = Field(
        [],
        description="module:Class of sparkring.training.hooks.Hook: code that sees steps, evaluations and checkpoints "
        "on rank 0, and changes nothing",
    )
    compile: bool = Field(False, description="torch.compile the model")
    dtype: Literal["float32", "float64"] = Field("float32", description="type of the master parameters")


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
        False,
        description="where no unfinished run is the same training, continue the newest one although its dataset or "
        "settings that decide the model were others",
    )
    timeout_s: PositiveFloat = Field(600.0, description="how long a rank waits for the others to write their parts")
