"""Host memory of a start, a load and an export: the peak of the process beyond what it had before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.peers import torch_peers
from sparkring.training.checkpoint.weights import write_weights
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.initial import record_model
from sparkring.training.parallel.step import MeshStrategy
from tests.ranks.problem import make_strategy

LARGE = {"vocab": 1000, "width": 768, "layers": 2, "heads": 8, "tied": False}
SMALL = {**LARGE, "width": 64}
M_MMAP_THRESHOLD = -3  # malloc.h


def now(key: str) -> int:
    """`VmRSS` or `VmHWM`, its peak, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def growth(act: Callable[..., Any], *given: Any) -> int:
    """Bytes by which resident memory was larger within than before, at most."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)  # what is larger goes back when it is freed: resident is what is held
    libc.malloc_trim(0)  # freed memory that is kept would hide new memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
    before = now("VmRSS")
    act(*given)
    return now("VmHWM") - before


def prepared(strategy: MeshStrategy, shape: dict[str, Any], whole: bool) -> None:
    model = GPT(**shape) if whole else record_model(lambda: GPT(**shape), 0)
    strategy.prepare(model, LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig()))


def exported(strategy: MeshStrategy, folder: Path) -> None:
    described, values = strategy.stream_model()
    given = (value for value in values if value is not None)
    if strategy.rank == 0:
        write_weights(open_storage(str(folder)), described, given, strategy.aliases)
    assert not list(given)


def saved_and_loaded(strategy: MeshStrategy, folder: Path) -> int:
    checkpoints = Checkpointer(open_storage(str(folder)), torch_peers(timedelta(minutes=5)))
    state = strategy.state_dict()
    checkpoints.save(1, state, {})
    info = checkpoints.latest(verify=False)
    checkpoints.close()
    assert info is not None
    return growth(checkpoints.load, info, state)


def peaks(rank: int, world: int, payload: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By case: the most that a start, an export and a load have added, in the better of two tries.

    A small model goes first, for what the code itself needs. The system may take pages of libraries back, and give
    them again while a try is measured.
    """
    found: dict[str, dict[str, int]] = {}
    for name, settings in payload["cases"].items():
        whole = name == "made whole"
        tries: list[dict[str, int]] = []
        for number, shape in enumerate((SMALL, LARGE, LARGE)):
            folder = Path(payload["tmp"]) / f"{name}-{number}"
            strategy = make_strategy(rank, world, {"engine": "torch", **settings})
            tries.append({"start": growth(prepared, strategy, shape, whole)})
            if not whole:
                tries[-1]["export"] = growth(exported, strategy, folder / "model")
            if name == "zero3":
                tries[-1]["load"] = saved_and_loaded(strategy, folder)
            strategy.local.data_parallel.close(failed=True)
        found[name] = {what: min(tries[1][what], tries[2][what]) for what in tries[1]}
    torch.distributed.destroy_process_group()
    return found
