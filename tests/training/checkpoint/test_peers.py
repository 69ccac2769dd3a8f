"""Ranks act together: all succeed, or every one raises the error of those that failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkring.training.checkpoint.format import CheckpointError
from sparkring.training.checkpoint.peers import Peers, solo


def in_threads(world: int) -> list[Peers]:
    """Ranks as threads of this process."""
    barrier, sent = threading.Barrier(world), [b""] * world

    def peer(rank: int) -> Peers:
        def gather(mine: bytes) -> list[bytes]:
            sent[rank] = mine
            barrier.wait(60)
            found = list(sent)
            barrier.wait(60)
            return found

        return Peers(rank, world, gather)

    return [peer(rank) for rank in range(world)]


def test_one_process_is_its_own_peer() -> None:
    assert solo().together("counting", lambda: 3) == [3]


def test_every_rank_gets_the_results_of_all_in_rank_order() -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda peer: peer.together("asking", lambda: peer.rank * 10), in_threads(3)))
    assert found == [[0, 10, 20]] * 3


def test_a_failure_on_one_rank_is_the_error_of_every_rank() -> None:
    def act(peer: Peers) -> str:
        def work() -> None:
            if peer.rank == 1:
                raise OSError("disk full")

        with pytest.raises(CheckpointError) as caught:
            peer.together("writing", work)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(act, in_threads(3))) == {"writing failed on rank 1 of 3: OSError: disk full"}
