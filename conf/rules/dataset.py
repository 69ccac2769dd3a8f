"""Settings that are right in themselves and wrong for this dataset: its splits, labels and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sparkring.conf.config import RunConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.promotion import drift_column_problems
from sparkring.conf.rules.recipe import is_built_in_tabular
from sparkring.conf.rules.rule import Rule, nearest
from sparkring.conf.rules.trees import tree_column_problems
from sparkring.conf.tasks import LabelForm, as_texts, some


@dataclass(frozen=True)
class OnDataset:
    """A recipe and the dataset that it is trained on."""

    config: RunConfig
    manifest: DatasetManifest


def _split_problems(on: OnDataset) -> Iterator[str]:
    train, splits = on.config.train, on.manifest.splits
    for key, split in (("valid_split", train.valid_split), ("test_split", train.test_split)):
        if split is not None and split not in splits:
            yield f"train.{key} = {split!r}: the dataset has the splits {sorted(splits)}"
    if "train" not in splits:
        yield f"the dataset has no split 'train', only {sorted(splits)}"


def _batch_problems(on: OnDataset) -> Iterator[str]:
    data, batch, train = on.config.data, on.config.train.global_batch, on.manifest.splits.get("train")
    is_whole = data.mix is None and data.tail != "pad" and not data.filters  # no batch is filled up with other rows
    if train is not None and is_whole and not on.config.model.is_trees and batch > train.rows:
        yield (
            f"train.global_batch = {batch}: larger than the training split of {count_of(train.rows, 'row')}, so an "
            "epoch has no full batch; make it smaller, or set data.tail to pad"
        )


def _tree_columns(on: OnDataset) -> Iterator[str]:
    if "trees" in on.config.model.families:
        yield from tree_column_problems(_features(on.config, on.manifest), on.manifest.hashed)


def _features(config: RunConfig, manifest: DatasetManifest) -> list[Column]:
    """Return the tensors that the model reads."""
    wanted = config.model.inputs
    return [c for c in manifest.tensors if (c.role == "feature" if wanted is None else c.name in wanted)]


def label_problems(config: RunConfig, columns: Iterable[Column], features: State) -> list[str]:
    """Check the task against the label: its type, its classes or tags, its values.

    Args:
        config: resolved configuration of the run.
        columns: stored columns of the dataset.
        features: feature state; without classes and values where nothing is measured yet.
    """
    kind = config.model.kind
    labels = [c for c in columns if c.role == "label" and config.model.label in (None, c.name)]
    if kind.is_own or not labels:
        return []
    if len(labels) > 1:
        return _several_problems(config, features.get("flags", {"values": [c.name for c in labels], "odd": {}}))
    (label,) = labels
    if label.dtype != "string" and kind.has_several_labels:
        one = f"model.task = {kind.name!r}: there is one label, {label.name!r}; list several columns of 0 and 1 in "
        return [f"{one}etl.label, name a column of array<string>, or set model.task to binary"]
    if label.dtype != "string":
        return []
    names = [value for state in features.get("labels", []) for value in state["values"]]
    return (_tags_problems if label.layout == "ragged" else _classes_problems)(config, label.name, names)


def _classes_problems(config: RunConfig, label: str, names: Sequence[str]) -> list[str]:
    """Check the task against a label of texts: how many classes there are decides it. `names`: [] if not yet known."""
    kind = config.model.kind
    if problem := kind.text_problem(names):
        return [f"model.task = {kind.name!r}: the label {label!r} is text{problem}"]
    outputs = config.model.args.get("outputs", len(names) if len(names) > 2 else 1)
    if kind.form is LabelForm.CLASS and names and is_built_in_tabular(config) and outputs != len(names):
        return [
            f"model.args.outputs = {outputs}: the label {label!r} has {count_of(len(names), 'class')} ({some(names)})"
        ]
    return []


def label_range_problem(config: RunConfig, label: str, low: float, high: float) -> str:
    """Explain why a label with values from `low` to `high` does not fit the task; "" if it does."""
    kind, outputs = config.model.kind, config.model.args.get("outputs", 1)
    problem = kind.range_problem(label, low, high)
    if not problem and kind.form is LabelForm.CLASS and is_built_in_tabular(config) and outputs <= high:
        problem = f"and model.args.outputs is {outputs}; set it to {high + 1:.0f}, {as_texts(label)}"
    about = f"model.task = {kind.name!r}: the label {label!r} has values from {low:.10g} to {high:.10g}"
    return f"{about}, {problem}" if problem else ""


def _tags_problems(config: RunConfig, label: str, names: Sequence[str]) -> list[str]:
    """Check the task against a label of arrays of texts. `names`: [] if not yet known."""
    kind = config.model.kind
    if not kind.has_several_labels:
        return [f"model.task = {kind.name!r}: the label {label!r} is an array of texts; set model.task to multilabel"]
    if config.data.reader == "petastorm":
        return [f"data.reader = 'petastorm': it reads no tags, as the label {label!r} has; set it to native"]
    if len(names) == 1:
        only = f"model.task = {kind.name!r}: the label {label!r} has the tag {names[0]!r} only"
        return [f"{only}; make a number of 0 and 1 of it in the recipe's SQL, and set model.task to binary"]
    return _outputs_problems(config, names)


def _several_problems(config: RunConfig, flags: State) -> list[str]:
    """Check the task against several label columns."""
    names, kind = flags["values"], config.model.kind
    if not kind.has_several_labels:
        has = f"model.task = {kind.name!r}: it has one label, and there are {names}"
        return [f"{has}; name one of them by model.label, or set model.task to multilabel"]
    if odd := {name: rows for name, rows in flags["odd"].items() if rows}:
        name, rows = next(iter(odd.items()))
        check = f"{{name: flags, kind: expression, sql: {name} IN (0, 1), level: row}}"
        return [f"model.task = {kind.name!r}: {count_of(rows, 'row has')} a label {name!r} other than 0 and 1; "
                f"make one of it in the recipe's SQL, or leave them out by etl.checks: {check}"]  # fmt: skip
    return _outputs_problems(config, names)


def _outputs_problems(config: RunConfig, names: Sequence[str]) -> list[str]:
    outputs = config.model.args.get("outputs", len(names))
    if names and is_built_in_tabular(config) and outputs != len(names):
        return [
            f"model.args.outputs = {outputs}: there are {count_of(len(names), 'label')} ({some(names)}); leave it out"
        ]
    return []


def _group_problems(on: OnDataset) -> Iterator[str]:
    """Check the columns that `report` names."""
    for key, names in on.config.report.columns.items():
        yield from _not_scalar(key, names, on.manifest, "the report groups by scalar ones")


def _slice_problems(on: OnDataset) -> Iterator[str]:
    slices = on.config.promote.slices if on.config.promote else []
    return _not_scalar("promote.slices", slices, on.manifest, "slices are of scalar ones")


def _not_scalar(key: str, names: Iterable[str], manifest: DatasetManifest, rule: str) -> Iterator[str]:
    """Yield the columns that are not stored with one value per row."""
    layouts = {column.name: column.layout for column in manifest.columns}
    known = [name for name, layout in layouts.items() if layout == "scalar"]
    for name in (name for name in names if name not in known):
        has = f"has it as a {layouts[name]}" if name in layouts else "has no such"
        yield f"{key} = {name!r}: the dataset {has} column, {rule}; {nearest(name, known)}"


# what its columns alone decide, before anything is built or measured
DECLARED: tuple[Rule[OnDataset], ...] = (
    Rule(("report.groups", "report.share_by"), _group_problems),
    Rule(("promote.slices",), _slice_problems),
    Rule(
        ("model.task", "model.label", "etl.label", "model.args", "data.reader"),
        lambda on: label_problems(on.config, on.manifest.columns, on.manifest.features),
    ),
)
DATASET: tuple[Rule[OnDataset], ...] = (
    Rule(("train.valid_split", "train.test_split"), _split_problems),
    Rule(("train.global_batch", "data.tail", "data.filters", "data.mix"), _batch_problems),
    *DECLARED,
    Rule(("model.family", "model.inputs", "etl.features"), _tree_columns),
    Rule(("drift.rules",), lambda on: drift_column_problems(on.config, on.manifest)),
)
