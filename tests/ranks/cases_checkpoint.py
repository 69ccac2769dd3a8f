"""Ranks that save and load checkpoints, and one that dies.

save: train a sharded (FSDP2) model two steps and checkpoint it. load: load into another seed's model and write the
whole state beside. full: rank 1's disk is full once. dies: rank 1 is killed while writing. other: ranks disagree.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint import writer
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.format import CheckpointError
from sparkring.training.checkpoint.peers import torch_peers


def build(seed: int, world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).double()
    if world > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        data = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5) + step  # the same on every rank
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parts = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {
        **{name: t.tolist() for name, t in parts[0].items()},
        **{f"{n}.{k}": float(v.sum()) for n, row in parts[1].get("state", {}).items() for k, v in row.items()},
    }


def forked(rank: int, world: int, payload: dict[str, Any]) -> list[int]:
    """Fork a world of ranks, of which one may die and the others must end; their exit codes."""
    children = []
    for number in range(payload["world"]):
        pid = os.fork()
        if pid == 0:
            try:
                run(payload["mode"], payload["folder"], number, payload["world"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # with a dead peer, leaving the group in order could wait for it
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def run(mode: str, folder: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{mode}-{world}", rank=rank, world_size=world)
    checkpointer = Checkpointer(open_storage(f"{folder}/checkpoints"), torch_peers(timedelta(seconds=60)))
    model, optimizer = build(1 if mode == "load" else 0, world)
    train(model, optimizer, 1 if mode == "load" else 2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    answer: dict[str, Any] = {}
    if mode == "load":
        info = checkpointer.latest()
        assert info is not None
        restored = checkpointer.load(info, state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        answer = {"trainer": restored.trainer, "rank_state": restored.rank_state, "whole": whole(model, optimizer)}
        answer["random"] = torch.rand(2).tolist() if restored.rank_state else None
    elif mode == "save":
        torch.manual_seed(100 + rank)
        checkpointer.save(2, state, {"cursor": 8}, rank_state={"rank": rank})
        checkpointer.wait()
        answer = {"whole": whole(model, optimizer), "random": torch.rand(2).tolist()}
    elif mode == "full":
        real = writer.write_file

        def full(*args: Any) -> Any:
            raise OSError(28, "No space left on device")

        writer.write_file = full if rank == 1 else real  # type: ignore[assignment]
        checkpointer.save(1, state, {})
        answer["errors"] = []
        try:
            checkpointer.wait()
        except CheckpointError as error:
            answer["errors"].append(str(error))
        info = checkpointer.latest()
        answer["after_error"] = info.step if info else None
        writer.write_file = real
        checkpointer.save(2, state, {})
        info = checkpointer.latest()
        answer["after_good"] = info.step if info else None
    elif mode == "dies":
        checkpointer.save(1, state, {})
        checkpointer.wait()
        if rank == 1:
            writer.write_file = lambda *a: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        checkpointer.save(2, state, {})
        try:
            checkpointer.wait()
            answer["error"] = None
        except Exception as error:
            answer["error"] = type(error).__name__
    elif mode == "other":
        try:
            checkpointer.save(rank, state, {})
        except CheckpointError as error:
            answer["error"] = str(error)
    with open(f"{folder}/{mode}-{world}-{rank}.json", "w") as file:
        json.dump(answer, file)
