"""The dataset of a job: built from the recipe's sources, found where it was built before, or given by URI."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import pyspark
from pyspark.sql import SparkSession

from conf.load import Resolved
from conf.manifest import DatasetManifest, ManifestError, read_manifest
from conf.schema import RunConfig
from conf.storage import Storage, open_storage
from etl import source
from etl.build import build_dataset, dataset_fingerprint, find_dataset

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """`seconds` by stage of the build; empty where nothing was built."""

    manifest: DatasetManifest
    folder: Storage
    rebuilt: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


def wanted_fingerprint(config: RunConfig) -> str:
    """The fingerprint of the dataset this configuration asks for, from its sources alone. Needs no Spark."""
    if config.dataset is not None:
        return read_manifest(open_storage(config.dataset)).fingerprint
    assert config.etl is not None
    prints = {name: source.fingerprint(source.find_source(name, c)) for name, c in config.etl.sources.items()}
    return dataset_fingerprint(config.etl, prints, pyspark.__version__, config.spark.settings())


def find(config: RunConfig, fingerprint: str) -> Dataset | None:
    """The finished dataset, or None where it must be built. ManifestError where `dataset` names none."""
    if config.dataset is not None:
        folder = open_storage(config.dataset)
        return Dataset(read_manifest(folder), folder)
    folder = open_storage(config.storage.datasets).at(f"{config.name}-{fingerprint[:12]}")
    manifest = find_dataset(folder, fingerprint)
    return None if manifest is None else Dataset(manifest, folder)


def require(config: RunConfig, fingerprint: str) -> Dataset:
    """As `find`; ManifestError tells what to run where there is none."""
    found = find(config, fingerprint)
    if found is None:
        where = open_storage(config.storage.datasets).at(f"{config.name}-{fingerprint[:12]}").uri
        raise ManifestError(f"{where}: no dataset of these sources and this configuration; run `sparkring etl` first")
    return found


def build(spark: SparkSession, resolved: Resolved, code_commit: str) -> Dataset:
    """Build the dataset, or find it built by another job meanwhile."""
    config = resolved.config
    assert config.etl is not None
    began = time.monotonic()
    built = build_dataset(
        spark,
        config.etl,
        name=config.name,
        root_uri=config.storage.datasets,
        settings=config.spark.settings(),
        code_commit=code_commit,
        config_digest=resolved.digest,
    )
    seconds = {**built.seconds, "total_s": time.monotonic() - began} if built.rebuilt else {}
    return Dataset(built.manifest, open_storage(built.uri), built.rebuilt, seconds)
