"""What trees (model.family) have no use for, columns that they cannot split, and what both families need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column
from sparkring.conf.rules.rule import Rule, refuse
from sparkring.conf.tasks import TABLE_TASKS

WITHOUT_TREES = (
    "parallel.layout",
    "parallel.pp",
    "parallel.tp",
    "parallel.cp",
    "parallel.zero",
    "parallel.shard",
    "parallel.engine",
    "parallel.accumulate",
    "parallel.micro_batches",
    "parallel.offload",
    "parallel.activation_checkpointing",
    "parallel.precision",
    "parallel.compress.codec",
    "parallel.averaging.kind",
    "parallel.servers.per_host",
    "train.compile",
    "model.start",
    "warm_start",
    "data.reader",
    "data.mix",
    "data.audit",
)
"""Keys of networks alone: set with trees, they would be ignored without a word.

Others may be set, so that one recipe describes both families: model.factory and args, optim, train.epochs. With family
both they are the network's (conf/rules/families.py).
"""


def _feature_problems(config: RunConfig) -> Iterator[str]:
    """Check that all features of the recipe become numbers or categories."""
    if "trees" not in config.model.families or config.etl is None:
        return
    for name, feature in config.etl.features.items():
        if feature.kind in ("hashed", "image") and (config.model.inputs is None or name in config.model.inputs):
            remedy = "make it categorical" if feature.kind == "hashed" else "leave it out by model.inputs"
            yield f"etl.features.{name}: trees split numbers and categories, none of kind {feature.kind}; {remedy}"


TREES: tuple[Rule[RunConfig], ...] = (
    refuse(
        ("model.family", "model.task"),
        lambda c: "trees" in c.model.families and not c.model.kind.is_table,
        f"model.task = {{0.model.task!r}}: trees learn {', '.join(TABLE_TASKS)} alone",
        "set model.family to net",
    ),
    refuse(
        ("model.family", "parallel.dp", "launch.world"),
        lambda c: c.model.is_trees and c.parallel.dp not in (-1, c.launch.world),
        "parallel.dp = {0.parallel.dp}: trees have a data rank for each of launch.world = {0.launch.world}",
        "remove it",
    ),
    refuse(
        ("model.family", "train.device"),
        lambda c: c.model.is_trees and c.train.device == "cuda",
        "train.device = 'cuda': trees are trained on CPUs",
        "set it to auto or cpu",
    ),
    refuse(
        ("model.family", "data.mix", "data.petastorm.url"),
        lambda c: c.model.family == "both" and (c.data.mix is not None or c.data.petastorm.url is not None),
        "model.family = 'both': with data.mix or data.petastorm.url the network is trained on rows that trees do not "
        "read, so the two cannot be compared",
        "set model.family to net, or remove them",
    ),
    refuse(
        ("model.family", "train.valid_split"),
        lambda c: c.model.family == "both" and c.train.valid_split == "train",
        "model.family = 'both': with train.valid_split = 'train' the better one, and a blend, would be chosen by rows "
        "that both were trained on",
        "hold rows out for it (etl.split), or train one family",
    ),
    refuse(
        ("trees.refit", "train.valid_split"),
        lambda c: "trees" in c.model.families and c.trees.refit and c.train.valid_split == "train",
        "trees.refit: with train.valid_split = 'train' there are no other rows to grow the trees on again",
        "set it to false, or hold rows out for validation (etl.split)",
    ),
    Rule(("model.family", "model.inputs", "etl.features"), _feature_problems),
)


def tree_column_problems(columns: Sequence[Column], hashed: Sequence[str]) -> list[str]:
    """List problems with columns that trees cannot split.

    Args:
        columns: tensors that the model reads as features.
        hashed: names of columns with 64-bit ids.
    """
    kinds: dict[str, str] = {
        column.name: column.layout for column in columns if column.layout not in ("scalar", "vector")
    }
    kinds |= {column.name: "hashed" for column in columns if column.name in hashed}
    return [
        f"model.inputs: trees split numbers and categories, and the column {name!r} is {kind}; name the others"
        for name, kind in kinds.items()
    ]
