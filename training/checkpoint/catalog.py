"""Which checkpoints are committed, which are damaged, and what killed saves have left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sparkring.conf.digest import digest
from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError, parse
from sparkring.training.checkpoint.format import encode_value, to_json
from sparkring.training.checkpoint.layout import FORMAT_VERSION, MARKER, STEP, Marker, step_folder


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint. `skipped`: why better ones were passed over, as `step-30: ...`."""

    step: int
    uri: str
    generation: str
    world: int
    metric: float | None
    files: dict[str, dict[str, Any]]  # path below the step's folder -> {"bytes", "sha256"}
    skipped: tuple[str, ...] = ()
    needs: dict[str, dict[str, Any]] = field(default_factory=dict)  # likewise, of files below earlier steps' folders

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())


def encode_marker(
    step: int,
    generation: str,
    world: int,
    metric: float | None,
    files: dict[str, dict[str, Any]],
    needs: dict[str, dict[str, Any]] | None = None,
) -> bytes:
    """Return the content of COMMIT.json.

    Args:
        step: the training step.
        generation: name of the folder, below the step's, that holds the files.
        world: number of ranks that wrote it.
        metric: what checkpoints are compared by, if any.
        files: path below the step's folder -> {"bytes", "sha256"}.
        needs: the same of files of earlier steps, by path below the folder of all steps.
    """
    marker = {
        "format": FORMAT_VERSION if needs else 1,
        "step": step,
        "generation": generation,
        "world": world,
        "metric": encode_value(metric, "metric"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": files,
    } | ({"needs": needs} if needs else {})
    return to_json(marker | {"digest": digest(marker)})


def parse_marker(data: bytes, uri: str) -> CheckpointInfo:
    """Read COMMIT.json. StoredError for one that is cut, changed, of a newer format, or lacks a file."""
    marker, content = parse(Marker, data, f"{uri}/{MARKER}"), json.loads(data)
    expected = content.pop("digest")
    if digest(content) != expected:
        raise StoredError(f"{uri}/{MARKER}: its digest does not match its content")
    files, needs = ({path: file.model_dump() for path, file in part.items()} for part in (marker.files, marker.needs))
    return CheckpointInfo(marker.step, uri, marker.generation, marker.world, marker.metric, files, needs=needs)


def committed(storage: Storage) -> tuple[list[CheckpointInfo], dict[int, str]]:
    """List checkpoints with a good marker, in order of step, and for other marked steps what is wrong."""
    good, bad = [], {}
    for path in storage.list_files():
        folder, _, name = path.partition("/")
        if name != MARKER or not (named := STEP.fullmatch(folder)):
            continue
        try:
            info = parse_marker(storage.read_bytes(path), storage.at(folder).uri)
            if folder != step_folder(info.step):
                raise StoredError(f"{info.uri}/{MARKER}: is of step {info.step}")
            good.append(info)
        except ValueError as error:
            bad[int(named[1])] = str(error)
    return sorted(good, key=lambda info: info.step), bad


def damage(
    folder: Storage, path: str, want: dict[str, Any], on_progress: Callable[[], None] = lambda: None
) -> str | None:
    """Describe what is wrong with one file; None if nothing is. Reads all of it; `on_progress` as in Storage.sha256."""
    size = folder.size_bytes(path)
    if size != want["bytes"]:
        return f"{path} has {'no' if size is None else size} bytes, not {want['bytes']}"
    if folder.sha256(path, on_progress) != want["sha256"]:
        return f"{path} has another sha256 than its marker says"
    return None


def leftovers(paths: list[str], kept: dict[str, str], needed: Collection[str] = ()) -> list[str]:
    """Pick the files and folders that killed saves, and deleted steps, left among `paths`.

    A folder whose marker cannot be read is left alone: a newer sparkring may have written it.

    Args:
        paths: paths of all files.
        kept: step folder -> its generation.
        needed: files that checkpoints of other steps need.
    """
    folders = {"/".join(path.split("/")[:depth]) for path in needed for depth in (1, 2)}
    marked = {path.split("/")[0] for path in paths if path.endswith(f"/{MARKER}")}
    gone = set()
    for path in paths:
        parts = path.split("/")
        if not STEP.fullmatch(parts[0]) or len(parts) == 1 or path in needed:
            continue
        if parts[0] in kept and parts[1] not in (MARKER, kept[parts[0]]):
            old = "/".join(parts[:2])
        elif parts[0] not in marked:
            old = parts[0]
        else:
            continue
        gone.add(path if old in folders else old)
    return sorted(gone)
