"""Everything that a registered model takes along: its files, code, requirements and a sample."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from sparkring.conf.config import RunConfig
from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.model.sample import sample_of, write_sample
from sparkring.pipelines.model.sources import model_sources, requirements
from sparkring.pipelines.serving import make_predictor
from sparkring.training.model.folder import SAMPLE, copy_model_files, write_digests

log = logging.getLogger("sparkring")


@dataclass(frozen=True)
class PackedModel:
    """data: as training/model/folder.py describes it, and a sample; code: a folder for Python's path."""

    data: Path
    code: Path
    requirements: list[str]  # name==version


def pack_model(config: RunConfig, dataset: Dataset, model: Storage, folder: Path) -> PackedModel:
    """Pack the model folder of a finished run below `folder`, which is empty."""
    data, code = folder / "data", folder / "code"
    packed = open_storage(str(data))
    copy_model_files(model, packed)
    sources = model_sources(config, images=bool(dataset.manifest.images))
    if sources.left_out:
        log.warning("%s: no Python source, so not in the model; install it where the model is loaded", sources.left_out)
    for name, text in sources.files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text, encoding="utf-8")
    if config.tracking.sample_rows:
        add_sample(config, dataset, data)
    write_digests(packed, [name for name in SAMPLE if packed.exists(name)])
    return PackedModel(data, code, requirements(sources.packages))


def add_sample(config: RunConfig, dataset: Dataset, data: Path) -> None:
    """Record a sample next to the model's files; a warning where the model cannot be tried on this host."""
    try:
        predictor = make_predictor(open_storage(str(data)))
        rows, predictions = sample_of(config, dataset.manifest, dataset.folder, predictor)
    except Exception as error:  # a model of the user's: anything. It is trained, and is registered all the same
        log.warning("the model is registered without a sample of predictions: %s", " ".join(str(error).split()))
        return
    write_sample(data, rows, predictions)
