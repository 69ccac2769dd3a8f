"""Drift of a run's data and predictions against a reference, by the counts of both datasets' day partitions.

No row is read for it: every day partition has counts of its categories and histograms of its numbers, which add up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from sparkring.conf.blocks.drift import PREDICTION, DriftConfig, DriftDataset, DriftRule
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest, WindowPart, read_manifest
from sparkring.conf.rules.promotion import measured_columns
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError, read
from sparkring.etl.columns.statistics import Statistics, merge
from sparkring.etl.errors import EtlError
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.promotion.distributions import Counts, column_counts, distance, prediction_counts
from sparkring.training.worker.result import DriftFinding

log = logging.getLogger(__name__)
Array = NDArray[Any]


class DriftStop(EtlError):
    """A drift rule with the action `stop` was exceeded: nothing is trained (exit code 3)."""


@dataclass(frozen=True)
class Reference:
    """A dataset that is compared with. `name`: in messages."""

    name: str
    manifest: DatasetManifest
    root: Storage  # the folders of its day partitions are below it


class NoReference(ValueError):
    """There is nothing to compare with. `absent`: there never was; else something is damaged or away."""

    def __init__(self, why: str, absent: bool) -> None:
        super().__init__(why)
        self.absent = absent


def dataset_reference(block: DriftDataset) -> Reference:
    """Return the dataset of `drift.against`. NoReference if it is none, or not partitioned."""
    folder = open_storage(block.dataset)
    try:
        return _over_parts(f"dataset {block.dataset}", read_manifest(folder), folder.parent)
    except (StoredError, OSError) as error:
        raise NoReference(f"drift.against: {error}", absent=False) from error


def trained_reference(name: str, config: RunConfig, manifest: DatasetManifest) -> Reference:
    """Return a model's training dataset, if its recipe had one. NoReference as above."""
    root = open_storage(config.dataset).parent if config.dataset else open_storage(config.storage.datasets)
    return _over_parts(f"the dataset of {name}", manifest, root)


def _over_parts(name: str, manifest: DatasetManifest, root: Storage) -> Reference:
    if not manifest.parts:
        raise NoReference(f"{name} is not made of parts, so nothing has counted its values", absent=False)
    return Reference(name, manifest, root)


def input_drift(config: DriftConfig, dataset: Dataset, reference: Reference | NoReference) -> list[DriftFinding]:
    """Compare the columns of every rule; a NoReference gives findings that say so."""
    wanted = [(rule, column) for rule in config.rules for column in columns_of(rule, dataset.manifest)]
    if not wanted:
        return []
    try:
        before, now = _statistics_of(config, dataset, reference)
    except NoReference as error:
        return [not_compared(rule, column, error) for rule, column in wanted]
    return [finding(rule, column, column_counts(column, before, now)) for rule, column in wanted]


def columns_of(rule: DriftRule, manifest: DatasetManifest) -> list[str]:
    """Return the dataset's columns that a rule covers."""
    return measured_columns(manifest) if rule.inputs == "all" else [*rule.inputs]


def _statistics_of(
    config: DriftConfig, dataset: Dataset, reference: Reference | NoReference
) -> tuple[Statistics, Statistics]:
    if isinstance(reference, NoReference):
        raise reference
    parts = compared_parts(dataset.manifest.parts, reference.manifest.parts, config.parts)
    if not parts:
        raise NoReference(f"every part is one of {reference.name} too", absent=True)
    try:
        before = merge(part_statistics(reference.root, reference.manifest.parts))
        now = merge(part_statistics(dataset.manifest.files_folder(dataset.folder), parts))
    except (StoredError, EtlError, OSError) as error:
        raise NoReference(f"what the parts have counted cannot be read: {error}", absent=False) from error
    return before, now


def compared_parts(own: Sequence[WindowPart], reference: Sequence[WindowPart], which: str) -> list[WindowPart]:
    """Return the day partitions to compare, by `drift.parts`. Both in the order of intervals."""
    there = {part.fingerprint for part in reference} if which != "all" else set()
    return [part for part in (own[-1:] if which == "last" else own) if part.fingerprint not in there]


def part_statistics(root: Storage, parts: Sequence[WindowPart]) -> Iterator[Statistics]:
    """Read the counts of day partitions. StoredError, EtlError or OSError for one that is damaged or gone."""
    from sparkring.etl.windows.parts import PART_NAME, Part
    from sparkring.etl.windows.window import read_statistics

    for part in parts:
        storage = root.at(part.folder)
        yield read_statistics(storage, read(Part, storage, PART_NAME))


def prediction_drift(
    config: DriftConfig, predictions: Array, reference: Array | NoReference, several: bool = False
) -> list[DriftFinding]:
    """Compare the predictions of both models by the rules that ask for it; arguments as of `prediction_counts`."""
    rules = [rule for rule in config.rules if rule.predicts]
    if isinstance(reference, NoReference):
        return [not_compared(rule, PREDICTION, reference) for rule in rules]
    try:
        counts = prediction_counts(reference, predictions, several)
    except ValueError as error:
        return [not_compared(rule, PREDICTION, NoReference(str(error), absent=False)) for rule in rules]
    return [finding(rule, PREDICTION, counts) for rule in rules]


def finding(rule: DriftRule, column: str, counts: Counts | None) -> DriftFinding:
    """Judge a column by its counts; None where a side has counted nothing of it."""
    try:
        if counts is None:
            raise ValueError("the reference has not counted this column's values")
        value = distance(rule.measure, *counts)
    except ValueError as error:
        return not_compared(rule, column, NoReference(str(error), absent=False))
    return DriftFinding(
        column=column, measure=rule.measure, value=value, max=rule.max, action=rule.action, exceeded=value > rule.max
    )


def not_compared(rule: DriftRule, column: str, why: NoReference) -> DriftFinding:
    """Return a finding without a value. An unexpectedly missing comparison counts as exceeded.

    It holds at most: the first model has no reference, but a damaged one lets nothing pass unseen.
    """
    return DriftFinding(
        column=column,
        measure=rule.measure,
        value=None,
        max=rule.max,
        action="warn" if rule.action == "warn" else "hold",
        exceeded=not why.absent,
        note=str(why),
    )


def lines_of(findings: Sequence[DriftFinding], action: str) -> list[str]:
    """List a line for each exceeded finding with that action."""
    return [line_of(found) for found in findings if found.exceeded and found.action == action]


def line_of(found: DriftFinding) -> str:
    """Describe a finding: `drift of dep_delay: psi 0.31, at most 0.2`."""
    if found.value is None:
        return f"drift of {found.column}: not compared: {found.note}"
    return f"drift of {found.column}: {found.measure} {found.value:.4g}, at most {found.max:g}"


def drift_metrics(findings: Sequence[DriftFinding]) -> dict[str, float]:
    """Return `drift/<column>/<measure>` metrics, in characters that MLflow takes."""
    return {
        f"drift/{re.sub(r'[^A-Za-z0-9_.-]', '_', found.column)}/{found.measure}": found.value
        for found in findings
        if found.value is not None
    }
