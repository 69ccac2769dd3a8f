"""A dataset of a pinned snapshot is found again after a commit, by a process that starts no Java."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
import yaml

from sparkring.conf.load import load_config
from sparkring.etl.build import BuildRequest, Built, build_dataset
from sparkring.etl.sources.pin import pin_sources
from sparkring.etl.windows.window import pin_dataset
from tests.etl.sources.iceberg.tables import NAME, catalog_at

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """A recipe with one source, in a folder of its own."""

    folder: Path
    source: dict[str, Any]

    @property
    def recipe(self) -> Path:
        path = self.folder / "found.yaml"
        block = {"sources": {"t": self.source}, "rows": "t", "keep": ["y"], "features": {"x": {"kind": "numeric"}}}
        storage = {"datasets": str(self.folder / "datasets"), "runs": str(self.folder / "runs")}
        path.write_text(yaml.safe_dump({"name": "found", "etl": block, "storage": storage}))
        return path

    def build(self, spark: Any) -> Built:
        """As the command does, in this session."""
        config = load_config(str(self.recipe)).config
        assert config.etl is not None
        pinned = pin_dataset(config.etl, config.spark.settings())
        request = BuildRequest(config.etl, pinned, "found", config.storage.datasets, config.spark.settings())
        return build_dataset(spark, request)

    def fingerprint(self) -> str:
        config = load_config(str(self.recipe)).config
        assert config.etl is not None
        return pin_sources(config.etl.sources)["t"].fingerprint

    def run(self, *words: str) -> tuple[subprocess.CompletedProcess[str], bool]:
        """Run Python; also whether it called Java, in whose place is a program that notes the call."""
        java, called = self.folder / "no_java/bin/java", self.folder / "called"
        java.parent.mkdir(parents=True, exist_ok=True)
        java.write_text(f"#!/bin/sh\ntouch '{called}'\nexit 1\n")
        java.chmod(0o755)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAVA_HOME": str(java.parent.parent)}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600)
        return done, called.exists()

    def imports(self) -> set[str]:
        """The packages that a finished `sparkring etl` has imported."""
        command = f"from sparkring.pipelines.cli import main; main(['etl', {str(self.recipe)!r}])"
        done, _ = self.run("-c", f"import sys; {command}; print(*sys.modules)")
        return {name.partition(".")[0] for name in done.stdout.split()}

    def found_again(self, built: Built, before: str) -> None:
        """Assert that after a commit the snapshot and the dataset are the same, and Java is left alone."""
        assert built.rebuilt and self.fingerprint() == before
        began, used = time.monotonic(), os.times().children_user
        done, called_java = self.run("-m", "sparkring.pipelines.cli", "etl", str(self.recipe))
        print(f"found in {time.monotonic() - began:.1f} s, {os.times().children_user - used:.1f} s of CPU")
        assert done.returncode == 0 and f"{built.uri} is there already" in done.stderr, done.stderr
        assert not called_java
        slow = self.imports() & {"pyspark", "torch", "mlflow", "matplotlib"}
        assert slow == {"pyspark"}  # whose session is never opened


ROWS = pa.table({"x": [float(n) for n in range(20)], "y": list(range(20))})


def test_a_delta_version_is_found_after_the_next_commit(spark: Any, tmp_path: Path) -> None:
    table = tmp_path / "t"
    for _ in range(4):
        deltalake.write_deltalake(str(table), ROWS, mode="append")
    job = Job(tmp_path, {"format": "delta", "path": str(table), "versionAsOf": 3})
    built, before = job.build(spark), job.fingerprint()
    deltalake.write_deltalake(str(table), ROWS, mode="append")
    job.found_again(built, before)
    assert Job(tmp_path, {"format": "delta", "path": str(table)}).fingerprint() != before
    _, called_java = job.run("-c", "from pyspark import SparkContext; SparkContext()")
    assert called_java  # by whoever starts Spark


def test_an_iceberg_tag_is_found_after_the_next_commit(spark: Any, tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        table = catalog.create_table("db.t", ROWS.schema)
        table.append(ROWS)
        table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "eod").commit()
        job = Job(tmp_path, {"format": "iceberg", "table": NAME, "tag": "eod"})
        built, before = job.build(spark), job.fingerprint()
        table.append(ROWS)
        job.found_again(built, before)
        assert Job(tmp_path, {"format": "iceberg", "table": NAME}).fingerprint() != before
