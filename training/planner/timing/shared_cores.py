"""What a step costs on CPUs beyond its operations: nothing runs parallel to a rank's own work, and ranks share cores.

A strategy's own code starts operations and copies buffers, which a GPU's host does while the device computes; the
counts below are those of torch 2.13, from its profiler and from steps of a model that is all overhead. Ranks that are
more than the cores take turns. Those of a pipeline use each other's idle time: of work W with a critical path C, m
cores make a list schedule that takes at least max(W / m, C) and at most W / m + (1 - 1 / m) C (Graham 1969,
https://doi.org/10.1137/0117039, theorem 1); the middle is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.conf.clusters.cluster import MICRO, Cluster
from sparkring.training.parallel.measure import ring_share

ZERO_STARTS = 240  # operations' time that fully_shard takes for a unit in a pass, forward and backward
ZERO_COPIES = 3.0  # times that fully_shard reads or writes what it gathers or reduces
TENSOR_STARTS = 10  # operations' time that DTensor takes to dispatch one
TENSOR_PASSES = 3.0  # times more that the norms and the loss move, which DTensor takes apart
TENSOR_ENDS = 6  # collectives of the embedding, the head and the loss
CONTEXT_COPIES = 4.0  # times that an exchange of tokens for heads reads or writes its tensor


def is_cpu(cluster: Cluster) -> bool:
    return cluster.device.type == "cpu"


def ranks_per_core(cluster: Cluster, world: int) -> float:
    """Return how many ranks of a machine share a core that each could use; 1 with enough, and on GPUs."""
    if not is_cpu(cluster):
        return 1.0
    return max(1.0, min(world, cluster.node.devices) * cluster.device.processors / cluster.node.cores)


def own_work_s(cluster: Cluster, starts: float, moved: float) -> float:
    """Return seconds of a strategy's own operations on its own core; 0 on a GPU, which does not wait.

    Args:
        cluster: cluster with the cores.
        starts: number of operations.
        moved: bytes read and written.
    """
    if not is_cpu(cluster):
        return 0.0
    rate = cluster.device.memory_bytes_per_s * cluster.reached.memory
    return starts * cluster.reached.kernel_us * MICRO + moved / rate


def whole_bytes(sent: float, ranks: int) -> float:
    """Return the bytes of tensors of which a rank sends `sent` bytes to the others."""
    return sent / ring_share(ranks) if ranks > 1 else 0.0


def shared_pipeline_s(critical_s: float, busy_s: Sequence[float], per_core: float) -> float:
    """Return the seconds of a pipeline's passes on fewer cores than ranks.

    Args:
        critical_s: seconds with a core for each rank.
        busy_s: each rank's own seconds.
        per_core: ranks that share a core.
    """
    cores = len(busy_s) / per_core
    if cores >= len(busy_s):
        return critical_s
    work_s = sum(busy_s) / cores
    most_s = work_s + max(0.0, 1 - 1 / cores) * critical_s
    return (max(work_s, critical_s) + most_s) / 2


def message_waits_s(busy_s: Sequence[float], send_s: float, passes: int) -> float:
    """Return the seconds that 1F1B waits for messages in transit while ranks compute.

    As many passes as ranks are under way, so one of them is done at best in the time of a way forward and back over the
    number of ranks; the first one goes the whole way.

    Args:
        busy_s: each rank's own seconds in a pass.
        send_s: seconds of a message to the next rank.
        passes: passes per step.
    """
    way_s = 2 * (len(busy_s) - 1) * send_s
    return way_s + (passes - 1) * max(0.0, (sum(busy_s) + way_s) / len(busy_s) - max(busy_s))
