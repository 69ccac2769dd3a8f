"""The weights that a run begins with (model.start): found, copied into its folder once, and noted by their sha256.

<run>/model_start.json           what was given, which version or file that was, and its sha256
      start/weights.safetensors  the copy: ranks read it wherever they are, and neither a promotion nor another file of
                                 that name in between changes where a resumed run had started
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from torch import nn

from sparkring.conf.blocks.model import StartConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import CHUNK_BYTES, Storage, open_storage
from sparkring.conf.stored import CLOSED, Sha256, StoredError, read, up_to
from sparkring.pipelines.model.plan import meta_model
from sparkring.pipelines.run.problems import Problems
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.tags import ENGINE
from sparkring.training.checkpoint.weights import FILE, open_weights
from sparkring.training.model.folder import DIGESTS, MANIFEST, TREES_ENGINE, TREES_FILE, check_digests, weights_at
from sparkring.training.model.start import match_tensors
from sparkring.training.model.start_match import StartMatch
from sparkring.training.models.warm_start import WarmStartError, compare_features
from sparkring.training.tasks import model_class
from sparkring.training.worker.result import WorkerResult

if TYPE_CHECKING:
    from sparkring.pipelines.tracking.store.fetch import RegisteredModel

log = logging.getLogger(__name__)
RECORD, FOLDER = "model_start.json", "start"
OF_TREES = "is of family trees, whose file has no tensors; begin with a network's"


@dataclass(frozen=True)
class ModelStart:
    """model_start.json."""

    __pydantic_config__ = CLOSED

    given: str  # model.start.weights of the recipe
    weights: str  # the version or file that this was
    sha256: Sha256
    features: str  # how the features of a model folder differ from those of the dataset; empty: they do not
    format: Annotated[int, up_to(1)] = 1

    def describe(self, train: WorkerResult) -> str:
        """Describe in a line the file, and which of its tensors the model took."""
        return self.text if train.started is None else f"{self.text}; {train.started.text}"

    @property
    def text(self) -> str:
        """In a line."""
        differ = f"; its features differ: {self.features}" if self.features else ""
        return f"with the weights of {self.weights} (sha256 {self.sha256[:12]}){differ}"


def start_problems(config: RunConfig, manifest: DatasetManifest | None = None) -> Problems:
    """List why a run cannot start with model.start.

    For a file or folder the header is read, and compared with the model if that is known by now. For a registered model
    the registry tells which engine trained it.
    """
    start = config.model.start
    if start is None:
        return Problems()
    key = f"model.start.weights = {start.weights!r}"
    try:
        if start.registered:
            if manifest is None and _find(config, start).tags.get(ENGINE) == TREES_ENGINE:  # else it was found before
                return Problems([f"{key}: {OF_TREES}"])
            return Problems()
        folder, file = weights_at(start.weights)
        check_file(folder, file)
        match_file(config, start, manifest)
    except StoreUnreachable as error:
        return Problems(resources=[f"{key}: the registry does not answer: {error}"])
    except (StoredError, OSError, ValueError) as error:
        return Problems([str(error) if str(error).startswith("model.start") else f"{key}: {error}"])
    return Problems()


def check_file(folder: Storage, file: str) -> None:
    """Raise StoredError where a folder has no file of tensors."""
    if not folder.exists(file):
        raise StoredError(OF_TREES if folder.exists(TREES_FILE) else f"there is no {folder.uri}/{file}")


def match_file(config: RunConfig, start: StartConfig, manifest: DatasetManifest | None) -> StartMatch | None:
    """Compare the file's tensors with the model's; None where that is not known by now.

    ValueError where none matches, StoredError for a damaged file.
    """
    given = open_weights(*weights_at(start.weights))
    model = _model(config, manifest)
    if model is None:
        return None
    return match_tensors(model, {name: each.shape for name, each in given.items()}, start.rename)


def _model(config: RunConfig, manifest: DatasetManifest | None) -> nn.Module | None:
    """Return the recipe's model without memory; None if only its dataset sizes it, or it is invalid."""
    try:
        if manifest is None and hasattr(model_class(config.model.factory), "from_manifest"):
            return None
        return meta_model(config, manifest)
    except Exception:  # the user's code runs; `check_recipe` reports what is wrong with it
        return None


def resolve_model_start(
    resolved: Resolved, manifest: DatasetManifest, run: Storage
) -> tuple[Resolved, ModelStart | None]:
    """Copy the weights into the run's folder, and name the copy and its sha256 in the configuration.

    ConfigError where the file is not the one that `model.start.sha256` names, or matches no tensor of the model.
    """
    start = resolved.config.model.start
    if start is None:
        return resolved, None
    if run.exists(RECORD):
        record = read(ModelStart, run, RECORD)
        log.info("training starts %s (as it had started)", record.text)
    else:
        record = copy_weights(resolved.config, start, manifest, run)
        log.info("training starts %s", record.text)
        if record.features:
            log.warning(
                "model.start: the model was trained on other features (%s), and its tensors are taken over by name: "
                "codes and scales may stand for other values; warm_start follows them",
                record.features,
            )
    copy = start.model_copy(update={"weights": f"{run.at(FOLDER).uri}/{FILE}", "sha256": record.sha256})
    config = _with_start(resolved.config, copy)
    try:
        match = match_file(config, copy, manifest)
    except ValueError as error:
        raise ConfigError(config.name, [str(error)]) from error
    if match is not None:
        log.info("model.start: %s", match.text)
    return replace(resolved, config=config), record


def _with_start(config: RunConfig, start: StartConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"start": start})})


def copy_weights(config: RunConfig, start: StartConfig, manifest: DatasetManifest, run: Storage) -> ModelStart:
    """Copy the file of weights to the run's folder, and then note it there.

    ConfigError where it cannot be had, or is another file than `sha256` says.
    """
    key = f"model.start.weights = {start.weights!r}"
    try:
        with _source(config, start) as (folder, file, weights):
            check_file(folder, file)
            if folder.exists(DIGESTS):
                check_digests(folder)
            with (
                folder.fs.open_input_stream(folder.path(file)) as source,
                run.at(FOLDER).create(FILE) as target,
            ):
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
            features = feature_differences(folder, manifest)
    except (StoredError, StoreUnreachable, OSError) as error:
        raise ConfigError(config.name, [f"{key}: {error}"]) from error
    sha256 = run.at(FOLDER).sha256(FILE)
    if start.sha256 not in (None, sha256):
        raise ConfigError(
            config.name, [f"{key}: the file's sha256 is {sha256}, not model.start.sha256 = {start.sha256}"]
        )
    record = ModelStart(start.weights, weights, sha256, features)
    run.put_atomic(RECORD, json.dumps(asdict(record), indent=1).encode())
    return record


@contextmanager
def _source(config: RunConfig, start: StartConfig) -> Iterator[tuple[Storage, str, str]]:
    """Locate the weights file: (folder, name, registered version or URI)."""
    if not start.registered:
        folder, file = weights_at(start.weights)
        yield folder, file, f"{folder.uri}/{file}"
        return
    from sparkring.pipelines.tracking.store.fetch import copy_model  # MLflow: seconds

    tracking = config.tracking.named(config.name)
    with scratch_folder("start") as scratch, client_limits(tracking):
        found = _find(config, start)
        yield open_storage(str(copy_model(tracking, found, scratch))), FILE, found.uri


def _find(config: RunConfig, start: StartConfig) -> RegisteredModel:
    from sparkring.pipelines.tracking.store.fetch import find_model  # MLflow: seconds

    tracking = config.tracking.named(config.name)
    with client_limits(tracking):
        return find_model(tracking, start.weights)


def feature_differences(folder: Storage, manifest: DatasetManifest) -> str:
    """Describe how a model folder's training features differ from a dataset's; "" without a manifest."""
    if not folder.exists(MANIFEST):
        return ""
    try:
        trained = DatasetManifest.from_json(folder.read_bytes(MANIFEST), f"{folder.uri}/{MANIFEST}")
        return "; ".join(compare_features(trained, manifest).changed)
    except (WarmStartError, StoredError) as error:
        return str(error)
