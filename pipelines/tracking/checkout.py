"""The git checkout that our code runs in."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sparkring.conf.secrets import redact
from sparkring.pipelines.tracking.rules import without_password


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout around `folder`, `+changes` if some are uncommitted; None outside a checkout."""
    try:
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def git_remote(folder: Path) -> str | None:
    """Where the checkout around `folder` comes from, its own path where it has no remote; None outside a checkout."""
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return redact(without_password(_git(folder, "config", "--get", "remote.origin.url")))
    except (OSError, subprocess.SubprocessError):
        return Path(top).as_uri()


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
