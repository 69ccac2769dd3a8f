"""Checkpoints of what changed: after any history they give the table that a whole copy gives, on any world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sparkring.conf.storage import Storage, open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.format import CheckpointError
from sparkring.training.checkpoint.layout import MARKER
from sparkring.training.checkpoint.policy import Retention
from sparkring.training.tables.files import newest, stored_dumps, to_tensors
from sparkring.training.tables.hashing import BUCKETS, bucket_of, bucket_owners
from sparkring.training.tables.table import Table, TableDump, TableSpec, summed
from sparkring.training.tables.update_rules import UpdateRule

ALL = np.arange(BUCKETS)
PLAIN = TableSpec("users", 3, 0.5, 7, UpdateRule("rowwise_adagrad"))
LIMITED = replace(PLAIN, max_rows=2 * BUCKETS)
WAITING = replace(PLAIN, rule=UpdateRule("adam"), max_rows=BUCKETS, admit_after=2)
ENOUGH = 1 << 40  # bytes


@dataclass(frozen=True)
class Rows:
    """A tensor of a file."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]


def as_file(dump: TableDump) -> Mapping[str, Rows]:
    return {name: Rows(tensor) for name, tensor in to_tensors(dump).items()}


def owned(rank: int, world: int) -> NDArray[np.int64]:
    return np.flatnonzero(bucket_owners(world) == rank)


def push(parts: list[Table], ids: NDArray[np.int64], grads: NDArray[Any]) -> None:
    """One step of a table that `parts` hold, each its rank's buckets."""
    owner = bucket_owners(len(parts))[bucket_of(ids)]
    for rank, part in enumerate(parts):
        part.push(*summed(ids[owner == rank], grads[owner == rank]), 0.1)


def assert_same(one: TableDump, other: TableDump) -> None:
    for name, value in vars(one).items():
        assert np.array_equal(value, getattr(other, name)), name


def loaded(spec: TableSpec, files: list[Mapping[str, Rows]], world: int) -> list[Table]:
    parts = [Table(spec) for _ in range(world)]
    for rank, part in enumerate(parts):
        for dump in stored_dumps("users", files, owned(rank, world)):
            part.load(dump)
    return parts


def whole(parts: list[Table]) -> TableDump:
    return newest(ALL, [part.dump(owned(rank, len(parts))) for rank, part in enumerate(parts)])


@pytest.mark.parametrize("spec", [PLAIN, LIMITED, WAITING], ids=["plain", "limited", "waiting"])
@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_pushes_evictions_saves_and_kills_gives_the_table_of_a_whole_copy(
    spec: TableSpec, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin is never saved; after a kill the ranks, as many as there are then, go on from the last save."""
    monkeypatch.setattr("sparkring.training.tables.table.WAITING", 3)  # so that ids that wait are evicted too
    rng = np.random.default_rng(seed)
    parts, twin, chain, kinds = [Table(spec), Table(spec)], Table(spec), list[list[Mapping[str, Rows]]](), set[bool]()
    for _ in range(12):
        for _ in range(int(rng.integers(0, 4))):
            ids = rng.zipf(1.2, 1800) % int(rng.choice([50, 5000])) - 40
            grads = rng.standard_normal((1800, 3)).astype(np.float32)
            push(parts, ids, grads)
            push([twin], ids, grads)
        dumps = [
            part.save(owned(rank, len(parts)), int(rng.choice([-1, ENOUGH, ENOUGH, 60_000])))
            for rank, part in enumerate(parts)
        ]
        kinds |= {len(dump.since) > 0 for dump in dumps}
        if not chain or len(chain) != len(parts):
            chain = [[] for _ in parts]
        for rank, dump in enumerate(dumps):
            chain[rank] = [*chain[rank], as_file(dump)] if len(dump.since) else [as_file(dump)]
        files = [file for rank in chain for file in rank]
        rng.shuffle(files)  # type: ignore[arg-type]
        again = loaded(spec, files, int(rng.integers(1, 4)))
        assert_same(whole(again), twin.dump(ALL))
        if rng.random() < 0.3:
            parts, chain = again, []
    assert kinds == {True, False} and len(twin) > 300
    if spec.max_rows is not None:
        assert twin.counts[:, 1].sum() > 100


@pytest.fixture
def table() -> Table:
    rng, made = np.random.default_rng(0), Table(PLAIN)
    push([made], np.arange(60_000), rng.standard_normal((60_000, 3)).astype(np.float32))
    return made


def test_five_percent_of_the_rows_take_at_most_a_fifth_more_than_their_bytes() -> None:
    table, rng = Table(replace(PLAIN, dim=16)), np.random.default_rng(0)
    push([table], np.arange(200_000), rng.standard_normal((200_000, 16)).astype(np.float32))
    everything = sum(part.nbytes for part in vars(table.save(ALL, -1)).values())
    push([table], np.arange(10_000), rng.standard_normal((10_000, 16)).astype(np.float32))
    changes = table.save(ALL, ENOUGH)
    assert set(changes.ids.tolist()) == set(range(10_000)) and changes.since == [1]
    row_bytes = 17 * 4
    assert sum(part.nbytes for part in vars(changes).values()) <= 1.2 * row_bytes * 10_000 < everything / 10


def test_changes_that_are_more_than_allowed_are_copied_whole(table: Table) -> None:
    table.save(ALL, ENOUGH)
    push([table], np.arange(100), np.ones((100, 3), np.float32))
    assert len(table.save(ALL, 100 * (8 + 16) - 1).ids) == 60_000
    push([table], np.arange(100), np.ones((100, 3), np.float32))
    assert len(table.save(ALL, 100 * (8 + 16)).ids) == 100
    assert len(table.save(ALL, 0).ids) == 0 and len(table.save(ALL, -1).ids) == 60_000


def spoiled(files: list[Mapping[str, Rows]], number: int, name: str, value: Any) -> list[Mapping[str, Rows]]:
    changed = {**files[number], name: Rows(torch.as_tensor(value))}
    return [*files[:number], changed, *files[number + 1 :]]


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda files: files[1:], "bucket 0, missing"),
        (lambda files: [*files, files[0]], "bucket 0, stored twice"),
        (lambda files: [files[0], files[2]], "bucket 0, without some of its changes"),
        (lambda files: spoiled(files, 1, "buckets", np.delete(ALL, 9)), "bucket 9, without some of its changes"),
        (lambda files: spoiled(files, 2, "buckets", np.delete(ALL, 9)), "bucket 9, without some of its changes"),
    ],
    ids=["no base", "two bases", "no second", "bucket of second", "bucket of last"],
)
def test_a_base_or_an_increment_that_is_missing_or_there_twice_is_one_clear_error(
    table: Table, change: Callable[[Any], Any], how: str
) -> None:
    files = []
    for _ in range(3):
        push([table], np.arange(100), np.ones((100, 3), np.float32))
        files.append(as_file(table.save(ALL, ENOUGH)))
    assert_same(newest(ALL, [*stored_dumps("users", files, ALL)]), table.dump(ALL))
    with pytest.raises(ValueError, match=rf"table 'users': .* the first is {how}; the checkpoint is damaged"):
        list(stored_dumps("users", change(files), ALL))


def saver(storage: Storage, **options: Any) -> Checkpointer:
    return Checkpointer(storage, keep=Retention(last=1, best=1), asynchronous=False, **options)


def save(checkpointer: Checkpointer, step: int, table: Table, metric: float | None = None) -> None:
    state = {"step": step}

    def copy(most_bytes: int) -> dict[str, torch.Tensor]:
        return to_tensors(table.save(ALL, most_bytes))

    checkpointer.save(step, state, {}, metric, tables={"users": copy})


def load(checkpointer: Checkpointer, table: Table) -> TableDump:
    info = checkpointer.latest()
    assert info is not None
    (again,) = loaded(table.spec, checkpointer.tables(info)["users"], 1)  # type: ignore[arg-type]
    return again.dump(ALL)


def table_files(folder: Path) -> dict[str, int]:
    """How many files of tables each step's folder has."""
    steps = [path.relative_to(folder).parts[0] for path in folder.glob("step-*/*/tables/users/*")]
    return {step: steps.count(step) for step in sorted(steps)}


def test_a_base_stays_while_a_checkpoint_needs_it_and_goes_after_the_next_base(table: Table, tmp_path: Path) -> None:
    checkpointer = saver(open_storage(str(tmp_path)))
    for step in range(1, 11):
        push([table], np.arange(step, step + 300), np.ones((300, 3), np.float32))
        save(checkpointer, step, table, metric=0.0 if step == 2 else 1.0)
        assert_same(load(checkpointer, table), table.dump(ALL))
        kept = {path.parent.name for path in tmp_path.glob(f"step-*/{MARKER}")}
        assert kept == {f"step-{step}", "step-2" if step > 1 else "step-1"}
        if step < 10:  # a base and at most eight increments
            assert table_files(tmp_path) == {f"step-{number}": 1 for number in range(1, step + 1)}
    assert table_files(tmp_path) == {"step-1": 1, "step-10": 1, "step-2": 1}  # the best one's, and the new base
    assert [path.name for path in (tmp_path / "step-1").rglob("*.*")] == ["rank-00000.safetensors"]
    save(checkpointer, 11, table, metric=-1.0)
    assert table_files(tmp_path) == {"step-10": 1, "step-11": 1} and not (tmp_path / "step-1").exists()


def test_increments_together_are_at_most_half_of_their_base(table: Table, tmp_path: Path) -> None:
    checkpointer = saver(open_storage(str(tmp_path)))
    steps = []
    for step in range(1, 7):
        push([table], np.arange(12_000), np.ones((12_000, 3), np.float32))  # a fifth of the rows
        save(checkpointer, step, table)
        steps.append(len(table_files(tmp_path)))
    assert steps == [1, 2, 3, 1, 2, 3]


def test_a_base_that_is_gone_damages_the_checkpoints_that_need_it(
    table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = saver(open_storage(str(tmp_path)))
    for step in (1, 2):
        push([table], np.arange(9), np.ones((9, 3), np.float32))
        save(checkpointer, step, table)
    info = checkpointer.latest()
    (base,) = tmp_path.glob("step-1/*/tables/users/*")
    base.unlink()
    assert info is not None and checkpointer.latest() is None
    assert "checkpoint skipped: step-2: step-1/" in caplog.text and "has no bytes" in caplog.text
    with pytest.raises(CheckpointError, match=r"step-1/.*is gone, and the tables of step 2 need it"):
        checkpointer.tables(info)


def test_after_a_save_that_failed_the_table_is_written_whole(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failed one had copied as saved is in no checkpoint."""
    checkpointer = saver(open_storage(str(tmp_path)))
    save(checkpointer, 1, table)
    push([table], np.arange(9), np.ones((9, 3), np.float32))
    with monkeypatch.context() as broken:
        broken.setattr("sparkring.training.checkpoint.writer.encode_marker", lambda *_: 1 / 0)
        with pytest.raises(CheckpointError, match="ZeroDivisionError"):
            save(checkpointer, 2, table)
    push([table], np.arange(20, 25), np.ones((5, 3), np.float32))
    save(checkpointer, 3, table)
    assert_same(load(checkpointer, table), table.dump(ALL))
    assert table_files(tmp_path) == {"step-3": 1}


def test_a_rank_that_holds_every_row_saves_the_changes_of_its_own_buckets() -> None:
    """As with `place: replicate`: changes elsewhere are in the files of others, and count for nothing here."""
    rng, ranks, files = np.random.default_rng(3), [Table(LIMITED), Table(LIMITED)], list[Mapping[str, Rows]]()
    for _ in range(3):
        ids, grads = rng.integers(0, 9000, 3000), rng.standard_normal((3000, 3)).astype(np.float32)
        for rank, table in enumerate(ranks):
            push([table], ids, grads)
            dump = table.save(owned(rank, 2), 90_000)  # half of the changes, and not all
            files.append(as_file(dump))
    assert [len(file["since"].tensor) for file in files] == [0, 0, 1, 1, 1, 1]
    assert_same(whole(loaded(LIMITED, files, 1)), ranks[0].dump(ALL))
