"""Seconds that a step's sparse tables take: ids, rows and gradients travel between the hosts' memories, by all-to-all.

A rank asks the owners of its ids (8 bytes each) for their rows and sends them the gradients, by the bytes of
training/tables/sharded.py: a call for counts, and one each for ids, rows and gradients. They go through Gloo, on GPUs
too, so a rank sends at most `HOST_BYTES_PER_S`. Owners look rows up and update them on a core, at rates that
benchmarks/results/sparse_tables_rates_2core_202611.md has measured. Nothing of it runs parallel to compute, unless
`tables.lag` says so.
"""

from __future__ import annotations

from typing import NamedTuple

from sparkring.training.planner.timing.collectives import RankGroup, Topology

CALLS = 4
LOOKUPS_PER_S, UPDATES_PER_S = 11.4e6, 9.0e6  # rows of one core, with Adam
HOST_BYTES_PER_S = 2.5e9  # of one process through TCP: an estimate


class TableWork(NamedTuple):
    """What one rank does for one table in a step.

    ids: distinct ids of its rows. sent: bytes to other ranks. replicated: every rank applies all ranks' gradients.
    lagged: whether what is sent travels while ranks compute.
    """

    ids: int
    sent: float
    replicated: bool = False
    lagged: bool = False


def tables_s(tables: tuple[TableWork, ...], topology: Topology, group: RankGroup) -> float:
    """Return the seconds per step that ranks wait for their tables."""
    return sum(_table_s(table, topology, group) for table in tables)


def _table_s(table: TableWork, topology: Topology, group: RankGroup) -> float:
    updated = table.ids * (group.size if table.replicated else 1)
    work = table.ids / LOOKUPS_PER_S + updated / UPDATES_PER_S
    if table.lagged or group.size == 1:
        return work
    return work + topology.all_to_all_s(table.sent, group, HOST_BYTES_PER_S) + CALLS * topology.latency_s(group)
