"""Nothing that is downloaded at set-up is installed, or run, before its hash is checked."""

from __future__ import annotations

import io
import os
import re
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
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
    assert not ran.exists()


def test_a_changed_torch_is_not_installed(tmp_path: Path, offline: dict[str, str]) -> None:
    with zipfile.ZipFile(tmp_path / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch-2.13.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr("torch-2.13.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-2.13.0.dist-info/RECORD", "")
    # the lines of set-up that fetch and check it, with pip's installing switched off
    lines = (CI / "setup.sh").read_text().partition("    fetched=")[2].partition("\nfi\n")[0]
    assert lines.count("pip install") == 1 and lines.index(".ci/torch.txt") < lines.index("pip install")
    script = f"""set -euo pipefail
die() {{ echo "$*" >&2; exit 1; }}
pip() {{ if [ "$1" = install ]; then touch {tmp_path}/installed; else {sys.executable} -m pip "$@"; fi; }}
fetched={lines}
"""

    def set_up(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", script]
        return subprocess.run(command, env=environment, cwd=CI.parent, capture_output=True, text=True, timeout=600)

    done = set_up(offline)
    assert done.returncode == 1 and "not listed in .ci/torch.txt" in done.stderr, done.stderr
    assert not (tmp_path / "installed").exists()
    digest = re.search(r"TORCH_HASH=(sha256:[0-9a-f]{64})", done.stderr)
    assert digest is not None and set_up(offline | {"TORCH_HASH": digest[1]}).returncode == 0
    assert (tmp_path / "installed").exists()


@pytest.mark.parametrize(("minor", "taken"), [(10, False), (11, True), (12, True), (13, True), (14, False)])
def test_set_up_takes_the_pythons_that_the_package_allows(tmp_path: Path, minor: int, taken: bool) -> None:
    python = tmp_path / "python"
    version = f"import sys; sys.version_info = (3, {minor}, 0)"
    python.write_text(f"""#!/bin/sh
case "$1" in
    --version) echo "Python 3.{minor}.0";;
    *) exec {sys.executable} -c "{version}; $2";;
esac
""")
    python.chmod(0o755)
    lines = (CI / "setup.sh").read_text().partition("\njava_major()")[0].replace('cd "$(dirname "$0")/.."', "")
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(
        ["bash", "-c", lines], env=environment, cwd=CI.parent, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode == 0) == taken, done.stderr
    assert taken or f"Python 3.{minor}.0 cannot be used: sparkring needs Python 3.11 to 3.13" in done.stderr
