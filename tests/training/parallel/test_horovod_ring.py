"""Horovod's collectives, with a fake of Horovod: bytes are counted, waiting polls, another ring is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.training.parallel.data_parallel import horovod_ring
from sparkring.training.parallel.data_parallel.horovod_ring import HorovodCollectives, HorovodRing, start_horovod


@pytest.fixture
def hvd(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(Sum="sum", polls=[False, False, True], shut=0)
    fake.allreduce_async_ = lambda buffer, name, op: buffer
    fake.alltoall_async = lambda rows, name: rows
    fake.reducescatter_async = lambda rows, name, op: rows[:1]
    fake.allgather_async = lambda flat, name: flat
    fake.poll = lambda handle: fake.polls.pop(0) if fake.polls else True
    fake.synchronize = lambda handle: (handle, "splits")
    fake.init = lambda: None
    fake.rank, fake.size = (lambda: 1), (lambda: 2)
    fake.shutdown = lambda: setattr(fake, "shut", fake.shut + 1)
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=fake))
    monkeypatch.setitem(sys.modules, "horovod.torch", fake)
    return fake


def test_sent_bytes_follow_the_formulas(hvd: SimpleNamespace) -> None:
    x, sent = torch.zeros(4, 10), []  # 160 bytes
    for call in ("start", "start_all_to_all", "start_reduce_scatter", "start_all_gather"):
        collectives = HorovodCollectives(0, 4)
        getattr(collectives, call)("name", x)
        sent.append(collectives.sent_bytes)
    assert sent == [2 * 0.75 * 160, 0.75 * 160, 0.75 * 160, 3 * 160]


def test_waiting_polls_before_it_synchronizes(hvd: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(horovod_ring.time, "sleep", pauses.append)
    handle: Any = torch.ones(1)
    assert HorovodCollectives(0, 2).wait(handle) is handle
    assert pauses == [horovod_ring.FIRST_PAUSE_S, 2 * horovod_ring.FIRST_PAUSE_S]


def test_a_ring_other_than_the_launchers_is_refused(hvd: SimpleNamespace) -> None:
    start_horovod(1, 2)
    with pytest.raises(RuntimeError, match="rank 1 of 2, expected rank 0 of 2"):
        start_horovod(0, 2)


def test_the_bytes_of_a_step_are_reported_and_horovod_is_shut_down_on_success_only(hvd: SimpleNamespace) -> None:
    ring, model = HorovodRing(0, 2, bucket_bytes=2**20), nn.Linear(3, 1, bias=False)
    ring.wrap(model)
    with ring.pass_scope(last=True):
        model(torch.ones(1, 3)).sum().backward()
    ring.finish_reduction()
    ring.after_step()
    assert ring.step_bytes == 4 * (3 + 1), "three gradients and one flag, 2 (w-1)/w of them"
    ring.close(failed=True)
    assert hvd.shut == 0
    ring.close(failed=False)
    assert hvd.shut == 1
