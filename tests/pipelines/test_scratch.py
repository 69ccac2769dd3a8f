"""Temporary folders: a killed process leaves one, the next process deletes it, and no other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import sparkring.pipelines
from sparkring.pipelines.run.scratch import open_scratch, scratch_folder

HOLDER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from sparkring.pipelines.run.scratch import open_scratch
print(open_scratch("code").path, flush=True)
time.sleep(100)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_process_deletes_what_a_killed_one_left_and_nothing_else(place: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        (left / "archive.zip").write_bytes(b"x")
        (place / "sparkring-code-of-another-program").mkdir()
        (place / "sparkring-predict-x").mkdir()
        with scratch_folder("code") as alive:
            assert left.exists() and alive != left
        assert not alive.exists()
        os.kill(holder.pid, signal.SIGKILL)
    first, second = open_scratch("code"), open_scratch("code")
    assert not left.exists() and first.path.exists() and second.path.exists()
    first.close(), second.close()
    assert sorted(path.name for path in place.iterdir()) == ["sparkring-code-of-another-program", "sparkring-predict-x"]


def test_a_link_is_never_followed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / ".lock").write_text("")
    (place / "sparkring-code-link").symlink_to(elsewhere)
    open_scratch("code").close()
    assert elsewhere.exists() and (place / "sparkring-code-link").is_symlink()


def test_a_job_makes_no_temporary_folder_that_a_kill_would_leave() -> None:
    """Others are deleted by nobody: 365 nights a year are killed now and then."""
    made = re.compile(r"TemporaryDirectory\(|mkdtemp\(")
    folder = Path(sparkring.pipelines.__file__).parent
    found = [path.name for path in sorted(folder.rglob("*.py")) if made.search(path.read_text())]
    assert found == ["scratch.py", "spark_classes.py"], "the latter by set-up alone"
