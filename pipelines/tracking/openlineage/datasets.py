"""Name datasets as OpenLineage does, so that other producers' events speak of the same ones. Pure.

The rules: https://openlineage.io/docs/spec/naming. A namespace is the data source (`s3://bucket`, `file`), a name is
unique in it. Three kinds have no rule there: registered models (`mlflow://host`, the model's name), and tables whose
place only a catalog knows, Spark's (`spark_catalog`) or Iceberg's (`iceberg://<catalog>`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.secrets import redact
from sparkring.conf.sources import CatalogSource, DeltaSource, FilesSource, IcebergSource, JdbcSource, SourceConfig
from sparkring.pipelines.tracking.client import without_password
from sparkring.pipelines.tracking.ops import LineageDataset

SCHEMES = {"s3a": "s3", "s3n": "s3"}  # names of one store, by which client reads it
IN_BUCKETS = {"s3", "gs", "abfs", "abfss", "wasb", "wasbs"}  # a name there has no slash in front
VERSIONS = ("version", "snapshot-id", "fingerprint")  # what says best which state of a source was read
METADATA = re.compile(r"/metadata(?:/[^/]*\.metadata\.json)?$")  # of an Iceberg table's folder
DATABASE = re.compile(r"jdbc:(?P<kind>\w+)://(?:[^/?;@]*@)?(?P<where>[^/?;@]+)/(?P<database>[^/?;@]+)(?=[?;]|$)")
PORTS = {"postgresql": ("postgres", 5432), "mysql": ("mysql", 3306)}  # and the name of the kind in a namespace
TABLE = re.compile(r"[\w.\"`]+")
Kind = Literal["FILE", "TABLE", "MODEL"]


def place_name(uri: str) -> tuple[str, str]:
    """Namespace and name of a path or URI; a relative path is one below the working directory."""
    parts = urlsplit(uri)
    scheme = SCHEMES.get(parts.scheme, parts.scheme)
    if scheme in ("", "file"):
        return "file", os.path.abspath(parts.path if parts.scheme else uri)
    path = parts.path.rstrip("/")
    name = path.lstrip("/") if scheme in IN_BUCKETS else path
    return f"{scheme}://{parts.netloc}", name or "/"


def at_place(uri: str, kind: Kind) -> LineageDataset:
    """A dataset at a path or URI; what the URI says about its store's host stays out of the events."""
    namespace, name = place_name(uri)
    shown = Path(name).as_uri() if namespace == "file" else f"{namespace}/{quote(name.lstrip('/'))}"
    return LineageDataset(namespace=namespace, name=name, kind=kind, uri=shown)


def source_dataset(
    name: str, source: SourceConfig, read: Mapping[str, Any], environment: Mapping[str, str]
) -> LineageDataset:
    """A source of a recipe.

    Args:
        name: in the recipe.
        source: where it is.
        read: what of it was read: the manifest's lineage of it; {} where that is not known yet.
        environment: variables that a database's URL comes from.
    """
    kind: Kind = "FILE" if isinstance(source, FilesSource) else "TABLE"
    if (path := path_of(source)) is not None:
        found = at_place(path, kind)
    else:
        namespace, label = table_name(name, source, environment)
        found = LineageDataset(namespace=namespace, name=label, kind=kind)
    if columns := getattr(source, "columns", {}):
        found["schema"] = [{"name": column, "type": declared} for column, declared in columns.items()]
    version = next((read[key] for key in VERSIONS if read.get(key) is not None), None)
    if version is not None:
        found["version"] = str(version)
    for key in ("rows", "files", "bytes"):
        if isinstance(read.get(key), int):
            found[key] = read[key]
    return found


def path_of(source: SourceConfig) -> str | None:
    """Path or URI of a source's table; None of one that a catalog or a database finds."""
    if isinstance(source, IcebergSource):
        return source.path and METADATA.sub("", source.path)
    return source.path if isinstance(source, FilesSource | DeltaSource) else None


def table_name(name: str, source: SourceConfig, environment: Mapping[str, str]) -> tuple[str, str]:
    """Namespace and name of a source without a path. `name`: in the recipe; `environment`: as in `source_dataset`."""
    if isinstance(source, JdbcSource):
        return database_table(name, source, environment)
    if isinstance(source, CatalogSource):
        return "spark_catalog", source.table
    assert isinstance(source, IcebergSource) and source.table is not None
    catalog, _, table = source.table.partition(".")
    return f"iceberg://{catalog}", table


def database_table(name: str, source: JdbcSource, environment: Mapping[str, str]) -> tuple[str, str]:
    """Namespace and name of a table behind JDBC, or of the query under its source's name. Without credentials."""
    table = source.dbtable if source.dbtable and TABLE.fullmatch(source.dbtable) else None
    found = DATABASE.match(environment.get(source.url_env, ""))
    if found is None:
        return f"jdbc:{source.url_env}", table or name
    kind, port = PORTS.get(found["kind"], (found["kind"], None))
    where = found["where"] if ":" in found["where"] or port is None else f"{found['where']}:{port}"
    if table is not None and "." not in table and kind == "postgres":
        table = f"public.{table}"
    return f"{kind}://{where}", f"{found['database']}.{table or name}"


def built_dataset(uri: str, manifest: DatasetManifest) -> LineageDataset:
    """A finished dataset. Its name is the same for all fingerprints, which are its versions."""
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
    """Predictions below a folder. `files`: rows and bytes of each that was written."""
    found = at_place(uri, "FILE")
    found["rows"], found["bytes"] = sum(rows for rows, _ in files), sum(size for _, size in files)
    found["files"] = len(files)
    return found


def scoring_model(tracking: TrackingConfig, uri: str, name: str, version: str) -> LineageDataset:
    """The model that scores: `models:/<name>/<version>`, or a folder."""
    if uri.startswith("models:/"):
        return model_dataset(tracking, name, version)
    found = at_place(uri, "MODEL")
    found["version"] = version
    return found


def model_dataset(tracking: TrackingConfig, name: str, version: str) -> LineageDataset:
    """A version of a registered model. `tracking`: where the registry is."""
    uri = f"models:/{name}/{version}"
    return LineageDataset(namespace=registry_name(tracking), name=name, kind="MODEL", uri=uri, version=version)


def registry_name(tracking: TrackingConfig) -> str:
    """Namespace of registered models: the server, or the folder of the embedded store."""
    if tracking.uri is None:
        return f"mlflow://{os.path.abspath(tracking.root)}"
    parts = urlsplit(without_password(tracking.uri))
    return f"mlflow://{redact(parts.netloc + parts.path).rstrip('/')}"
