"""How long training stands still for a checkpoint, beside the copy to host memory that it cannot do without.

usage: python benchmarks/checkpoint_stall.py [--megabytes 400] [--saves 7] [--out FILE]

One process on the CPU, an AdamW-shaped state (parameters and two moments). Prints JSON: medians over the saves after
the first, which also allocates the host buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer


def state_of(megabytes: int) -> dict[str, Any]:
    count = megabytes * 1_000_000 // (3 * 4 * 1024 * 1024)
    tensors = {f"layer{i}": torch.randn(1024, 1024) for i in range(max(count, 1))}
    moments = {name: {"exp_avg": t.clone(), "exp_avg_sq": t.clone(), "step": 1} for name, t in tensors.items()}
    return {"model": tensors, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(tensors)}]}}


def plain_copy(state: dict[str, Any]) -> Callable[[], float]:
    """Seconds to copy every tensor into memory that exists already: the floor of any stall."""
    sources = [*state["model"].values()]
    sources += [moment[key] for moment in state["optimizer"]["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    targets = [torch.empty_like(source).fill_(0) for source in sources]

    def run() -> float:
        began = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return time.perf_counter() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    state = state_of(arguments.megabytes)
    copy, copies, rows = plain_copy(state), [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(open_storage(folder))
        for step in range(1, arguments.saves + 2):
            copies.append(copy())  # in turns, so that a busy machine slows both
            checkpointer.save(step, state, {"step": step})
            checkpointer.wait()
            rows.append(vars(checkpointer.times).copy())
        info = checkpointer.latest()
        assert info is not None
        size = info.bytes
    copy_s = statistics.median(copies[1:])
    medians = {key: statistics.median(row[key] for row in rows[1:]) for key in ("stall_s", "copy_s", "write_s")}
    result = {
        "state_bytes": size,
        "plain_copy_s": copy_s,
        **medians,
        "stall_over_copy": medians["stall_s"] / copy_s,
        "write_bytes_per_s": size / medians["write_s"],
        "load_average": os.getloadavg()[0],
        "torch": str(torch.__version__),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
