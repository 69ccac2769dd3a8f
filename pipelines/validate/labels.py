"""Check the values of a label against its task, and whether there is anything to learn of it, before training.

Of texts the manifest has the counts; of numbers the footers of the dataset's files have the least and largest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pyarrow.parquet as pq

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.rules.dataset import label_range_problem
from sparkring.conf.storage import Storage
from sparkring.conf.tasks import some
from sparkring.pipelines.context.footers import read_footers

log = logging.getLogger(__name__)
Range = tuple[float, float]


def label_range_problems(config: RunConfig, manifest: DatasetManifest, dataset: Storage) -> list[str]:
    """List what is wrong with the label's least and largest value; [] where it is no number, or read by others.

    Of many files some are looked at. `dataset`: its folder.
    """
    labels = _read_labels(config, manifest)
    if not config.model.kind.has_label_range or len(labels) != 1 or labels[0].dtype == "bool" or _is_text(labels[0]):
        return []
    found = value_range(manifest.files_folder(dataset), [file.path for file in manifest.files], labels[0].name)
    problem = found and label_range_problem(config, labels[0].name, *found)
    return [problem] if problem else []


def one_label_problems(config: RunConfig, manifest: DatasetManifest, dataset: Storage) -> list[str]:
    """Report a dataset whose rows all have the same label, where nothing else promotes its model; else []."""
    if not config.report.must_beat_guess:
        return []
    labels = _read_labels(config, manifest)
    found = constant_labels(labels, manifest, dataset, ["train"])
    if not _is_all(found, labels, manifest) or constant_labels(labels, manifest, dataset, manifest.splits) != found:
        return []
    return [
        f"{_shown(found)} in every row of the dataset, so there is nothing to learn, and nothing to judge a model by: "
        "give rows of other labels too, or set report.must_beat_guess=false to train all the same"
    ]


def warn_of_labels(config: RunConfig, manifest: DatasetManifest, dataset: Storage) -> None:
    """Log which labels the training rows have nothing to teach of: one value of a label, or no row of a class."""
    labels = _read_labels(config, manifest)
    found = constant_labels(labels, manifest, dataset, ["train"])
    if _is_all(found, labels, manifest):
        end = ", and its model will not be promoted" if config.report.must_beat_guess else ""
        log.warning("%s in every training row: there is nothing to learn%s; see etl.split", _shown(found), end)
    elif found:
        log.warning("%s in every training row: there is nothing to learn of it", _shown(found))
    elif labels and _is_text(labels[0]):
        counts = manifest.class_counts.get("train", [0] * len(manifest.classes))
        if untrained := [name for name, rows in zip(manifest.classes, counts, strict=True) if not rows]:
            log.warning("etl.label = %r: no training row is of the classes %s", labels[0].name, some(untrained))


def constant_labels(
    labels: Sequence[Column], manifest: DatasetManifest, dataset: Storage, splits: Collection[str]
) -> dict[str, str]:
    """Map each label, or tag, that has one value in all rows of `splits` to this value."""
    if not any(map(_is_text, labels)):
        files = [file.path for file in manifest.files if file.split in splits]
        footers = read_footers(manifest.files_folder(dataset), files, most=len(files))
        found = constant_numbers(footers, [c.name for c in labels if c.layout == "scalar" and c.dtype != "binary"])
        return {name: f"{value:.10g}" for name, value in found.items()}
    counted = [rows for split, rows in manifest.class_counts.items() if split in splits]
    counts = [sum(each) for each in zip(*counted, strict=True)]
    if manifest.classes:
        present = [name for name, rows in zip(manifest.classes, counts, strict=False) if rows]
        return {labels[0].name: repr(present[0])} if len(present) == 1 else {}
    rows = sum(manifest.splits[split].rows for split in splits if split in manifest.splits)
    tags = zip(manifest.label_names, counts or [0] * len(manifest.label_names), strict=True)
    return {name: str(int(n > 0)) for name, n in tags if n in (0, rows)}


def _read_labels(config: RunConfig, manifest: DatasetManifest) -> list[Column]:
    """Return the stored labels of a built-in task; [] where its training reads other rows, or none is named."""
    if not config.model.kind.is_table or config.data.mix is not None or config.data.petastorm.url is not None:
        return []
    return [c for c in manifest.columns if c.role == "label" and config.model.label in (None, c.name)]


def _is_text(label: Column) -> bool:
    return label.dtype == "string"


def _is_all(found: Mapping[str, str], labels: Sequence[Column], manifest: DatasetManifest) -> bool:
    """Return whether all labels of a dataset are among those found."""
    has_tags = len(labels) == 1 and _is_text(labels[0]) and not manifest.classes
    return bool(found) and len(found) == (len(manifest.label_names) if has_tags else len(labels))


def _shown(found: Mapping[str, str]) -> str:
    return f"etl.label: {some([f'{name!r} is {value}' for name, value in found.items()])}"


def constant_numbers(footers: Iterable[pq.FileMetaData], columns: Sequence[str]) -> dict[str, float]:
    """Map each column whose values all row groups say to be one to this value; reads on as long as there may be one."""
    found: dict[str, float | None] = dict.fromkeys(columns)
    for footer in footers:
        for name in [*found]:
            for group in group_ranges(footer, name):
                if group is None or group[0] != group[1] or found.setdefault(name, group[0]) not in (None, group[0]):
                    del found[name]
                    break
                found[name] = group[0]
        if not found:
            break
    return {name: value for name, value in found.items() if value is not None}


def group_ranges(footer: pq.FileMetaData, column: str) -> Iterator[Range | None]:
    """Yield the least and the largest value of a column in each row group with rows; None without statistics."""
    place = footer.schema.names.index(column) if column in footer.schema.names else None
    for group in (footer.row_group(number) for number in range(footer.num_row_groups)):
        if not group.num_rows:
            continue
        statistics = None if place is None else group.column(place).statistics
        if statistics is None or not statistics.has_min_max:
            yield None
        else:
            yield float(statistics.min_raw) + 0.0, float(statistics.max_raw) + 0.0  # -0.0 is shown as 0


def value_range(folder: Storage, files: Iterable[str], column: str) -> Range | None:
    """Return a column's least and largest value by the footers of Parquet files; None without statistics."""
    footers = read_footers(folder, tuple(files))
    known = [each for footer in footers for each in group_ranges(footer, column) if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None
