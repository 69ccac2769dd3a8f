"""Record what a job's OpenLineage events name: sources, dataset, model. Nothing where no events are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.sources import VERSION_KEYS
from sparkring.pipelines.tracking.openlineage.datasets import (
    built_dataset,
    predictions_dataset,
    scoring_model,
    source_dataset,
)
from sparkring.pipelines.tracking.ops import LineageDataset

if TYPE_CHECKING:
    from sparkring.etl.sources.snapshot import SourceSnapshot
    from sparkring.pipelines.context.etl_step import Dataset
    from sparkring.pipelines.tracking.tracker import Tracker


def begin(tracker: Tracker, name: str, resolved: Resolved, snapshots: Iterable[SourceSnapshot]) -> None:
    """Send the job and its sources.

    Args:
        tracker: tracker of the job.
        name: name of the job, for all its runs.
        resolved: configuration of the job.
        snapshots: snapshots of its sources, as far as pinned.
    """
    if tracker.config.openlineage is not None:
        inputs = source_datasets(resolved.config, reads_of(snapshots))
        tracker.begin_lineage(name, resolved.interval, inputs)


def reads_of(snapshots: Iterable[SourceSnapshot]) -> dict[str, dict[str, Any]]:
    """Return what was read, by source; for a source read in pieces, their common version."""
    pieces: dict[str, list[dict[str, Any]]] = {}
    for snapshot in snapshots:
        pieces.setdefault(snapshot.name, []).append(snapshot.lineage())
    return {name: found[0] if len(found) == 1 else in_common(found) for name, found in pieces.items()}


def in_common(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the common version of pieces: of the whole table, whatever interval is read."""
    return {key: pieces[0][key] for key in VERSION_KEYS if key in pieces[0] and len({p.get(key) for p in pieces}) == 1}


def source_datasets(config: RunConfig, reads: Mapping[str, Mapping[str, Any]]) -> list[LineageDataset]:
    sources = config.etl.sources if config.etl is not None else {}
    return [source_dataset(name, source, reads.get(name, {}), os.environ) for name, source in sources.items()]


def record_dataset(tracker: Tracker, config: RunConfig, dataset: Dataset) -> None:
    """Record the job's dataset, an output where it was built for it, else an input; and its sources by the manifest."""
    if tracker.config.openlineage is not None:
        made = [built_dataset(dataset.folder.uri, dataset.manifest)]
        inputs = source_datasets(config, dataset.manifest.lineage.sources)
        tracker.lineage(*((inputs, made) if dataset.rebuilt else (inputs + made, [])))


def record_model(tracker: Tracker, uri: str, name: str, version: str) -> None:
    """Record the model that scores: where it is, and the version it is of which registered model ("": of none)."""
    if tracker.config.openlineage is not None:
        tracker.lineage(inputs=[scoring_model(tracker.config, uri, name, version)])


def record_predictions(tracker: Tracker, to: str, sizes: Sequence[tuple[int, int]]) -> None:
    """Record what was scored: rows and bytes of each file. `to`: the folder of the predictions of all dates."""
    if tracker.config.openlineage is not None:
        tracker.lineage(outputs=[predictions_dataset(to, sizes)])
