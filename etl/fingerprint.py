"""The fingerprint of a dataset: a hash over all that decides its content, known before anything is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.code import code_digest
from sparkring.conf.digest import digest
from sparkring.conf.manifest import FORMAT_VERSION, SPARK_SEMANTICS
from sparkring.etl.sources.own_code import own_modules
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.spark_platform.session import decides_rows

PACKAGE = "sparkring.etl"  # other code may build other rows
HASH_CHARACTERS = 12  # of what a fingerprint is made of: it is compared, not relied on
ORDER = "the order of "


def dataset_fingerprint(config: EtlConfig, sources: Mapping[str, SourceSnapshot], settings: Mapping[str, str]) -> str:
    """Hash (sha256) the sources' content, the etl block, the code, Spark's semantics and its `settings`.

    The location of a source and the requested snapshot do not count; what was found there does. The order of keys
    counts, because columns are stored in it.
    """
    prints = {name: source.fingerprint for name, source in sources.items()}
    parts = [FORMAT_VERSION, prints, json.dumps(declared(config)), own_modules(config.rows), code_digest(PACKAGE)]
    return digest([*parts, SPARK_SEMANTICS, deciding_settings(settings)])


def made_of(config: EtlConfig, contents: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Hash what a fingerprint is made of piece by piece, each by a name for people.

    Args:
        config: the etl block.
        contents: fingerprints of what is read, by name: the sources, or the day partitions of a window.
        settings: the recipe's `spark.conf`.
    """
    found: dict[str, Any] = {}
    for key, value in declared(config).items():
        if not isinstance(value, dict):
            found[f"etl.{key}"] = value
            continue
        found |= {f"etl.{key}.{name}": each for name, each in value.items()}
        found[f"{ORDER}etl.{key}"] = [*value]
    found |= {f"what {name} holds": content for name, content in contents.items()}
    found |= {f"the module {name}": content for name, content in own_modules(config.rows).items()}
    found |= {f"spark.conf.{key}": value for key, value in deciding_settings(settings).items()}
    found |= {
        "the format of datasets": FORMAT_VERSION,
        "the ETL code of sparkring": code_digest(PACKAGE),
        "the semantics of Spark": SPARK_SEMANTICS,
    }
    return {name: digest(json.dumps(value))[:HASH_CHARACTERS] for name, value in found.items()}


def what_differs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List what differs between two fingerprints by their ingredients; marks new and gone names."""
    changed = [name for name in after if name in before and before[name] != after[name]]
    new, gone = [n for n in after if n not in before], [n for n in before if n not in after]
    other = {name.rpartition(".")[0] for name in (*new, *gone)}  # with another number of keys their order is another
    changed = [name for name in changed if name.removeprefix(ORDER) not in other or not name.startswith(ORDER)]
    return [*changed, *(f"{name} (new)" for name in new), *(f"{name} (gone)" for name in gone)]


def declared(config: EtlConfig) -> dict[str, Any]:
    """Return the etl block without the locations of sources and the requested snapshots."""
    block = config.model_dump(mode="json")
    for name, source in config.sources.items():
        block["sources"][name] = source.model_dump(mode="json", exclude=set(source.POINTERS))
    return block


def deciding_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the Spark settings that may change rows."""
    return {key: value for key, value in sorted(settings.items()) if decides_rows(key)}
