"""Names that the dataset of a recipe will not have, known from its etl block alone: before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkring.conf.blocks.etl import EtlConfig, Feature, ImageFeature, PassthroughFeature
from sparkring.conf.config import RunConfig
from sparkring.conf.rules.promotion import nearest

TEXT_TENSORS = ("tokens", "document")  # of a dataset of packed text


@dataclass(frozen=True)
class ForeseenNames:
    """The columns that a dataset will have.

    `scalar`: stored, and one value per row as far as a recipe says. `tensors`: of the model's inputs, with those that
    are there only where the training split has nulls. `splits`: None where the rows decide. `counted`: values are
    counted when they are written.
    """

    stored: tuple[str, ...]
    scalar: tuple[str, ...]
    tensors: tuple[str, ...]
    counted: tuple[str, ...]
    splits: tuple[str, ...] | None


def foreseen_names(etl: EtlConfig) -> ForeseenNames:
    """The names of a dataset that this block makes."""
    splits = {"time": ("train", *etl.split.boundaries), "hash": tuple(etl.split.shares), "column": None}[etl.split.kind]
    if etl.kind == "text":
        return ForeseenNames(TEXT_TENSORS, (), TEXT_TENSORS, (), splits)
    plain = [name for name in (*etl.labels, etl.weight, *etl.keep) if name is not None]
    passed = {name: f for name, f in etl.features.items() if isinstance(f, (PassthroughFeature, ImageFeature))}
    fitted = [f.column or name for name, f in etl.features.items() if name not in passed]
    counted = [f.column or name for name, f in etl.features.items() if f.kind in ("categorical", "numeric")]
    stored = dict.fromkeys([*fitted, *passed, *plain])
    arrays = {name for name, feature in passed.items() if feature.shape is not None}
    tensors = [tensor for name, feature in etl.features.items() for tensor in _tensors(name, feature)]
    return ForeseenNames(
        stored=tuple(stored),
        scalar=tuple(name for name in stored if name not in arrays),
        tensors=tuple(dict.fromkeys([*tensors, *plain])),
        counted=tuple(dict.fromkeys(counted)),
        splits=splits,
    )


def _tensors(name: str, feature: Feature) -> list[str]:
    """The tensors that a feature may become."""
    if feature.kind == "cyclic":
        return [f"{name}_sin", f"{name}_cos"]
    if feature.kind == "numeric":
        return [name, *([f"{name}__null"] if feature.indicator != "never" else [])]
    return [name, f"{name}__valid"] if feature.kind == "passthrough" and feature.nulls == "mask" else [name]


def foreseen_problems(config: RunConfig) -> Iterator[str]:
    """Yield what of training names a column or split that the recipe's own dataset will not have.

    Nothing without an etl block. Not of every command: a recipe without a label can be built, and not trained on.
    """
    if config.etl is None:
        return
    names = foreseen_names(config.etl)
    splits = {"train.valid_split": config.train.valid_split, "train.test_split": config.train.test_split}
    for key, split in splits.items():
        if split is not None and names.splits is not None and split not in names.splits:
            yield f"{key} = {split!r}: the dataset will have the splits {[*names.splits]}, by etl.split"
    for key, wanted, known, why in (
        *((key, of, names.scalar, "scalar column; add it to etl.keep") for key, of in config.report.columns.items()),
        ("promote.slices", config.promote.slices if config.promote else [], names.scalar, "scalar column; add it to "
         "etl.keep"),
        ("data.filters", [c[0] for c in config.data.filters], names.stored, "stored column; add it to etl.keep"),
    ):  # fmt: skip
        if config.etl.kind == "text":
            continue
        for name in wanted:
            if name not in known:
                yield f"{key} = {name!r}: the dataset will have no such {why}, or {_meant(name, known)}"
    for number, rule in enumerate(config.drift.rules if config.drift else ()):
        for name in rule.inputs if rule.inputs != "all" else ():
            if name not in names.counted:
                yield (
                    f"drift.rules.{number}.columns = {name!r}: no numeric or categorical feature is made of such a "
                    f"column, so nothing will have counted its values; {nearest(name, names.counted)}"
                )
    if config.data.mix is None and config.data.petastorm.url is None:
        yield from _model_problems(config, names)


def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = nearest(name, known)
    return f"take one of {sorted(known)}" if hint.startswith("there are") else hint


def _model_problems(config: RunConfig, names: ForeseenNames) -> Iterator[str]:
    """`model.inputs` and `model.label` are tensors."""
    if config.model.kind.is_text:
        return
    wanted = [("model.inputs", name) for name in config.model.inputs or []]
    wanted += [("model.label", config.model.label)] if config.model.label else []
    assert config.etl is not None
    for key, name in wanted:
        if name == config.etl.weight and key == "model.inputs":
            yield f"{key}: {name!r} is the weight, which no model sees; leave it out, or select it by a second name"
        elif name not in names.tensors:
            yield f"{key} = {name!r}: the dataset will have no such tensor; {nearest(name, names.tensors)}"
    kind, task = config.model.kind, config.model.task
    if kind.is_table:
        labels = [config.model.label] if config.model.label else config.etl.labels
        if not labels:
            yield f"etl.label: model.task = {task!r} needs a label column, and the recipe names none; set etl.label"
        elif len(labels) > 1 and not kind.has_several_labels:
            yield f"model.task = {task!r}: it has one label, and etl.label lists {labels}; name one by model.label"
        for label in labels:
            if label == config.etl.weight:
                yield f"model.label = {label!r}: is etl.weight too; select the column a second time by another name"
            elif label in (config.model.inputs or []):
                yield f"model.inputs: {label!r} is the label, which the model would be shown; leave it out"
