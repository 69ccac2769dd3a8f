"""Whole training jobs on parameter servers: the ring's model at bound 0, else a run that its logs make again."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli.audit import audit_run
from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.servers.event_log import EVENTS
from sparkring.training.worker.replay import ReplayReport, replay_run
from tests.training.own_served import WaitsForKills
from tests.training.test_worker import Job, kill_one_rank, write_table
from tests.training.test_worker_tables import SETTINGS, TABLE, hashed, rows_of  # noqa: F401

pytestmark = pytest.mark.ranks
OWN = "tests.training.own_served"
MODELS = f"model.factory={OWN}:"
NOISY = f"{MODELS}Noisy"
LATE = (f"{MODELS}Late", f"train.hooks=[{OWN}:SaysStep3]")
SERVED = (*SETTINGS, "data.audit=true", "parallel.servers.per_host=2")


@pytest.fixture(scope="module")
def ring(group: WorkerGroup, hashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:  # noqa: F811
    return Job(tmp_path_factory.mktemp("ring") / "run", hashed, *SETTINGS).run(group, 2)


def replayed(job: Job) -> ReplayReport:
    """The run once more, from its event logs."""
    torch.set_num_threads(job.result.threads_per_rank)
    config, dataset = RunConfig.model_validate(job.config), open_storage(str(job.table))
    events = open_storage(str(job.folder)).at(EVENTS)
    return replay_run(config, dataset, read_manifest(dataset), events, job.result.steps)


def check_whole(job: Job) -> None:
    """Every row once, every push once on every server, and the logs give the same bits."""
    assert (report := audit_run(str(job.folder))).ok, report.lines()
    found = replayed(job)
    assert not found.different and found.clocks == job.result.steps, found.describe()


def test_with_bound_0_the_model_is_the_rings(group: WorkerGroup, ring: Job, hashed: Path, tmp_path: Path) -> None:  # noqa: F811
    job = Job(tmp_path / "run", hashed, *SERVED).run(group, 2)
    assert job.result.engine == "servers" and job.result.finished
    for name, weight in ring.weights().items():
        torch.testing.assert_close(job.weights()[name], weight, rtol=1e-8, atol=1e-10)
    assert np.abs(rows_of(job, tmp_path / "a") - rows_of(ring, tmp_path / "b")).max() < 1e-9
    assert job.result.valid == pytest.approx(ring.result.valid, rel=1e-9)
    assert job.losses == pytest.approx(ring.losses, rel=1e-9)
    assert {k: v for k, v in job.result.tables[TABLE].items() if k != "bytes"} == {
        "rows": 7, "admitted": 7, "evicted": 0
    }  # fmt: skip
    assert job.result.hot_ids == ring.result.hot_ids
    servers = job.result.servers
    assert servers is not None and servers.gaps == {0: servers.applied} and servers.repeated == 0
    check_whole(job)


@pytest.mark.parametrize(
    ("bound", "more"),
    [
        pytest.param("1", (), marks=pytest.mark.slow),
        ("null", ("parallel.servers.damp=true", "model.args.dropout=0.2", NOISY)),
    ],
)
def test_an_asynchronous_run_learns_and_is_made_again_bit_for_bit_after_a_stop_on_other_ranks(
    group: WorkerGroup,
    ring: Job,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
    bound: str,
    more: tuple[str, ...],
) -> None:
    """Three ranks, then two: with dropout, whose masks are drawn anew for each rank and step."""
    job = Job(tmp_path / "run", hashed, *SERVED, f"parallel.servers.bound={bound}", *more)
    control = Control()
    job.run(group, 3, on_step=lambda step: control.stop() if step == 8 else None, control=control)
    assert not job.result.finished
    job.run(group, 2, attempt=2)
    assert job.from_step >= 8 and job.result.finished
    assert job.losses[30] == pytest.approx(ring.losses[30], rel=0.15)
    servers = job.result.servers
    assert servers is not None and servers.applied == (30 - job.from_step) * 2 * 2, "two servers"
    if bound == "1":
        assert set(servers.gaps) <= {0, 1} and max(servers.lags) <= 3
    check_whole(job)


def test_a_run_whose_bound_was_changed_at_a_stop_is_made_again_bit_for_bit(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """One rank is slow, so that it pushes with lags that the last attempt would reject."""
    job = Job(tmp_path / "run", hashed, *SERVED)
    modes = (["bound=null", "damp=true"], ["bound=0"], ["backup=1"], ["bound=null", "max_lag=2"])
    for attempt, (mode, until) in enumerate(zip(modes, (8, 14, 20, 99), strict=True), 1):
        control, words = Control(), [f"{MODELS}Slow", *(f"parallel.servers.{word}" for word in mode)]
        job.config = Job(tmp_path / "run", hashed, *SERVED, *words).config

        def stop(step: int, until: int = until, control: Control = control) -> None:
            if step >= until:
                control.stop()

        job.run(group, 3, attempt, on_step=stop, control=control)
    assert job.result.finished
    check_whole(job)


@pytest.mark.slow  # rejected pushes, and runs with them again: tests/training/servers
def test_gradients_that_are_too_old_are_computed_again_and_their_rows_count_once(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Those of a rank that waits until the others are steps ahead."""
    words = ("parallel.servers.bound=null", "parallel.servers.max_lag=2", *LATE, "train.epochs=1")
    job = Job(tmp_path / "run", hashed, *SERVED, *words).run(group, 3)
    servers = job.result.servers
    assert job.result.finished and servers is not None and servers.rejected >= 1 and max(servers.lags) <= 2
    assert servers.applied == 10 * 3 * 2 and job.result.hot_ids[TABLE].total == 1000
    check_whole(job)


def test_a_checkpoint_goes_from_the_ring_to_servers_and_back(
    group: WorkerGroup,
    ring: Job,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    job, control = Job(tmp_path / "run", hashed, *SERVED), Control()
    on_ring = (*SETTINGS, "data.audit=true")
    for attempt, (settings, until) in enumerate([(on_ring, 5), (SERVED, 11), (on_ring, 99)], 1):
        control = Control()
        job.config = Job(tmp_path / "run", hashed, *settings).config

        def stop(step: int, until: int = until, control: Control = control) -> None:
            if step >= until:
                control.stop()

        job.run(group, 2, attempt, on_step=stop, control=control)
    assert job.result.finished and audit_run(str(job.folder)).ok
    for name, weight in ring.weights().items():
        torch.testing.assert_close(job.weights()[name], weight, rtol=1e-8, atol=1e-10)
    assert np.abs(rows_of(job, tmp_path / "a") - rows_of(ring, tmp_path / "b")).max() < 1e-9


FEW_MEETINGS = ("train.eval_every_steps=1000", "checkpoint.every_steps=1000")


def test_a_killed_rank_is_replaced_and_every_push_still_counts_once(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("train.epochs=5", "parallel.servers.bound=2", f"train.hooks=[{OWN}:WaitsForKills]")
    job, killed = Job(tmp_path / "run", hashed, *SERVED, *FEW_MEETINGS, *words), list[int]()

    def kill(step: int) -> None:
        """While rank 0 waits, and so the others, which may be two steps ahead."""
        for at in WaitsForKills.steps:
            if step == at - 1 and not (killed_at := tmp_path / f"run/killed-{at}").exists():
                kill_one_rank(step, step, one := list[int]())
                killed.extend(one)
                killed_at.touch()

    job.run(group, 3, on_step=kill)
    assert len(killed) == len(job.replaced) == 2
    assert job.result.finished and job.result.steps == 50
    servers = job.result.servers
    assert servers is not None and servers.applied == 50 * 3 * 2 and set(servers.gaps) <= {0, 1, 2}
    check_whole(job)


def test_a_rank_that_died_while_others_wait_for_it_at_an_evaluation_is_replaced(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = (FEW_MEETINGS[1], "train.epochs=2", "parallel.servers.bound=null", f"{MODELS}Dying")
    job = Job(tmp_path / "run", hashed, *SERVED, *words).run(group, 2)
    assert len(job.replaced) == 1 and job.result.finished
    check_whole(job)


def test_a_rank_that_died_just_before_an_evaluation_to_which_no_other_had_come_ends_the_attempt(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its next process would not evaluate, and the other would wait for it there."""
    words = (FEW_MEETINGS[1], "train.epochs=2", "parallel.servers.bound=null", f"{MODELS}Slow")
    job = Job(tmp_path / "run", hashed, *SERVED, *words, f"train.hooks=[{OWN}:DiesAtMeeting]")
    with pytest.raises(WorkerFailed, match="rank 0 died at the synchronization point after step 10"):
        job.run(group, 2)
    job.run(group, 2, attempt=2)
    assert job.result.finished
    check_whole(job)


@pytest.mark.parametrize("entry", ["dies_before_begin", pytest.param("dies_after_begin", marks=pytest.mark.slow)])
def test_a_rank_that_died_between_the_load_of_a_checkpoint_and_the_first_step_is_replaced(
    group: WorkerGroup,
    ring: Job,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
    entry: str,
) -> None:
    """The rows that others had loaded stay, its own are not there twice, and nobody waits for it."""
    job, control = Job(tmp_path / "run", hashed, *SERVED), Control()
    job.run(group, 2, on_step=lambda step: control.stop() if step >= 7 else None, control=control)
    job.run(group, 2, attempt=2, entry=f"{OWN}:{entry}", limits=Limits(hang_s=20))
    assert len(job.replaced) == 1 and job.result.finished and job.from_step >= 7
    for name, weight in ring.weights().items():
        torch.testing.assert_close(job.weights()[name], weight, rtol=1e-8, atol=1e-10)
    assert np.abs(rows_of(job, tmp_path / "a") - rows_of(ring, tmp_path / "b")).max() < 1e-9
    check_whole(job)


def test_a_rank_is_replaced_though_retention_would_have_deleted_where_the_attempt_began(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    keep = ("checkpoint.every_steps=8", "checkpoint.keep_last=1", "checkpoint.keep_best=0", "train.epochs=4")
    slow = (f"{MODELS}Slow", "train.eval_every_steps=1000", f"train.hooks=[{OWN}:DiesAtStep31]")
    job, control = Job(tmp_path / "run", hashed, *SERVED, *keep, *slow, "parallel.servers.bound=1"), Control()
    job.run(group, 2, on_step=lambda step: control.stop() if step >= 3 else None, control=control)
    job.run(group, 2, attempt=2)
    assert len(job.replaced) == 1 and job.result.finished
    check_whole(job)


def test_a_killed_server_ends_the_attempt_and_training_goes_on_from_the_last_checkpoint(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "run", hashed, *SERVED, "parallel.servers.bound=2")

    def kill(step: int) -> None:
        if step == 12:
            os.kill(job.servers[1], signal.SIGKILL)

    with pytest.raises(WorkerFailed, match=r"server [01] on .* killed by SIGKILL"):
        job.run(group, 3, on_step=kill)
    job.run(group, 3, attempt=2)
    assert job.result.finished and job.from_step in (5, 10)
    assert not any(map(psutil.pid_exists, job.servers))
    check_whole(job)


@pytest.mark.slow  # a server killed behind a checkpoint is above
def test_a_server_lost_before_any_checkpoint_lets_training_begin_anew(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """And a world that is smaller than the number of servers of the attempt before."""
    job = Job(tmp_path / "run", hashed, *SERVED, *FEW_MEETINGS, "parallel.servers.bound=null")
    with pytest.raises(WorkerFailed, match=r"server [01] on .* killed"):
        job.run(group, 3, on_step=lambda step: os.kill(job.servers[0], signal.SIGKILL) if step == 3 else None)
    job.run(group, 1, attempt=2)
    assert job.result.finished and job.from_step == 0
    check_whole(job)


def test_a_rank_whose_gradients_are_not_finite_is_named_and_its_pushes_are_refused(
    group: WorkerGroup, tmp_path: Path
) -> None:
    poisoned = write_table(tmp_path, poisoned=True)
    served = ("parallel.servers.per_host=2", "parallel.servers.bound=2", "data.audit=true")
    job = Job(tmp_path / "run", poisoned, *served).run(group, 2)
    servers = job.result.servers
    assert servers is not None and sum(servers.not_finite.values()) == 3 * 2, "once an epoch, at two servers"
    assert job.result.skipped_steps == 2, "once an epoch, as ranks go on after they have met"
    assert job.result.finished and all(torch.isfinite(weight).all() for weight in job.weights().values())
    check_whole(job)
    strict = Job(tmp_path / "strict", poisoned, *served, "train.max_skipped_steps=0")
    with pytest.raises(WorkerFailed, match=r"1 step in a row had gradients that are not finite"):
        strict.run(group, 2)


BACKED = (*SERVED, "parallel.servers.backup=1")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_with_backup_workers_every_row_makes_one_step_and_the_logs_give_the_same_bits(
    group: WorkerGroup,
    ring: Job,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
    world: int,
) -> None:
    job = Job(tmp_path / "run", hashed, *BACKED, "model.args.dropout=0.2", NOISY).run(group, world)
    assert job.result.finished and job.result.steps == ring.result.steps
    assert job.result.consumed_samples == ring.result.consumed_samples
    assert {r["steps"] for r in job.results} == {30} and len({r["best_value"] for r in job.results}) == 1
    assert job.losses[30] == pytest.approx(ring.losses[30], rel=0.15)
    servers = job.result.servers
    assert servers is not None and servers.applied == 30 * (world - 1) * 2, "at two servers"
    assert job.result.hot_ids[TABLE].total == ring.result.hot_ids[TABLE].total, (
        "ids of rows that came too late count once"
    )
    check_whole(job)


def test_a_rank_that_is_slow_is_not_waited_for(group: WorkerGroup, hashed: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its rows are computed by the others."""
    job = Job(tmp_path / "run", hashed, *BACKED, *LATE, *FEW_MEETINGS).run(group, 3)
    servers = job.result.servers
    assert job.result.finished and servers is not None and servers.late[1] >= 1
    check_whole(job)


LONG = (f"{MODELS}Slow", "train.epochs=7", *FEW_MEETINGS)  # slow and long: a stop is heard before the end


def test_backup_workers_go_on_where_one_meeting_follows_another(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """In the one step between there are fewer parts than ranks: who has none waits for the gradients of the others."""
    often = ("train.eval_every_steps=4", "checkpoint.every_steps=5", "train.epochs=1")
    job = Job(tmp_path / "run", hashed, *BACKED, *often).run(group, 3, limits=Limits(hang_s=20))
    assert job.result.finished and {4, 8, 10} <= job.valid.keys()
    every = Job(tmp_path / "every", hashed, *BACKED, "train.eval_every_steps=1", "train.epochs=1")
    assert every.run(group, 3, limits=Limits(hang_s=20)).result.finished
    check_whole(job), check_whole(every)


def test_backup_workers_stop_go_on_with_fewer_ranks_and_with_the_ring(
    group: WorkerGroup,
    ring: Job,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A stop or a checkpoint may come at any step: by then whole global batches are done, though a rank is late."""
    job = Job(tmp_path / "run", hashed, *BACKED, *LONG)
    for attempt, (world, until) in enumerate([(3, 8), (2, 16), (1, 22)], 1):
        control = Control()

        def stop(step: int, until: int = until, control: Control = control) -> None:
            if step >= until:
                control.stop()
            else:
                control.checkpoint()

        job.run(group, world, attempt, on_step=stop, control=control)
        assert not job.result.finished and job.result.consumed_samples == job.result.steps * 100
    check_whole(job)
    job.config = Job(tmp_path / "run", hashed, *SETTINGS, "data.audit=true", *LONG[1:]).config
    job.run(group, 2, attempt=4)
    assert job.from_step >= 22 and job.result.finished and job.result.engine != "servers"
    assert audit_run(str(job.folder)).ok
    assert job.result.valid["loss"] < 1.05 * ring.result.valid["loss"]


@pytest.mark.slow  # one killed rank is replaced above; kills at random: test_worker_servers_kills.py
def test_killed_backup_workers_are_replaced_and_no_part_is_lost_or_recorded_twice(
    group: WorkerGroup,
    hashed: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    job, killed = Job(tmp_path / "run", hashed, *BACKED, *FEW_MEETINGS, "train.epochs=12"), list[int]()

    def kill(step: int) -> None:
        if step >= 10 * (len(killed) + 1) and len(killed) == len(job.replaced) < 4:  # else one that is dying
            kill_one_rank(step, step, one := list[int]())
            killed.extend(one)

    job.run(group, 3, on_step=kill)
    assert len(killed) == len(job.replaced) == 4 and job.result.finished and job.result.steps == 120
    servers = job.result.servers
    assert servers is not None and servers.applied == 120 * 2 * 2
    check_whole(job)


@pytest.mark.slow  # a slow rank, which is not waited for, is above
def test_a_stopped_rank_holds_up_only_the_next_meeting(group: WorkerGroup, hashed: Path, tmp_path: Path) -> None:  # noqa: F811
    job = Job(tmp_path / "run", hashed, *BACKED, *FEW_MEETINGS, "train.epochs=5", f"{MODELS}Stopping")
    stopped: list[psutil.Process] = []

    def resume() -> None:
        """When the others are far ahead."""
        give_up = time.monotonic() + 90
        while time.monotonic() < give_up and not (stopped and job.furthest >= 45):
            time.sleep(0.05)
            children = [] if stopped else psutil.Process().children(recursive=True)
            stopped.extend(child for child in children if child.status() == psutil.STATUS_STOPPED)
        reached.append(job.furthest)
        for child in stopped:
            child.resume()

    reached: list[int] = []
    watching = threading.Thread(target=resume)
    watching.start()
    job.run(group, 3)
    watching.join()
    assert len(stopped) == 1 and reached[0] >= 45 and job.result.finished
    check_whole(job)


def test_a_part_that_is_not_finite_skips_one_step_on_every_rank(group: WorkerGroup, tmp_path: Path) -> None:
    poisoned = write_table(tmp_path, poisoned=True)
    words = ("parallel.servers.per_host=2", "parallel.servers.backup=1", "data.audit=true")
    job = Job(tmp_path / "run", poisoned, *words).run(group, 3)
    assert {r["skipped_steps"] for r in job.results} == {3}, "once an epoch"
    assert job.result.finished and all(torch.isfinite(weight).all() for weight in job.weights().values())
    check_whole(job)
