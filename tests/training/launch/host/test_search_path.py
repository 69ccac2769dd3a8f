"""Python's library is searched first, and the folder that one works in last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkring.training.launch.host.search_path import LIBRARY, library_first

ROOT = Path(__file__).parents[4]
DYNLOAD, ZIPPED = f"{LIBRARY}/lib-dynload", f"{os.path.dirname(LIBRARY)}/python311.zip"


@pytest.mark.parametrize("own", ["", ".", "/"])
def test_the_library_comes_first_and_the_folder_last_whatever_it_is_called(own: str) -> None:
    folder = os.path.abspath(own or ".")
    path = [own, "/packages/a.zip", ZIPPED, LIBRARY, DYNLOAD, "/site-packages", "hook of a finder", folder]
    expected = [ZIPPED, LIBRARY, DYNLOAD, "/packages/a.zip", "/site-packages", "hook of a finder", folder]
    assert library_first(path, folder) == expected
    assert library_first(expected, folder) == expected
    assert library_first([LIBRARY], folder) == [LIBRARY, folder]


NAMES = ("queue", "random", "select", "inspect", "token", "json", "logging", "signal", "numbers", "platform", "string")
NAMES += ("socket", "datetime", "calendar", "uuid", "struct", "threading", "tempfile", "code", "ssl", "csv", "email")


@pytest.mark.parametrize("start", ["script", "module"])
def test_a_file_named_as_a_module_of_pythons_is_not_imported_by_the_command_and_is_named(
    tmp_path: Path, start: str
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}')")
    (tmp_path / "r.yaml").write_text("name: r\ndataset: somewhere\n")
    words = [sys.executable, "-m", "sparkring.pipelines.cli"]
    if start == "script":  # as the one that pip writes
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/sparkring").write_text(
            "import sys\nfrom sparkring.pipelines.cli import console\nsys.exit(console())"
        )
        words = [sys.executable, str(tmp_path / "bin/sparkring")]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [*words, "config", "show", "r.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Python's own modules of these names are imported") == 1 and "calendar.py" in done.stderr
