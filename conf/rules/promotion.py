"""What of `promote` and `drift` goes with the rest of a recipe, and with its dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparkring.conf.blocks.drift import DriftDataset, DriftRule
from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.promote import MetricRule
from sparkring.conf.config import RunConfig
from sparkring.conf.rules.rule import Rule, nearest, refuse
from sparkring.conf.tasks import TABLE_TASKS, TaskKind
from sparkring.conf.uris import check_uri

if TYPE_CHECKING:
    from sparkring.conf.manifest import DatasetManifest

COUNTED = ("numeric", "categorical")  # kinds of features


def _untracked_problems(config: RunConfig) -> list[str]:
    """Check that blocks which need a registered version have tracking enabled."""
    from_champion = config.warm_start is not None and config.warm_start.from_alias is not None
    blocks = {"promote": config.promote, "drift": config.drift, "warm_start.from": from_champion or None}
    return [
        f"{key}: tracking.enabled is false, so no version is registered; set it true, or remove {key}"
        for key, block in blocks.items()
        if block is not None and not config.tracking.enabled
    ]


def _promote_problems(config: RunConfig) -> Iterator[str]:
    for number, rule in enumerate(config.promote.rules if config.promote else ()):
        yield from (f"promote.rules.{number}: {problem}" for problem in _rule_problems(rule, config.model.kind))


def _rule_problems(rule: MetricRule, kind: TaskKind) -> Iterator[str]:
    task, known = kind.name, kind.directions
    if not kind.is_own and rule.metric not in known:
        yield f"metric = {rule.metric!r}: no held-out metric of model.task = {task!r}; {nearest(rule.metric, known)}"
        return
    if kind.is_own and rule.greater_is_better is None:
        yield f"greater_is_better: say whether more is better of {rule.metric!r}, a metric of your own task {task!r}"
    if rule.compares and not kind.is_table:
        yield (
            f"metric = {rule.metric!r}: the champion is scored again for the tasks {[*TABLE_TASKS]} only, so with "
            f"model.task = {task!r} a rule can have a threshold, no change"
        )
    elif rule.confidence is not None and not kind.is_own and rule.metric not in kind.resampled:
        yield (
            f"confidence: {rule.metric} cannot be resampled; leave confidence out, or use one of "
            f"{sorted(kind.resampled)}"
        )


def _drift_problems(config: RunConfig) -> Iterator[str]:
    drift = config.drift
    if drift is None:
        return
    if isinstance(drift.against, DriftDataset):
        try:
            check_uri(drift.against.dataset)
        except ValueError as error:
            yield f"drift.against.dataset: {error}"
    for number, rule in enumerate(drift.rules):
        key = f"drift.rules.{number}"
        if rule.predicts and isinstance(drift.against, DriftDataset):
            yield f"{key}: a dataset has no predictions; compare them against champion or previous"
        if rule.predicts and (config.train.test_split is None or not config.model.kind.is_table):
            yield (
                f"{key}: predictions are compared over train.test_split, for the tasks {[*TABLE_TASKS]}; here they "
                f"are {config.train.test_split!r} and {config.model.task!r}"
            )
        if rule.inputs and config.etl is not None and config.etl.interval is None:
            yield (
                f"{key}: columns are compared by what the parts of a dataset have counted; set etl.interval, or "
                "compare `prediction` only"
            )
        elif config.etl is not None:
            yield from (f"{key}: {problem}" for problem in _uncounted(rule, _counted_by(config.etl)))


PROMOTION: tuple[Rule[RunConfig], ...] = (
    Rule(("promote", "drift", "warm_start.from", "tracking.enabled"), _untracked_problems),
    refuse(
        ("promote.rules", "train.test_split"),
        lambda c: c.promote is not None and c.train.test_split is None and bool(c.promote.rules),
        "promote.rules: train.test_split is null, so there are no held-out rows to judge the model on",
    ),
    refuse(
        ("promote.slices", "model.task"),
        lambda c: c.promote is not None and bool(c.promote.slices) and not c.model.kind.is_table,
        f"promote.slices: the champion is scored again for the tasks {[*TABLE_TASKS]} only, not for "
        "{0.model.kind.name!r}",
    ),
    Rule(("promote.rules", "model.task"), _promote_problems),
    Rule(("drift.rules", "drift.against", "train.test_split", "etl.interval", "etl.features"), _drift_problems),
)


def drift_column_problems(config: RunConfig, manifest: DatasetManifest) -> Iterator[str]:
    """Yield drift columns that the dataset does not have, or not in a form that can be compared."""
    for number, rule in enumerate(config.drift.rules if config.drift else ()):
        yield from (f"drift.rules.{number}: {problem}" for problem in _column_problems(rule, manifest))


def _column_problems(rule: DriftRule, manifest: DatasetManifest) -> Iterator[str]:
    if rule.inputs and not manifest.parts:
        yield (
            f"columns = {rule.inputs!r}: the dataset has no day partitions, so its values are not counted; build it "
            "with etl.interval, or compare `prediction` only"
        )
        return
    yield from _uncounted(rule, measured_columns(manifest))


def _uncounted(rule: DriftRule, counted: Sequence[str]) -> Iterator[str]:
    """Yield the columns of a rule that are none of those whose values are counted."""
    for name in rule.inputs if rule.inputs != "all" else ():
        if name not in counted:
            yield (
                f"columns = {name!r}: no numeric or categorical feature is made of such a column, so nothing has "
                f"counted its values; {nearest(name, counted)}"
            )


def measured_columns(manifest: DatasetManifest) -> list[str]:
    """List the columns whose values are counted on writing: numeric and categorical features."""
    fitted = (state for state in manifest.fitted if state["kind"] in COUNTED)
    return list(dict.fromkeys(state["column"] for state in fitted))


def _counted_by(etl: EtlConfig) -> list[str]:
    """List the counted columns of the dataset that a recipe makes (see `measured_columns`)."""
    return [feature.column or name for name, feature in etl.features.items() if feature.kind in COUNTED]
