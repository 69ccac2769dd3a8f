"""The gate between a trained model and the alias.

The model is judged before it is registered; then the journal carries the decision to the registry, which moves the
alias only from the version that was judged against, and forward in date. Where another version has it by then, the
model is judged again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from sparkring.conf.blocks.promote import PromoteConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.evaluation.evaluate import EVALUATE, HeldOut, prediction_values, scored_rows, text_columns
from sparkring.pipelines.promotion.champion import Champion, NotComparable, predict_test_rows
from sparkring.pipelines.promotion.drift import NoReference, drift_metrics, line_of, lines_of, prediction_drift
from sparkring.pipelines.promotion.prepare import champion_reader, previous_result
from sparkring.pipelines.promotion.rules import ScoredRows, judge, reasons_of
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.tracking.alias import refuse_move
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.tags import NO_CHAMPION, WEIGHTS
from sparkring.pipelines.tracking.tracker import JOB
from sparkring.training.metrics import task_scores
from sparkring.training.model.folder import weights_sha256
from sparkring.training.worker.result import MODEL, Decision, DriftFinding, Evaluated, Promotion, RuleFinding, Trained

log = logging.getLogger(__name__)
Array = NDArray[Any]
MOST_JUDGED = 3  # times, where other jobs move the alias meanwhile


@dataclass(frozen=True)
class Candidate:
    """A trained model that is not registered yet, and what is known of it.

    held_out: predictions of the test rows, where the task has any. lost: a line for each baseline that is better.
    """

    trained: Trained
    evaluated: Evaluated
    held_out: HeldOut | None
    lost: list[str]


def open_gate(job: JobContext, candidate: Candidate, drift: list[DriftFinding]) -> Gate | None:
    """Judge a model; None where the alias moves to each that `report.must_beat` lets pass.

    `drift`: of the inputs, as it was found before training.
    """
    config = job.config
    if not config.tracking.enabled or not (config.promote or config.drift or job.ds):
        return None
    return Gate(job, candidate, drift)


@dataclass(frozen=True)
class Judged:
    """A decision, and what it was made against: as `judged_against` of `refuse_move`."""

    promotion: Promotion
    judged_against: str | None


@dataclass(frozen=True)
class Compared:
    """The champion next to the model. `rows` has its predictions where it was scored."""

    rows: ScoredRows | None = None
    champion_scores: dict[str, float] = field(default_factory=dict)
    version: str | None = None  # of the champion
    judged_against: str | None = None
    why_not: str = ""  # it was needed, and could not be read or scored
    older: str = ""  # the model is older than the champion
    same: str = ""  # the champion is this model


class Gate:
    """Judges one model, and has the alias moved to it."""

    def __init__(self, job: JobContext, candidate: Candidate, drift: list[DriftFinding]) -> None:
        """Judge at once. `drift`: findings on the inputs."""
        self.job, self.candidate, self.drift = job, candidate, drift
        self.judged = self.judge()

    def judge(self) -> Judged:
        """Judge the model against the baselines, the version that has the alias now, and the drift rules."""
        config, promote = self.job.config, self.job.config.promote
        undecided = Promotion(
            decision="disabled", reasons=[], alias=config.tracking.alias, date=self.job.ds, drift=self.drift
        )
        if promote is not None and promote.mode == "disabled":
            return Judged(replace(undecided, reasons=["promote.mode is disabled"]), None)
        if not self.job.publication.may_promote:
            return Judged(replace(undecided, reasons=["a backfill moves no alias without --promote"]), None)
        compared = self._compare()
        drift = [*self.drift, *self._prediction_drift(compared)]
        rules = self._rules(promote, compared) if promote is not None else []
        seen = Seen([*self.candidate.lost, *reasons_of(rules)], compared, lines_of(drift, "hold"))
        decision, reasons = conclude(seen, "enabled" if promote is None else promote.mode)
        promotion = replace(
            undecided,
            decision=decision,
            reasons=reasons,
            champion=compared.version,
            champion_scores=compared.champion_scores,
            rules=rules,
            drift=drift,
        )
        return Judged(promotion, compared.judged_against)

    def _rules(self, promote: PromoteConfig, compared: Compared) -> list[RuleFinding]:
        kind, rows = self.job.config.model.kind, compared.rows
        ours = dict(self.candidate.evaluated.scores[MODEL])
        if rows is not None and kind.is_table:
            ours |= task_scores(kind, rows.labels, rows.ours, rows.weights)  # by the code that scores the champion
        return judge(promote, kind, ours, compared.champion_scores, rows)

    def _compare(self) -> Compared:
        """Score the champion on the rows that the model was scored on, if a rule needs it."""
        config, rows = self.job.config, self._rows()
        needed = needs_champion(config)
        with champion_reader(self.job) as champion:
            try:
                found = champion()
                if found is None:
                    return Compared(rows, judged_against=NO_CHAMPION if needed else None)
                number = found.version.version
                ours = replace(found.version, version="", date=self.job.ds)
                if (refusal := refuse_move(config.tracking.alias, found.version, ours, None)) is not None:
                    return Compared(rows, version=number, older=refusal.why)
                if self._is_this_model(found):
                    return Compared(rows, version=number, same=f"version {number} is this model")
                if not needed:
                    return Compared(rows, version=number)
                return self._scored(rows, found)
            except NotComparable as error:
                return Compared(rows, why_not=str(error) if needed else "")

    def _scored(self, rows: ScoredRows | None, champion: Champion) -> Compared:
        if rows is None:
            raise NotComparable("this run has no predictions of its test rows, so it cannot be compared")
        job, number = self.job, champion.version.version
        test = scored_rows(job.config, job.dataset, self.candidate.trained)
        theirs = predict_test_rows(champion, job.config, job.dataset, test)
        scores = task_scores(job.config.model.kind, rows.labels, theirs, rows.weights)
        return Compared(replace(rows, champion=theirs), scores, number, number)

    def _is_this_model(self, champion: Champion) -> bool:
        """Return whether an earlier, killed attempt of this run has registered the champion."""
        version, weights = champion.version, self.candidate.trained.train.weights
        assert weights is not None, "training is finished"
        if version.date != self.job.ds or WEIGHTS not in version.tags:
            return False
        return version.tags[WEIGHTS] == weights_sha256(self.job.folder.at(weights))

    def _rows(self) -> ScoredRows | None:
        """Return the model's predictions, and the columns of `promote.slices`."""
        held_out, config = self.candidate.held_out, self.job.config
        if held_out is None:
            return None
        slices = {}
        if config.promote is not None and config.promote.slices:
            slices = text_columns(scored_rows(config, self.job.dataset, self.candidate.trained), config.promote.slices)
        return ScoredRows(config.model.kind, held_out.labels, held_out.scores, None, slices, held_out.weights)

    def _prediction_drift(self, compared: Compared) -> list[DriftFinding]:
        drift, held_out = self.job.config.drift, self.candidate.held_out
        if drift is None or held_out is None or not any(rule.predicts for rule in drift.rules):
            return []
        ours, several = held_out.scores, self.job.config.model.kind.has_several_labels
        if drift.against == "previous":
            return prediction_drift(drift, ours, self._previous_predictions(), several)
        if compared.rows is not None and compared.rows.champion is not None:
            return prediction_drift(drift, ours, compared.rows.champion, several)
        absent = f"no version has the alias {self.job.config.tracking.alias!r} yet"
        why = compared.why_not or compared.older or compared.same or absent
        return prediction_drift(drift, ours, NoReference(why, absent=not compared.why_not))

    def _previous_predictions(self) -> Array | NoReference:
        try:
            previous = previous_result(self.job)
            return prediction_values(previous)
        except NoReference as error:
            return error
        except StoredError as error:
            return NoReference(str(error), absent=False)

    def settle(self) -> Promotion:
        """Send the decision, see what came of it, and record it; to be called when the model is registered.

        Where another version has the alias by then, the model is judged again.
        """
        for _ in range(MOST_JUDGED):
            promotion = self._sent(self.judged)
            moved = promotion.decision == "held" and self.judged.promotion.decision == "promoted"
            if not moved or promotion.version is None:
                break
            log.warning("%s; the model is judged again", "; ".join(promotion.reasons))
            self.judged = self.judge()
        tracker, scores = self.job.tracker, promotion.champion_scores
        steps = self.candidate.trained.train.steps
        tracker.metrics(EVALUATE, steps, {f"test/champion/{metric}": value for metric, value in scores.items()})
        tracker.metrics(JOB, 0, drift_metrics(promotion.drift))
        if drifted := [line_of(found) for found in promotion.drift if found.exceeded]:
            tracker.tags(JOB, {"sparkring.drift": "; ".join(drifted)})
        return promotion

    def _sent(self, judged: Judged) -> Promotion:
        """Send a decision; return its outcome, with `version` if the store has answered."""
        from sparkring.pipelines.tracking.store.registry import Registry, decided  # seconds of imports

        tracker, promotion = self.job.tracker, judged.promotion
        tracking = self.job.config.tracking.named(self.job.config.name)
        assert tracking.registered_model is not None, "TrackingConfig.named gives it a name"
        tracker.promote(JOB, tracking.registered_model, tracking.alias, promotion, judged.judged_against)
        try:
            if not tracker.settled() or (run := tracker.run_id(JOB, timeout_s=1.0)) is None:
                return pending(promotion, self.job.config.promote, judged.judged_against)
            version = Registry(tracking).version_of_run(run)
        except StoreUnreachable:
            return pending(promotion, self.job.config.promote, judged.judged_against)
        decision, reason = (None, "") if version is None else decided(version)
        if version is None or decision is None:
            return held(promotion, "the tracking store has not taken it; the run's tag sparkring.not_recorded says why")
        if decision == promotion.decision:
            return replace(promotion, version=version.version)
        return replace(promotion, version=version.version, decision=decision, reasons=[reason])


def pending(promotion: Promotion, promote: PromoteConfig | None, judged_against: str | None) -> Promotion:
    """Return the decision while the tracking store does not answer: nothing has moved yet."""
    if promotion.decision != "promoted":
        return promotion
    rule = "where it is still on that of an earlier date, or none"
    if judged_against is not None:
        has = "no version has it" if judged_against == NO_CHAMPION else f"version {judged_against} still has it"
        rule = f"where {has}"
    why = f"the tracking store does not answer: once the journal is sent, {promotion.alias} moves {rule}"
    # Without gates, tracking that is away has never been an error: the journal is sent later.
    return replace(promotion, reasons=[why]) if promote is None else held(promotion, why)


def held(promotion: Promotion, why: str) -> Promotion:
    """Return the decision as held."""
    return replace(promotion, decision="held", reasons=[why, *promotion.reasons])


def needs_champion(config: RunConfig) -> bool:
    """Return whether a rule compares the model with the champion on the test rows."""
    promote, drift = config.promote, config.drift
    by_rule = promote is not None and any(rule.compares for rule in promote.rules)
    by_drift = drift is not None and drift.against == "champion" and any(rule.predicts for rule in drift.rules)
    return by_rule or by_drift


@dataclass(frozen=True)
class Seen:
    """What speaks against promoting a model, one line each."""

    lost: list[str]  # rules and baselines that it did not meet
    compared: Compared
    drifted: list[str]  # by rules that hold


def conclude(seen: Seen, mode: str) -> tuple[Decision, list[str]]:
    """Return decision and reasons, the worst first: worse, of an older date, not comparable, drifted."""
    decision: Decision = "promoted"
    reasons: list[str] = []
    if seen.lost:
        decision, reasons = "rejected", seen.lost
    elif seen.compared.older:
        return "older_date", [seen.compared.older]
    elif seen.compared.why_not or seen.drifted:
        decision, reasons = "held", [*filter(None, [seen.compared.why_not]), *seen.drifted]
    if mode == "dry_run":
        return "dry_run", [f"would be {decision}", *reasons]
    return decision, reasons


def report_decision(promotion: Promotion) -> Exit:
    """Log the decision; the job's exit code."""
    alias, reasons = promotion.alias, "; ".join(promotion.reasons)
    number = f"version {promotion.version}" if promotion.version else "the model"
    if promotion.decision == "promoted":
        log.info("promotion: %s is %s now%s", alias, number, f" ({reasons})" if reasons else "")
        return Exit.OK
    is_quality = promotion.decision in ("rejected", "held")
    level = logging.ERROR if is_quality else logging.WARNING
    log.log(level, "promotion: %s is %s (%s); %r stays where it was", number, promotion.decision, reasons, alias)
    return Exit.QUALITY if is_quality else Exit.OK
