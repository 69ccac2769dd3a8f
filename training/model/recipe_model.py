"""A recipe's model: the columns it reads, its module and its task. Ranks, the driver and serving share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.training.data.batch import SAMPLE
from sparkring.training.models.groups import freeze
from sparkring.training.models.initial import InitialModel, Unrecordable, record_model
from sparkring.training.models.task import Task
from sparkring.training.tasks import build_task, model_class


@dataclass(frozen=True)
class ModelColumns:
    """Which columns of the dataset a model is fed, and which is its label; a list of them where there are several."""

    features: list[str]  # columns, and the masks of those that may be null (conf/manifest.py)
    label: str | list[str] | None
    read: list[str]  # the stored columns they are made of

    @property
    def labels(self) -> list[str]:
        """The label columns, as a list."""
        return [self.label] if isinstance(self.label, str) else self.label or []


def pick_columns(manifest: DatasetManifest, model: ModelConfig, samples: bool = False) -> ModelColumns:
    """Pick the model's columns by role, or as the recipe names them.

    `samples`: add the rows' numbers, for a model that takes all columns as one dict. ValueError names the key and the
    dataset's columns.
    """
    tensors, inputs, label = manifest.tensors, model.inputs, model.label
    names = {column.name for column in tensors}
    masks = {column.mask: column.name for column in tensors if column.mask is not None}
    for key, given, known in (("model.inputs", inputs or [], names | set(masks)), ("model.label", [label], names)):
        if unknown := [name for name in given if name and name not in known]:
            raise ValueError(f"{key}: {unknown} not in dataset {manifest.name!r}, which has {sorted(known)}")
    made = [column for column in tensors if column.role == "feature"]
    features = inputs or [*(c.name for c in made), *(c.mask for c in made if c.mask is not None)]
    features = for_trees(manifest, features, inputs) if model.is_trees else features
    features = [*features, *([SAMPLE] if samples and inputs is None else [])]
    labels = [label] if label else [c.name for c in tensors if c.role == "label"]
    if shown := [name for name in labels if name in features]:
        raise ValueError(
            f"model.label = {shown[0]!r}: it is among the model's inputs, which would be shown what they must predict; "
            "leave it out of model.inputs"
        )
    if weighed := [name for name in (*features, *labels) if manifest.weight and name == manifest.weight["column"]]:
        raise ValueError(
            f"model.inputs, model.label: {weighed[0]!r} is the weight of dataset {manifest.name!r}, no input or label; "
            "select the column a second time by another name in the recipe's SQL"
        )
    read = dict.fromkeys([*(masks.get(name, name) for name in features), *labels])
    return ModelColumns(features, labels if len(labels) > 1 else next(iter(labels), None), list(read))


def for_trees(manifest: DatasetManifest, features: list[str], inputs: list[str] | None) -> list[str]:
    """Omit the columns that tell a network that a number is null: trees see it as missing, by the masks.

    `inputs`: named by the recipe, which stay.
    """
    masks = [c.mask for c in manifest.tensors if c.mask is not None and c.name in features]
    states = manifest.features.get("features", [])
    indicators = {f"{state['name']}__null" for state in states if state["kind"] == "numeric" and state["indicator"]}
    left_out = indicators - {*(inputs or [])}
    return list(dict.fromkeys([*(name for name in features if name not in left_out), *masks]))


def recipe_task(model: ModelConfig, columns: ModelColumns, manifest: DatasetManifest | None = None) -> Task:
    """Build the recipe's task for these columns. ValueError where the task does not go with them.

    `manifest`: says which token pads the texts of a language model; None: none does.
    """
    padding = {} if manifest is None or "pad_id" not in manifest.text else {"pad_id": manifest.text["pad_id"]}
    inputs = None if model.is_trees else model.inputs  # trees take one dict of all of them
    return build_task(model.task, columns.features, columns.label, inputs, args=model.task_args, **padding)


def build_model(config: RunConfig, manifest: DatasetManifest) -> nn.Module:
    """Build the recipe's module in its master dtype. ValueError where the factory refuses the recipe's args.

    Parameters of frozen groups have no gradients.
    """
    factory = model_class(config.model.factory)
    try:
        if hasattr(factory, "from_manifest"):
            model: nn.Module = factory.from_manifest(_of_label(manifest, config.model.label), **config.model.args)
        else:
            model = factory(**config.model.args)
    except TypeError as error:
        raise ValueError(
            f"model.args = {config.model.args}: {config.model.factory} does not take them: {error}"
        ) from error
    freeze(model, config.optim.groups)
    return model.to(getattr(torch, config.train.dtype))


def _of_label(manifest: DatasetManifest, label: str | None) -> DatasetManifest:
    """Return the manifest for a model that predicts `label`, one of several; None: all labels."""
    if label is None or "flags" not in manifest.features:
        return manifest
    features = {key: state for key, state in manifest.features.items() if key != "flags"}
    return manifest.model_copy(update={"features": features})


def start_model(config: RunConfig, manifest: DatasetManifest) -> InitialModel | Unrecordable:
    """Record the recipe's module and its initial values without memory; or why its constructor needs memory."""
    try:
        return record_model(lambda: build_model(config, manifest), config.train.seed)
    except Unrecordable as error:
        return error
