"""Decide which event the end of a job is, and what is sent about it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparkring.conf.blocks.notify import EventName
from sparkring.conf.secrets import HIDDEN, is_secret_name, redact, redacted
from sparkring.pipelines.run.exit_codes import Exit

Outcome = Literal["ok", "failed", "rejected", "held"]
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended, as far as it came."""

    recipe: str
    code: int
    ds: str | None = None
    decision: str | None = None  # of the promotion gate: promoted, rejected, held, dry_run, older_date, disabled
    reasons: Sequence[str] = ()  # of the decision
    scores: Mapping[str, float] = field(default_factory=dict)
    champion_scores: Mapping[str, float] = field(default_factory=dict)  # on the same rows
    links: Mapping[str, str] = field(default_factory=dict)  # what -> URI: report, mlflow
    error: str = ""
    late: bool = False  # the schedule's deadline has passed


@dataclass(frozen=True, kw_only=True)
class Event:
    """What webhooks and commands get, as JSON, field by field."""

    event: EventName
    recipe: str
    ds: str | None
    exit_code: int
    at: str  # UTC, ISO 8601
    reasons: list[str]
    scores: dict[str, float]
    champion_scores: dict[str, float]
    links: dict[str, str]
    error: str
    next: str  # the command line to run next
    format: int = FORMAT

    def payload(self) -> dict[str, Any]:
        """The JSON-able content, with secrets hidden."""
        shown: dict[str, Any] = redacted(asdict(self))
        return shown


def outcome_of(code: int, decision: str | None) -> Outcome | None:
    """What a job's end means for the next one's event; None where it means nothing, and the one before still counts."""
    if Exit(code).is_quiet:
        return None
    if decision == "held" and Exit(code).has_trained:
        return "held"
    if code == Exit.QUALITY:
        return "rejected"
    return "ok" if code == Exit.OK else "failed"


def is_repeated(end: JobEnd) -> bool:
    """Whether the date was done before: its own job has sent the events, and its exit code is returned again."""
    return end.ds is not None and end.code == Exit.QUALITY and not end.links


def decide_event(end: JobEnd, previous: str | None) -> EventName | None:
    """Which event the end is; None where nobody needs to know. `previous`: the outcome before it, if any."""
    outcome = outcome_of(end.code, end.decision)
    if outcome in ("failed", "rejected", "held"):
        return outcome
    if end.late:
        return "late"
    return "recovered" if outcome == "ok" and previous == "failed" else None


def is_before(end: JobEnd, last: str | None) -> bool:
    """Whether the job was for an earlier date than the last one: its success mends nothing of that one's."""
    return end.ds is not None and last is not None and end.ds < last


def next_command(event: EventName, end: JobEnd, command: Sequence[str]) -> str:
    """The command line to run next.

    Args:
        event: what happened.
        end: of the job.
        command: the job's own command line.
    """
    if event in ("rejected", "held"):
        return shlex.join(["sparkring", "ui", *_recipe_and_overrides(command)[:1]])
    if event == "failed" and end.code == Exit.USAGE:
        return shlex.join(["sparkring", "config", "validate", *_recipe_and_overrides(command)])
    return shlex.join(_without_secret(word) for word in command) if event in ("failed", "late") else ""


def _without_secret(word: str) -> str:
    """A word of a command line; of `key=value` with the key of a secret, the key alone."""
    key, equals, value = word.partition("=")
    return f"{key}={HIDDEN}" if equals and value and is_secret_name(key) else redact(word)


def _recipe_and_overrides(command: Sequence[str]) -> list[str]:
    """Of `sparkring run RECIPE a.b=c --date D`: the words that `config validate` takes."""
    return [word for number, word in enumerate(command[2:]) if number == 0 or ("=" in word and word[0] != "-")]


def make_event(event: EventName, end: JobEnd, command: Sequence[str], at: str) -> Event:
    """Put together what is sent.

    Args:
        event: what happened.
        end: of the job.
        command: the job's own command line.
        at: when it ended, UTC, ISO 8601.
    """
    return Event(
        event=event,
        recipe=end.recipe,
        ds=end.ds,
        exit_code=end.code,
        at=at,
        reasons=list(end.reasons),
        scores=dict(end.scores),
        champion_scores=dict(end.champion_scores),
        links=dict(end.links),
        error=end.error,
        next=next_command(event, end, command),
    )


def ping_suffix(code: int) -> str | None:
    """What is added to a ping's URL; None where none is sent."""
    if Exit(code).is_quiet:
        return None
    return "" if Exit(code).has_trained else "/fail"
