"""`sparkring plan measure`: measure the machines a recipe would run on, as a cluster of conf/clusters.

One rank per slot, in the barrier stage that training uses. All ranks of a host measure at once, as they train: each has
its share of cores and of the memory's bandwidth. Links are measured as by netcheck.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from pyspark.sql import SparkSession

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
from sparkring.pipelines.launch.barrier import launch_options, run_barrier
from sparkring.pipelines.launch.netcheck import NetReport, join_ranks, measure_links, measuring_job, summarize
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.model.recipe_model import pick_columns

MOST_SHARE = 1.0


def measure_machines(spark: SparkSession, config: RunConfig, dataset: tuple[str, DatasetManifest] | None) -> Cluster:
    """Measure on all ranks of a barrier stage. Raises what a launch raises.

    `dataset`: its folder and manifest, if it exists; else the reader is not measured.
    """
    job = measuring_job("sparkring.pipelines.launch.measure:measure", payload_of(config, dataset))
    results = run_barrier(spark, job, config.launch.world, options=launch_options(config.launch)).results
    return cluster_of(summarize([each["links"] for each in results]), results, dataset[0] if dataset else "")


def payload_of(config: RunConfig, dataset: tuple[str, DatasetManifest] | None) -> dict[str, Any]:
    """What ranks need to know: where checkpoints are stored, and what is read."""
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
    """Measure links, products, memory, operators, storage and the reader, on every rank."""
    from dataclasses import asdict

    import torch.distributed as dist

    from sparkring.conf.blocks.data import DataConfig
    from sparkring.conf.storage import open_storage
    from sparkring.training.data.request import DataRank
    from sparkring.training.worker import hardware

    device, info = join_ranks(ctx), ctx.rank_info
    found: dict[str, Any] = {"links": measure_links(ctx, device) | {"codecs": []}, "type": device.type}
    dist.barrier()
    ctx.heartbeat(0, "matrix products")
    rates = hardware.product_rates(device)
    found["products"] = {dtype: {size: asdict(each) for size, each in of.items()} for dtype, of in rates.items()}
    dist.barrier()
    ctx.heartbeat(0, "memory")
    found["memory"] = asdict(hardware.memory_rate(device))
    found["operator_s"] = hardware.operator_seconds(device)
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
    return found | hardware.device_facts(device, info.local_size)


def cluster_of(net: NetReport, results: Sequence[dict[str, Any]], dataset: str = "") -> Cluster:
    """Make a cluster of what all ranks have measured: of rates the median rank's, of links the slowest pair's."""
    hosts = list(dict.fromkeys(net.hosts))
    first = results[0]
    peaks = {
        dtype: median(max(rate["per_s"] for rate in each["products"][dtype].values()) for each in results)
        for dtype in first["products"]
    }
    rates = [r for each in results for of in each["products"].values() for r in of.values()]
    spread = max(rate["spread"] for rate in [*rates, *(each["memory"] for each in results)])
    memory = median(each["memory"]["per_s"] for each in results)
    inside, between = (links_of(net, within) for within in (True, False))
    link_s, link_rate = inside or between or (0.0, memory)
    net_s, net_rate = between or inside or (0.0, memory)
    read, written = (median(each["storage"][i] for each in results if each["storage"]) for i in (0, 1))
    launch_us = median(each["operator_s"] for each in results) / MICRO
    ring = min(MOST_SHARE, net.ring_bytes_per_s / net.predicted_bytes_per_s) if net.pairs else MOST_SHARE
    shares = dict.fromkeys(("link", "network"), rounded(ring)) | dict.fromkeys(("matmul", "memory"), 1.0)
    reached = Reached(**shares, kernel_us=0.0, launch_us=rounded(launch_us))
    when = datetime.now(UTC).date()
    return Cluster(
        description=f"measured by sparkring plan measure on {when}: {len(results)} ranks on {', '.join(hosts)}",
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
            link_gb_per_s=rounded(link_rate / GIGA),
            link_latency_us=rounded(link_s / MICRO),
            cores=int(first["processors"]) * -(-len(results) // len(hosts)) if first["type"] == "cpu" else 1,
        ),
        network=Network(kind="ethernet", gbit_per_s=rounded(net_rate * 8 / GIGA), latency_us=rounded(net_s / MICRO)),
        storage=StorageSpeed(read_gb_per_s=rounded(read / GIGA), write_gb_per_s=rounded(written / GIGA)),
        reached=reached,
        measured=Measurement(
            hosts=hosts,
            ranks=len(results),
            spread=rounded(spread),
            dataset=dataset,
            rows_per_s=rounded(sum(each["rows_per_s"] for each in results)),
            reader_threads=first.get("reader_threads", 1),
        ),
    )


def links_of(net: NetReport, within: bool) -> tuple[float, float] | None:
    """(latency in s, bytes per s) of the slowest pair within a host, or between hosts; None without one."""
    pairs = [pair for pair in net.pairs if (net.hosts[pair.first] == net.hosts[pair.second]) == within]
    if not pairs:
        return None
    return max(pair.latency_s for pair in pairs), min(pair.bytes_per_s for pair in pairs)


def rounded(value: float) -> float:
    """Three digits: no measurement has more."""
    return float(f"{value:.3g}")
