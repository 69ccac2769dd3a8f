"""Write a snapshot: every rank's shard, then the marker by rank 0, then delete what is no longer kept.

This runs behind training, in a thread of its own. Ranks agree after each phase, so all of them succeed or all fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from sparkring.conf.storage import Storage
from sparkring.training.checkpoint.catalog import (
    CheckpointInfo,
    committed,
    encode_marker,
    leftovers,
    parse_marker,
)
from sparkring.training.checkpoint.dcp import build_index
from sparkring.training.checkpoint.format import DTYPE_NAMES, CheckpointError, place_chunks, raw_bytes, to_json
from sparkring.training.checkpoint.layout import (
    MARKER,
    index_file,
    rank_file,
    step_folder,
    table_file,
    tensors_file,
    trainer_file,
)
from sparkring.training.checkpoint.peers import Peers
from sparkring.training.checkpoint.policy import Retention, expendable, most_increment_bytes
from sparkring.training.checkpoint.snapshot import Snapshot
from sparkring.training.checkpoint.table_files import has_changes_only, whole_tensors

log = logging.getLogger(__name__)
Files = dict[str, dict[str, Any]]  # path -> {"bytes", "sha256"}, in the order written


class CheckpointWriter:
    """Writes checkpoints below one folder, one at a time.

    `progress` counts pieces written, files seen and folders deleted; it only grows. `damaged` holds steps whose files
    failed their hashes: the next good save deletes them. `held` is a step that retention does not delete.
    """

    def __init__(
        self, storage: Storage, peers: Peers, keep: Retention, on_commit: Callable[[CheckpointInfo], None]
    ) -> None:
        self._storage, self._peers, self._keep, self._on_commit = storage, peers, keep, on_commit
        self.progress = 0
        self.damaged: set[int] = set()
        self.held: int | None = None
        self._tables: dict[str, Files] = {}  # this rank's files of the last checkpoint: base, then increments

    def most_increment_bytes(self, table: str) -> int:
        """Return how many bytes of changes may follow this rank's files of a table; -1: write it whole."""
        return most_increment_bytes([file["bytes"] for file in self._tables.get(table, {}).values()])

    def write(self, step: int, snapshot: Snapshot | Exception) -> None:
        """Write and commit; `snapshot` is the error where this rank could not copy its state, which fails all ranks."""
        before, self._tables = self._tables, {}  # after a failure they are written whole

        def write_part() -> dict[str, Any]:
            if isinstance(snapshot, Exception):
                raise snapshot
            return self._write_part(snapshot, before)

        parts = self._peers.together(f"writing the checkpoint of step {step}", write_part)

        def commit() -> None:
            if self._peers.rank == 0:
                assert isinstance(snapshot, Snapshot)
                self._commit(snapshot, parts)

        self._peers.together(f"committing the checkpoint of step {step}", commit)
        self._tables = parts[self._peers.rank]["tables"]

    def _write_part(self, snapshot: Snapshot, before: dict[str, Files]) -> dict[str, Any]:
        folder, made, rank = self._folder(snapshot), snapshot.generation, self._peers.rank
        tensors_path, rank_path = tensors_file(made, rank), rank_file(made, rank)
        header, chunks = place_chunks([chunk for chunk, _ in snapshot.chunks], tensors_path)
        data: list[bytes | memoryview] = [header, *(raw_bytes(tensor) for _, tensor in snapshot.chunks)]
        files = {
            tensors_path: write_file(folder, tensors_path, data, self._count),
            rank_path: write_file(folder, rank_path, [to_json(snapshot.rank)], self._count),
        }
        tables: dict[str, Files] = {}
        for table, tensors in snapshot.tables.items():
            file = table_file(made, table, rank)
            placed, parts = whole_tensors(tensors, file)
            files[file] = write_file(folder, file, [placed, *parts], self._count)
            own = {f"{step_folder(snapshot.step)}/{file}": files[file]}
            tables[table] = before[table] | own if has_changes_only(tensors) else own
        rows = [vars(chunk) | {"dtype": DTYPE_NAMES[chunk.dtype], "name": chunk.name} for chunk in chunks]
        return {"files": files, "chunks": rows, "values": snapshot.values, "tables": tables}

    def _commit(self, snapshot: Snapshot, parts: list[dict[str, Any]]) -> None:
        folder = self._folder(snapshot)
        files = {path: info for part in parts for path, info in part["files"].items()}
        for path, info in files.items():
            if folder.size_bytes(path) != info["bytes"]:
                raise CheckpointError(
                    f"{folder.uri}/{path}: not seen by rank 0; checkpoints need a storage all hosts share"
                )
            self._count()
        made, step = snapshot.generation, step_folder(snapshot.step)
        shared = {index_file(made): build_index(parts, snapshot.paths), trainer_file(made): snapshot.trainer}
        for path, value in shared.items():
            files[path] = write_file(folder, path, [to_json(value)], self._count)
        every = {path: info for part in parts for table in part["tables"].values() for path, info in table.items()}
        needs = {path: info for path, info in every.items() if path.removeprefix(f"{step}/") not in files}
        marker = encode_marker(snapshot.step, snapshot.generation, self._peers.world, snapshot.metric, files, needs)
        folder.put_atomic(MARKER, marker)
        info = parse_marker(marker, folder.uri)
        log.info("checkpoint of step %d committed: %s, %d bytes", info.step, info.uri, info.bytes)
        self._clean(info.step)
        try:
            self._on_commit(info)
        except Exception as error:  # the checkpoint is good, even if the report of it fails
            log.warning("the checkpoint of step %d could not be announced: %s", info.step, error)

    def _clean(self, new: int) -> None:
        """Delete what retention does not keep and what killed saves left; a failure here does not fail the save."""
        try:
            good, _ = committed(self._storage)
            self.damaged.discard(new)
            whole = [(info.step, info.metric) for info in good if info.step not in self.damaged]
            stay = {new, self.held}
            gone = [step for step in expendable(whole, self._keep) if step not in stay] + sorted(self.damaged)
            kept = {step_folder(info.step): info.generation for info in good if info.step not in gone}
            needed = {path for info in good if info.step not in gone for path in info.needs}
            for folder in map(step_folder, gone):
                self._storage.delete(f"{folder}/{MARKER}")  # first, so that no reader finds half a checkpoint
                if not any(path.startswith(f"{folder}/") for path in needed):
                    self._storage.delete(folder)
                self._count()
            for path in leftovers(self._storage.list_files(), kept, needed):
                self._storage.delete(path)
        except Exception as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._storage.uri, error)

    def _folder(self, snapshot: Snapshot) -> Storage:
        return self._storage.at(step_folder(snapshot.step))

    def _count(self) -> None:
        self.progress += 1


def write_file(
    folder: Storage, path: str, parts: Iterable[bytes | memoryview], on_progress: Callable[[], None]
) -> dict[str, Any]:
    """Write a file of `parts`, flushed to the device; its marker entry `{"bytes": ..., "sha256": ...}`."""
    with folder.create(path, on_progress) as file:
        for part in parts:
            file.write(part)
    return {"bytes": file.bytes, "sha256": file.sha256}
