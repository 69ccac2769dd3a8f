"""Tables through files: by buckets into any world, and looked up in a finished model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.weights import FILE, open_weights, write_weights
from sparkring.training.model.folder import (
    TABLES,
    attach_tables,
    model_files,
    open_tables,
    part_file,
    weights_sha256,
    write_tables,
)
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.tables.exchange import Alone
from sparkring.training.tables.files import stored_dumps, to_tensors
from sparkring.training.tables.hashing import BUCKETS, bucket_of, bucket_owners
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import Table, TableSpec, summed
from sparkring.training.tables.update_rules import UpdateRule

SPEC = TableSpec("users", 3, [0.5, 0.5, 0.0], 7, UpdateRule("adam"), "float64", max_rows=4 * BUCKETS, admit_after=2)
ALL = np.arange(BUCKETS)


class RankOf(Alone):
    """One of several ranks, whose collectives nobody calls."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world  # type: ignore[misc]


@pytest.fixture(scope="module")
def table() -> Table:
    rng, made = np.random.default_rng(0), Table(SPEC)
    for _ in range(5):
        made.push(*summed(rng.integers(-900, 900, 700), rng.standard_normal((700, 3))), 0.1)
    assert len(made) > 800 and len(made.dump(ALL).seen) > 100
    return made


def saved_by(world: int, table: Table, folder: Storage, spoil: Callable[[dict[str, Any], int], None]) -> Any:
    """The files of a checkpoint that so many ranks wrote; `spoil` changes the tensors of a rank."""
    owners, parts = bucket_owners(world), []
    for rank in range(world):
        tensors = to_tensors(table.dump(np.flatnonzero(owners == rank)))
        spoil(tensors, rank)
        saver = Checkpointer(folder.at(f"of-rank-{rank}"), asynchronous=False)
        saver.save(3, {"step": 3}, {}, tables={"users.all": lambda most_bytes, own=tensors: own})
        info = saver.latest()
        assert info is not None
        (files,) = saver.tables(info)["users.all"]
        parts.append(files)
    return parts


def as_it_is(tensors: dict[str, Any], rank: int) -> None:
    return None


@pytest.mark.parametrize("written", [1, 3])
def test_any_world_loads_what_another_wrote(table: Table, written: int, tmp_path: Path) -> None:
    files = saved_by(written, table, open_storage(str(tmp_path)), as_it_is)
    again, owners = Table(SPEC), bucket_owners(2)
    for rank in range(2):
        buckets = np.flatnonzero(owners == rank)
        part = ShardedTable(SPEC, RankOf(rank, 2))
        part.load(stored_dumps("users", files, part.held_buckets))
        assert 0.3 * len(table) < len(part.table) < 0.7 * len(table)
        again.load(part.table.dump(buckets))
    for name, value in vars(table.dump(ALL)).items():
        assert np.array_equal(value, getattr(again.dump(ALL), name)), name


@pytest.mark.parametrize(("change", "how"), [(lambda b: b[b != 5], "missing"), (lambda b: b, "stored twice")])
def test_buckets_that_are_missing_or_there_twice_are_refused(
    table: Table, change: Callable[[Any], Any], how: str, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, Any], rank: int) -> None:
        if how == "missing":
            tensors["buckets"] = change(tensors["buckets"])

    files = saved_by(1, table, open_storage(str(tmp_path)), spoil)
    files = files * 2 if how == "stored twice" else files
    with pytest.raises(
        ValueError, match=f"table 'users': .* the first is bucket [05], {how}; the checkpoint is damaged"
    ):
        list(stored_dumps("users", files, ALL))


def test_a_model_folder_gives_the_rows_of_the_table_and_never_more(table: Table, tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for rank in (1, 0):
        part = ShardedTable(SPEC, RankOf(rank, 2))
        part.load([table.dump(part.own_buckets)])
        write_tables(folder, {"users": part}, lambda block: None)
    assert set(model_files(folder)) > {TABLES, part_file("users", 0), part_file("users", 1)}
    stored = [open_weights(folder, part_file("users", rank)) for rank in range(2)]
    assert sum(each["rows"].shape[0] for each in stored) == len(table)
    assert isinstance(stored[0]["rows"].mapped(), np.memmap)
    model = nn.ModuleDict({"users": SparseEmbedding("user", 3)})
    attach_tables(model, folder)
    ids = torch.arange(-2000, 2000)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):  # ids that are not stored have their initial rows, and are as unknown as before
        assert (model["users"](ids).numpy() == table.pull(ids.numpy())).all()
    assert before == {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}


def test_another_run_begins_with_the_rows_of_a_model(table: Table, tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for rank in range(2):
        part = ShardedTable(SPEC, RankOf(rank, 2))
        part.load([table.dump(part.own_buckets)])
        write_tables(folder, {"users": part}, lambda block: None)
    found, ids = open_tables(folder, {"users": 3})["users"], table.dump(ALL).ids
    three = [ShardedTable(SPEC, RankOf(rank, 3)) for rank in range(3)]
    for part in three:
        for some, rows in found.content(part.held_buckets, at_once=100):
            part.table.begin_with(some, rows)
    dumps = [part.table.dump(part.own_buckets) for part in three]
    assert sum(len(dump.ids) for dump in dumps) == len(table) == sum(int(dump.counts.sum()) for dump in dumps)
    for dump in dumps:
        assert (dump.rows[:, :3] == table.pull(dump.ids)).all() and (dump.rows[:, 3:] == 0).all()
    full = Table(replace(SPEC, max_rows=BUCKETS))
    full.begin_with(ids, table.pull(ids))
    in_pieces = Table(replace(SPEC, max_rows=BUCKETS))
    for start in range(0, len(ids), 70):
        in_pieces.begin_with(ids[start : start + 70], table.pull(ids[start : start + 70]))
    for name, value in vars(full.dump(ALL)).items():
        assert np.array_equal(value, getattr(in_pieces.dump(ALL), name)), name
    filled = len(np.unique(bucket_of(ids)))
    assert len(full) == filled == int(full.counts.sum())


def test_the_hash_of_a_model_tells_its_tables_too(table: Table, tmp_path: Path) -> None:
    folder, part = open_storage(str(tmp_path)), ShardedTable(SPEC, Alone())
    write_weights(folder, [], [], {})
    dense = folder.sha256(FILE)
    assert weights_sha256(folder) == dense
    write_tables(folder, {"users": part}, lambda block: None)
    empty = weights_sha256(folder)
    part.load([table.dump(ALL)])
    write_tables(folder, {"users": part}, lambda block: None)
    assert len({dense, empty, weights_sha256(folder)}) == 3 and folder.sha256(FILE) == dense


def test_an_empty_table_is_a_table(tmp_path: Path) -> None:
    folder, empty = open_storage(str(tmp_path)), ShardedTable(SPEC, Alone())
    write_tables(folder, {"users": empty}, lambda block: None)
    model = nn.ModuleDict({"users": SparseEmbedding("user", 3)})
    attach_tables(model, folder)
    assert (model["users"](torch.tensor([1])).numpy() == empty.table.pull(np.array([1]))).all()


def test_a_folder_whose_tables_do_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    write_tables(folder, {"users": ShardedTable(SPEC, Alone())}, lambda block: None)
    for name, dim in (("users", 4), ("goods", 3)):
        with pytest.raises(StoredError, match=rf"no table '{name}' with rows of {dim} values.*'users': 3"):
            attach_tables(nn.ModuleDict({name: SparseEmbedding("user", dim)}), folder)
    folder.delete(part_file("users", 0))
    with pytest.raises(StoredError, match=r"part-00000\.safetensors: no part of a table"):
        attach_tables(nn.ModuleDict({"users": SparseEmbedding("user", 3)}), folder)
