"""A finished model as a folder: what it was configured as, the dataset it was trained on, and its weights.

    <folder>/config.json    the resolved configuration: which module, with which arguments, for which task
             manifest.json  the dataset's manifest: columns, vocabularies, fitted feature state
             weights.safetensors  parameter name -> tensor (training/checkpoint/weights.py)

A run has it below `model/`; a registered model holds a copy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from sparkring.conf.blocks.train import WEIGHTS_FILE
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError, parse
from sparkring.training.checkpoint.weights import FILE

CONFIG, MANIFEST = "config.json", "manifest.json"
FILES = (CONFIG, MANIFEST, FILE)


@dataclass(frozen=True)
class TrainedModel:
    """What a model folder says of its weights."""

    config: RunConfig
    manifest: DatasetManifest


def describe_model(folder: Storage, config: RunConfig, manifest: DatasetManifest) -> None:
    """Put config.json and manifest.json beside the weights."""
    folder.put_atomic(CONFIG, json.dumps(config.model_dump(mode="json"), indent=1).encode())
    folder.put_atomic(MANIFEST, manifest.to_json().encode())


def read_model_folder(folder: Storage) -> TrainedModel:
    """Read what is beside the weights. StoredError names a file that is missing or damaged."""
    if missing := [name for name in FILES if not folder.exists(name)]:
        raise StoredError(f"{folder.uri}: no model: it has no {', '.join(missing)}")
    config = parse(RunConfig, folder.read_bytes(CONFIG), f"{folder.uri}/{CONFIG}")
    manifest = DatasetManifest.from_json(folder.read_bytes(MANIFEST), f"{folder.uri}/{MANIFEST}")
    return TrainedModel(config, manifest)


def weights_at(uri: str) -> tuple[Storage, str]:
    """Folder and name of the file of weights that a URI names: the file itself, or a model folder with one."""
    place = open_storage(uri)
    return (place.parent, place.root.rpartition("/")[2]) if place.root.endswith(WEIGHTS_FILE) else (place, FILE)
