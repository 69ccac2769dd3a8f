"""Versions of a registered model and their aliases, in MLflow.

    champion (tracking.alias)   the version that is used
    previous                    the one that was used before it
    challenger                  the last version that was judged and not promoted

MLflow has no compare-and-set of an alias. It is read again right before it is set and once more behind it; with the
embedded store a lock keeps other processes of this machine out meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import error_line
from sparkring.conf.storage import Storage, exclusive, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.alias import Refusal, Version, refuse_move
from sparkring.pipelines.tracking.describe import CARD
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.mlmodel import read_mlmodel
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.tags import DATE, DECISION, NO_CHAMPION, REASON, WEIGHTS
from sparkring.pipelines.tracking.views import NOTE, decision_note, decision_text
from sparkring.training.worker.result import Decision

log = logging.getLogger(__name__)
AT_MS = "sparkring.at_ms"  # tag of a version: when its job registered it, however late that was sent
CHAMPION_BEFORE = "sparkring.champion_before"  # tag of a version
EARLIER = "sparkring.earlier_decisions"  # tag of a version: a line per decision before the last, newest first
MODEL_VERSION = "sparkring.model_version"  # tag of a run
PREVIOUS, CHALLENGER = "previous", "challenger"
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for an alias or a version that is not


class Registry:
    """The versions of one registered model. `config`: with its names filled in."""

    def __init__(self, config: TrackingConfig, client: MlflowClient | None = None) -> None:
        assert config.registered_model is not None, "TrackingConfig.named gives it a name"
        self.config, self.name = config, config.registered_model
        self._given = client

    @property
    def _client(self) -> MlflowClient:
        if self._given is None:
            self._given = open_client(self.config)
        return self._given

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes of this machine from moving an alias of an embedded store."""
        if self.config.uri is not None:
            return nullcontext()
        return exclusive(Path(self.config.root) / ".alias.lock")

    def with_alias(self, alias: str) -> Version | None:
        """Return the version that has the alias, or None. StoreUnreachable if the store does not answer."""
        return self._found(lambda: self._client.get_model_version_by_alias(self.name, alias))

    def version(self, number: str) -> Version | None:
        """Return the version of that number, or None. StoreUnreachable as above."""
        return self._found(lambda: self._client.get_model_version(self.name, number))

    def _found(self, ask: Any) -> Version | None:
        try:
            return _version(ask())
        except MlflowException as error:
            if error.error_code in ABSENT:
                return None
            raise StoreUnreachable(error_line(error)) from error
        except Exception as error:  # of the client's transport, which has errors of its own
            raise StoreUnreachable(error_line(error)) from error

    def version_of_run(self, run_id: str) -> Version | None:
        """Return the version that a run has registered; None if it has none (yet)."""
        try:
            named = self._client.get_run(run_id).data.tags.get(MODEL_VERSION, "")
        except Exception as error:
            raise StoreUnreachable(error_line(error)) from error
        return self.version(named.rpartition("/")[2]) if named else None

    def fetch(self, version: Version, into: Path) -> Storage:
        """Copy a version's files into a folder; the model folder among them. StoredError where they are not there."""
        from mlflow.artifacts import download_artifacts  # seconds

        where = f"version {version.version} of {self.name!r} ({version.source})"
        try:
            copied = download_artifacts(
                artifact_uri=version.source, dst_path=str(into), tracking_uri=self.config.store_uri
            )
            return open_storage(str(Path(copied) / read_mlmodel(Path(copied), where)["data"]))
        except Exception as error:  # of whatever keeps the artifacts
            raise StoredError(f"{where}: its files cannot be read: {error_line(error)}") from error

    def move(self, alias: str, ours: Version, judged_against: str | None) -> Refusal | None:
        """Move the alias to `ours` under the rules of `refuse_move`, and `previous` to the version it was on.

        Returns why it does not move.
        """
        with self.lock():
            current = self.with_alias(alias)
            if (refusal := refuse_move(alias, current, ours, judged_against)) is not None:
                return refusal
            if current is None or current.version != ours.version:
                # A version with the same weights, of a run that was resumed at its very end, is no model before it.
                same = current is not None and WEIGHTS in ours.tags and current.tags.get(WEIGHTS) == ours.tags[WEIGHTS]
                self.set(alias, ours.version, None if current is None or same else current.version)
            now = self.with_alias(alias)
        if now is None or now.version != ours.version:
            has = NO_CHAMPION if now is None else now.version
            return Refusal(f"{alias} was set on version {has} by another job at the same time", False)
        return None

    def set(self, alias: str, to: str, before: str | None) -> None:
        """Set the alias, and `previous` to the version that had it; a promoted version is no challenger any more."""
        if before is not None:
            self._client.set_registered_model_alias(self.name, PREVIOUS, before)
        self._client.set_registered_model_alias(self.name, alias, to)
        challenger = self.with_alias(CHALLENGER)
        if challenger is not None and challenger.version == to:
            self._client.delete_registered_model_alias(self.name, CHALLENGER)
        log.info("%s: %s is version %s now, and was %s", self.name, alias, to, before or "no version")

    def challenge(self, ours: Version) -> None:
        """Set `challenger` on a version that was not promoted, unless it is on one of a later date."""
        if refuse_move(CHALLENGER, self.with_alias(CHALLENGER), ours, None) is None:
            self._client.set_registered_model_alias(self.name, CHALLENGER, ours.version)

    def tag(self, version: str, tags: dict[str, str]) -> None:
        """Set tags of a version, and its description to the decision in them, unless a user has described it.

        A decision that another one takes the place of is kept in EARLIER.
        """
        found = self._client.get_model_version(self.name, version)
        tags = earlier_decisions(found.tags, tags) | tags
        # First: after a kill in between the text is still that of the tags.
        text = described(found.description or "", found.tags, dict(found.tags) | tags)
        if text is not None:
            self._client.update_model_version(self.name, version, text)
        for name, value in tags.items():
            self._client.set_model_version_tag(self.name, version, name, value[:4000])

    def apply(self, op: ops.Promote, run_id: str) -> dict[str, str]:
        """Apply the decision to the version that the run has registered; return its tags, which the run gets too.

        The decision in them is what came of it: a `promoted` that may not move the alias is `older_date` or `held`.
        """
        ours = self.version_of_run(run_id)
        if ours is None:
            raise MlflowException.invalid_parameter_value(f"run {run_id} has registered no version of {self.name!r}")
        decision, reason = op.decision, op.reason
        refusal = self.move(op.alias, ours, op.judged_against) if decision == "promoted" else None
        if refusal is not None:
            decision = "older_date" if refusal.older else "held"
            reason = "; ".join(filter(None, [refusal.why, op.reason]))
        tags = {DECISION: decision, REASON: reason}
        if op.judged_against is not None:
            tags[CHAMPION_BEFORE] = op.judged_against
        self.tag(ours.version, tags)
        if decision not in ("promoted", "older_date"):
            self.challenge(ours)
        return tags | {NOTE: decision_note(tags, self.name, ours.version)}


def described(text: str, before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Write the decision of the tags `now` above a version's card; None if a user wrote the description.

    `text`: present description, under the tags `before`.
    """
    card = text.removeprefix(decision_text(before)).lstrip("\n")
    if card and not CARD.match(card):
        return None
    return "\n\n".join(filter(None, [decision_text(now), card]))


def earlier_decisions(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the tag of earlier decisions when tags change from `before` to `now`; {} without a change."""
    last = [before.get(DECISION), before.get(REASON, "")]
    if last[0] is None or DECISION not in now or last == [now[DECISION], now.get(REASON, "")]:
        return {}
    return {EARLIER: "\n".join([": ".join(filter(None, last)), *before.get(EARLIER, "").splitlines()])}


def decided(version: Version) -> tuple[Decision | None, str]:
    """Return the decision in a version's tags (or None), and its reason."""
    found: Any = version.tags.get(DECISION)
    return found, version.tags.get(REASON, "")


def _version(found: ModelVersion) -> Version:
    tag = found.tags.get(AT_MS, "")
    at_ms = int(tag) if tag.isdecimal() else int(found.creation_timestamp)
    tags = dict(found.tags)
    return Version(found.name, str(found.version), at_ms, tags.get(DATE) or None, found.source or "", tags)
