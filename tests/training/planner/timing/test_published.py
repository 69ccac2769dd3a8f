"""Published steps that nothing was fitted on: FSDP on networks of 400 and 800 Gbit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import Cluster
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.search import traced_model
from sparkring.training.planner.timing.step_time import step_counts, step_time
from sparkring.training.planner.workload import Workload

PUBLISHED = Path(__file__).parents[4] / "benchmarks/published/ibm_fsdp_a100_400gbit.csv"
CLUSTERS = {"a100-80gb": "a100-80gb-infiniband", "h100-80gb": "h100-80gb-infiniband"}
REDUCED_BYTES = 2  # fms_fsdp/policies/mixed_precision.py: bfSixteen reduces gradients in bf16


def published() -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")))


def workload(row: dict[str, str]) -> Workload:
    sizes = {name: int(row[name]) for name in ("vocab", "width", "layers", "heads", "kv_heads", "hidden")}
    devices, group = int(row["devices"]), int(row["sharded_over"])
    with torch.device("meta"):
        model = GPT(**sizes, tied=False)
    config = ParallelConfig(
        dp=devices,
        zero=3,
        shard=group if group < devices else 0,
        precision="bf16",
        engine="torch",
        activation_checkpointing=row["activation_checkpointing"] == "true",
    )
    tokens = (torch.zeros(1, int(row["seq_len"]), dtype=torch.int64, device="meta"),)
    rows = devices * int(row["rows_per_device"])
    return Workload(model, config, Mesh(dp=devices), "torch", tokens, rows, element_bytes=REDUCED_BYTES)


def cluster_of(row: dict[str, str]) -> Cluster:
    cluster = load_cluster(CLUSTERS[row["gpu"]])
    network = cluster.network.model_copy(update={"gbit_per_s": float(row["network_gbit_s"])})
    return cluster.model_copy(update={"network": network})


def error_of(row: dict[str, str]) -> float:
    """Predicted over measured seconds, less one."""
    step = workload(row)
    traced = traced_model(step)
    predicted = step_time(step_counts(step, traced.work, traced.trace), cluster_of(row)).total
    measured = int(row["rows_per_device"]) * int(row["seq_len"]) / float(row["tokens_per_s_per_gpu"])
    return predicted / measured - 1


def test_steps_on_slower_networks_than_those_of_the_fit_are_predicted() -> None:
    errors = [error_of(row) for row in published()]
    assert sum(map(abs, errors)) / len(errors) < 0.1, errors
    assert max(map(abs, errors)) < 0.15, errors


@pytest.mark.parametrize("row", published(), ids=lambda row: f"{row['model']}-{row['gpu']}")
def test_no_step_is_faster_than_its_compute_or_its_exchange_alone(row: dict[str, str]) -> None:
    step = workload(row)
    traced = traced_model(step)
    time = step_time(step_counts(step, traced.work, traced.trace), cluster_of(row))
    assert time.total > time.compute + time.recompute and time.total > time.hidden
