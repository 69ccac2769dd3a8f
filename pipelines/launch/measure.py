"""`sparkring plan measure`: measure the machines a recipe would run on, as a cluster of conf/clusters.

One rank per slot, in the barrier stage that training uses. As many ranks of a host measure at once as have a device or
cores of their own, so that each has its share of the memory's bandwidth. Links are measured as by netcheck, and on CPUs
by collectives in turns with products (training/worker/exchange_rate.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from pyspark.sql import SparkSession

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.clusters.cluster import (
    GIB,
    GIGA,
    MICRO,
    Cluster,
    Device,
    Measurement,
    Network,
    Node,
    Reached,
    StorageSpeed,
)
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.storage import open_storage
from sparkring.pipelines.launch.barrier import launch_options, run_barrier
from sparkring.pipelines.launch.netcheck import NetReport, join_ranks, measure_links, measuring_job, summarize
from sparkring.training.data.request import DataRank
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.planner.timing.operations import trace_operations
from sparkring.training.planner.timing.roofline import BACKWARD_ATTENTION, BACKWARD_MEMORY, OperationTable
from sparkring.training.worker.exchange_rate import exchange_cost

if TYPE_CHECKING:
    from sparkring.training.worker.exchange_rate import ExchangeCost

MOST_SHARE = 1.0
MOST_RANKS = 1 << 20
MEASURED_ERROR = 0.22  # the worst of 36 layouts on measured CPUs (benchmarks/results/plan_here_2core_202611.md)


def measure_machines(spark: SparkSession, config: RunConfig, dataset: tuple[str, DatasetManifest] | None) -> Cluster:
    """Measure on all ranks of a barrier stage. Raises what a launch raises.

    `dataset`: its folder and manifest, if it exists; else the reader is not measured.
    """
    job = measuring_job("sparkring.pipelines.launch.measure:measure", payload_of(config, dataset))
    results = run_barrier(spark, job, config.launch.world, options=launch_options(config.launch)).results
    return cluster_of(summarize([each["links"] for each in results]), results, dataset[0] if dataset else "")


def payload_of(config: RunConfig, dataset: tuple[str, DatasetManifest] | None) -> dict[str, Any]:
    """Return the payload of the ranks: where checkpoints are stored, and what to read."""
    payload: dict[str, Any] = {"storage": config.storage.runs, "reader": None}
    if dataset is not None and config.data.reader == "native" and config.data.mix is None:
        folder, manifest = dataset
        payload["reader"] = {
            "dataset": folder,
            "split": "train",
            "columns": pick_columns(manifest, config.model).read,
            "config": config.data.model_dump(mode="json"),
            "batch": config.train.global_batch,
        }
    return payload


def measure(ctx: WorkerContext) -> dict[str, Any]:
    """Measure links, products, memory, operators, the host, storage and the reader, on every rank."""
    from sparkring.training.worker import hardware

    device, info = join_ranks(ctx), ctx.rank_info
    found: dict[str, Any] = {"links": measure_links(ctx, device) | {"codecs": []}, "type": device.type}
    facts = hardware.device_facts(device, info.local_size)
    measuring = gather_measuring(info, ranks_at_once(facts, device.type == "cuda"))
    for turn in range(1 + max(each.turn for each in measuring)):  # more ranks than cores would measure each other
        dist.barrier()
        if measuring[ctx.rank].turn == turn:
            found |= measure_device(ctx, device)
    for turn in range(1 + max(each.turn for each in measuring)):
        dist.barrier()  # ranks share the host's memory: those of a turn measure it at once
        if measuring[ctx.rank].turn == turn:
            found |= measure_host(ctx, device)
    dist.barrier()
    if device.type == "cpu":
        ctx.heartbeat(0, "exchanges")
        found["exchanges"] = {
            name: asdict(cost) for name, cost in exchange_costs(measuring).items() if cost is not None
        }
    dist.barrier()
    ctx.heartbeat(0, "storage")
    found["storage"] = hardware.storage_rates(open_storage(ctx.payload["storage"])) if info.local_rank == 0 else None
    dist.barrier()
    found["rows_per_s"] = 0.0
    if (reader := ctx.payload["reader"]) is not None:
        ctx.heartbeat(0, "reader")
        settings = {**reader, "config": DataConfig.model_validate(reader["config"])}
        found["rows_per_s"] = hardware.reader_rows_per_s(**settings, rank=DataRank(ctx.rank, ctx.world_size))
        found["reader_threads"] = settings["config"].threads or 1
    dist.destroy_process_group()
    return found | facts


def ranks_at_once(facts: Mapping[str, Any], is_gpu: bool) -> int:
    """Return how many ranks can measure at once: all on GPUs, else as many as have cores."""
    return MOST_RANKS if is_gpu else max(1, int(facts["cores"] // facts["processors"]))


def measure_device(ctx: WorkerContext, device: Any) -> dict[str, Any]:
    """Measure products, memory and operators on this rank."""
    from sparkring.training.worker import hardware

    ctx.heartbeat(0, "matrix products")
    rates = hardware.product_rates(device)
    found: dict[str, Any] = {
        "products": {dtype: {size: asdict(each) for size, each in of.items()} for dtype, of in rates.items()}
    }
    ctx.heartbeat(0, "memory")
    if device.type == "cpu":
        found["attention"] = asdict(hardware.attention_rate(device, BACKWARD_ATTENTION))
    found["memory"] = asdict(hardware.memory_rate(device, BACKWARD_MEMORY))
    layers = trace_operations(*hardware.small_model(), [], {}).layers
    starts = OperationTable(operation for operations in layers.values() for operation in operations).starts
    found["operator_s"] = hardware.operator_seconds(device, starts)
    return found


def measure_host(ctx: WorkerContext, device: Any) -> dict[str, Any]:
    """Measure the host's memory, an optimizer's step there, and copies between it and the device, on this rank."""
    from sparkring.training.worker import hardware

    ctx.heartbeat(0, "host memory")
    return {
        "host": asdict(hardware.host_memory_rate()),
        "host_step": asdict(hardware.host_step_rate()),
        "copies": {direction: asdict(each) for direction, each in hardware.host_copy_rates(device).items()},
    }


class MeasuringRank(NamedTuple):
    """A rank's host, its rank there, and how many ranks of the host measure at once."""

    host: int
    local_rank: int
    at_once: int

    @property
    def turn(self) -> int:
        return self.local_rank // self.at_once


def gather_measuring(info: RankInfo, at_once: int) -> list[MeasuringRank]:
    """Gather `MeasuringRank` of each rank, by rank. Collective."""
    found: list[Any] = [None] * info.world_size
    dist.all_gather_object(found, MeasuringRank(info.node_rank, info.local_rank, at_once))
    return found


def exchange_groups(measuring: Sequence[MeasuringRank]) -> dict[str, list[list[int]]]:
    """Group the ranks that exchange: within a host with enough cores, on a crowded host, between hosts."""
    hosts = sorted({each.host for each in measuring})
    on = {host: [rank for rank, each in enumerate(measuring) if each.host == host] for host in hosts}
    crowded = [host for host in hosts if any(measuring[rank].turn for rank in on[host])]
    return {
        "link": [[rank for rank in on[host] if measuring[rank].turn == 0] for host in hosts],
        "turns": [on[host] for host in crowded],
        "network": [[rank for rank, each in enumerate(measuring) if each.local_rank == 0]],
    }


def exchange_costs(measuring: Sequence[MeasuringRank]) -> dict[str, ExchangeCost | None]:
    """Measure exchanges of ranks on CPUs, by kind of group; None for those that this rank is not in. Collective."""
    found: dict[str, ExchangeCost | None] = {}
    for name, groups in exchange_groups(measuring).items():
        made = [dist.new_group(ranks) for ranks in groups if len(ranks) > 1]
        mine = next((group for group in made if dist.get_rank(group) >= 0), None)
        dist.barrier()
        found[name] = exchange_cost(mine) if mine is not None else None
    return found


def cluster_of(net: NetReport, results: Sequence[dict[str, Any]], dataset: str = "") -> Cluster:
    """Make a cluster of what all ranks have measured: of rates the median rank's, of links the slowest pair's."""
    hosts = list(dict.fromkeys(net.hosts))
    first = results[0]
    peaks = {
        dtype: median(max(rate["per_s"] for rate in each["products"][dtype].values()) for each in results)
        for dtype in first["products"]
    }
    rates = [r for each in results for of in each["products"].values() for r in of.values()]
    others = [each[name] for each in results for name in ("memory", "host", "host_step")]
    copies = [rate for each in results for rate in each["copies"].values()]
    spread = max(rate["spread"] for rate in [*rates, *others, *copies])
    memory = median(each["memory"]["per_s"] for each in results)
    read, written = (median(each["storage"][i] for each in results if each["storage"]) for i in (0, 1))
    is_cpu = first["type"] == "cpu"
    host = host_rates(results, len(hosts))
    links = exchanged_links(results, memory) if is_cpu else paired_links(net, memory)
    starts = {"kernel_us" if is_cpu else "launch_us": median(each["operator_s"] for each in results) / MICRO}
    reached = {"matmul": MOST_SHARE, "memory": MOST_SHARE, "kernel_us": 0.0, "launch_us": 0.0, **starts}
    reached |= links.reached | {"host": host.step_share}
    if is_cpu:
        reached["attention"] = median(each["attention"]["per_s"] for each in results) / peaks["fp32"]
        reached["depth"] = median(depth_of(each["products"]["fp32"]) for each in results)
    when = datetime.now(UTC).date()
    return Cluster(
        description=f"measured by sparkring plan measure on {when}: {count_of(len(results), 'rank')} on "
        f"{', '.join(hosts)}",
        device=Device(
            name=first["name"],
            type=first["type"],
            peak_tflops={dtype: rounded(peak / 1e12) for dtype, peak in peaks.items()},
            memory_gib=rounded(first["memory_bytes"] / GIB),
            memory_gb_per_s=rounded(memory / GIGA),
            processors=int(first["processors"]),
        ),
        node=Node(
            devices=-(-len(results) // len(hosts)),
            link_gb_per_s=rounded(links.link.bytes_per_s / GIGA),
            link_latency_us=rounded(links.link.latency_s / MICRO),
            turn_us=rounded(links.turn_s / MICRO),
            cores=int(first["cores"]),
            memory_gib=0.0 if is_cpu else rounded(first["host_bytes"] / GIB),
            memory_gb_per_s=rounded(host.memory_per_s / GIGA),
            copy_gb_per_s=rounded(host.copy_per_s / GIGA),
        ),
        network=Network(
            kind="ethernet",
            gbit_per_s=rounded(links.network.bytes_per_s * 8 / GIGA),
            latency_us=rounded(links.network.latency_s / MICRO),
        ),
        storage=StorageSpeed(read_gb_per_s=rounded(read / GIGA), write_gb_per_s=rounded(written / GIGA)),
        error=MEASURED_ERROR if is_cpu else None,
        reached=Reached(**{name: rounded(min(value, most(name))) for name, value in reached.items()}),
        measured=Measurement(
            hosts=hosts,
            ranks=len(results),
            spread=rounded(spread),
            dataset=dataset,
            rows_per_s=rounded(sum(each["rows_per_s"] for each in results)),
            reader_threads=first.get("reader_threads", 1),
        ),
    )


class HostRates(NamedTuple):
    """Memory rates of a machine, in bytes per second.

    Of the machine's memory and of one device's copies; `step_share`: share of the first that an optimizer's step
    reaches.
    """

    memory_per_s: float
    copy_per_s: float
    step_share: float


def host_rates(results: Sequence[dict[str, Any]], hosts: int) -> HostRates:
    """Return memory rates with the maximum of simultaneous ranks; for copies, the slower direction's."""
    first, per_host = results[0], -(-len(results) // hosts)
    copied, step = (median(each[name]["per_s"] for each in results) for name in ("host", "host_step"))
    memory = max(copied, step)
    copies = median(min(rate["per_s"] for rate in each["copies"].values()) for each in results)
    return HostRates(memory * min(per_host, ranks_at_once(first, first["type"] == "cuda")), copies, step / memory)


class Link(NamedTuple):
    latency_s: float
    bytes_per_s: float


class MeasuredLinks(NamedTuple):
    """Within a machine and between machines. turn_s: latency where ranks take turns on too few cores."""

    link: Link
    network: Link
    turn_s: float
    reached: dict[str, float]


def paired_links(net: NetReport, memory: float) -> MeasuredLinks:
    """Return links of GPUs: of the slowest pairs, and the ring's share of their rate.

    `memory`: bytes per second, of one rank alone.
    """
    inside, between = (links_of(net, within) for within in (True, False))
    alone = Link(0.0, memory)
    ring = min(MOST_SHARE, net.ring_bytes_per_s / net.predicted_bytes_per_s) if net.pairs else MOST_SHARE
    return MeasuredLinks(inside or between or alone, between or inside or alone, 0.0, {"link": ring, "network": ring})


def exchanged_links(results: Sequence[dict[str, Any]], memory: float) -> MeasuredLinks:
    """Return links of CPUs for the slowest rank, as measured by exchanges between products.

    `memory`: bytes per second, of one rank alone.
    """
    found: dict[str, Any] = {}
    for name in ("link", "turns", "network"):
        costs = [each["exchanges"][name] for each in results if name in each["exchanges"]]
        found[name] = max(costs, key=lambda cost: cost["latency_s"], default=None)
    shared, per_host = found["turns"], len(results) / len({each["links"]["host"] for each in results})
    near, far = (as_link(found[name]) for name in ("link", "network"))
    if near is None and shared is not None:
        per_core = per_host * results[0]["processors"] / results[0]["cores"]
        near = Link(shared["latency_s"], shared["bytes_per_s"] * per_core)
    farthest = found["network"] or found["link"] or shared
    return MeasuredLinks(
        link=near or far or Link(0.0, memory),
        network=far or near or Link(0.0, memory),
        turn_s=shared["latency_s"] / (per_host - 1) if shared else 0.0,
        reached={"link": MOST_SHARE, "network": MOST_SHARE, "contention": farthest["busy"] if farthest else 1.0},
    )


def as_link(cost: Mapping[str, float] | None) -> Link | None:
    return Link(cost["latency_s"], cost["bytes_per_s"]) if cost else None


def depth_of(rates: Mapping[Any, Mapping[str, float]]) -> float:
    """Estimate the depth at which a product reaches half the peak, from the smallest measured one."""
    smallest = min(rates, key=int)
    peak = max(rate["per_s"] for rate in rates.values())
    return int(smallest) * (peak / rates[smallest]["per_s"] - 1)


def most(name: str) -> float:
    """Return the upper limit of a parameter: 1 for shares."""
    return (
        MOST_SHARE
        if name in ("matmul", "memory", "attention", "link", "network", "contention", "host")
        else float("inf")
    )


def links_of(net: NetReport, within: bool) -> Link | None:
    """Return the slowest pair within a host, or between hosts; None without one."""
    pairs = [pair for pair in net.pairs if (net.hosts[pair.first] == net.hosts[pair.second]) == within]
    if not pairs:
        return None
    return Link(max(pair.latency_s for pair in pairs), min(pair.bytes_per_s for pair in pairs))


def rounded(value: float) -> float:
    """Round to three digits: no measurement has more."""
    return float(f"{value:.3g}")
