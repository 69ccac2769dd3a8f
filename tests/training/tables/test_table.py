import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparkring.training.tables.hashing import BUCKETS, bucket_of, bucket_owners, initial_rows, table_key
from sparkring.training.tables.id_map import IdMap
from sparkring.training.tables.slab import Slab
from sparkring.training.tables.table import Table, TableSpec, summed
from sparkring.training.tables.update_rules import Kind, UpdateRule

ALL = np.arange(BUCKETS)
KINDS: tuple[Kind, ...] = ("sgd", "rowwise_adagrad", "adam")
EXTREME = np.array([0, -1, 1, 2**63 - 1, -(2**63)], np.int64)


def spec(kind: Kind = "rowwise_adagrad", **given: object) -> TableSpec:
    made = {"name": "users", "dim": 4, "scale": 0.5, "seed": 7, "rule": UpdateRule(kind), "dtype": "float64"} | given
    return TableSpec(**made)  # type: ignore[arg-type]


def random_ids(rng: np.random.Generator, count: int, space: int = 2**63) -> np.ndarray:
    return np.unique(rng.integers(-space, space, count, np.int64))


def test_a_map_finds_what_a_dict_finds_through_inserts_and_removals() -> None:
    rng, ours, oracle = np.random.default_rng(0), IdMap(4), dict[int, int]()
    free = itertools.count()
    for _ in range(60):
        new = np.setdiff1d(random_ids(rng, 90, 4000), np.array([*oracle], np.int64))
        slots = np.array([next(free) for _ in new], np.int32)
        ours.insert(new, slots)
        oracle |= dict(zip(new.tolist(), slots.tolist(), strict=True))
        gone = np.array(list(itertools.islice(oracle, 40)), np.int64)
        ours.remove(gone)
        for each in gone.tolist():
            del oracle[each]
        asked = np.concatenate([rng.integers(-4000, 4000, 200), EXTREME])
        assert ours.find(asked).tolist() == [oracle.get(each, -1) for each in asked.tolist()]
        assert ours.live == len(oracle)
    ids, slots = ours.items()
    assert dict(zip(ids.tolist(), slots.tolist(), strict=True)) == oracle


def test_a_map_takes_any_id_and_keeps_free_places() -> None:
    ours = IdMap()
    ours.insert(EXTREME, np.arange(5, dtype=np.int32))
    assert ours.find(EXTREME).tolist() == [0, 1, 2, 3, 4] and ours.find(np.array([2, -2])).tolist() == [-1, -1]
    for start in range(0, 100_000, 1000):  # as many removed as inserted: the map does not grow
        ids = np.arange(start, start + 1000) + 10
        ours.insert(ids, np.arange(1000, dtype=np.int32) + 5)
        ours.remove(ids)
    assert ours.bytes <= 12 * 8192


def test_a_slab_reads_what_was_written_across_its_chunks() -> None:
    rng, slab, oracle = np.random.default_rng(1), Slab(3, np.float32, chunk_bytes=100), np.zeros((70, 3), np.float32)
    slab.reserve(70)
    slab.scatter(np.arange(70), oracle)
    for _ in range(20):
        slots = rng.permutation(70)[:30]
        oracle[slots] = rng.random((30, 3))
        slab.scatter(slots, oracle[slots])
        asked = rng.integers(0, 70, 50)
        assert (slab.gather(asked) == oracle[asked]).all()


def test_an_initial_row_is_a_function_of_seed_table_and_id() -> None:
    ids = random_ids(np.random.default_rng(2), 20_000)
    scale = np.array([0.5, 0.0, 2.0])
    rows = initial_rows(table_key(7, "users"), ids, scale)
    assert (initial_rows(table_key(7, "users"), ids[::-1], scale) == rows[::-1]).all()
    assert (np.abs(rows) <= scale).all() and (rows[:, 1] == 0).all()
    assert abs(rows[:, 0].mean()) < 0.01 and abs(rows[:, 0].std() - 0.5 / 3**0.5) < 0.01
    assert abs(np.corrcoef(rows[:, 0], rows[:, 2])[0, 1]) < 0.03
    others = [initial_rows(table_key(*other), ids, scale) for other in ((8, "users"), (7, "items"))]
    assert all((other[:, 0] != rows[:, 0]).all() for other in others)


def naive(
    kind: Kind,
    rows: dict[int, torch.nn.Parameter],
    states: dict[int, object],
    pushed: tuple[np.ndarray, np.ndarray],
    lr: float,
) -> None:
    """One torch optimizer for each row."""
    for each, grad in zip(pushed[0].tolist(), pushed[1], strict=True):
        row = rows[each]
        if kind == "rowwise_adagrad":
            states[each] = states.get(each, 0.0) + float((grad**2).mean())  # type: ignore[operator]
            row.data -= lr * torch.from_numpy(grad) / (states[each] ** 0.5 + 1e-8)  # type: ignore[operator]
            continue
        makes = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
        optimizer: torch.optim.Optimizer = states.setdefault(each, makes([row], lr=lr))  # type: ignore[assignment]
        optimizer.param_groups[0]["lr"] = lr
        row.grad = torch.from_numpy(grad)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_trains_as_one_optimizer_for_each_row(kind: Kind) -> None:
    rng, table = np.random.default_rng(3), Table(spec(kind))
    rows: dict[int, torch.nn.Parameter] = {}
    states: dict[int, object] = {}
    for step in range(30):
        ids, grads = summed(rng.integers(0, 60, 40), rng.standard_normal((40, 4)))
        start = initial_rows(table_key(7, "users"), ids, table.scale)
        for each, row in zip(ids.tolist(), start, strict=True):
            rows.setdefault(each, torch.nn.Parameter(torch.from_numpy(row.copy())))
        table.push(ids, grads, 0.1 / (step + 1))
        naive(kind, rows, states, (ids, grads), 0.1 / (step + 1))
    known = np.array([*rows], np.int64)
    want = np.stack([row.detach().numpy() for row in rows.values()])
    assert np.abs(table.pull(known) - want).max() < 1e-12 and len(table) == len(rows)


def test_the_first_steps_of_adam_in_float32_are_those_in_float64() -> None:
    rows: dict[str, np.ndarray] = {}
    for dtype in ("float32", "float64"):
        table = Table(spec("adam", dtype=dtype, scale=0.0, rule=UpdateRule("adam", betas=(0.9, 0.9999))))
        table.push(np.array([1]), np.full((1, 4), 0.3, dtype), 1.0)
        rows[dtype] = table.pull(np.array([1]))
    assert np.abs(rows["float32"] / rows["float64"] - 1).max() < 3e-7


def test_sums_add_the_gradients_of_an_id() -> None:
    ids, sums = summed(np.array([5, -1, 5, 5]), np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert ids.tolist() == [-1, 5] and sums.tolist() == [[3, 4], [13, 16]]


def test_looking_up_stores_nothing() -> None:
    table = Table(spec())
    ids = np.array([3, 3, -9])
    first = table.pull(ids)
    assert len(table) == 0 and (first[0] == first[1]).all() and (first[0] != first[2]).all()
    table.push(ids[1:], np.zeros((2, 4)), 0.1)
    assert len(table) == 2 and (table.pull(ids) == first).all()


def test_an_id_is_stored_by_the_push_that_admits_it() -> None:
    table, grads = Table(spec("sgd", admit_after=3)), np.ones((1, 4))
    ids = np.array([42])
    start = table.pull(ids)
    for pushes in range(1, 5):
        table.push(ids, grads, 0.5)
        assert len(table) == (pushes >= 3)
        assert np.allclose(table.pull(ids), start - 0.5 * max(0, pushes - 2))
    assert table.counts.sum(axis=0).tolist() == [1, 0]


def test_a_table_never_has_more_rows_than_it_may_and_forgets_what_it_evicts() -> None:
    rng, table = np.random.default_rng(4), Table(spec("adam", max_rows=4 * BUCKETS))
    pushed = dict[int, tuple[int, int]]()
    for step in range(1, 40):
        ids, grads = summed(rng.integers(0, 20_000, 700), rng.standard_normal((700, 4)))
        table.push(ids, grads, 0.1)
        assert len(table) <= 4 * BUCKETS
        pushed |= {each: (step, pushed.get(each, (0, 0))[1] + 1) for each in ids.tolist()}
        assert np.bincount(bucket_of(table.dump(ALL).ids), minlength=BUCKETS).max() <= 4
    admitted, evicted = table.counts.sum(axis=0)
    assert evicted > 0 and admitted - evicted == len(table)
    kept = set(table.dump(ALL).ids.tolist())
    gone = np.array([each for each in pushed if each not in kept], np.int64)
    assert (table.pull(gone) == initial_rows(table_key(7, "users"), gone, table.scale)).all()
    table.push(gone[:1], np.ones((1, 4)), 0.1)  # its averages begin anew
    fresh = Table(spec("adam"))
    fresh.push(gone[:1], np.ones((1, 4)), 0.1)
    assert (table.pull(gone[:1]) == fresh.pull(gone[:1])).all()


def test_what_was_touched_longest_ago_is_evicted() -> None:
    ids = np.arange(200_000)
    inside = ids[bucket_of(ids) == 5][:6]
    table = Table(spec("sgd", max_rows=5 * BUCKETS))
    for each in [0, 1, 2, 3, 4, 0, 5]:
        table.push(inside[each : each + 1], np.ones((1, 4)), 0.1)
    assert sorted(table.dump(ALL).ids.tolist()) == sorted(inside[[0, 3, 4, 5]].tolist())


@pytest.mark.parametrize("given", [{}, {"max_rows": 2 * BUCKETS}, {"admit_after": 2}])
def test_a_table_goes_on_from_the_dumps_of_any_cut_into_buckets(given: dict[str, int]) -> None:
    table = Table(spec("adam", **given))

    def push(into: Table, seed: int) -> None:
        rng = np.random.default_rng(seed)
        into.push(*summed(rng.integers(0, 9_000, 800), rng.standard_normal((800, 4))), 0.1)

    for seed in range(6):
        push(table, seed)
    owners = bucket_owners(3)
    other = Table(spec("adam", **given))
    for owner in range(3):
        other.load(table.dump(np.flatnonzero(owners == owner)))
    for seed in range(6, 12):
        push(table, seed)
        push(other, seed)
    for name, value in vars(table.dump(ALL)).items():
        assert np.array_equal(value, getattr(other.dump(ALL), name)), name


def test_a_dump_of_other_rows_is_refused() -> None:
    table = Table(spec("adam"))
    table.push(np.array([1]), np.ones((1, 4)), 0.1)
    with pytest.raises(ValueError, match=r"stored rows have 13 values, a row has 4: .* another tables\.optimizer"):
        Table(spec("sgd")).load(table.dump(ALL))


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"max_rows": 1023}, "max_rows = 1023: must be at least 1024"),
        ({"scale": [0.1, 0.2]}, "scale has 2 values, a row has 4"),
        ({"dim": 0}, "dim = 0"),
    ],
)
def test_a_table_that_cannot_be_is_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        spec(**given)  # type: ignore[arg-type]


def test_rows_of_a_push_are_not_evicted_by_it_and_no_world_changes_which_are() -> None:
    """Also where a bucket is given more ids than it may hold: it keeps those it has, then the first by hash."""
    given = spec("adam", max_rows=2 * BUCKETS, admit_after=1)
    table, owners = Table(given), bucket_owners(3)
    ranks = [Table(given) for _ in range(3)]
    overfull = 0
    for step in range(12):
        rng = np.random.default_rng(step)
        ids, grads = summed(rng.integers(0, 5_000, 2_500), rng.standard_normal((2_500, 4)))
        before = set(table.dump(ALL).ids.tolist())
        table.push(ids, grads, 0.1)
        stored = set(table.dump(ALL).ids.tolist())
        assert len(stored) <= 2 * BUCKETS and {each for each in ids.tolist() if each in before} <= stored
        in_push = np.bincount(bucket_of(ids), minlength=BUCKETS)
        has_room = in_push[bucket_of(ids)] <= 2
        assert set(ids[has_room].tolist()) <= stored
        overfull += int((in_push > 2).sum())
        for rank, part in enumerate(ranks):
            own = owners[bucket_of(ids)] == rank
            part.push(ids[own], grads[own], 0.1)
    assert overfull > 1000
    whole = Table(given)
    for rank, part in enumerate(ranks):
        whole.load(part.dump(np.flatnonzero(owners == rank)))
    for name, value in vars(table.dump(ALL)).items():
        assert np.array_equal(value, getattr(whole.dump(ALL), name)), name


def test_an_eviction_looks_at_the_full_buckets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(spec("sgd", max_rows=20 * BUCKETS))
    ids = np.arange(60_000)
    order = np.argsort(bucket_of(ids), kind="stable")
    bucket = bucket_of(ids)[order]
    place = np.arange(len(ids)) - np.searchsorted(bucket, bucket)
    table.push(ids[order][place < 20], np.ones((20 * BUCKETS, 4)), 0.1)
    looked_at, gather = list[int](), Slab.gather
    monkeypatch.setattr(Slab, "gather", lambda self, slots: (looked_at.append(len(slots)), gather(self, slots))[1])
    monkeypatch.setattr(IdMap, "items", None)
    table.push(ids[order][place == 20][:3], np.ones((3, 4)), 0.1)
    assert len(table) == 20 * BUCKETS - 3 * 2 and sum(looked_at) <= 3 * 20 + 20


def test_ids_that_wait_to_be_admitted_are_bounded_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.training.tables.table.WAITING", 4)
    table, last = Table(spec("sgd", admit_after=2)), np.zeros(0, np.int64)
    for step in range(8):
        last = np.arange(1500) + 1500 * step
        table.push(last, np.ones((1500, 4)), 0.1)
        assert np.bincount(bucket_of(table.dump(ALL).seen[:, 0].copy()), minlength=BUCKETS).max() <= 4
    assert len(table) == 0
    known = last[np.isin(last, table.dump(ALL).seen[:, 0])]
    assert len(known) > 1400
    table.push(np.concatenate([known, np.arange(100)]), np.ones((len(known) + 100, 4)), 0.1)
    assert table.dump(ALL).ids.size == len(known), "the first 100 had been forgotten"


def test_a_checkpoint_of_before_waiting_ids_had_a_last_push_is_read() -> None:
    table, old = Table(spec("sgd", admit_after=2)), Table(spec("sgd", admit_after=2))
    table.push(np.array([1, 2]), np.ones((2, 4)), 0.1)
    dump = table.dump(ALL)
    old.load(replace(dump, seen=dump.seen[:, :2]))
    old.push(np.array([1]), np.ones((1, 4)), 0.1)
    assert old.dump(ALL).ids.tolist() == [1] and old.dump(ALL).seen.tolist() == [[2, 1, 0]]


def test_a_table_that_may_have_fewer_rows_than_were_stored_keeps_the_newest() -> None:
    table, fewer = Table(spec("sgd", max_rows=5 * BUCKETS)), Table(spec("sgd", max_rows=2 * BUCKETS))
    ids = np.arange(200_000)
    inside = ids[bucket_of(ids) == 5][:4]
    for each in (0, 1, 2, 3, 1):
        table.push(inside[each : each + 1], np.ones((1, 4)), 0.1)
    fewer.load(table.dump(ALL))
    assert sorted(fewer.dump(ALL).ids.tolist()) == sorted(inside[[1, 3]].tolist())
    assert fewer.counts.sum(axis=0).tolist() == [4, 2]


def test_buckets_move_to_a_new_rank_only() -> None:
    for world in range(1, 9):
        now, then = bucket_owners(world), bucket_owners(world + 1)
        moved = now != then
        assert (then[moved] == world).all()
        assert moved.mean() == pytest.approx(1 / (world + 1), rel=0.25)
        assert np.bincount(now, minlength=world).max() <= 1.25 * BUCKETS / world
