"""Strategies side by side: 2 and 4 ranks, on loopback and between network namespaces whose links are limited by tbf.

usage (root, Linux): unshare --net python benchmarks/strategies.py [--seconds 30] [--ranks 2 4]
[--links loopback 1gbit 200mbit]     (--links alone: draw the report again from what was measured)
Writes benchmarks/results/strategies_2core_<yyyymm>.md and .json. Each rank is a process with one thread on a core of
its own where there are enough; between namespaces every rank has its own, joined by a bridge, each end of each link
limited on the way out.

Ours and bare code take turns in the same processes, in blocks of steps between two barriers, ours bare bare ours: what
slows the machine for longer than a block hits both. What is compared are such pairs of neighbours. Their ratio's middle
half is averaged, and an interval of 95 % is had by drawing pairs with replacement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SHARDED = {0: "ddp", 1: "zero1 (torch)", 3: "zero3"}  # measured with accumulation and in bf16, too
PIPE = {"engine": "torch", "micro_batches": 8, "schedule": "1f1b"}


def cases(world: int) -> dict[str, dict[str, Any]]:
    torch = {"engine": "torch"}
    return {
        "horovod": {"engine": "horovod"},
        "ddp": {"engine": "torch"},
        "zero1 (torch)": {"engine": "torch", "zero": 1},
        "zero1 (horovod)": {"engine": "horovod", "zero": 1},
        "zero2": {"engine": "torch", "zero": 2},
        "zero3": {"engine": "torch", "zero": 3},
        "1f1b": {**PIPE, "pp": world},
        "zero-bubble": {**PIPE, "pp": world, "schedule": "zero-bubble"},
        "tensor": {"engine": "torch", "tp": world},
        "context": {"engine": "torch", "cp": world},
        "horovod, accumulate 4": {"engine": "horovod", "accumulate": 4},
        **{f"{name}, accumulate 4": {**torch, "accumulate": 4, "zero": level} for level, name in SHARDED.items()},
        **{f"{name}, bf16": {**torch, "precision": "bf16", "zero": level} for level, name in SHARDED.items()},
    }


def sh(*words: str) -> None:
    subprocess.run(words, check=True)


class Namespaces:
    """One network namespace per rank (or one for all), held by a sleeping process each; gone with `close`."""

    def __init__(self, world: int, link: str, burst: str = "256kb") -> None:
        self.shared, self.burst = link == "loopback", burst
        self.holders = [
            subprocess.Popen(["unshare", "--net", "--uts", "sleep", "100000"])
            for _ in range(1 if self.shared else world)
        ]
        time.sleep(0.5)
        for rank, holder in enumerate(self.holders):
            self._inside(holder, "ip", "link", "set", "lo", "up")
            if not self.shared:
                self._join(rank, holder, link)

    @staticmethod
    def _inside(holder: Any, *words: str) -> None:
        sh("nsenter", "--net", "--uts", "--target", str(holder.pid), *words)

    def _join(self, rank: int, holder: Any, rate: str) -> None:
        if rank == 0:
            sh("ip", "link", "add", "ring", "type", "bridge")
            sh("ip", "link", "set", "ring", "up")
        sh("ip", "link", "add", f"host{rank}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        sh("ip", "link", "set", f"host{rank}", "master", "ring", "up")
        self._inside(holder, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
        self._inside(holder, "ip", "link", "set", "eth0", "up")
        # Horovod 0.28.1 takes the given interface for its first context only; its ring resolves the hostname
        self._inside(holder, "hostname", f"10.77.0.{rank + 1}")
        self._inside(
            holder,
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            self.burst,
            "latency",
            "400ms",
        )

    def command(self, rank: int, words: list[str]) -> list[str]:
        holder = self.holders[0 if self.shared else rank]
        return ["nsenter", "--net", "--uts", "--target", str(holder.pid), *words]

    def close(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.wait()
        if not self.shared:
            subprocess.run(["ip", "link", "del", "ring"], check=False)


def environment(rank: int, world: int, shared: bool) -> dict[str, str]:
    first, interface = ("127.0.0.1", "lo") if shared else ("10.77.0.1", "eth0")
    local = {"LOCAL_RANK": rank, "LOCAL_SIZE": world, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    if not shared:
        local = {"LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": world}
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": first,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": interface,
        "BENCHMARK_SHARED_INTERFACE": str(int(shared)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "localhost" if shared else f"host{rank}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": first,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29501",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(world),
        **{f"HOROVOD_{key}": str(value) for key, value in local.items()},
    }


STORE = (
    "from horovod.runner.http.http_server import RendezvousHTTPServer, RendezvousHandler\n"
    "RendezvousHTTPServer(('0.0.0.0', 29501), RendezvousHandler, False).serve_forever()\n"
)


def run(world: int, link: str, seconds: float, only: list[str]) -> list[dict[str, Any]]:
    """Every case on one kind of link."""
    spaces = Namespaces(world, link)
    folder = Path(tempfile.mkdtemp())
    chosen = {name: case for name, case in cases(world).items() if not only or name in only}
    (folder / "cases.json").write_text(json.dumps(chosen))
    words = [
        sys.executable,
        str(HERE / "strategies_rank.py"),
        str(folder / "cases.json"),
        str(folder / "out.json"),
        str(seconds),
    ]
    store = subprocess.Popen(spaces.command(0, [sys.executable, "-c", STORE]))
    time.sleep(3)
    ranks = [
        subprocess.Popen(spaces.command(rank, words), env=environment(rank, world, spaces.shared))
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.wait(timeout=1200)
        return list(json.loads((folder / "out.json").read_text()))
    finally:
        for process in [*ranks, store]:
            process.kill()
            process.wait()
        spaces.close()


Block = dict[str, list[float]]  # ours, bare -> wall and CPU seconds per step
Interval = tuple[float, float, float]  # the value, and between what it lies
OURS_AT_MOST = 1.02
DRAWS = 4000


def middle_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis: nearly as sharp as the mean, nearly as deaf to outliers as the
    median."""
    ordered = np.sort(values, axis=-1)
    cut = values.shape[-1] // 4
    mean: np.ndarray = ordered[..., cut : values.shape[-1] - cut].mean(axis=-1)
    return mean


def ratio(parts: list[list[Block]], what: int) -> Interval:
    """Ours over bare of wall (0) or CPU (1) seconds with its 95 % interval; of several parts, their geometric mean."""
    random = np.random.default_rng(0)
    logs = [np.log([block["ours"][what] / block["bare"][what] for block in blocks]) for blocks in parts]
    drawn = [middle_mean(random.choice(each, (DRAWS, len(each)))) for each in logs]
    low, high = np.quantile(np.mean(drawn, axis=0), [0.025, 0.975])
    return float(np.exp(np.mean([middle_mean(each) for each in logs]))), float(np.exp(low)), float(np.exp(high))


def judged(interval: Interval) -> str:
    return "{:.3f} ({:.3f}-{:.3f}) ".format(*interval) + verdict(interval)


def verdict(interval: Interval) -> str:
    """Whether ours costs at most 2 % more than bare code."""
    _, low, high = interval
    return "met" if high <= OURS_AT_MOST else "missed" if low > OURS_AT_MOST else "undecided"


def cells(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    blocks = result["blocks"]
    row = [result["case"], result["engine"]]
    row += [f"{np.median([block[code][0] for block in blocks]):.3f}" for code in ("ours", "bare")]
    row += [str(len(blocks)), *(judged(ratio([blocks], what)) for what in (0, 1))]
    row += [f"{result[key] / 1e6:.2f}" for key in ("sent_bytes", "planned_bytes", "bare_sent_bytes")]
    row.append(f"{result['memory_bytes'] / 1e6:.1f}")
    row.append(f"{result['hidden_share']:.0%}" if "hidden_share" in result else "-")
    row.append("{:.2f} ({:.2f})".format(*result["bubble"]) if result["bubble"][0] is not None else "-")
    return row


def as_table(lines: list[list[str]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])


def table(results: list[dict[str, Any]]) -> str:
    names = ["strategy", "engine", "step s", "bare s", "pairs", "ours / bare", "the same in CPU time"]
    names += ["MB sent per rank and step", "formula MB", "bare MB", "memory MB", "hidden", "bubble (schedule's)"]
    return as_table([names, *(cells(result) for result in results)])


def together(found: dict[str, Any]) -> str:
    """Each strategy over all parts, whose own verdicts on wall time are counted beside."""
    lines = [["strategy", "parts: met, undecided, missed", "ours / bare", "the same in CPU time"]]
    by_case: dict[str, list[list[Block]]] = {}
    for part in found.values():
        for result in part["results"]:
            by_case.setdefault(result["case"], []).append(result["blocks"])
    for case, parts in by_case.items():
        own = [verdict(ratio([blocks], 0)) for blocks in parts]
        counts = ", ".join(str(own.count(kind)) for kind in ("met", "undecided", "missed"))
        lines.append([case, f"{len(parts)}: {counts}", *(judged(ratio(parts, what)) for what in (0, 1))])
    return as_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30, help="of turns per case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="*", default=["loopback", "1gbit", "200mbit"])
    parser.add_argument("--cases", nargs="*", default=[], help="only these; default all")
    arguments = parser.parse_args()
    target = HERE / "results" / f"strategies_2core_{time.strftime('%Y%m')}"
    found: dict[str, Any] = {}  # cases measured before stay in their parts, those measured now replace them
    if target.with_suffix(".json").exists():
        found = json.loads(target.with_suffix(".json").read_text())
    for world in arguments.ranks:
        for link in arguments.links:
            began, busy_s, own_s = time.monotonic(), machine_busy_s(), children_s()
            results = run(world, link, arguments.seconds, arguments.cases)
            others_s = machine_busy_s() - busy_s - (children_s() - own_s)
            others = max(0.0, others_s) / (time.monotonic() - began) / (os.cpu_count() or 1)
            now = {"others_share": others, "load": os.getloadavg()[1], "results": results}
            name = f"{world} ranks, {link}"
            found[name] = merged(found.get(name), now, list(cases(world)))
            target.with_suffix(".json").write_text(json.dumps(found))
    target.with_suffix(".md").write_text(report(found))


def merged(before: dict[str, Any] | None, now: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """A part with the cases measured now in place of those measured before, and the worse of what else ran."""
    if before is None:
        return now
    by_case = {result["case"]: result for part in (before, now) for result in part["results"]}
    whole = len(now["results"]) == len(by_case)
    worse = {key: now[key] if whole else max(before[key], now[key]) for key in ("others_share", "load")}
    return {**worse, "results": [by_case[name] for name in order if name in by_case]}


def machine_busy_s() -> float:
    """CPU seconds this machine has worked since it started, interrupts and stolen time included."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    """CPU seconds of the ranks that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(found: dict[str, Any]) -> str:
    import torch

    head = (
        f"# Strategies on {os.cpu_count()} cores\n\n`unshare --net python benchmarks/strategies.py`, "
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, one thread per rank, each rank "
        "bound to a core (two to one with four ranks). GPT of 2 M parameters (vocab 1024, width 192, 4 layers), 64 "
        "tokens, 8 rows per rank, AdamW, clipping. Ours and bare code for the same strategy take turns in the same "
        "processes, in blocks of steps between two barriers (ours bare bare ours), each on a model of its own. `ours / "
        "bare`: mean over the middle half of the pairs' ratios, its 95 % interval by bootstrap over the pairs, and "
        "whether ours costs at most 2 % more: met when the whole interval says so, missed when none of it does. CPU "
        "time is that of all ranks and all their threads.\n\n"
        "Bare code (`strategies_bare.py`) shares the model with ours and nothing else: horovod is its "
        "DistributedOptimizer, ddp torch's DistributedDataParallel beside our ring over torch's all-reduce, zero 1-3 "
        "fully_shard with an all-to-all in place of Gloo's reduce-scatter, zero1 (horovod) flat buckets with Horovod's "
        "own reduce-scatter and all-gather, 1f1b and zero-bubble torch's schedules over the same cut, tensor torch's "
        "styles by hand, context an all-to-all around attention under DDP. Both end a few steps at the same loss. With "
        "accumulate 4 a pass has 2 rows. `hidden`: share of the all-reduce's time alone that the step does not show. "
        "All AdamW kernels are fused ones. No GPU was at hand.\n\n"
        "Where a rank waits for Horovod ours sleeps and bare code spins, hence its CPU time. A pipeline's measured "
        "bubble holds what its messages make it wait, and its stages are not quite equal.\n"
    )
    parts = [
        f"\n## {name}\n\nAll but the ranks took {part['others_share']:.0%} of the cores; load average "
        f"over the last 5 minutes {part['load']:.1f}.\n\n{table(part['results'])}\n"
        for name, part in found.items()
    ]
    if any(part["others_share"] > 0.1 for part in found.values()):
        head += (
            "\nWhere other work, the kernel's network and the host together took more than 10 % of the cores (see each "
            "part), step times and `hidden` are weaker evidence; bytes and memory are unaffected.\n"
        )
    head += f"\n## All parts together\n\nGeometric mean over the parts below.\n\n{together(found)}\n"
    return head + "".join(parts)


if __name__ == "__main__":
    main()
