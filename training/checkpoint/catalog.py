"""The stored files of checkpoints: the marker and what it lists, which steps are committed, what is damaged."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sparkring.conf.digest import digest
from sparkring.conf.storage import Storage
from sparkring.conf.stored import Count, FolderName, RelativePath, Sha256, Stored, StoredError, parse, up_to
from sparkring.training.checkpoint.format import decode_value, encode_value, to_json
from sparkring.training.checkpoint.rng import checked_rng

MARKER = "COMMIT.json"
FORMAT_VERSION = 2  # of a checkpoint that needs files of earlier steps; 1: of one that stands alone
SHARED = ("index.json", "trainer.json")


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


class WrittenFile(Stored):
    bytes: Count
    sha256: Sha256


class Marker(Stored):
    """COMMIT.json: every file of a checkpoint. `digest` is of all the rest, so that no part of it can be changed."""

    format: Annotated[int, up_to(FORMAT_VERSION)]
    step: Count
    generation: FolderName
    world: Annotated[int, Field(ge=1)]
    metric: Annotated[float | None, BeforeValidator(decode_value)]
    time: str
    files: dict[RelativePath, WrittenFile]
    needs: dict[RelativePath, WrittenFile] = {}
    digest: Sha256

    @model_validator(mode="after")
    def _lists_every_file(self) -> Self:
        ranks = range(min(self.world, len(self.files)))  # the world may be any number
        wanted = [*SHARED, *(f"rank-{rank:05d}.json" for rank in ranks)]
        if missing := [name for name in wanted if f"{self.generation}/{name}" not in self.files]:
            raise ValueError(f"files of {self.world} ranks are not all listed, such as {missing[0]}")
        return self


class TrainerFile(Stored):
    """trainer.json: the plain values of the training loop."""

    trainer: Annotated[dict[str, Any], AfterValidator(decode_value)]
    versions: dict[str, str]


class RankFile(Stored):
    """rank-00000.json: the random state and the plain values of one rank."""

    rng: Annotated[Any, AfterValidator(decode_value), AfterValidator(checked_rng)]
    state: Annotated[dict[str, Any] | None, AfterValidator(decode_value)]


def encode_marker(
    step: int,
    generation: str,
    world: int,
    metric: float | None,
    files: dict[str, dict[str, Any]],
    needs: dict[str, dict[str, Any]] | None = None,
) -> bytes:
    """Content of COMMIT.json.

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
        if not re.fullmatch(rf"step-\d+/{MARKER}", path):
            continue
        folder = path.split("/")[0]
        try:
            info = parse_marker(storage.read_bytes(path), storage.at(folder).uri)
            if folder != f"step-{info.step}":
                raise StoredError(f"{info.uri}/{MARKER}: is of step {info.step}")
            good.append(info)
        except ValueError as error:
            bad[int(folder.removeprefix("step-"))] = str(error)
    return sorted(good, key=lambda info: info.step), bad


def damage(
    folder: Storage, path: str, want: dict[str, Any], on_progress: Callable[[], None] = lambda: None
) -> str | None:
    """Say what is wrong with one file, or None. Reads all of it; `on_progress` as in Storage.sha256."""
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
        paths: of all files.
        kept: step folder -> its generation.
        needed: files that checkpoints of other steps need.
    """
    folders = {"/".join(path.split("/")[:depth]) for path in needed for depth in (1, 2)}
    marked = {path.split("/")[0] for path in paths if path.endswith(f"/{MARKER}")}
    gone = set()
    for path in paths:
        parts = path.split("/")
        if not re.fullmatch(r"step-\d+", parts[0]) or len(parts) == 1 or path in needed:
            continue
        if parts[0] in kept and parts[1] not in (MARKER, kept[parts[0]]):
            old = "/".join(parts[:2])
        elif parts[0] not in marked:
            old = parts[0]
        else:
            continue
        gone.add(path if old in folders else old)
    return sorted(gone)
