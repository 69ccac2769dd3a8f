"""What is deleted of builds that were killed. Whole builds: tests/spark/test_etl_build.py."""

import os
import time

from sparkring.conf.manifest import Accounting, DataFile, DatasetManifest, Lineage, SplitInfo
from sparkring.conf.storage import open_storage
from sparkring.etl.build import _sweep


def test_only_old_folders_no_manifest_lists_are_deleted(tmp_path):
    for name in ("data-used", "data-dead", "data-young", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000.parquet").write_bytes(b"x")
        if name != "data-young":
            for path in (tmp_path / name / "train-00000.parquet", tmp_path / name):
                os.utime(path, (time.time() - 90_000,) * 2)
    path, sha = "data-used/train-00000.parquet", "0" * 64
    file = DataFile(path=path, split="train", rows=1, bytes=1, sha256=sha, row_groups=(1,))
    manifest = DatasetManifest(
        name="t",
        fingerprint="0" * 64,
        created_at="",
        columns=(),
        files=(file,),
        splits={"train": SplitInfo(rows=1, files=1)},
        accounting=Accounting(rows_in=1, rows_out=1),
        lineage=Lineage(sources={}),
    )
    _sweep(open_storage(str(tmp_path)), manifest)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data-used", "data-young", "notes"]
