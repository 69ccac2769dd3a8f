"""The fingerprint of a dataset: a hash over all that decides its content, known before anything is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.code import code_digest
from sparkring.conf.manifest import FORMAT_VERSION, digest
from sparkring.etl.session import decides_rows
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.views import own_modules

PACKAGE = "sparkring.etl"  # other code may build other rows


def dataset_fingerprint(
    config: EtlConfig, sources: Mapping[str, SourceSnapshot], spark_version: str, settings: Mapping[str, str]
) -> str:
    """sha256 over the sources' content, the etl block, the code, Spark's version and its `settings`.

    Where a source is, and which snapshot was asked for, is not content: what was found there is. The order of keys is,
    as columns are stored in it.
    """
    prints = {name: source.fingerprint for name, source in sources.items()}
    parts = [FORMAT_VERSION, prints, json.dumps(declared(config)), own_modules(config.rows), code_digest(PACKAGE)]
    return digest([*parts, spark_version, deciding_settings(settings)])


def declared(config: EtlConfig) -> dict[str, Any]:
    """The etl block, without where its sources are and which snapshots are asked for."""
    block = config.model_dump(mode="json")
    for name, source in config.sources.items():
        block["sources"][name] = source.model_dump(mode="json", exclude=set(source.POINTERS))
    return block


def deciding_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings of Spark that may change rows."""
    return {key: value for key, value in sorted(settings.items()) if decides_rows(key)}
