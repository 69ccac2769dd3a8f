"""Decide whether an alias may move to a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkring.pipelines.tracking.tags import NO_CHAMPION


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    version: str
    at_ms: int  # when its job registered it, however late that was sent
    date: str | None = None  # start of its job's data interval, as ISO text
    source: str = ""  # URI of its files
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Refusal:
    """Why an alias does not move. older: its version is of a later date, or of a later job."""

    why: str
    older: bool


def refuse_move(alias: str, current: Version | None, ours: Version, judged_against: str | None) -> Refusal | None:
    """Decide whether an alias may move from `current` to `ours`; None: it may.

    It moves forward only: by the date of the data where both have one, else by the time of registration. And only from
    the version that ours was judged against (NO_CHAMPION: from none), where there was one; None: it was not judged.
    """
    if current is not None and current.version != ours.version:
        if current.date is not None and ours.date is not None and current.date != ours.date:
            if current.date > ours.date:
                return Refusal(f"{alias} stays on version {current.version}, of the later date {current.date}", True)
        elif current.at_ms > ours.at_ms:
            younger_s = (current.at_ms - ours.at_ms) / 1000
            return Refusal(f"{alias} stays on version {current.version}, {younger_s:.0f} s younger", True)
    has = NO_CHAMPION if current is None else current.version
    if judged_against is not None and has not in (judged_against, ours.version):
        return Refusal(f"{alias} is on version {has} now, and the model was judged against {judged_against}", False)
    return None
