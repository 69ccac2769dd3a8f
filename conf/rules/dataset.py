"""Settings that are right in themselves and wrong for this dataset: its splits, labels and columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparkring.conf.blocks.promotion import HIGHER_IS_BETTER
from sparkring.conf.config import RunConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.rules.promotion import dataset_promotion_problems, nearest
from sparkring.conf.rules.recipe import BUILT_IN_TABULAR


def dataset_problems(config: RunConfig, manifest: DatasetManifest) -> list[str]:
    """List settings that are right in themselves and wrong for this dataset."""
    problems: list[str] = []
    train = config.train
    for key, split in (("valid_split", train.valid_split), ("test_split", train.test_split)):
        if split is not None and split not in manifest.splits:
            problems.append(f"train.{key} = {split!r}: the dataset has the splits {sorted(manifest.splits)}")
    if "train" not in manifest.splits:
        problems.append(f"the dataset has no split 'train', only {sorted(manifest.splits)}")
    elif config.data.mix is None and config.data.tail != "pad" and not config.data.filters:
        rows = manifest.splits["train"].rows
        if train.global_batch > rows:
            problems.append(
                f"train.global_batch = {train.global_batch}: larger than the training split of {rows} rows, so an "
                "epoch has no full batch; make it smaller, or set data.tail to pad"
            )
    problems += label_problems(config, manifest.columns, manifest.features)
    return problems + group_problems(config, manifest) + dataset_promotion_problems(config, manifest)


def label_problems(config: RunConfig, columns: Iterable[Column], features: State) -> list[str]:
    """Check the task against the label: its type, its classes or tags, its values.

    Args:
        config: the recipe.
        columns: stored ones.
        features: the state; of a dataset of which nothing is measured yet, without classes and values.
    """
    task = config.model.task
    labels = [c for c in columns if c.role == "label" and config.model.label in (None, c.name)]
    if task not in HIGHER_IS_BETTER or not labels:
        return []
    if len(labels) > 1:
        return _several_problems(config, features.get("flags", {"values": [c.name for c in labels], "odd": {}}))
    (label,) = labels
    if label.dtype != "string" and task == "multilabel":
        one = f"model.task = 'multilabel': there is one label, {label.name!r}; list several columns of 0 and 1 in "
        return [f"{one}etl.label, name a column of array<string>, or set model.task to binary"]
    if label.dtype != "string":
        return []
    names = [value for state in features.get("labels", []) for value in state["values"]]
    return (_tags_problems if label.layout == "ragged" else _classes_problems)(config, label.name, names)


def _classes_problems(config: RunConfig, label: str, names: Sequence[str]) -> list[str]:
    """Check the task against a label of texts: how many classes there are decides it. `names`: [] if not yet known."""
    task = config.model.task
    about = f"model.task = {task!r}: the label {label!r} is text"
    if task == "regression":
        return [f"{about}, a class and no number; set model.task to multiclass, or binary where there are two"]
    if task == "multilabel":
        return [f"{about}, one class per row; set model.task to multiclass, or make an array of texts of it, its tags"]
    if task == "binary" and names and len(names) != 2:
        return [f"{about} of {len(names)} classes ({_some(names)}); set model.task to multiclass"]
    outputs = config.model.args.get("outputs", len(names) if len(names) > 2 else 1)
    if task == "multiclass" and names and config.model.factory.endswith(BUILT_IN_TABULAR) and outputs != len(names):
        return [f"model.args.outputs = {outputs}: the label {label!r} has {len(names)} classes ({_some(names)})"]
    return []


def label_range_problem(config: RunConfig, label: str, low: float, high: float) -> str:
    """Say why a label with values from `low` to `high` is not one of a task of classes; empty where it may be."""
    task, outputs = config.model.task, config.model.args.get("outputs", 1)
    about = f"model.task = {task!r}: the label {label!r} has values from {low:.10g} to {high:.10g}"
    if task == "binary" and (low < 0 or high > 1):
        return f"{about}, and binary has 0 and 1; set model.task to regression, or make a label of it in the SQL"
    texts = f"or make texts of them, which are classes whatever they are: CAST({label} AS string) in the SQL"
    if task == "multiclass" and (low < 0 or not low.is_integer() or not high.is_integer()):
        return f"{about}, and classes are whole numbers from 0; set model.task to regression, {texts}"
    if task == "multiclass" and config.model.factory.endswith(BUILT_IN_TABULAR) and outputs <= high:
        return f"{about}, and model.args.outputs is {outputs}; set it to {high + 1:.0f}, {texts}"
    return ""


def _tags_problems(config: RunConfig, label: str, names: Sequence[str]) -> list[str]:
    """Check the task against a label of arrays of texts. `names`: [] if not yet known."""
    task = config.model.task
    if task != "multilabel":
        return [f"model.task = {task!r}: the label {label!r} is an array of texts; set model.task to multilabel"]
    if config.data.reader == "petastorm":
        return [f"data.reader = 'petastorm': it reads no tags, as the label {label!r} has; set it to native"]
    if len(names) == 1:
        only = f"model.task = 'multilabel': the label {label!r} has the tag {names[0]!r} only"
        return [f"{only}; make a number of 0 and 1 of it in the recipe's SQL, and set model.task to binary"]
    return _outputs_problems(config, names)


def _several_problems(config: RunConfig, flags: State) -> list[str]:
    """Check the task against several label columns."""
    names, task = flags["values"], config.model.task
    if task != "multilabel":
        has = f"model.task = {task!r}: it has one label, and there are {names}"
        return [f"{has}; name one of them by model.label, or set model.task to multilabel"]
    if odd := {name: rows for name, rows in flags["odd"].items() if rows}:
        name, rows = next(iter(odd.items()))
        check = f"{{name: flags, kind: expression, sql: {name} IN (0, 1), level: row}}"
        return [f"model.task = 'multilabel': {rows} rows have a label {name!r} other than 0 and 1; make one of it in "
                f"the recipe's SQL, or leave them out by etl.checks: {check}"]  # fmt: skip
    return _outputs_problems(config, names)


def _outputs_problems(config: RunConfig, names: Sequence[str]) -> list[str]:
    outputs = config.model.args.get("outputs", len(names))
    if names and config.model.factory.endswith(BUILT_IN_TABULAR) and outputs != len(names):
        return [f"model.args.outputs = {outputs}: there are {len(names)} labels ({_some(names)}); leave it out"]
    return []


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def group_problems(config: RunConfig, manifest: DatasetManifest) -> list[str]:
    """Check the columns that `report` names: they may be stored ones of one value per row."""
    layouts = {column.name: column.layout for column in manifest.columns}
    known = [name for name, layout in layouts.items() if layout == "scalar"]
    return [
        f"{key} = {name!r}: the dataset has {'it as a ' + layouts[name] if name in layouts else 'no such'} "
        f"column, the report groups by scalar ones; {nearest(name, known)}"
        for key, names in config.report.columns.items()
        for name in names
        if name not in known
    ]
