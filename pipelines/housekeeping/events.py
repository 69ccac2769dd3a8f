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
        """Return the JSON-able content, with secrets hidden."""
        shown: dict[str, Any] = redacted(asdict(self))
        return shown


def outcome_of(code: int, decision: str | None) -> Outcome | None:
    """Return a job's outcome for the next event; None keeps the previous outcome."""
    if Exit(code).is_quiet:
        return None
    if decision == "held" and Exit(code).has_trained:
        return "held"
    if code == Exit.QUALITY:
        return "rejected"
    return "ok" if code == Exit.OK else "failed"


def is_repeated(end: JobEnd) -> bool:
    """Return whether the date was done before, so that its own job sent the events already."""
    return end.ds is not None and end.code == Exit.QUALITY and not end.links


def decide_event(end: JobEnd, previous: str | None) -> EventName | None:
    """Choose the event for an end, or None. `previous`: outcome of the previous job, if any."""
    outcome = outcome_of(end.code, end.decision)
    if outcome in ("failed", "rejected", "held"):
        return outcome
    if end.late:
        return "late"
    return "recovered" if outcome == "ok" and previous == "failed" else None


def is_before(end: JobEnd, last: str | None) -> bool:
    """Return whether the job was for an earlier date than the last one, whose failure it cannot fix."""
    return end.ds is not None and last is not None and end.ds < last


def next_command(event: EventName, end: JobEnd, command: Sequence[str]) -> str:
    """Return the command line to run next.

    Args:
        event: name of the event.
        end: end of the job.
        command: command line of the job.
    """
    if event in ("rejected", "held"):
        return shlex.join(["sparkring", "ui", *_recipe_and_overrides(command)[:1]])
    if event == "failed" and end.code == Exit.USAGE:
        return shlex.join(["sparkring", "config", "validate", *_recipe_and_overrides(command)])
    return shlex.join(_without_secret(word) for word in command) if event in ("failed", "late") else ""


def _without_secret(word: str) -> str:
    """Hide a secret in a command-line word; `key=value` with a secret's key keeps the key."""
    key, equals, value = word.partition("=")
    return f"{key}={HIDDEN}" if equals and value and is_secret_name(key) else redact(word)


def _recipe_and_overrides(command: Sequence[str]) -> list[str]:
    """Return the words for `config validate` from `sparkring run RECIPE a.b=c --date D`."""
    return [word for number, word in enumerate(command[2:]) if number == 0 or ("=" in word and word[0] != "-")]


def make_event(event: EventName, end: JobEnd, command: Sequence[str], at: str) -> Event:
    """Make the event to send.

    Args:
        event: name of the event.
        end: end of the job.
        command: command line of the job.
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
    """Return the suffix of a ping's URL; None if no ping is sent."""
    if Exit(code).is_quiet:
        return None
    return "" if Exit(code).has_trained else "/fail"
