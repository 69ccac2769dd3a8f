"""Combinations of settings that are each legal and together impossible. Pure; one line per problem, key path first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from conf.manifest import DatasetManifest
from conf.schema import RunConfig

BASELINE_METRICS = {"binary": ["loss", "auc", "accuracy"], "language_model": ["loss", "perplexity"]}


def combination_problems(config: RunConfig) -> list[str]:
    problems: list[str] = []
    if (config.etl is None) == (config.dataset is None):
        given = "neither is" if config.etl is None else "both are"
        problems.append(f"etl, dataset: {given} given; a run has either an etl block or the URI of a finished dataset")
    train, optim = config.train, config.optim
    if train.epochs is None and train.steps is None:
        problems.append("train.epochs, train.steps: both are null; training would have no end")
    if train.steps is not None and optim.warmup_steps >= train.steps:
        problems.append(
            f"optim.warmup_steps = {optim.warmup_steps}: must be less than train.steps = {train.steps}, "
            "or the learning rate never reaches optim.lr"
        )
    if train.valid_split == train.test_split:
        problems.append(f"train.test_split = {train.test_split!r}: is train.valid_split too; hold out rows of its own")
    if config.data.audit and config.data.mix is not None:
        problems.append("data.audit: a mix repeats rows by design, so there is nothing to prove; remove one of the two")
    return problems + must_beat_problems(config)


def must_beat_problems(config: RunConfig) -> list[str]:
    """Of `report.must_beat`: there must be baselines, and they must have the metrics."""
    wanted, task = config.report.must_beat, config.model.task
    key = f"report.must_beat = {wanted}"
    if not wanted:
        return []
    if task not in BASELINE_METRICS:
        return [f"{key}: there are no baselines for model.task = {task!r}, only for {sorted(BASELINE_METRICS)}"]
    problems = []
    if unknown := [metric for metric in wanted if metric not in BASELINE_METRICS[task]]:
        problems.append(f"{key}: baselines of model.task = {task!r} have {BASELINE_METRICS[task]}, not {unknown}")
    if not config.report.baselines:
        problems.append(f"{key}: report.baselines is false, so there is nothing to beat; set it true")
    if config.train.test_split is None:
        problems.append(f"{key}: train.test_split is null, so there are no held-out rows to beat the baselines on")
    return problems


def dataset_problems(config: RunConfig, manifest: DatasetManifest) -> list[str]:
    """Settings that are right in themselves and wrong for this dataset."""
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
    return problems + share_by_problems(config, manifest)


def share_by_problems(config: RunConfig, manifest: DatasetManifest) -> list[str]:
    """Of `report.share_by`: stored columns of one value per row."""
    layouts = {column.name: column.layout for column in manifest.columns}
    known = [name for name, layout in layouts.items() if layout == "scalar"]
    return [
        f"report.share_by = {name!r}: the dataset has {'it as a ' + layouts[name] if name in layouts else 'no such'} "
        f"column, the report groups by scalar ones; {nearest(name, known)}"
        for name in config.report.share_by
        if name not in known
    ]


def metric_problems(config: RunConfig, names: Sequence[str]) -> list[str]:
    """`names`: what every validation of the recipe's task gives."""
    early = config.train.early_stopping
    wanted = {"train.best_metric": config.train.best_metric} | (
        {"train.early_stopping.metric": early.metric} if early else {}
    )
    return [
        f"{key} = {name!r}: no validation metric of model.task = {config.model.task!r}; {nearest(name, names)}"
        for key, name in wanted.items()
        if name not in names
    ]


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say of a name there is not: the one that was meant, or all there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {names}"
