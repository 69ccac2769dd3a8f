"""What a rank writes of a snapshot, in which order it appears, and what a failure leaves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.catalog import CheckpointInfo, committed
from sparkring.training.checkpoint.format import CheckpointError, Chunk
from sparkring.training.checkpoint.peers import solo
from sparkring.training.checkpoint.policy import Retention
from sparkring.training.checkpoint.snapshot import Snapshot
from sparkring.training.checkpoint.writer import CheckpointWriter, write_file


def snapshot(step: int) -> Snapshot:
    chunk = Chunk("w", torch.float32, (2,), (0,), (2,))
    paths: dict[str, tuple[Any, ...]] = {"w": ("w",)}
    return Snapshot(step, "g", None, [(chunk, torch.ones(2))], {}, paths, {"trainer": {}, "versions": {}}, {})


def test_a_file_is_written_with_its_hash_and_progress_is_called_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkring.conf.storage.CHUNK_BYTES", 4)
    calls: list[int] = []
    entry = write_file(open_storage(str(tmp_path)), "a/f", [b"123456", memoryview(b"78")], lambda: calls.append(1))
    assert entry == {"bytes": 8, "sha256": hashlib.sha256(b"12345678").hexdigest()}
    assert (tmp_path / "a/f").read_bytes() == b"12345678" and len(calls) == 3


def test_the_marker_is_written_last_and_news_of_it_cannot_spoil_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(tmp_path))

    def announce(info: CheckpointInfo) -> None:
        assert [good.step for good in committed(storage)[0]] == [info.step]
        raise OSError("nobody is there")

    writer = CheckpointWriter(storage, solo(), Retention(last=1, best=0), announce)
    writer.write(1, snapshot(1))
    writer.write(2, snapshot(2))
    assert [info.step for info in committed(storage)[0]] == [2] and not (tmp_path / "step-1").exists()
    assert "could not be announced: nobody is there" in caplog.text and writer.progress > 0


def test_a_rank_that_could_not_copy_its_state_fails_the_save(tmp_path: Path) -> None:
    writer = CheckpointWriter(open_storage(str(tmp_path)), solo(), Retention(), lambda info: None)
    with pytest.raises(CheckpointError, match="step 3 failed on rank 0 of 1: ValueError: no memory"):
        writer.write(3, ValueError("no memory"))
    assert not list(tmp_path.iterdir())


def test_a_damaged_step_is_deleted_by_the_next_good_save(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    writer = CheckpointWriter(storage, solo(), Retention(last=5), lambda info: None)
    writer.write(1, snapshot(1))
    writer.damaged.add(1)
    writer.write(2, snapshot(2))
    assert [info.step for info in committed(storage)[0]] == [2]
