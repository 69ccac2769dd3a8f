"""The model that scores: found, copied to this machine, checked, and packed for Spark's workers."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sparkring.conf.blocks.predict import PredictConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.references import module_of
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.serving import TablePredictor, check_trusted, make_predictor
from sparkring.pipelines.tracking.client import client_limits
from sparkring.training.model.folder import (
    CONFIG,
    DIGESTS,
    TrainedModel,
    copy_model_files,
    model_files,
    read_description,
    read_model_folder,
    weights_sha256,
)

SHORT = 12  # hex digits of a hash that names something


@dataclass(frozen=True)
class ScoringModel:
    """A model whose files are in the local `folder`, and what it is called wherever its predictions are."""

    folder: Path
    uri: str  # models:/<name>/<version>, or the folder's that was given
    name: str
    version: str  # of a folder: the first digits of `weights_sha256`
    run_id: str  # of MLflow; "" where it is not known
    weights_sha256: str
    trained: TrainedModel


def model_uri(config: RunConfig, block: PredictConfig) -> str:
    """Return the URI of the model that a recipe predicts with."""
    tracking = config.tracking.named(config.name)
    return block.model or f"models:/{tracking.registered_model}@{tracking.alias}"


def get_model(config: RunConfig, block: PredictConfig, scratch: Path) -> ScoringModel:
    """Copy the model below `scratch`. StoredError for one that is missing, damaged or names code of others.

    The modules of the recipe's own model are trusted: its author wrote them, and this is their job.
    """
    uri, tracking = model_uri(config, block), config.tracking.named(config.name)
    run_id = name = version = ""
    if block.folder is None:
        from sparkring.pipelines.tracking.store.fetch import copy_model, find_model  # MLflow: seconds

        with client_limits(tracking):
            registered = find_model(tracking, uri)
            folder = copy_model(tracking, registered, scratch / "registered")
        uri, name, version, run_id = registered.uri, registered.name, registered.version, registered.run_id
    else:
        folder, given = scratch / "model", open_storage(block.folder)
        read_description(given)  # names a file that is missing before anything is copied
        copy_model_files(given, open_storage(str(folder)))
    copied = open_storage(str(folder))
    trained = read_model_folder(copied)
    own = [module_of(each) for each in config.model_code.values()]
    check_trusted(trained.config, f"{uri}/{CONFIG}", own)
    if trained.config.model.kind.is_text:
        raise StoredError(f"{uri}: is a language model; `predict` scores rows of tables")
    sha256 = weights_sha256(copied)
    return ScoringModel(folder, uri, name or trained.config.name, version or sha256[:SHORT], run_id, sha256, trained)


def load(folder: Path) -> TablePredictor:
    """Return the predictor of a checked model folder. StoredError if its files make none."""
    found = make_predictor(open_storage(str(folder)))
    assert isinstance(found, TablePredictor), "language models are refused when the model is found"
    return found


def pack(model: Path, folder: Path) -> Path:
    """Pack a model into an archive in `folder`. Its name tells the content: Spark takes a name for one content only."""
    stored = open_storage(str(model))
    hasher, files = hashlib.sha256(), model_files(stored)
    for name in files:
        hasher.update(bytes.fromhex(stored.sha256(name)))
    archive = folder / f"sparkring-model-{hasher.hexdigest()[:SHORT]}.zip"
    if not archive.exists():
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
            for name in [*files, *([DIGESTS] if stored.exists(DIGESTS) else [])]:
                packed.write(model / name, name)
    return archive
