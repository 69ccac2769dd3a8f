"""Check the values of a label that is a number against the task, by the footers of the dataset's files."""

from __future__ import annotations

from collections.abc import Iterable

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.rules.dataset import label_range_problem
from sparkring.conf.storage import Storage
from sparkring.pipelines.context.footers import read_footers


def label_range_problems(config: RunConfig, manifest: DatasetManifest, dataset: Storage) -> list[str]:
    """List what is wrong with the label's least and largest value; [] where it is no number, or read by others.

    Of many files some are looked at. `dataset`: its folder.
    """
    if not config.model.kind.has_label_range or config.data.mix is not None or config.data.petastorm.url is not None:
        return []
    labels = [c for c in manifest.columns if c.role == "label" and config.model.label in (None, c.name)]
    if len(labels) != 1 or not _is_number(labels[0]):
        return []
    found = value_range(manifest.files_folder(dataset), [file.path for file in manifest.files], labels[0].name)
    problem = found and label_range_problem(config, labels[0].name, *found)
    return [problem] if problem else []


def _is_number(label: Column) -> bool:
    return label.layout == "scalar" and label.dtype not in ("string", "bool")


def value_range(folder: Storage, files: Iterable[str], column: str) -> tuple[float, float] | None:
    """Return the least and largest value of a column in the Parquet footers; None if none has them."""
    low, high = [], []
    for footer in read_footers(folder, tuple(files)):
        if column not in footer.schema.names:
            continue
        place = footer.schema.names.index(column)
        for group in range(footer.num_row_groups):
            statistics = footer.row_group(group).column(place).statistics
            if statistics is not None and statistics.has_min_max:
                low.append(float(statistics.min_raw))
                high.append(float(statistics.max_raw))
    return (min(low) + 0.0, max(high) + 0.0) if low else None  # -0.0 is shown as 0
