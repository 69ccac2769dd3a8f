"""Which device ranks train on, agreed before they form a group.

No machine of the suite has a GPU, so what ranks see is made up; that they tell each other, and what follows, is real.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local
from sparkring.training.worker import device
from sparkring.training.worker.device import SeenGpu, choose_device_type, expected_device_type, pick_device

TIMEOUT = timedelta(seconds=60)


def seen(*gpus: str | None) -> list[SeenGpu]:
    """One rank each: `host:gpu`, or None."""
    return [SeenGpu("h0", "m0", None) if g is None else SeenGpu(g[:2], f"m{g[1]}", g[3:]) for g in gpus]


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        (["h0:a"], None),
        (["h0:a", "h0:b"], None),
        (["h0:a", "h1:a"], None),  # the same slot of two machines
        (["h0:a", "h0:b", "h1:a", "h1:b"], None),
        (["h0:a", "h0:a"], "ranks 0 and 1 on h0 would share GPU a"),
        (["h0:a", "h1:a", "h1:b", "h1:a"], "ranks 1 and 3 on h1 would share GPU a"),
        (["h0:a", None], "torch sees no GPU for rank 1 on h0"),
        ([None, "h1:a"], "torch sees no GPU for rank 0 on h0"),
    ],
)
def test_gpus_are_taken_where_each_rank_has_its_own(gpus: list[str | None], problem: str | None) -> None:
    if problem is None:
        assert choose_device_type("auto", seen(*gpus)) == choose_device_type("cuda", seen(*gpus)) == ("cuda", None)
        return
    kind, why = choose_device_type("auto", seen(*gpus))
    assert kind == "cpu" and why is not None and problem in why
    with pytest.raises(ValueError, match=f"train.device = 'cuda': {problem}.*; set train.device=cpu"):
        choose_device_type("cuda", seen(*gpus))


def test_a_machine_without_gpus_is_no_news() -> None:
    assert choose_device_type("auto", seen(None, None)) == ("cpu", None)
    assert choose_device_type("cpu", seen("h0:a")) == ("cpu", None)
    assert choose_device_type("cpu", []) == ("cpu", None)
    with pytest.raises(ValueError, match="torch sees no GPU for rank 0"):
        choose_device_type("cuda", seen(None))


def test_two_names_of_one_machine_are_one_machine() -> None:
    """Two containers have names of their own; NCCL goes by the GPU."""
    with pytest.raises(ValueError, match="would share GPU a"):
        choose_device_type("cuda", [SeenGpu("pod-1", "boot", "a"), SeenGpu("pod-2", "boot", "a")])


def test_what_is_expected_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [expected_device_type("auto", world, True) for world in (1, 2, 3)] == ["cuda", "cuda", "cpu"]
    assert expected_device_type("auto", 1, False) == "cpu" and expected_device_type("cuda", 3, False) == "cuda"


def pick(ctx: WorkerContext, wanted: str, gpus: list[SeenGpu]) -> list[Any]:
    device.see_gpu = lambda local_rank: gpus[local_rank]
    warnings: list[str] = []
    device.log.warning = lambda text, *args: warnings.append(text % args)  # type: ignore[method-assign]
    return [pick_device(wanted, ctx.rank_info, TIMEOUT).type, warnings]


@pytest.mark.ranks
@pytest.mark.parametrize("gpus", [seen(None, "h0:a"), seen("h0:a", None), seen("h0:a", "h0:a")])
def test_all_ranks_take_the_same_device_and_one_says_why(gpus: list[SeenGpu]) -> None:
    job = JobSpec(pick, args=("auto", gpus), preload=("torch",))
    first, second = run_local(job, 2, lambda event: None, control=Control()).results
    assert first[0] == second[0] == "cpu" and second[1] == []
    (line,) = first[1]
    assert line.startswith("train.device=auto: all ranks are on the CPU, since ")
    assert ("launch.world=1" in line) == all(each.gpu for each in gpus)


@pytest.mark.ranks
def test_a_rank_that_cannot_have_a_gpu_ends_all_of_them_by_one_error() -> None:
    job = JobSpec(pick, args=("cuda", seen("h0:a", "h0:a")), preload=("torch",))
    with pytest.raises(WorkerFailed, match="ranks 0 and 1 on h0 would share GPU a, and NCCL needs one for each"):
        run_local(job, 2, lambda event: None, control=Control())
