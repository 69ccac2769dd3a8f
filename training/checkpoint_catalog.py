"""What lies in a folder of checkpoints: which are committed, and whether their files are whole."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.manifest import digest
from conf.storage import Storage
from training.checkpoint_format import decode_value, encode_value, to_json

MARKER = "COMMIT.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint. `skipped`: why newer ones were passed over, as `step-30: ...`."""

    step: int
    uri: str
    generation: str
    world: int
    metric: float | None
    files: dict[str, dict[str, Any]]  # path below the step's folder -> {"bytes", "sha256"}
    skipped: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())


def encode_marker(
    step: int, generation: str, world: int, metric: float | None, files: dict[str, dict[str, Any]]
) -> bytes:
    marker = {
        "format": FORMAT_VERSION,
        "step": step,
        "generation": generation,
        "world": world,
        "metric": encode_value(metric, "metric"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": files,
    }
    return to_json(marker | {"digest": digest(marker)})


def parse_marker(data: bytes, uri: str) -> CheckpointInfo:
    """Raises ValueError for a marker that is cut, changed, or of a newer format."""
    try:
        marker = json.loads(data)
        expected = marker.pop("digest")
        if marker["format"] > FORMAT_VERSION:
            raise ValueError(f"format {marker['format']} is newer than this sparkring's {FORMAT_VERSION}: upgrade it")
        if digest(marker) != expected:
            raise ValueError("its digest does not match its content")
        metric = decode_value(marker["metric"])
        return CheckpointInfo(marker["step"], uri, marker["generation"], marker["world"], metric, marker["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {error} in it") from error


def committed(storage: Storage) -> tuple[list[CheckpointInfo], list[str]]:
    """Checkpoints below `storage` that have a good marker, by step, and why the others are not among them."""
    good, bad = [], []
    for path in storage.list_files():
        if not re.fullmatch(rf"step-\d+/{MARKER}", path):
            continue
        folder = path.split("/")[0]
        try:
            info = parse_marker(storage.read_bytes(path), storage.at(folder).uri)
            if folder != f"step-{info.step}":
                raise ValueError(f"it is of step {info.step}")
            good.append(info)
        except ValueError as error:
            bad.append(f"{path}: not a marker: {error}")
    return sorted(good, key=lambda info: info.step), bad


def damaged(folder: Storage, path: str, want: dict[str, Any], tick: Callable[[], None] = lambda: None) -> str | None:
    """What is wrong with one file, or None. Reads all of it; `tick` as in Storage.sha256."""
    size = folder.size_bytes(path)
    if size != want["bytes"]:
        return f"{path} has {'no' if size is None else size} bytes, not {want['bytes']}"
    if folder.sha256(path, tick) != want["sha256"]:
        return f"{path} has another sha256 than its marker says"
    return None


def leftovers(paths: list[str], kept: dict[str, str]) -> list[str]:
    """What killed saves left among `paths`, as files and folders to delete. `kept`: step folder -> its generation.

    A folder whose marker cannot be read is left alone: a newer sparkring may have written it.
    """
    marked = {path.split("/")[0] for path in paths if path.endswith(f"/{MARKER}")}
    gone = set()
    for path in paths:
        parts = path.split("/")
        if not re.fullmatch(r"step-\d+", parts[0]) or len(parts) == 1:
            continue
        if parts[0] in kept and parts[1] not in (MARKER, kept[parts[0]]):
            gone.add("/".join(parts[:2]))
        elif parts[0] not in marked:
            gone.add(parts[0])
    return sorted(gone)
