"""The trained weights that a training begins with: by value (warm_start), or by name (model.start)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic import TypeAdapter
from torch import nn

from sparkring.conf.blocks.model import StartConfig
from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.rules.families import of_family
from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.weights import open_weights, read_weights
from sparkring.training.model.folder import TrainedModel, check_digests, read_description, weights_at
from sparkring.training.model.recipe_model import build_model
from sparkring.training.model.start import match_tensors, start_model_with
from sparkring.training.model.start_match import StartMatch
from sparkring.training.models.initial import InitialModel
from sparkring.training.models.sparse_embedding import sparse_embeddings
from sparkring.training.models.warm_start import (
    METHOD,
    FeatureChange,
    WarmStartError,
    compare_features,
    refuse_changes,
    warm_start,
)
from sparkring.training.tasks import model_class

log = logging.getLogger(__name__)


def check_starts_without_tables(model: nn.Module) -> None:
    """Raise ValueError for a model with sparse tables, whose rows are not taken over."""
    if tables := sparse_embeddings(model):
        raise ValueError(
            f"model.start: the model has sparse tables ({', '.join(tables)}), and a file of tensors has no rows of "
            "them; remove it, or begin with this recipe's own model by warm_start"
        )


def starting_model(config: RunConfig, start: WarmStartConfig) -> TrainedModel:
    """Return the model to start from, as its folder describes it. StoredError for a damaged folder.

    WarmStartError if the recipe's model differs.
    """
    assert start.model is not None, "`from` is made a folder before anything is launched"
    trained, config = read_description(open_storage(start.model)).parts[0], of_family(config, "net")
    for key in ("family", "factory", "args", "inputs"):
        before, now = getattr(trained.config.model, key), getattr(config.model, key)
        if before != now:
            raise WarmStartError(
                f"{start.model} was trained with model.{key} = {before!r}, the recipe says {now!r}; train from scratch"
            )
    return trained


def change_since(trained: TrainedModel, config: RunConfig, manifest: DatasetManifest) -> FeatureChange:
    """Compare the features with those of the trained model. WarmStartError if the model cannot adapt."""
    change = compare_features(trained.manifest, manifest)
    if not hasattr(model_class(config.model.factory), METHOD):
        refuse_changes(config.model.factory, change)
    return change


def start_from(
    model: InitialModel, config: RunConfig, start: WarmStartConfig, manifest: DatasetManifest, rank: int
) -> InitialModel:
    """Return the model with trained values for its initial ones; rank 0 reads and sends them.

    Args:
        model: model as its constructor made it.
        config: resolved configuration of this run.
        start: block `warm_start` of the recipe.
        manifest: manifest of this run's dataset.
        rank: number of this rank.
    """
    assert start.model is not None, "`from` is made a folder before anything is launched"
    if rank == 0:
        check_digests(open_storage(start.model))
    trained = starting_model(config, start)
    change = change_since(trained, config, manifest)
    weights = read_weights(open_storage(start.model)) if rank == 0 else None
    if rank == 0:
        log.info("warm start from %s: %s", start.model, "; ".join(change.changed) or "the same features")
    return warm_start(model, lambda: build_model(config, trained.manifest), weights, change, start.new_values)


def begin_with(
    model: InitialModel, start: StartConfig, resumed: bool, gather: Callable[[bytes], list[bytes]], rank: int
) -> tuple[InitialModel, StartMatch]:
    """Return the model with tensors of `model.start` for its initial ones, and the match. Collective.

    ValueError if no tensor matches, StoredError for a damaged file.

    Args:
        model: model as its constructor made it.
        start: block `model.start`, resolved to a file or folder.
        resumed: whether the run continues from its own checkpoint, which has the values.
        gather: all-gather of bytes between the ranks.
        rank: number of this rank; rank 0 reads the file.
    """
    given, match = None, None
    if rank == 0:
        given = open_weights(*weights_at(start.weights))
        match = match_tensors(model.module, {name: each.shape for name, each in given.items()}, start.rename)
    adapter = TypeAdapter(StartMatch)
    agreed = adapter.validate_json(gather(adapter.dump_json(match) if match is not None else b"-")[0])
    if resumed:
        return model, agreed
    if rank == 0:
        log.info("model.start %s: %s", start.weights, agreed.text)
    return start_model_with(model, agreed, given), agreed
