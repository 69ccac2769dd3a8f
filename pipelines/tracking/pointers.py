"""What MLflow points to: versions with an alias, and folders of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AliasedModel:
    """A registered version that has an alias. `job`: `<recipe>/<run folder>` that made it; empty where not known."""

    model: str
    alias: str
    job: str
    fingerprint: str  # of the dataset


@dataclass(frozen=True)
class CheckpointPointer:
    """What points at a checkpoint's folder: a LoggedModel, or in MLflow 2 a tag of its run, named by `id`."""

    id: str
    name: str
    uri: str
