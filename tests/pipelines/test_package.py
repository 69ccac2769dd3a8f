"""The code archive: the same bytes for the same code, whole or not at all."""

from __future__ import annotations

import io
import runpy
import zipfile
from pathlib import Path

import pytest

from sparkring.pipelines import cli
from sparkring.pipelines.run.package import code_archive, code_files, write_archive


def test_the_archive_holds_all_our_code_and_only_that() -> None:
    with zipfile.ZipFile(io.BytesIO(code_archive())) as archive:
        names = archive.namelist()
    assert {
        f"sparkring/{name}" for name in ("training/worker/train.py", "pipelines/report/report.html", "__init__.py")
    } <= set(names)
    assert "sparkring/conf/recipes/flights.yaml" in names
    assert not [name for name in names if "__pycache__" in name or not name.startswith("sparkring/")]


def test_equal_code_makes_equal_bytes(tmp_path: Path) -> None:
    assert write_archive(tmp_path / "dist/code.zip").read_bytes() == code_archive()
    assert [path.name for path in (tmp_path / "dist").iterdir()] == ["code.zip"], "no part is left"


def test_the_program_for_spark_submit_ends_as_the_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended as Python does, which takes every object of torch apart first."""
    assert cli.main(["package", "--out", f"{tmp_path}/sparkring.zip"]) == 0
    monkeypatch.setattr(cli, "console", lambda: 7)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"{tmp_path}/sparkring_job.py")
    assert ended.value.code == 7


def test_a_folder_without_our_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no code of ours under"):
        code_files(tmp_path)
