"""The event logs of a run, which several attempts may have written: what its weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkring.conf.storage import Storage
from sparkring.training.servers.event_log import LogFile, decode


@dataclass(frozen=True)
class Segment:
    """What all servers of an attempt did between two coordinated stops, in their order."""

    attempt: int
    begin: int
    end: int
    logs: tuple[LogFile, ...]


def read_segments(events: Storage) -> list[Segment]:
    """Read the segments that a run's weights come from, in order.

    An attempt continues from a checkpoint; steps that an earlier attempt did after it are ignored. ValueError if there
    are no logs, or a server's log is missing.
    """
    found: dict[tuple[int, int, int], list[LogFile]] = {}
    for path in sorted(path for path in events.list_files() if path.endswith(".events")):
        log = decode(events.read_bytes(path), f"{events.uri}/{path}")
        found.setdefault((log.header.attempt, log.header.begin, log.header.end), []).append(log)
    if not found:
        raise ValueError(f"{events.uri}: no event logs; only runs with parallel.servers have them")
    chain: list[Segment] = []
    for (attempt, begin, end), logs in sorted(found.items()):
        while chain and chain[-1].attempt != attempt and chain[-1].end > begin:
            chain.pop()
        chain.append(Segment(attempt, begin, end, tuple(sorted(logs, key=lambda log: log.header.server))))
    for each in chain:  # not before: a server that died as logs were written ended its attempt, and wrote none
        if [log.header.server for log in each.logs] != list(range(each.logs[0].header.servers)):
            raise ValueError(
                f"{events.uri}: attempt {each.attempt}, steps {each.begin} to {each.end}: not one log of each server"
            )
    return chain


def check_all_there(segments: Sequence[Segment], steps: int, where: str) -> None:
    """Raise ValueError unless the segments cover the run from start to end without gaps.

    Args:
        segments: segments in order.
        steps: number of steps of the run.
        where: URI of the logs.
    """
    begins = [*(segment.begin for segment in segments), steps]
    ends = [0, *(segment.end for segment in segments)]
    for end, begin in zip(ends, begins, strict=True):
        if begin != end:
            raise ValueError(
                f"{where}: there are no logs of steps {end} to {begin}: they are missing, or that part "
                "of the run was not on parameter servers, and cannot be made again from logs"
            )
