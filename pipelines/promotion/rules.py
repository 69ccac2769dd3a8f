"""Does a model pass the rules of `promote`, against the champion on the same rows? Pure functions.

Words and arithmetic of a rule are those of MLflow's MetricThreshold (mlflow.models.validation, 3.17).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.blocks.promote import MetricRule, PromoteConfig
from sparkring.conf.plain_text import count_of, score_text
from sparkring.conf.tasks import TaskKind
from sparkring.pipelines.promotion.scores import resampled
from sparkring.training.metrics import task_scores
from sparkring.training.worker.result import RuleFinding

Array = NDArray[Any]
SLICE_CONFIDENCE = 0.95  # that a slice has lost, where its rule names none
WORSE = "not worse than the champion's"
LEAST_CHANGE = 1e-10  # asked for by MLflow where the champion's value is 0, which has no share


@dataclass(frozen=True)
class ScoredRows:
    """Predictions of the model and of the champion for the same rows, in the dataset's order."""

    kind: TaskKind
    labels: Array  # (N,) float64
    ours: Array  # (N,) or (N, classes)
    champion: Array | None  # the same; None: there is no champion
    slices: Mapping[str, Array] = field(default_factory=dict)  # column of promote.slices -> (N,) values as text
    weights: Array | None = None  # (N,) how much each row counts; None for equal weights

    def at(self, rows: Array) -> ScoredRows:
        """Select some of the rows; rows: (N,) bool."""
        champion = None if self.champion is None else self.champion[rows]
        weights = None if self.weights is None else self.weights[rows]
        return ScoredRows(self.kind, self.labels[rows], self.ours[rows], champion, weights=weights)

    @property
    def models(self) -> tuple[Array, Array]:
        assert self.champion is not None, "asked only where there is a champion"
        return self.ours, self.champion


def judge(
    promote: PromoteConfig,
    kind: TaskKind,
    ours: Mapping[str, float],
    champion: Mapping[str, float],
    rows: ScoredRows | None,
) -> list[RuleFinding]:
    """Judge the model by every rule, and then by every slice.

    Args:
        promote: the recipe's block.
        kind: the task of the model.
        ours: metric -> value of the model on the test rows.
        champion: the same of the champion, on the same rows; {}: no champion, so changes are not checked.
        rows: the predictions behind them; None where the task has none.
    """
    found = [judge_rule(rule, kind, ours, champion, rows) for rule in promote.rules]
    return [*found, *(judge_slices(promote, rows) if rows is not None and rows.champion is not None else [])]


def judge_rule(
    rule: MetricRule,
    kind: TaskKind,
    ours: Mapping[str, float],
    champion: Mapping[str, float],
    rows: ScoredRows | None,
) -> RuleFinding:
    """Judge the model by one rule. A metric that the model lacks passes nothing.

    Args:
        rule: rule of `promote.rules`.
        kind: task of the recipe.
        ours: metrics of the model, see `judge`.
        champion: metrics of the champion, see `judge`.
        rows: scored rows, see `judge`.
    """
    better, value = is_greater_better(rule, kind), ours.get(rule.metric, math.nan)
    passed = reaches_threshold(rule, better, value)
    theirs = champion.get(rule.metric, math.nan) if champion and rule.compares else None
    share = None
    if theirs is not None:
        passed = passed and bool(changed_enough(rule, better, np.array(value), np.array(theirs)))
        if rule.confidence is not None and passed:
            assert rows is not None, "a recipe with such a rule is of a task with predictions"
            samples = resampled(kind, rule.metric, rows.labels, rows.models, weights=rows.weights)
            share = float(changed_enough(rule, better, samples[:, 0], samples[:, 1]).mean())
            passed = share >= rule.confidence
    return RuleFinding(
        rule=rule_text(rule, better),
        passed=passed,
        rows=0 if rows is None else len(rows.labels),
        ours=finite(value),
        champion=None if theirs is None else finite(theirs),
        resamples_met=share,
    )


def reaches_threshold(rule: MetricRule, better: bool, value: float) -> bool:
    """Return whether the value is a number, and reaches the threshold if there is one."""
    if rule.threshold is None:
        return math.isfinite(value)
    return value >= rule.threshold if better else value <= rule.threshold


def changed_enough(rule: MetricRule, better: bool, ours: Array, champion: Array) -> Array:
    """Return where values beat the champion's by the rule's margin; False if one is no number."""
    enough = np.isfinite(ours) & np.isfinite(champion)
    if rule.min_absolute_change is not None:
        enough &= _as_good(ours, champion, rule.min_absolute_change, better)
    if rule.min_relative_change is not None:
        change = np.where(champion == 0, LEAST_CHANGE, rule.min_relative_change * np.abs(champion))
        enough &= _as_good(ours, champion, change, better)
    return enough


def _as_good(ours: Array, champion: Array, change: Array | float, better: bool) -> Array:
    found: Array = ours >= champion + change if better else ours <= champion - change
    return found


def judge_slices(promote: PromoteConfig, rows: ScoredRows) -> list[RuleFinding]:
    """Judge the model on the rows of each value of `promote.slices`, in the metrics of rules that compare.

    A slice is lost where the model is worse in so many paired resamples that, of all slices that are looked at, one is
    called lost by chance at most as often as one rule is (Bonferroni): noise loses no slice because there are many.
    """
    slices = slices_of(promote, rows)
    rules = [rule for rule in promote.rules if rule.compares and rule.metric in rows.kind.resampled]
    looks = len(slices) * len(rules)
    return [judge_slice(rule, rows.kind, name, rows.at(mask), looks) for name, mask in slices for rule in rules]


def slices_of(promote: PromoteConfig, rows: ScoredRows) -> list[tuple[str, Array]]:
    """List (`column = value`, (N,) bool) of values with enough rows of positive weight."""
    found = []
    for column, values in rows.slices.items():
        distinct, places = np.unique(values.astype(str), return_inverse=True)
        counts = np.bincount(places if rows.weights is None else places[rows.weights > 0], minlength=len(distinct))
        large = np.flatnonzero(counts >= promote.min_slice_rows)
        found += [(f"{column} = {distinct[value]}", places == value) for value in large]
    return found


def judge_slice(rule: MetricRule, kind: TaskKind, name: str, rows: ScoredRows, looks: int) -> RuleFinding:
    """Judge the rows of one slice.

    Args:
        rule: rule with the metric to compare.
        kind: task of the model.
        name: name of the slice.
        rows: rows of the slice.
        looks: number of slice comparisons in all.
    """
    better = is_greater_better(rule, kind)
    ours, champion = (
        task_scores(kind, rows.labels, scores, rows.weights).get(rule.metric, math.nan) for scores in rows.models
    )
    confidence = 1 - (1 - (rule.confidence or SLICE_CONFIDENCE)) / looks
    lost = False
    if ours < champion if better else ours > champion:
        samples = resampled(kind, rule.metric, rows.labels, rows.models, weights=rows.weights)
        worse = samples[:, 0] < samples[:, 1] if better else samples[:, 0] > samples[:, 1]
        lost = bool(worse.mean() >= confidence)
    text = f"{rule.metric} is not worse (confidence {confidence:.4g})"
    return RuleFinding(
        rule=text, passed=not lost, rows=len(rows.labels), ours=finite(ours), champion=finite(champion), slice=name
    )


def is_greater_better(rule: MetricRule, kind: TaskKind) -> bool:
    """Return whether more of the rule's metric is better: by the rule, else by the metric."""
    known = kind.directions.get(rule.metric)
    better = rule.greater_is_better if rule.greater_is_better is not None else known
    assert better is not None, "a recipe that names no direction of an unknown metric is refused"
    return better


def rule_text(rule: MetricRule, better: bool) -> str:
    """Describe the rule: `auc >= 0.68 and better than the champion by 0.01`."""
    words = [] if rule.threshold is None else [f"{rule.metric} {'>=' if better else '<='} {rule.threshold:g}"]
    if rule.min_absolute_change is not None:
        words.append(f"{rule.metric} better than the champion's by {rule.min_absolute_change:g}")
    if rule.min_relative_change is not None:
        share = f"better than the champion's by {rule.min_relative_change:.4g} of it"
        words.append(f"{rule.metric} {share if rule.min_relative_change else WORSE}")
    sure = "" if rule.confidence is None else f" (confidence {rule.confidence:g})"
    return " and ".join(words) + sure


def reasons_of(findings: Sequence[RuleFinding]) -> list[str]:
    """List a line for each finding that did not pass."""
    lines = []
    for found in findings:
        if not found.passed:
            where = f" where {found.slice} ({count_of(found.rows, 'row')})" if found.slice else ""
            beside = "" if found.champion is None else f", the champion's is {score_text(found.champion)}"
            ours = "no number" if found.ours is None else score_text(found.ours)
            sure = "" if found.resamples_met is None else f"; so it is in {found.resamples_met:.1%} of the resamples"
            lines.append(f"{found.rule}: not met{where}: it is {ours}{beside}{sure}")
    return lines


def finite(value: float) -> float | None:
    """Return the value, or None if not finite, because JSON has no such numbers."""
    return value if math.isfinite(value) else None
