"""The typed run configuration: what a recipe may say. Blocks of one part of the system are in schema_<part>.py."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, field_validator

from conf.schema_checkpoint import CheckpointConfig
from conf.schema_data import DataConfig
from conf.schema_etl import EtlConfig
from conf.schema_launch import LaunchConfig
from conf.schema_parallel import ParallelConfig
from conf.schema_tracking import TrackingConfig
from conf.secrets import is_secret_name, redact
from conf.strict import Strict

SPARK_REDACTS = "(?i)secret|password|token|access[.]?key"  # Spark's default of spark.redaction.regex
Reference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _plain(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


class StorageConfig(Strict):
    """Where datasets and run folders live: a local path or any URI pyarrow or fsspec knows."""

    datasets: str = "data/datasets"
    runs: str = "data/runs"


class SparkConfig(Strict):
    """The Spark session, where the job makes it itself; under spark-submit the submitted settings win."""

    master: str | None = Field(None, description="None: what spark-submit says, else local[<launch.world>]")
    app_name: str | None = None
    conf: dict[str, str | SecretStr] = Field(
        {},
        description="settings of Spark; those it redacts itself (spark.redaction.regex), and others that hold secrets, "
        "reach the session and nothing else",
    )

    @field_validator("conf")
    @classmethod
    def _hide(cls, conf: dict[str, str | SecretStr]) -> dict[str, str | SecretStr]:
        rule = _plain(conf.get("spark.redaction.regex", SPARK_REDACTS))
        try:
            hides = re.compile(rule)
        except re.error as error:
            raise ValueError(f"spark.redaction.regex is no regular expression: {error}") from None

        def is_secret(key: str, value: str) -> bool:
            spark_hides = hides.search(key) or hides.search(value)
            return bool(spark_hides) or is_secret_name(key) or redact(value) != value

        return {
            key: SecretStr(_plain(value))
            if key != "spark.redaction.regex" and is_secret(key, _plain(value))
            else _plain(value)
            for key, value in conf.items()
        }

    def settings(self) -> dict[str, str]:
        """`conf` with its secrets, for the session alone."""
        return {key: _plain(value) for key, value in self.conf.items()}


class ModelConfig(Strict):
    """`factory` is `module:Class` of a torch module. Where it has `from_manifest(manifest, **args)` that builds it
    (sizes of vocabularies come from the dataset), else `Class(**args)`."""

    factory: Reference = "training.models.tabular:Tabular"
    args: dict[str, Any] = {}
    task: Literal["binary", "regression", "multiclass", "language_model"] | Reference = "binary"
    inputs: list[str] | None = Field(
        None,
        description="columns, or masks of columns (`<name>__valid`), given to forward as positional tensors; "
        "None: one dict of all feature columns and their masks",
    )
    label: str | None = Field(None, description="label column; None: the dataset's only column with role label")


class OptimConfig(Strict):
    name: Literal["adamw", "sgd", "lamb", "lars"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    momentum: Decay = 0.9
    weight_decay: NonNegativeFloat = 0.01
    clip_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="lr at the end / lr after warm-up")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr with global_batch / reference_batch (Goyal 2017; Krizhevsky 2014)"
    )
    reference_batch: PositiveInt = 256


class EarlyStopping(Strict):
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = Field(3, description="evaluations without improvement before training stops")
    min_delta: NonNegativeFloat = 0.0


class TrainConfig(Strict):
    epochs: PositiveInt | None = 1
    steps: PositiveInt | None = Field(None, description="stop after this many steps; wins over epochs")
    global_batch: PositiveInt = 1024
    eval_batch: PositiveInt = 8192
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
    best_metric: str = "loss"
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
    compile: bool = Field(False, description="torch.compile the model")
    dtype: Literal["float32", "float64"] = Field("float32", description="type of the master parameters")


class ReportConfig(Strict):
    share_by: list[str] = Field(
        [], description="scalar columns of the dataset by which the report shows the positive share"
    )
    baselines: bool = Field(
        True,
        description="also fit the majority rate and, where there are scalar features, a Spark logistic regression "
        "(binary task); one that fails is a warning",
    )
    must_beat: list[Literal["loss", "auc", "accuracy", "perplexity"]] = Field(
        [],
        description="test metrics in which the model must beat every baseline; else, and where a baseline "
        "cannot be computed, it is registered without tracking.alias and the job's exit code is 6",
    )
    sample_prompt: str = Field("", description="language_model: text the sample in the report begins with")
    sample_tokens: PositiveInt = 200


class RunConfig(Strict):
    """One complete run, from raw tables to a registered model."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    description: str = ""
    storage: StorageConfig = StorageConfig()
    spark: SparkConfig = SparkConfig()
    etl: EtlConfig | None = None
    dataset: str | None = Field(None, description="URI of a finished dataset to train on, instead of etl")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    report: ReportConfig = ReportConfig()
