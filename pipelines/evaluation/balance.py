"""How train, valid and test differ: in what their labels are, and in how well the model does on them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.secrets import redact
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.data.features.tensors import element_names
from sparkring.training.result import LabelBalance, Scores

log = logging.getLogger(__name__)
MOST_CLASSES = 50  # stored by name; the rest together are OTHER
OTHER = "others"
# What is much: differences below these are usual between splits, or noise.
MUCH_SHARE, MUCH_MEAN, MUCH_LOSS = 0.05, 0.25, 0.2
SURE = 4.0  # standard errors


def label_balance(
    spark: SparkSession, task: str, splits: Mapping[str, SplitRows], labels: Sequence[Column]
) -> dict[str, LabelBalance]:
    """Measure the label in each split, by one Spark job; {} with a warning where it fails: the model is trained by now.

    Args:
        spark: the job's session.
        task: of the recipe.
        splits: rows by name of split.
        labels: its tensors: one, or those of several labels.
    """
    try:
        names = [each for column in labels for each in element_names(column)]
        frames = [
            rows.frame(spark, [c.name for c in labels]).withColumn("split", F.lit(name))
            for name, rows in splits.items()
        ]
        every = reduce(DataFrame.unionByName, frames)
        if task == "multilabel":
            shares = [F.avg(f"`{name}`").alias(str(n)) for n, name in enumerate(names)]
            found = every.groupBy("split").agg(F.count("*").alias("rows"), *shares).collect()
            each = {row["split"]: {str(n): row[str(n)] for n in range(len(names))} for row in found}
            return {row["split"]: LabelBalance(rows=row["rows"], shares=each[row["split"]]) for row in found}
        every = every.withColumnRenamed(names[0], "label")
        if task == "regression":
            mean, deviation = F.avg("label").alias("mean"), F.stddev_pop("label").alias("std")
            found = every.groupBy("split").agg(F.count("*").alias("rows"), mean, deviation).collect()
            return {row["split"]: LabelBalance(rows=row["rows"], mean=row["mean"], std=row["std"]) for row in found}
        counted: dict[str, dict[str, int]] = {name: {} for name in splits}
        for row in every.groupBy("split", "label").count().collect():
            counted[row["split"]][str(int(row["label"]))] = row["count"]
        return class_balance({name: counts for name, counts in counted.items() if counts})
    except Exception as error:
        log.warning("labels of %s are not compared: %s", sorted(splits), redact(first_line(error)))
        return {}


def class_balance(counted: Mapping[str, Mapping[str, int]]) -> dict[str, LabelBalance]:
    """Share of each class in each split; of more than MOST_CLASSES those with most rows. `counted`: by split."""
    classes = {name for counts in counted.values() for name in counts}
    common = sorted(classes, key=lambda name: (-sum(counts.get(name, 0) for counts in counted.values()), name))
    balances = {}
    for split, counts in counted.items():
        rows = sum(counts.values())
        shares = {name: counts.get(name, 0) / rows for name in common[:MOST_CLASSES]}
        rest = {OTHER: 1 - math.fsum(shares.values())} if len(common) > MOST_CLASSES else {}
        balances[split] = LabelBalance(rows=rows, shares=shares | rest)
    return balances


def differences(
    balances: Mapping[str, LabelBalance], losses: Mapping[str, float], label: str, names: Mapping[str, str]
) -> str:
    """Say in one sentence where the splits differ much; empty where they do not.

    Args:
        balances: by split, train first.
        losses: by split, as far as they are known.
        label: its column.
        names: of classes, by number.
    """
    found = [part for part in (_label_part(balances, label, names), _loss_part(losses)) if part]
    return f"The splits differ: {'; '.join(found)}." if found else ""


def _label_part(balances: Mapping[str, LabelBalance], label: str, names: Mapping[str, str]) -> str:
    train = balances.get("train")
    others = {name: each for name, each in balances.items() if name != "train"}
    if train is None or not others:
        return ""
    if train.mean is not None and train.std is not None:
        means = {name: each.mean for name, each in balances.items() if each.mean is not None}
        if not any(_other_mean(train, each) for each in others.values()):
            return ""
        shown = ", ".join(f"{mean:.4g} in {name}" for name, mean in means.items())
        return f"the mean of {label} is {shown}, with a standard deviation of {train.std:.4g} in train"
    gaps = {name: max(_gap(train, each, name) for each in others.values()) for name in train.shares}
    if not any(gaps.values()):
        return ""
    most = max(gaps, key=lambda name: (round(gaps[name], 9), name))  # of two classes, which tie, the positive one
    shown = ", ".join(f"{each.shares.get(most, 0.0):.1%} of {name}" for name, each in balances.items())
    return f"{label} = {names.get(most, most)} is {shown}"


def _gap(train: LabelBalance, other: LabelBalance, name: str) -> float:
    """How far a class's shares are apart; 0 where it is no more than MUCH_SHARE, or than chance would give."""
    ours, theirs = train.shares[name], other.shares.get(name, 0.0)
    both = (ours * train.rows + theirs * other.rows) / (train.rows + other.rows)
    error = math.sqrt(both * (1 - both) * (1 / train.rows + 1 / other.rows))
    gap = abs(ours - theirs)
    return gap if gap > max(MUCH_SHARE, SURE * error) else 0.0


def _other_mean(train: LabelBalance, other: LabelBalance) -> bool:
    if train.mean is None or train.std is None or other.mean is None:
        return False
    error = train.std * math.sqrt(1 / train.rows + 1 / other.rows)
    return abs(train.mean - other.mean) > max(MUCH_MEAN * train.std, SURE * error)


def _loss_part(losses: Mapping[str, float]) -> str:
    """Losses in their order, where a later one is much higher than an earlier one."""
    known = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    values = list(known.values())
    much = [b for i, a in enumerate(values) for b in values[i + 1 :] if b - a > MUCH_LOSS * abs(a)]
    return f"the loss is {', '.join(f'{loss:.4g} in {name}' for name, loss in known.items())}" if much else ""


def split_losses(history: Mapping[str, list[tuple[int, float]]], valid: Scores, scores: Scores) -> Scores:
    """The loss in train (its last logged window), valid and test, as far as they are known."""
    trained = history.get("train/loss", [])
    losses = {"train": trained[-1][1]} if trained else {}
    losses |= {"valid": valid["loss"]} if "loss" in valid else {}
    return losses | ({"test": scores["loss"]} if "loss" in scores else {})
