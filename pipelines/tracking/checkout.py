"""The git checkout that our code runs in."""

from __future__ import annotations

import getpass
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparkring.conf.secrets import redact
from sparkring.pipelines.tracking.client import without_password

CHANGED = "+changes"
# A checkout may be another's: its configuration names programs that git starts.
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C")


def git_commit(folder: Path) -> str | None:
    """Return the commit around `folder`, with CHANGED if some changes are uncommitted; None outside git."""
    try:
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + (CHANGED if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def source_tags(command: Sequence[str], commit: str) -> dict[str, str]:
    """Return MLflow's own tags of who ran what: its columns User, Source and Version.

    Args:
        command: words of the command line.
        commit: result of `git_commit`; empty if unknown.
    """
    tags = {"mlflow.source.name": source_name(command), "mlflow.source.type": "LOCAL"}
    try:
        tags["mlflow.user"] = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = "unknown"
    if commit:
        changed = commit.endswith(CHANGED)
        tags |= {
            "mlflow.source.git.commit": commit.removesuffix(CHANGED),
            "mlflow.source.git.dirty": str(changed).lower(),
        }
    return tags


def shown_command(command: Sequence[str]) -> str:
    """Return the command as it may be repeated, the program without its folder."""
    return shlex.join([Path(command[0]).name, *command[1:]]) if command else ""


def source_name(command: Sequence[str]) -> str:
    """Return the command without folders and overrides: MLflow's list shows what follows the last slash."""
    return " ".join(Path(word).name for word in command if "=" not in word)[:250]


def git_remote(folder: Path) -> str | None:
    """Return the remote of the checkout around `folder`, its path without one; None outside a checkout."""
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return redact(without_password(_git(folder, "config", "--get", "remote.origin.url")))
    except (OSError, subprocess.SubprocessError):
        return Path(top).as_uri()


def _git(folder: Path, *words: str) -> str:
    command = [*GIT, str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
