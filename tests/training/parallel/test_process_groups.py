"""Which library carries a group's collectives, in the notation torch has for groups of GPUs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.compose import start_process_group
from sparkring.training.parallel.process_groups import GPU_BACKENDS, abort_process_groups, backend_of, device_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("configuration", "device", "expected"),
    [("gloo", "cpu", "gloo"), ("nccl", "cuda", "nccl"), (GPU_BACKENDS, "cpu", "gloo"), (GPU_BACKENDS, "cuda", "nccl")],
)
def test_a_group_of_two_backends_has_one_for_each_device(configuration: str, device: str, expected: str) -> None:
    assert backend_of(configuration, device) == expected


def test_a_device_the_group_does_not_serve_is_named() -> None:
    with pytest.raises(ValueError, match=r"cpu:gloo,cuda:nccl\) has no backend for 'xpu'"):
        backend_of(GPU_BACKENDS, "xpu")


def test_a_real_group_in_the_notation_of_gpus(tmp_path: Path) -> None:
    """Gloo for CUDA tensors stands in for NCCL, which needs a GPU to be made."""
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert dist.get_backend() != "gloo", "torch answers with one string for both: why this module exists"
        assert device_backend(CPU) == device_backend(CUDA) == device_backend(torch.device("meta")) == "gloo"
        abort_process_groups()  # no NCCL: nothing is aborted, and nothing waits
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_ranks_on_gpus_say_which_gpu_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of `init_process_group`, since there is no GPU here: what it is asked for."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: asked.update(given, backend=backend))
    start_process_group(RankInfo(3, 4, 1, 2), CUDA, timedelta(seconds=5))
    assert (asked["backend"], asked["device_id"], asked["rank"]) == (GPU_BACKENDS, CUDA, 3)
    start_process_group(RankInfo(3, 4, 1, 2), CPU, timedelta(seconds=5))
    assert (asked["backend"], asked["device_id"]) == ("gloo", None)


class FakeNccl:
    """Of NCCL's backend what an abort needs; says in which order it was called."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.label = calls, name

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.calls.append(self.label)

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


class FakeGroup:
    def __init__(self, backend: FakeNccl | None) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> FakeNccl:
        if self.backend is None:
            raise RuntimeError("no backend for cuda")
        return self.backend


def test_nccl_is_aborted_in_every_group_and_gloo_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    groups = [FakeGroup(FakeNccl(calls, "a")), FakeGroup(None), FakeGroup(FakeNccl(calls, "b"))]
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    abort_process_groups()
    assert calls == ["start", "a", "b", "end"]
