"""One server's part, one call at a time: once each, in which order, at which rate, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.conf.stored import StoredError
from sparkring.training.data.batch import BatchShare
from sparkring.training.servers.client import cut_gradient
from sparkring.training.servers.definition import Definition, decoded
from sparkring.training.servers.event_log import Kind
from sparkring.training.servers.messages import ShardStatus
from sparkring.training.servers.replay import pull_all
from sparkring.training.servers.shard import BrokenPromise, Push, ServerShard
from sparkring.training.tables.hashing import BUCKETS
from tests.training.servers.toy import definition, fresh_shards, gradient_of, ids_of, make_sgd


def pushed(shard: ServerShard, worker: int, clock: int, version: int | None = None, attempt: int = 0) -> Push:
    """A worker's push, as of one pull now, or said to be of another version."""
    gradient = gradient_of(worker, clock, pull_all([shard], ids_of(worker, clock)))
    at = shard.version if version is None else version
    (push,) = cut_gradient(gradient, shard.definition, worker, clock, attempt, [at])
    return push


def alone(workers: int, **settings: Any) -> ServerShard:
    (shard,) = fresh_shards(definition(workers, "sgd", **settings), 1, make_sgd)
    return shard


def test_a_push_is_applied_once_and_its_repeat_is_acknowledged_and_counted() -> None:
    shard = alone(2, bound=None)
    push = pushed(shard, 0, 0)
    assert shard.push(push) is ShardStatus.APPLIED
    weights = shard.weights.clone()
    assert shard.push(push) is ShardStatus.REPEATED
    assert torch.equal(shard.weights, weights) and shard.version == 1 and shard.counts.repeated == 1


def test_pushes_of_one_clock_move_weights_as_one_step_does() -> None:
    """With plain SGD, from the same weights: n pushes at lr / n are a step on the mean of n times each part."""
    shards = [alone(3, bound=bound) for bound in (0, 0, None)]
    pushes = [pushed(shards[0], worker, 0) for worker in range(3)]
    for shard in shards[::2]:
        for push in pushes:
            shard.push(replace(push, version=0))
    answer = shards[0].answer(0)
    assert answer is not None and answer[1] is None
    shards[0].settle(0, 1.0)
    torch.testing.assert_close(shards[0].weights, shards[2].weights, rtol=0, atol=1e-14)
    mean = sum(push.dense for push in pushes) / 3
    torch.testing.assert_close(shards[0].weights, shards[1].weights - pushes[0].lr * mean, rtol=0, atol=1e-14)


def test_with_bound_0_nothing_moves_until_all_have_come_and_their_order_is_no_matter() -> None:
    shards = [alone(3, bound=0), alone(3, bound=0)]
    pushes = [pushed(shards[0], worker, 0) for worker in range(3)]
    before = shards[0].weights.clone()
    for shard, order in zip(shards, ((0, 1, 2), (2, 0, 1)), strict=True):
        for worker in order:
            assert torch.equal(shard.weights, before)
            assert shard.push(pushes[worker]) is ShardStatus.HELD
        shard.settle(0, 0.5)
        shard.settle(0, 0.5)
    assert shards[0].digest() == shards[1].digest() and shards[0].version == 1
    assert not torch.equal(shards[0].weights, before)


def test_gradients_applied_one_after_the_other_make_another_table() -> None:
    """Else the tests of equality could not see it: row-wise Adagrad and Adam are not linear."""
    given = [definition(2, rule, bound=bound) for rule in ("rowwise_adagrad", "adam") for bound in (0, None)]
    shards = [fresh_shards(each, 1)[0] for each in given]
    for shard in shards:
        for push in [pushed(shard, worker, 0) for worker in range(2)]:
            shard.push(replace(push, version=shard.version))
        if shard.definition.synchronous:
            shard.settle(0, 1.0)
    for together, apart in (shards[:2], shards[2:]):
        ids = np.intersect1d(ids_of(0, 0)[0], ids_of(1, 0)[0])
        assert len(ids) and np.abs(together.tables[0].pull(ids) - apart.tables[0].pull(ids)).max() > 1e-3


def test_a_worker_may_be_the_bound_ahead_and_no_clock_more() -> None:
    shard = alone(2, bound=2)
    for clock in range(3):
        assert shard.may_begin(0, clock, 0)
        shard.pull(0, clock, 0, ids_of(0, clock))
        shard.push(pushed(shard, 0, clock))
    assert not shard.may_begin(0, 3, 0) and shard.may_begin(1, 0, 0)
    with pytest.raises(BrokenPromise, match="bound = 2 does not allow"):
        shard.pull(0, 3, 0, ids_of(0, 3))
    shard.pull(1, 0, 0, ids_of(1, 0))
    shard.push(pushed(shard, 1, 0))
    assert shard.may_begin(0, 3, 0)
    assert dict(shard.counts.gaps) == {0: 2, 1: 1, 2: 1}


def test_a_lag_that_the_bound_excludes_stops_the_server() -> None:
    shard = alone(2, bound=1)  # at most 3
    for clock in range(2):
        shard.push(pushed(shard, 0, clock))
    shard.push(pushed(shard, 1, 0))
    shard.push(pushed(shard, 0, 2))
    with pytest.raises(BrokenPromise, match=r"lag of 4.*0 to 3"):
        shard.push(pushed(shard, 1, 1, version=0))


@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_push_that_is_not_finite_changes_nothing_and_names_its_worker(bound: int | None) -> None:
    shard = alone(2, bound=bound)
    before = shard.digest()
    bad = replace(pushed(shard, 1, 0), norm=math.nan)
    inner = pushed(shard, 0, 0)
    inner = replace(
        inner, dense=inner.dense.index_fill(0, torch.tensor(2), math.inf)
    )  # whatever its norm is said to be
    found = [shard.push(bad), shard.push(inner)]
    if bound == 0:
        answer = shard.answer(0)
        assert answer is not None and answer[1] == 0
        shard.settle(0, math.nan)
    else:
        assert found == [ShardStatus.SKIPPED, ShardStatus.SKIPPED]
    assert shard.digest() == before and dict(shard.counts.not_finite) == {0: 1, 1: 1}
    assert shard.applied == [1, 1] and [event.kind for event in shard.events] == [Kind.SKIPPED] * 2


def test_a_stale_push_has_a_smaller_rate_with_damp() -> None:
    given = definition(5, damp=True, bound=None)
    assert given.rate_share(0) == given.rate_share(4) == 1 / 5
    assert given.rate_share(8) == pytest.approx(1 / 10) and given.rate_share(40) == pytest.approx(1 / 50)
    assert definition(5, bound=None).rate_share(40) == 1 / 5
    shards = [alone(3, bound=None, damp=damp) for damp in (False, True)]
    moved = []
    for shard in shards:
        for clock in range(4):
            shard.push(replace(pushed(shard, 1, clock), lr=0.0))
        before = shard.weights.clone()
        shard.push(pushed(shard, 0, 0, version=0))  # lag 4 of 2 other workers: half the rate
        moved.append(shard.weights - before)
    torch.testing.assert_close(moved[0] / 2, moved[1])


@pytest.mark.parametrize(("workers", "max_lag"), [(2, 1), (3, 2), (3, 4)])
def test_a_push_whose_lag_is_max_lag_is_applied_and_one_more_is_too_many(workers: int, max_lag: int) -> None:
    for lag, status in ((max_lag, ShardStatus.APPLIED), (max_lag + 1, ShardStatus.REJECTED)):
        shard = alone(workers, bound=None, max_lag=max_lag)
        for clock in range(lag):
            assert shard.push(pushed(shard, 1, clock)) is ShardStatus.APPLIED
        assert shard.push(pushed(shard, 0, 0, version=0)) is status, lag


def test_a_push_above_max_lag_is_computed_again_and_the_next_try_is_in_time() -> None:
    shard = alone(3, bound=None, max_lag=2)
    for clock in range(3):
        shard.push(pushed(shard, 1, clock))
    late = pushed(shard, 0, 0, version=0)
    assert shard.push(late) is ShardStatus.REJECTED and shard.counts.rejected == 1 and shard.applied[0] == 0
    assert not shard.may_begin(1, 3, 0), "others would make the next try late too"
    assert shard.may_begin(0, 0, 1) and shard.may_begin(2, 0, 1)
    shard.pull(0, 0, 1, ids_of(0, 0))
    assert shard.push(pushed(shard, 0, 0, attempt=1)) is ShardStatus.APPLIED
    assert shard.may_begin(1, 3, 0)


def test_a_clock_that_was_not_reached_is_refused_and_so_is_a_try_that_is_over() -> None:
    shard = alone(2, bound=None)
    with pytest.raises(BrokenPromise, match="pushes step 1, and has done 0"):
        shard.push(pushed(shard, 0, 1))
    shard.pull(0, 0, 1, ids_of(0, 0))
    with pytest.raises(ValueError, match="try 0, after step, try"):
        shard.pull(0, 0, 0, ids_of(0, 0))


def test_a_replaced_worker_begins_with_its_first_clock_that_is_not_done() -> None:
    shard = alone(2, bound=None)
    shard.pull(0, 0, 0, ids_of(0, 0))
    shard.push(pushed(shard, 0, 0))
    assert shard.restart(0)[0] == 1 and shard.restart(1)[0] == 0
    shard.pull(0, 1, 0, ids_of(0, 1))
    assert shard.restart(0) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bound": -1}, "bound = -1: must not be negative"),
        ({"bound": None, "max_lag": 1}, "max_lag = 1: below 2"),
        ({"workers": 5000}, "5000 ranks"),
    ],
)
def test_settings_that_no_server_can_keep_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        definition(**{"workers": 3, **settings})


@pytest.mark.parametrize(
    "change",
    [
        lambda given: [],
        lambda given: given | {"workers": "3"},
        lambda given: given | {"workers": 0},
        lambda given: given | {"shapes": {"w": [4, -1]}},
        lambda given: given | {"shapes": {"w": [10**30]}},
        lambda given: given | {"shapes": None},
        lambda given: given | {"dtype": "nn"},
        lambda given: given | {"lr_share": -1.0},
        lambda given: given | {"lr_share": math.nan},
        lambda given: given | {"tables": [{"name": "t"}]},
        lambda given: given | {"tables": [given["tables"][0] | {"rule": {"kind": "momentum"}}]},
        lambda given: {key: value for key, value in given.items() if key != "tables"} | {"tables": 3},
        lambda given: {"workers": 3},
    ],
)
def test_a_definition_that_is_none_is_one_error(change: Any) -> None:
    data = json.dumps(change(json.loads(definition(3).encoded()))).encode()
    with pytest.raises(StoredError, match="the definition of the servers: "):
        decoded(data)


def test_a_definition_travels_as_it_is() -> None:
    given: Definition = definition(3, "adam", bound=2, max_lag=9, damp=True)
    assert decoded(given.encoded()).encoded() == given.encoded()
    assert list(decoded(given.encoded()).shapes) == list(given.shapes)


def test_with_backup_workers_the_gradients_that_are_named_make_the_step_in_the_order_of_their_parts() -> None:
    shard, plain = alone(3, bound=0, backup=1), alone(2, bound=0)
    pushes = [pushed(shard, worker, 0) for worker in range(3)]
    assert [shard.push(push) for push in pushes] == [ShardStatus.HELD] * 3
    chosen = [(2, BatchShare(0, 1)), (0, BatchShare(1, 0))]
    answer = shard.add_up(0, chosen)
    plain.push(replace(pushes[2], worker=0))
    plain.push(replace(pushes[0], worker=1))
    assert answer == plain.answer(0) == shard.add_up(0, chosen) is not None, "asked by several ranks"
    for each in (shard, plain):
        each.settle(0, 0.5)
        each.settle(0, 0.5)
    assert shard.digest() == plain.digest() and shard.version == 1 and shard.applied == [1, 1, 1]
    assert [(e.kind, e.worker, e.clock, e.attempt) for e in shard.take_events()] == [
        (Kind.APPLIED, 1, 0, 0), (Kind.APPLIED, 0, 1, 0)
    ]  # fmt: skip
    assert shard.push(pushes[1]) is ShardStatus.LATE and shard.push(pushes[0]) is ShardStatus.LATE
    assert shard.add_up(0, chosen) == answer, "to who asks after it was made"
    assert shard.is_drained(1) and shard.counts.applied == 2


def test_a_process_that_takes_a_dead_ones_place_gives_another_gradient_for_its_step() -> None:
    shard = alone(2, bound=0, backup=1)
    first, again = pushed(shard, 0, 0), replace(pushed(shard, 0, 1), clock=0, attempt=1)
    assert shard.push(first) is ShardStatus.HELD
    assert shard.push(first) is ShardStatus.REPEATED and shard.counts.repeated == 1
    assert shard.push(again) is ShardStatus.HELD
    shard.add_up(0, [(0, BatchShare(0, 0))])
    shard.settle(0, 1.0)
    other = alone(1, bound=0)
    other.push(again)
    other.settle(0, 1.0)
    assert shard.digest() == other.digest()
    (event,) = shard.take_events()
    assert event.attempt == 0, "the part is in the log, and not who computed it"


def test_with_backup_workers_what_cannot_be_ends_the_server() -> None:
    shard = alone(3, bound=0, backup=1)
    with pytest.raises(BrokenPromise, match="rank 1 pushes step 1 of version 0, in step 0 of version 0"):
        shard.push(pushed(shard, 1, 1))
    with pytest.raises(BrokenPromise, match="rank 1 pushes step 0 of version 3"):
        shard.push(pushed(shard, 1, 0, version=3))
    shard.push(pushed(shard, 0, 0))
    with pytest.raises(BrokenPromise, match=r"step 0: the gradients of ranks \[2\] make it, and are not here"):
        shard.add_up(0, [(0, BatchShare(0, 0)), (2, BatchShare(0, 1))])
    assert shard.add_up(5, []) is None, "long made"


def test_a_late_rank_may_pull_whatever_step_it_is_at() -> None:
    shard = alone(2, bound=0, backup=1)
    for step in range(3):
        shard.push(pushed(shard, 0, step))
        shard.add_up(step, [(0, BatchShare(step, 0))])
        shard.settle(step, 1.0)
    version, weights, _ = shard.pull(1, 0, 0, ids_of(1, 0))
    assert version == 3 and torch.equal(weights, shard.weights)
    assert shard.push(pushed(shard, 1, 0)) is ShardStatus.LATE


@pytest.mark.parametrize(("workers", "backup", "bound"), [(3, 2, 0), (3, 1, 1), (3, -1, 0), (1, 1, 0)])
def test_backups_that_cannot_be(workers: int, backup: int, bound: int) -> None:
    with pytest.raises(
        ValueError, match=f"parallel.servers.backup = {backup} with {workers} ranks? and bound = {bound}"
    ):
        definition(workers, "sgd", bound=bound, backup=backup)


def test_with_bound_0_the_first_push_of_a_rank_counts_though_others_have_not_come() -> None:
    """A rank that was replaced pushes its clock again."""
    shards = [alone(2, bound=0), alone(2, bound=0)]
    for shard in shards:
        first, other = pushed(shard, 0, 0), pushed(shard, 1, 0)
        assert shard.push(first) is ShardStatus.HELD
        if shard is shards[1]:
            assert shard.push(replace(first, attempt=1, dense=2 * first.dense)) is ShardStatus.REPEATED
        shard.push(other)
        shard.settle(0, 1.0)
    assert torch.equal(shards[0].weights, shards[1].weights) and shards[1].counts.repeated == 1


def test_content_that_is_given_twice_is_there_once() -> None:
    """A rank that died before the first step gives the servers its buckets again."""
    trained, shard, every = alone(1), alone(1), np.arange(BUCKETS)
    for clock in range(3):
        trained.push(pushed(trained, 0, clock))
        trained.settle(clock, 1.0)
    dump, most = trained.dump(0, every), every[every % 3 > 0]
    shard.load_table(0, dump.only(most))
    shard.load_table(0, dump)
    copied = shard.dump(0, every)
    for name, array in vars(dump).items():
        assert np.array_equal(array, getattr(copied, name)), name
    for _ in range(2):
        shard.begin_table(1, np.arange(5), np.ones((5, 2)))
    assert np.array_equal(shard.dump(1, every).counts.sum(axis=0), [5, 0]) and len(shard.dump(1, every).ids) == 5
    shard.clear_tables()
    shard.load_table(0, dump)
    assert np.array_equal(shard.dump(0, every).ids, dump.ids)
