"""The wheel carries everything the program reads, and works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_wheel_runs_on_its_own(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "dist")]
    subprocess.run([*pip, *build, str(ROOT)], check=True, timeout=300, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("sparkring-*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=300, capture_output=True)
    program = "import sparkring.pipelines.cli as c, sys; print(c.__file__); sys.exit(c.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "config", "show", "flights"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site")) and "optim.lr" in done.stdout
    assert (tmp_path / "site/pipelines/report/report.html").is_file()
