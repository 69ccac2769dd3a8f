"""The recipe of one family of models, taken out of a recipe that trains both (model.family)."""

from __future__ import annotations

from typing import Any

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.tasks import Families


def of_family(config: RunConfig, family: Families) -> RunConfig:
    """Return what a recipe of both says of one family; a recipe of that family, or of both, as it is.

    Keys that describe networks alone (WITHOUT_TREES in conf/rules/trees.py) have their defaults in a recipe of trees,
    which refuses others.
    """
    if config.model.family == family:
        return config
    changed: dict[str, Any] = {"model": config.model.model_copy(update={"family": family})}
    return config.model_copy(update=changed | (_without_network(config) if family == "trees" else {}))


def _without_network(config: RunConfig) -> dict[str, Any]:
    """Return the blocks of a trees-only recipe with defaults for all network settings."""
    usual = DataConfig()
    data = {"reader": usual.reader, "petastorm": usual.petastorm, "audit": usual.audit}
    return {
        "model": config.model.model_copy(update={"family": "trees", "start": None}),
        "warm_start": None,
        "data": config.data.model_copy(update=data),
        "train": config.train.model_copy(update={"compile": False, "device": "auto"}),
        "parallel": ParallelConfig(),
    }
