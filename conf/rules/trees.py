"""What trees (model.family) have no use for, and columns that they cannot split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column
from sparkring.conf.tasks import TABLE_TASKS

WITHOUT_TREES = (
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
    "optim.ema",
    "optim.groups",
    "train.compile",
    "model.start",
    "warm_start",
    "data.reader",
    "data.mix",
    "data.audit",
)
"""Keys of networks alone: set with trees, they would be ignored without a word.

Others may be set, so that one recipe describes both families: model.factory and args, the rest of optim, train.epochs.
"""


@dataclass(frozen=True)
class TreesRule:
    """A setting that trees cannot have; `problem` is formatted with the configuration `c`."""

    applies: Callable[[RunConfig], bool]
    problem: str


TREES_RULES: tuple[TreesRule, ...] = (
    TreesRule(
        lambda c: not c.model.kind.is_table,
        f"model.task = {{c.model.task!r}}: trees learn {', '.join(TABLE_TASKS)} alone; set model.family to net",
    ),
    TreesRule(
        lambda c: c.parallel.dp not in (-1, c.launch.world),
        "parallel.dp = {c.parallel.dp}: trees have a data rank for each of launch.world = {c.launch.world}; remove it",
    ),
    TreesRule(
        lambda c: c.train.device == "cuda",
        "train.device = 'cuda': trees are trained on CPUs; set it to auto or cpu",
    ),
)


def trees_rule_problems(config: RunConfig) -> list[str]:
    """List what is wrong with a recipe of trees without its dataset; [] of a network's."""
    if not config.model.is_trees:
        return []
    rules = [rule.problem.format(c=config) for rule in TREES_RULES if rule.applies(config)]
    return [*rules, *_feature_problems(config)]


def _feature_problems(config: RunConfig) -> Iterator[str]:
    """Features of the recipe that become no numbers or categories."""
    for name, feature in config.etl.features.items() if config.etl is not None else ():
        if feature.kind in ("hashed", "image") and (config.model.inputs is None or name in config.model.inputs):
            remedy = "make it categorical" if feature.kind == "hashed" else "leave it out by model.inputs"
            yield f"etl.features.{name}: trees split numbers and categories, none of kind {feature.kind}; {remedy}"


def tree_column_problems(columns: Sequence[Column], hashed: Sequence[str]) -> list[str]:
    """Name the columns that a model of trees would be fed and cannot split.

    Args:
        columns: tensors of the dataset that the model reads as features.
        hashed: those that are 64-bit ids.
    """
    kinds: dict[str, str] = {
        column.name: column.layout for column in columns if column.layout not in ("scalar", "vector")
    }
    kinds |= {column.name: "hashed" for column in columns if column.name in hashed}
    return [
        f"model.inputs: trees split numbers and categories, and the column {name!r} is {kind}; name the others"
        for name, kind in kinds.items()
    ]
