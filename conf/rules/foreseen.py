"""Names that the dataset of a recipe will not have, known from its etl block alone: before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkring.conf.blocks.etl import EtlConfig, Feature, ImageFeature, PassthroughFeature
from sparkring.conf.config import RunConfig
from sparkring.conf.rules.recipe import is_built_in_tabular
from sparkring.conf.rules.rule import Rule, find_problems, nearest

TEXT_TENSORS = ("tokens", "document")  # of a dataset of packed text


@dataclass(frozen=True)
class ForeseenNames:
    """The columns that a dataset will have.

    `scalar`: stored, and one value per row as far as a recipe says. `tensors`: of the model's inputs, with those that
    are there only where the training split has nulls. `splits`: None where the rows decide.
    """

    stored: tuple[str, ...]
    scalar: tuple[str, ...]
    tensors: tuple[str, ...]
    splits: tuple[str, ...] | None


def foreseen_names(etl: EtlConfig) -> ForeseenNames:
    """Predict the column and tensor names of the dataset that this block makes."""
    splits = {"time": ("train", *etl.split.boundaries), "hash": tuple(etl.split.shares), "column": None}[etl.split.kind]
    if etl.kind == "text":
        return ForeseenNames(TEXT_TENSORS, (), TEXT_TENSORS, splits)
    plain = [name for name in (*etl.labels, etl.weight, *etl.keep) if name is not None]
    passed = {name: f for name, f in etl.features.items() if isinstance(f, (PassthroughFeature, ImageFeature))}
    fitted = [f.column or name for name, f in etl.features.items() if name not in passed]
    stored = dict.fromkeys([*fitted, *passed, *plain])
    arrays = {name for name, feature in passed.items() if feature.shape is not None}
    tensors = [tensor for name, feature in etl.features.items() for tensor in _tensors(name, feature)]
    return ForeseenNames(
        stored=tuple(stored),
        scalar=tuple(name for name in stored if name not in arrays),
        tensors=tuple(dict.fromkeys([*tensors, *plain])),
        splits=splits,
    )


def _tensors(name: str, feature: Feature) -> list[str]:
    """List the tensors that a feature may become."""
    if feature.kind == "cyclic":
        return [f"{name}_sin", f"{name}_cos"]
    if feature.kind == "numeric":
        return [name, *([f"{name}__null"] if feature.indicator != "never" else [])]
    return [name, f"{name}__valid"] if feature.kind == "passthrough" and feature.nulls == "mask" else [name]


@dataclass(frozen=True)
class ForeseenDataset:
    """A recipe that has an etl block, and the names of the dataset that it will make."""

    config: RunConfig
    etl: EtlConfig
    names: ForeseenNames

    @property
    def reads_its_own(self) -> bool:
        """Whether a model of tables is trained on this dataset, and on no other."""
        config = self.config
        return not (config.model.kind.is_text or config.data.mix is not None or config.data.petastorm.url is not None)


def foreseen_problems(config: RunConfig) -> list[str]:
    """List what of training names a column or split that the recipe's own dataset will not have.

    Nothing without an etl block. Not of every command: a recipe without a label can be built, and not trained on.
    """
    if config.etl is None:
        return []
    return find_problems(FORESEEN, ForeseenDataset(config, config.etl, foreseen_names(config.etl)))


def _split_problems(foreseen: ForeseenDataset) -> Iterator[str]:
    train, splits = foreseen.config.train, foreseen.names.splits
    for key, split in {"train.valid_split": train.valid_split, "train.test_split": train.test_split}.items():
        if split is not None and splits is not None and split not in splits:
            yield f"{key} = {split!r}: the dataset will have the splits {[*splits]}, by etl.split"


def _stored_problems(foreseen: ForeseenDataset) -> Iterator[str]:
    """Check the columns that report, promotion and filters name."""
    config, names = foreseen.config, foreseen.names
    wanted = [(key, of, names.scalar, "scalar") for key, of in config.report.columns.items()]
    wanted.append(("promote.slices", config.promote.slices if config.promote else [], names.scalar, "scalar"))
    wanted.append(("data.filters", [c[0] for c in config.data.filters], names.stored, "stored"))
    for key, of, known, kind in wanted if foreseen.etl.kind != "text" else ():
        for name in of:
            if name not in known:
                hint = _meant(name, known)
                yield f"{key} = {name!r}: the dataset will have no such {kind} column; add it to etl.keep, or {hint}"


def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = nearest(name, known)
    return f"take one of {sorted(known)}" if hint.startswith("there are") else hint


def _input_problems(foreseen: ForeseenDataset) -> Iterator[str]:
    """Check that `model.inputs` and `model.label` are tensors of the dataset."""
    model, etl, names = foreseen.config.model, foreseen.etl, foreseen.names
    wanted = [("model.inputs", name) for name in model.inputs or []]
    wanted += [("model.label", model.label)] if model.label else []
    for key, name in wanted if foreseen.reads_its_own else ():
        if name == etl.weight and key == "model.inputs":
            yield f"{key}: {name!r} is the weight, which no model sees; leave it out, or select it by a second name"
        elif name not in names.tensors:
            yield f"{key} = {name!r}: the dataset will have no such tensor; {nearest(name, names.tensors)}"


def _additive_problems(foreseen: ForeseenDataset) -> Iterator[str]:
    """Check that `model.args.additive_only` names tensors of the dataset."""
    given, names = foreseen.config.model.args.get("additive_only"), foreseen.names.tensors
    if not foreseen.reads_its_own or not is_built_in_tabular(foreseen.config) or not isinstance(given, list):
        return
    for name in given:
        if name not in names:
            yield f"model.args.additive_only = {name!r}: the dataset will have no such tensor; {nearest(name, names)}"


def _label_problems(foreseen: ForeseenDataset) -> Iterator[str]:
    """Check that a table task has its label or labels, and that none of them is an input."""
    model, etl, kind = foreseen.config.model, foreseen.etl, foreseen.config.model.kind
    if not kind.is_table or not foreseen.reads_its_own:
        return
    labels = [model.label] if model.label else etl.labels
    if not labels:
        yield f"etl.label: model.task = {model.task!r} needs a label column, and the recipe names none; set etl.label"
    elif len(labels) > 1 and not kind.has_several_labels:
        yield f"model.task = {model.task!r}: it has one label, and etl.label lists {labels}; name one by model.label"
    for label in labels:
        if label == etl.weight:
            yield f"model.label = {label!r}: is etl.weight too; select the column a second time by another name"
        elif label in (model.inputs or []):
            yield f"model.inputs: {label!r} is the label, which the model would be shown; leave it out"


FORESEEN: tuple[Rule[ForeseenDataset], ...] = (
    Rule(("train.valid_split", "train.test_split", "etl.split"), _split_problems),
    Rule(("report.groups", "report.share_by", "promote.slices", "data.filters", "etl.keep"), _stored_problems),
    Rule(("model.inputs", "model.label", "etl.weight", "etl.features"), _input_problems),
    Rule(("model.args", "etl.features"), _additive_problems),
    Rule(("etl.label", "model.task", "model.label", "etl.weight", "model.inputs"), _label_problems),
)
