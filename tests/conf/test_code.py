"""The digest of our code: every file of a package counts, wherever it is imported from."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from sparkring.conf.code import code_digest, source_files
from sparkring.pipelines.run.package import write_archive


def test_names_and_contents_of_all_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.py", "sub/b.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    before = code_digest()
    (tmp_path / "sub/b.py").write_text("x = 1\n")
    changed = code_digest()
    (tmp_path / "sub/b.py").rename(tmp_path / "sub/c.py")
    assert len({before, changed, code_digest()}) == 3


def test_all_four_packages_and_their_subfolders_count() -> None:
    names = dict(source_files(files("sparkring"), "sparkring"))
    assert {
        "sparkring/__init__.py",
        "sparkring/conf/config.py",
        "sparkring/etl/sources/files/csv_file.py",
        "sparkring/training/launch/host/agent.py",
        "sparkring/pipelines/tracking/tracker.py",
    } <= set(names)
    assert "csv" in names["sparkring/etl/sources/files/csv_file.py"].read_text()


def test_the_digest_is_the_same_from_a_folder_and_from_an_archive(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "sparkring.zip")
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n"
    code += "import sparkring.conf.code as c; print(c.__file__, c.code_digest())"
    command = [sys.executable, "-P", "-c", code]
    where, digest = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.split()
    assert str(path) in where and digest == code_digest()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sparkring/training/extra.py", "x = 1\n")
    other = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.split()[1]
    assert other != digest
