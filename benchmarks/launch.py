"""Seconds from the call to a formed ring of two ranks: ours, horovod.spark.run, PySpark's TorchDistributor.

Each launcher runs in turn in one Spark session, several rounds; what is timed ends on rank 0 when its first
all-reduce has returned. Cold is the same for all three: every call starts new processes for its ranks, which import
torch and Horovod from nothing, while Spark's own Python workers stay from call to call. A launcher's first call in a
session is slower, as modules and archives are loaded for the first time; it is shown beside the median of all calls,
and compared with the others' first. Ours is timed warm too: a further launch of the same group.

With --connect only ours is timed, in a classic session of local[2] and in one of Spark Connect whose server is in the
same process, each in a process of its own.

    python benchmarks/launch.py --connect [--rounds 5] [--write FILE]
    python benchmarks/launch.py [--rounds 5] [--masters local[2] local-cluster[2,1,1024]] [--write FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import measured_with, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TARGETS = {"horovod.spark.run": 0.4, "TorchDistributor": 0.3}
CONNECT_TARGET = 1.2
CLASSIC, CONNECT = "classic", "Spark Connect"


def horovod_ring(ctx: Any = None) -> float:
    """Time of day at which this rank's first all-reduce has returned."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    formed = time.time()
    hvd.shutdown()
    return formed


def torch_ring(ctx: Any = None) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
    formed = time.time()
    dist.destroy_process_group()
    return formed


def measure(master: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per launcher and round, in one session."""
    import cloudpickle
    import horovod.spark
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    from sparkring.pipelines.launch.barrier import LaunchOptions, barrier_group, run_barrier
    from sparkring.training.launch.job import JobSpec

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for key in ("spark.driver.host", "spark.driver.bindAddress"):
        builder = builder.config(key, "127.0.0.1")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda i: i).collect()  # Python workers are up

    def ours(job: JobSpec) -> Callable[[], float]:
        return lambda: run_barrier(spark, job, 2, lambda event: None).result

    found: dict[str, list[float]] = {}

    def clock(name: str, call: Callable[[], float]) -> None:
        began = time.time()
        found.setdefault(name, []).append(call() - began)

    for _ in range(rounds):
        clock("ours, Horovod ring, cold", ours(JobSpec(horovod_ring)))
        clock("horovod.spark.run", lambda: horovod.spark.run(horovod_ring, num_proc=2, verbose=0, stdout=None)[0])
        clock("ours, torch ring, cold", ours(JobSpec(torch_ring, preload=("torch",))))
        clock("TorchDistributor", lambda: TorchDistributor(2, local_mode=False, use_gpu=False).run(torch_ring))
        with barrier_group(spark, 2, ("torch", "horovod.torch"), LaunchOptions()) as group:
            group.run(JobSpec(horovod_ring), 2, lambda event: None)
            for name, entry in (("Horovod", horovod_ring), ("torch", torch_ring)):
                clock(f"ours, {name} ring, warm", lambda e=entry: group.run(JobSpec(e), 2, lambda event: None).result)
    spark.stop()
    return found


def measure_ours(session: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of our launches per round, in a session of this kind on local[2]."""
    import cloudpickle
    from pyspark.sql import SparkSession

    from sparkring.pipelines.launch.barrier import LaunchOptions, barrier_group, run_barrier
    from sparkring.training.launch.job import JobSpec

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    builder = SparkSession.builder
    builder = builder.remote("local[2]") if session == CONNECT else builder.master("local[2]")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.range(2, numPartitions=2).mapInArrow(lambda batches: batches, "id long", barrier=True).collect()
    job, found = JobSpec(torch_ring, preload=("torch",)), dict[str, list[float]]()
    for _ in range(rounds):
        began = time.time()
        formed = run_barrier(spark, job, 2, lambda event: None).result
        found.setdefault("cold", []).append(formed - began)
        with barrier_group(spark, 2, ("torch",), LaunchOptions()) as group:
            group.run(job, 2, lambda event: None)
            began = time.time()
            found.setdefault("warm", []).append(group.run(job, 2, lambda event: None).result - began)
    return found


def connect_table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "| launch | session | median s | min s | max s | first s | Connect / classic |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, classic in found[CLASSIC].items():
        ratio = statistics.median(found[CONNECT][name]) / statistics.median(classic)
        for session in (CLASSIC, CONNECT):
            values = found[session][name]
            seconds = (statistics.median(values), min(values), max(values), values[0])
            shown = f"{ratio:.2f}" + f" (target {CONNECT_TARGET})" * (name == "cold") if session == CONNECT else ""
            lines.append(f"| {name} | {session} | {' | '.join(f'{s:.2f}' for s in seconds)} | {shown} |")
    return "\n".join(lines)


def table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "| master | launcher | median s | min s | max s | first call s | ours / it: medians | first calls |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for master, times in found.items():
        middle = {name: statistics.median(values) for name, values in times.items()}
        peers = {"horovod.spark.run": "ours, Horovod ring, cold", "TorchDistributor": "ours, torch ring, cold"}
        for name, values in times.items():
            ratios = " | "
            if name in peers:
                ours, ours_first = middle[peers[name]], times[peers[name]][0]
                ratios = f"{ours / middle[name]:.2f} (target {TARGETS[name]}) | {ours_first / values[0]:.2f}"
            seconds = " | ".join(f"{s:.2f}" for s in (middle[name], min(values), max(values), values[0]))
            lines.append(f"| {master} | {name} | {seconds} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--masters", nargs="+", default=["local[2]", "local-cluster[2,1,1024]"])
    parser.add_argument("--write", type=Path, help="result file")
    parser.add_argument("--connect", action="store_true", help="compare a session of Spark Connect with a classic one")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if args.one:
        timed = measure_ours if args.one in (CLASSIC, CONNECT) else measure
        print("RESULT " + json.dumps(timed(args.one, args.rounds)), flush=True)
        os._exit(0)  # what TorchDistributor and horovod leave behind must not keep us
    found = {}
    for master in [CLASSIC, CONNECT] if args.connect else args.masters:
        command = [sys.executable, __file__, "--one", master, "--rounds", str(args.rounds)]
        out = subprocess.run(command, capture_output=True, text=True)
        line = next((x for x in out.stdout.splitlines() if x.startswith("RESULT ")), None)
        if line is None:
            sys.exit(f"{master}: rc {out.returncode}\n{out.stdout[-3000:]}\n{out.stderr[-6000:]}")
        found[master] = json.loads(line.removeprefix("RESULT "))
    if args.connect:
        text = (
            f"# Launch through Spark Connect: from the call to a formed ring of two ranks\n\n"
            f"{measured_with('pyspark', 'torch')}. Cold: new processes import torch; warm: another launch of a group. "
            f"Both kinds of session in one run, one after the other.\n\n{connect_table(found)}\n"
        )
        return publish(text, args.write)
    text = (
        f"# Launch: from the call to a formed ring of two ranks\n\n"
        f"{measured_with('pyspark', 'horovod', 'torch')}. Cold: every call starts new "
        f"processes that import torch and Horovod from nothing, for all three alike. Medians are over all calls, each "
        f"launcher's first in the session included.\n\n"
        f"{table(found)}\n\nSeconds of every round:\n\n```json\n{json.dumps(found, indent=1)}\n```\n"
    )
    publish(text, args.write)


if __name__ == "__main__":
    main()
