"""Nothing that is downloaded at set-up is installed, or run, before its hash is checked."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """pip sees the files of `tmp_path` and nothing else."""
    return os.environ | {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip


def test_a_changed_horovod_does_not_run(tmp_path: Path, offline: dict[str, str]) -> None:
    """`pip download` of an sdist runs its setup.py."""
    ran = tmp_path / "ran"
    files = {
        "setup.py": f"open({str(ran)!r}, 'w')\nfrom setuptools import setup\nsetup(name='horovod', version='0.28.1')\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
    }
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    command = [str(CI / "build_horovod.sh"), sys.executable]
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
    assert not ran.exists()


def test_a_changed_torch_is_not_installed(tmp_path: Path, offline: dict[str, str]) -> None:
    with zipfile.ZipFile(tmp_path / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-2.13.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr("torch-2.13.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-2.13.0.dist-info/RECORD", "")
    options = ["--no-deps", "--require-hashes", "--ignore-installed", "--target", str(tmp_path / "installed")]
    command = [sys.executable, "-m", "pip", "install", *options, "-r", str(CI / "torch.txt")]
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
    assert not (tmp_path / "installed/torch-2.13.0.dist-info").exists()
    setup = (CI / "setup.sh").read_text()
    assert "--require-hashes" in setup.partition(".ci/torch.txt\n")[2].partition("torch==2.13.0\nfi")[0]
