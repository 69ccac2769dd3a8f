"""`sparkring netcheck`: measure the network between the hosts where training will run.

One rank per slot. In every round the ranks are paired differently (round-robin tournament), so each pair is measured
alone on its two cables: latency by small messages there and back, bandwidth by large ones in both directions at once.
Then all ranks all-reduce together, which is what training does, and the result is compared with what the slowest pair
predicts. Last, gradient codecs are timed on this machine without the network, which says below which bandwidth each
saves time.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.launch.barrier import LaunchOptions, run_barrier
from sparkring.training.launch.events import OnEvent
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.launch.job import JobSpec

NCCL_LOG = "/tmp/sparkring-nccl-%p.log"  # NCCL puts the process id there
PINGS = 50
TIMEOUT_S = 60.0  # of one collective
SHARES = (1 << 20, 16 << 20)  # bytes; the second gives the bandwidth


@dataclass(frozen=True)
class Pair:
    """Between two ranks: half a round trip, and bytes per second one way while the other way is as busy."""

    first: int
    second: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class CodingCost:
    """Of one gradient of 16 MiB: seconds of coding without any network, and bytes a rank sends."""

    codec: str
    coding_s: float
    sent_bytes: float
    dense_bytes: float  # of an all-reduce without a codec

    @property
    def pays_below(self) -> float:
        """Bytes per second: on a faster network the dense all-reduce takes less time; 0 or less: on any."""
        return (self.dense_bytes - self.sent_bytes) / self.coding_s

    def share_of_dense(self, bytes_per_s: float) -> float:
        """Return the time of an exchange / time of the dense all-reduce at this sending rate."""
        return (self.sent_bytes + self.coding_s * bytes_per_s) / self.dense_bytes


@dataclass(frozen=True)
class NetReport:
    hosts: tuple[str, ...]  # by rank
    transport: str
    pairs: tuple[Pair, ...]
    ring_bytes_per_s: float  # bus bandwidth of an all-reduce over all ranks, as measured
    predicted_bytes_per_s: float  # of the slowest pair: a ring is as fast as its slowest cable
    codecs: tuple[CodingCost, ...] = ()  # of the slowest rank

    def text(self) -> str:
        """Format a table for a terminal."""
        lines = [f"{count_of(len(self.hosts), 'rank')} over {self.transport}"]
        lines += [f"  rank {rank}: {host}" for rank, host in enumerate(self.hosts)]
        lines += [
            f"  {p.first} - {p.second}: {p.latency_s * 1e6:,.0f} us, {p.bytes_per_s * 8 / 1e9:.2f} Gbit/s"
            for p in self.pairs
        ]
        if self.pairs:
            predicted, ring = self.predicted_bytes_per_s * 8 / 1e9, self.ring_bytes_per_s * 8 / 1e9
            lines.append(
                f"ring: {ring:.2f} Gbit/s bus bandwidth measured, {predicted:.2f} predicted from the slowest pair"
            )
        for cost in self.codecs:
            share, coding_ms, gbits = cost.sent_bytes / cost.dense_bytes, cost.coding_s * 1e3, cost.pays_below * 8 / 1e9
            saves = (
                f"saves time below {gbits:,.2f} Gbit/s"
                if gbits > 0
                else f"saves none among {count_of(len(self.hosts), 'rank')}"
            )
            lines.append(
                f"{cost.codec}: {share:.1%} of the bytes, {coding_ms:,.0f} ms of coding per 16 MiB: {saves}; here an "
                f"exchange takes {cost.share_of_dense(self.ring_bytes_per_s):.2f} of the dense ring's time"
            )
        return "\n".join(lines)


def netcheck(
    spark: SparkSession,
    world: int,
    on_event: OnEvent = lambda event: None,
    options: LaunchOptions | None = None,
    compress: CompressConfig | None = None,
) -> NetReport:
    """Measure between all ranks of a barrier stage. Raises what a launch raises.

    Args:
        spark: session of the slots.
        world: number of ranks, one per slot.
        on_event: called with events of the launch.
        options: options of the launch.
        compress: share of top-k and columns of PowerSGD; None for defaults.
    """
    job = measuring_job("sparkring.pipelines.launch.netcheck:measure", (compress or CompressConfig()).model_dump())
    return summarize(run_barrier(spark, job, world, on_event, options=options or LaunchOptions()).results)


def measuring_job(entry: str, payload: dict[str, Any]) -> JobSpec:
    """Specify the measuring job: NCCL logs what it uses into a separate file."""
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,GRAPH", "NCCL_DEBUG_FILE": NCCL_LOG}
    return JobSpec(entry, payload=payload, preload=("torch",), env=env, collective_timeout_s=TIMEOUT_S)


def summarize(results: Sequence[dict[str, Any]]) -> NetReport:
    """Merge every rank's measurements into a report. A pair measured from both ends gets the worse of the two."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, result in enumerate(results):
        for other, latency_s, rate in result["pairs"]:
            key = (min(rank, other), max(rank, other))
            before = found.get(key, (0.0, float("inf")))
            found[key] = (max(before[0], latency_s), min(before[1], rate))
    pairs = tuple(Pair(a, b, *values) for (a, b), values in sorted(found.items()))
    slowest = min((pair.bytes_per_s for pair in pairs), default=0.0)
    ring = min(result["ring_bytes_per_s"] for result in results)
    hosts = tuple(result["host"] for result in results)
    by_codec = zip(*(result["codecs"] for result in results), strict=True)
    codecs = tuple(CodingCost(*max(costs, key=lambda cost: cost[1])) for costs in by_codec)
    return NetReport(hosts, results[0]["transport"], pairs, ring, slowest, codecs)


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """List all pairs of `world` ranks in rounds where no rank is in two pairs (circle method)."""
    circle: list[int | None] = [*range(world)] + ([None] if world % 2 else [])
    count = len(circle)
    found = []
    for _ in range(count - 1):
        pairs = [(circle[i], circle[count - 1 - i]) for i in range(count // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def ring_bandwidth(world: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth, in bytes/s, of an all-reduce of `size` bytes.

    Each link of a ring carries 2 (n-1)/n of them.
    """
    return 2 * (world - 1) / world * size / seconds if world > 1 else 0.0


def measure(ctx: WorkerContext) -> dict[str, Any]:
    """Measure pairs, the ring, and codecs, on every rank. NCCL between GPUs, else Gloo over TCP."""
    import torch.distributed as dist

    from sparkring.training.parallel.data_parallel.coding_cost import CODECS, coding_cost

    device = join_ranks(ctx)
    found = measure_links(ctx, device)
    codecs = []
    for codec in CODECS if ctx.world_size > 1 else ():
        ctx.heartbeat(0, f"codec {codec}")
        dist.barrier()  # all ranks of a host code at once, as in training
        settings = CompressConfig(**{**ctx.payload, "codec": codec})
        codecs.append([codec, *coding_cost(settings, ctx.world_size, device)])
    dist.destroy_process_group()
    return found | {"codecs": codecs}


def join_ranks(ctx: WorkerContext) -> Any:
    """Form the process group of all ranks; return this rank's device."""
    from sparkring.training.parallel.process_groups import start_process_group
    from sparkring.training.worker.device import pick_device

    timeout = timedelta(seconds=TIMEOUT_S)
    device = pick_device("auto", ctx.rank_info, timeout)
    start_process_group(ctx.rank_info, device, timeout)
    return device


def measure_links(ctx: WorkerContext, device: Any) -> dict[str, Any]:
    """Measure every pair of ranks alone, then the ring."""
    import torch
    import torch.distributed as dist

    pairs = []
    for number, matches in enumerate(rounds(ctx.world_size)):
        ctx.heartbeat(number, "pairs")
        mine = next((pair for pair in matches if ctx.rank in pair), None)
        if mine is not None:
            other = mine[0] if mine[1] == ctx.rank else mine[1]
            pairs.append([other, *_pair(ctx.rank, other, device)])
        dist.barrier()
    size = SHARES[-1]
    buffer = torch.zeros(size // 4, device=device)
    dist.all_reduce(buffer)
    _finish(device)  # NCCL's first one, which forms the ring, must not be counted
    began = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(buffer)
    _finish(device)
    seconds = (time.perf_counter() - began) / 3
    log = Path(NCCL_LOG.replace("%p", str(os.getpid())))
    transport = f"Gloo, TCP on {os.environ.get('GLOO_SOCKET_IFNAME', 'the default interface')}"
    if device.type == "cuda":
        transport = nccl_transport(log.read_text(errors="replace") if log.exists() else "")
    log.unlink(missing_ok=True)
    ring = ring_bandwidth(ctx.world_size, size, seconds)
    return {"pairs": pairs, "ring_bytes_per_s": ring, "transport": transport, "host": socket.gethostname()}


def nccl_transport(log: str) -> str:
    """Read from NCCL's log what it uses, best first. It may be one within a host and another between hosts."""
    signs = {
        "NVLink": r"\bNVL\[",
        "RDMA": r"NET/IB",
        "P2P": r"via P2P/",
        "shared memory": r"via SHM/",
        "TCP": r"NET/Socket",
    }
    found = [name for name, sign in signs.items() if re.search(sign, log)]
    return "NCCL: " + (", ".join(found) or "its log does not say what")


def _pair(rank: int, other: int, device: Any) -> tuple[float, float]:
    """Measure (latency in s, bytes per s one way) to `other`, which measures us at the same time."""
    import torch
    import torch.distributed as dist

    small = torch.zeros(1, device=device)
    began = 0.0
    for i in range(PINGS + 5):
        if i == 5:  # the first ones open connections
            began = time.perf_counter()
        if rank < other:
            dist.send(small, other)
            dist.recv(small, other)
        else:
            dist.recv(small, other)
            dist.send(small, other)
    _finish(device)
    latency_s = (time.perf_counter() - began) / PINGS / 2
    rate = 0.0
    for size in SHARES:
        out, back = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)
        began = time.perf_counter()
        operations = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, back, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _finish(device)
        rate = size / (time.perf_counter() - began)
    return latency_s, rate


def _finish(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
