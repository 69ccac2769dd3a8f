"""Say whether the reader can feed the model: rows per second that it gives against those that the model takes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from sparkring.conf.clusters.cluster import Cluster, Measurement
from sparkring.conf.plain_text import count_of
from sparkring.training.planner import Untraceable, Workload
from sparkring.training.planner.search import traced_model
from sparkring.training.planner.timing.step_time import step_counts, step_time

UNSURE = 0.3  # spread of a measurement from which it is worth a word
STALLED = 0.1  # share of a step from which waiting for rows is worth a word


def step_seconds(workload: Workload, cluster: Cluster) -> float:
    """Predict the seconds of a step. Untraceable if the model is."""
    traced = traced_model(workload)
    return step_time(step_counts(workload, traced.work, traced.trace), cluster).total


def fed_notes(workload: Workload, cluster: Cluster, is_here: bool, dataset: str | None = None) -> list[str]:
    """Compare a measured cluster with the recipe's reader; [] for a cluster from data sheets.

    Args:
        workload: step of the recipe.
        cluster: machines of the cluster.
        is_here: whether ranks would be on this machine.
        dataset: folder of the recipe's dataset; None if not built.
    """
    if cluster.measured is None:
        return []
    found, host = unsure_notes(cluster.measured), socket.gethostname()
    if is_here and host not in cluster.measured.hosts:
        measured_on = ", ".join(cluster.measured.hosts)
        found.append(
            f"the cluster was measured on {measured_on}, and this is {host}: its numbers are another machine's; "
            f"`sparkring plan measure` measures this one"
        )
    if dataset is not None and cluster.measured.rows_per_s and cluster.measured.dataset != dataset:
        found.append(
            f"the reader was measured on {cluster.measured.dataset}, another dataset than {dataset}: "
            "`sparkring plan measure` with this recipe says whether it is fed"
        )
    elif cluster.measured.rows_per_s:
        with suppress(Untraceable):  # the plan says why
            found.append(fed_text(cluster.measured, workload.global_batch / step_seconds(workload, cluster)))
    return found


def unsure_notes(measured: Measurement) -> list[str]:
    """Warn of a measurement whose repetitions differ much."""
    if measured.spread < UNSURE:
        return []
    return [
        f"the cluster's measurement is unsure: the middle half of its repetitions is {measured.spread:.0%} wide, as on "
        "a machine that does other work; measure again when it has none"
    ]


def fed_text(measured: Measurement, taken: float) -> str:
    """Compare the reader with the model. `taken`: rows per second that the model takes."""
    given, threads = measured.rows_per_s, measured.reader_threads
    text = (
        f"the reader gives {given:,.0f} rows/s on {count_of(measured.ranks, 'rank')} with "
        f"{count_of(threads, 'thread')} each, the model takes {taken:,.0f}"
    )
    if given >= taken:
        return f"{text}: it is fed"
    return f"{text}: ranks would wait for rows {1 - given / taken:.0%} of the time; {remedy(threads)}"


def stall_advice(per_step_s: Mapping[str, float], global_batch: int, threads: int) -> str:
    """Suggest a change for a run whose ranks waited long for rows; "" otherwise.

    Args:
        per_step_s: rank 0's seconds per step by cause.
        global_batch: rows per step.
        threads: reader threads per rank.
    """
    step_s, stall_s = per_step_s.get("step_s", 0.0), per_step_s.get("data_stall_s", 0.0)
    if step_s <= 0 or stall_s < STALLED * (step_s + stall_s):
        return ""
    given, taken = global_batch / (step_s + stall_s), global_batch / step_s
    share = stall_s / (step_s + stall_s)
    return (
        f"ranks waited for rows {share:.0%} of the time: the reader gave {given:,.0f} rows/s, the model takes "
        f"{taken:,.0f}; {remedy(threads)}"
    )


def remedy(threads: int) -> str:
    """Suggest what makes a reader faster, the first thing to try first."""
    return f"try data.threads={threads + 1}, or data.cache for storage that is far away"
