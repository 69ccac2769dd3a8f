"""The etl step around a build: sources are pinned once, and that is the only time their files are hashed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load_config
from conf.storage import Storage
from pipelines import etl_job

RECIPE = """
name: small
etl:
  sources: {t: {path: TABLE, columns: {a: int}}}
  rows: t
  features: {a: {kind: numeric}}
storage: {datasets: DATASETS}
"""


def test_one_job_hashes_every_source_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "t"
    table.mkdir()
    for name in ("a.csv", "b.csv", "c.csv"):
        (table / name).write_text("a\n1\n")
    (tmp_path / "small.yaml").write_text(
        RECIPE.replace("TABLE", str(table)).replace("DATASETS", str(tmp_path / "datasets"))
    )
    resolved = load_config(str(tmp_path / "small.yaml"))
    hashed: Counter[str] = Counter()
    real = Storage.sha256

    def counted(self: Storage, relative: str, *rest: Any) -> str:
        hashed[self.path(relative)] += 1
        return real(self, relative, *rest)

    monkeypatch.setattr(Storage, "sha256", counted)
    fingerprints = []

    def build(spark: Any, request: Any) -> Any:
        fingerprints.append(
            etl_job.dataset_fingerprint(request.config, request.sources, etl_job.pyspark.__version__, {})
        )
        return SimpleNamespace(manifest=None, uri=str(tmp_path / "datasets"), rebuilt=True, seconds={})

    monkeypatch.setattr(etl_job, "build_dataset", build)
    sources = etl_job.pin(resolved.config)
    wanted = etl_job.wanted_fingerprint(resolved.config, sources)
    assert etl_job.find(resolved.config, wanted) is None
    etl_job.build(None, resolved, sources, "commit")  # type: ignore[arg-type]
    assert fingerprints == [wanted]
    assert hashed == {str(table / name): 1 for name in ("a.csv", "b.csv", "c.csv")}
