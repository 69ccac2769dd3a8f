"""The recipe's `train` block: how long to train, on which splits, and which step becomes the model."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from sparkring.conf.schema import NonNegativeFloat, Reference, Strict


class EarlyStopping(Strict):
    """When training ends before its last step: the metric has stopped improving."""

    metric: str = Field("loss", description="validation metric, as in train.best_metric")
    mode: Literal["min", "max"] = Field("min", description="whether lower or higher values are better")
    patience: PositiveInt = Field(3, description="evaluations without improvement before training stops")
    min_delta: NonNegativeFloat = Field(0.0, description="smallest change that counts as an improvement")


class TrainConfig(Strict):
    """How long to train, on which splits, and which step becomes the model."""

    epochs: PositiveInt | None = Field(
        1, description="passes over the training split; None: only `steps` ends training"
    )
    steps: PositiveInt | None = Field(None, description="stop after this many steps; wins over epochs")
    global_batch: PositiveInt = Field(1024, description="rows per step over all ranks")
    eval_batch: PositiveInt | None = Field(
        None,
        description="rows that all ranks compute at a time in evaluation; None: as many as in training, which is "
        "global_batch / parallel.accumulate, and in a pipeline / parallel.micro_batches too",
    )
    eval_every_steps: PositiveInt | None = Field(None, description="None: at the end of every epoch")
    valid_split: str = Field("valid", description="split that is scored while training")
    test_split: str | None = Field(
        "test", description="split that is scored once, when training has ended; None: no split"
    )
    seed: int = Field(0, description="of initial weights and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: CUDA where every rank has a GPU, else the CPU"
    )
    threads_per_rank: PositiveInt | None = Field(
        default=None,
        description="torch CPU threads; None: 1 for a small network, else cores / ranks on the fullest host when the "
        "run begins, then as it began",
    )
    early_stopping: EarlyStopping | None = None
    best_metric: str = Field(
        "loss",
        description="validation metric: loss, those of the task that are means over rows (accuracy, abs_error), or of "
        "all rows together (binary: auc, average_precision, f1; multiclass: macro_f1; multilabel: macro_auc "
        "and others; regression: rmse, r2), exact over ranks; the latter are gathered to every rank where they are "
        "named here or in early_stopping",
    )
    best_mode: Literal["min", "max"] = Field("min", description="whether a lower or a higher best_metric is better")
    export: Literal["best", "last"] = Field(
        "best",
        description="the step whose weights become the model: the best by best_metric, or the last, the steadier one "
        "where the schedule ends near zero",
    )
    log_every_steps: PositiveInt = Field(10, description="steps between two records of metrics")
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


def evaluation_batch(asked: int | None, global_batch: int, passes: int, split_rows: int) -> int:
    """Return the rows all ranks evaluate at a time: at most a training pass and the split.

    Args:
        asked: value of `train.eval_batch`, which overrides the default.
        global_batch: rows of a training step.
        passes: number of gradient accumulation passes per step.
        split_rows: number of rows in the split.
    """
    return min(asked or max(1, global_batch // passes), max(1, split_rows))
