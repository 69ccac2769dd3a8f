"""Prepare a recipe's model for training, on a rank and where a run is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.training.model.recipe_model import ModelColumns, pick_columns, recipe_task
from sparkring.training.model.start_match import StartMatch
from sparkring.training.model.starting import begin_with, check_starts_without_tables, start_from
from sparkring.training.models.dropout import draws_masks
from sparkring.training.models.initial import InitialModel
from sparkring.training.models.task import Task
from sparkring.training.tasks import check_takes_weights


@dataclass(frozen=True)
class TrainableModel:
    """What a strategy trains."""

    initial: InitialModel  # with the weights that training starts from
    columns: ModelColumns
    task: Task
    started: StartMatch | None  # which weights `model.start` gave; None: the recipe has none


def prepare_model(
    initial: InitialModel,
    config: RunConfig,
    manifest: DatasetManifest,
    *,
    continued: bool,
    gather: Callable[[bytes], list[bytes]],
    rank: int,
) -> TrainableModel:
    """Give a model its starting weights, its columns and its task. Collective.

    ValueError or StoredError if the recipe, the dataset and the starting weights do not match.

    Args:
        initial: model as its constructor made it.
        config: resolved configuration of the run.
        manifest: manifest of the dataset.
        continued: whether the run continues from a checkpoint, which has the weights.
        gather: all-gather of bytes between the ranks.
        rank: number of this rank; rank 0 reads weights and sends them.
    """
    started = None
    if config.model.start is not None:
        check_starts_without_tables(initial.module)
    if config.warm_start is not None and not continued:
        initial = start_from(initial, config, config.warm_start, manifest, rank)
    if config.model.start is not None:
        initial, started = begin_with(initial, config.model.start, continued, gather, rank)
    columns = pick_columns(manifest, config.model, samples=draws_masks(initial.module))
    task = recipe_task(config.model, columns, manifest)
    if manifest.weight is not None:
        check_takes_weights(task)
    return TrainableModel(initial, columns, task, started)
