"""The recipe as a whole: RunConfig has one field per block. Units: names in `_s` are seconds, in `_bytes` bytes."""

from typing import Annotated

from pydantic import Field

from sparkring.conf.blocks.checkpoint import CheckpointConfig
from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.drift import DriftConfig
from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.blocks.notify import NotifyConfig
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.predict import PredictConfig
from sparkring.conf.blocks.promote import PromoteConfig
from sparkring.conf.blocks.report import ReportConfig
from sparkring.conf.blocks.retention import RetentionConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.blocks.storage import StorageConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.blocks.train import TrainConfig, evaluation_batch
from sparkring.conf.blocks.trees import TreesConfig
from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schema import RUN_NAME, Strict


class RunConfig(Strict):
    """One complete run, from raw tables to a registered model."""

    name: Annotated[str, Field(pattern=RUN_NAME)] = Field(
        description="name of the run folder, the MLflow experiment and the registered model"
    )
    description: str = Field("", description="free text about the recipe; tracked with every run")
    storage: StorageConfig = StorageConfig()
    schedule: ScheduleConfig | None = Field(None, description="None: the recipe has no dates")
    spark: SparkConfig = SparkConfig()
    etl: EtlConfig | None = None
    dataset: str | None = Field(None, description="URI of a finished dataset to train on, instead of etl")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig | None = Field(None, description="None: train from scratch")
    optim: OptimConfig = OptimConfig()
    tables: TablesConfig = TablesConfig()
    trees: TreesConfig = TreesConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    report: ReportConfig = ReportConfig()
    retention: RetentionConfig = RetentionConfig()
    notify: NotifyConfig = NotifyConfig()
    predict: PredictConfig | None = Field(None, description="None: the recipe scores no rows")
    promote: PromoteConfig | None = Field(
        None, description="None: the alias moves to each model, unless report.must_beat says otherwise"
    )
    drift: DriftConfig | None = None

    def evaluation_batch(self, split_rows: int) -> int:
        """Return how many rows of a split all ranks evaluate at a time."""
        return evaluation_batch(self.train.eval_batch, self.train.global_batch, self.parallel.passes, split_rows)

    @property
    def model_code(self) -> dict[str, str]:
        """Key -> `module:name` of the user's code that training and serving run: the model, its task, its decoders."""
        named = {"model.factory": self.model.factory, "model.task": self.model.task}
        named |= {f"data.decoders.{column}": decoder for column, decoder in self.data.decoders.items()}
        return {key: reference for key, reference in named.items() if ":" in reference}
