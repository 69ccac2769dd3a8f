"""Name datasets as OpenLineage does, so that other producers' events speak of the same ones. Pure.

The rules: https://openlineage.io/docs/spec/naming. A namespace is the data source (`s3://bucket`, `file`), a name is
unique in it. Three kinds have no rule there: registered models (`mlflow://host`, the model's name), and tables whose
place only a catalog knows, Spark's (`spark_catalog`) or Iceberg's (`iceberg://<catalog>`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.secrets import redact
from sparkring.conf.sources import SourceConfig
from sparkring.conf.uris import local_path
from sparkring.pipelines.tracking.client import without_password
from sparkring.pipelines.tracking.ops import LineageDataset

SCHEMES = {"s3a": "s3", "s3n": "s3"}  # names of one store, by which client reads it
IN_BUCKETS = {"s3", "gs", "abfs", "abfss", "wasb", "wasbs"}  # a name there has no slash in front
Kind = Literal["FILE", "TABLE", "MODEL"]


def place_name(uri: str) -> tuple[str, str]:
    """Return namespace and name of a path or URI; relative paths start at the working directory."""
    if (local := local_path(uri)) is not None:
        return "file", os.path.abspath(local)
    parts = urlsplit(uri)
    scheme = SCHEMES.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/")
    name = path.lstrip("/") if scheme in IN_BUCKETS else path
    return f"{scheme}://{parts.netloc}", name or "/"


def at_place(uri: str, kind: Kind) -> LineageDataset:
    """Describe a dataset at a path or URI; options of its store's host stay out of the events."""
    namespace, name = place_name(uri)
    shown = Path(name).as_uri() if namespace == "file" else f"{namespace}/{quote(name.lstrip('/'))}"
    return LineageDataset(namespace=namespace, name=name, kind=kind, uri=shown)


def source_dataset(
    name: str, source: SourceConfig, read: Mapping[str, Any], environment: Mapping[str, str]
) -> LineageDataset:
    """Describe a source of a recipe.

    Args:
        name: name in the recipe.
        source: configuration of the source.
        read: manifest's lineage of the source; {} if not known yet.
        environment: variables with URLs of databases.
    """
    kind: Kind = "FILE" if source.IS_FILES else "TABLE"
    if (path := source.lineage_location) is not None:
        found = at_place(path, kind)
    else:
        namespace, label = source.lineage_name(name, environment)
        found = LineageDataset(namespace=namespace, name=label, kind=kind)
    if source.columns:
        found["schema"] = [{"name": column, "type": declared} for column, declared in source.columns.items()]
    version = next((read[key] for key in (source.VERSION_KEY or "", "fingerprint") if read.get(key) is not None), None)
    if version is not None:
        found["version"] = str(version)
    for key in ("rows", "files", "bytes"):
        if isinstance(read.get(key), int):
            found[key] = read[key]
    return found


def built_dataset(uri: str, manifest: DatasetManifest) -> LineageDataset:
    """Describe a finished dataset. All fingerprints share its name, and are its versions."""
    found = at_place(uri, "FILE")
    return found | LineageDataset(
        namespace=found["namespace"],
        name=found["name"].removesuffix(f"-{manifest.fingerprint[:12]}"),
        kind="FILE",
        version=manifest.fingerprint,
        schema=[{"name": column.name, "type": column.logical or column.dtype} for column in manifest.columns],
        rows=manifest.accounting.rows_out,
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
    )


def predictions_dataset(uri: str, files: Sequence[tuple[int, int]]) -> LineageDataset:
    """Describe predictions below a folder. `files`: rows and bytes of each written file."""
    found = at_place(uri, "FILE")
    found["rows"], found["bytes"] = sum(rows for rows, _ in files), sum(size for _, size in files)
    found["files"] = len(files)
    return found


def scoring_model(tracking: TrackingConfig, uri: str, name: str, version: str) -> LineageDataset:
    """Describe the model that scores: `models:/<name>/<version>`, or a folder."""
    if uri.startswith("models:/"):
        return model_dataset(tracking, name, version)
    found = at_place(uri, "MODEL")
    found["version"] = version
    return found


def model_dataset(tracking: TrackingConfig, name: str, version: str) -> LineageDataset:
    """Describe a version of a registered model. `tracking`: configuration of the registry."""
    uri = f"models:/{name}/{version}"
    return LineageDataset(namespace=registry_name(tracking), name=name, kind="MODEL", uri=uri, version=version)


def registry_name(tracking: TrackingConfig) -> str:
    """Return the namespace of registered models: the server, or the folder of the embedded store."""
    if tracking.uri is None:
        return f"mlflow://{os.path.abspath(tracking.root)}"
    parts = urlsplit(without_password(tracking.uri))
    return f"mlflow://{redact(parts.netloc + parts.path).rstrip('/')}"
