"""Combinations of settings that are each legal and together impossible; one line per problem, key path first."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from conf.manifest import DatasetManifest
from conf.schema import RunConfig
from conf.secrets import HIDDEN, redact, redacted
from conf.storage import NO_SECRETS, check_uri

BASELINE_METRICS = {"binary": ["loss", "auc", "accuracy"], "language_model": ["loss", "perplexity"]}


@dataclass(frozen=True)
class Idle:
    """Keys nothing reads in a run `when` holds of: set to anything but their default they are refused, not ignored."""

    keys: tuple[str, ...]
    when: Callable[[RunConfig], bool]
    why: str
    remedy: str


def _split_kind(*kinds: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.etl is not None and c.etl.split.kind in kinds


IDLE: tuple[Idle, ...] = (
    Idle(
        ("data.tail", "data.window_row_groups", "data.on_corrupt", "data.cache.files", "data.cache.decoded"),
        lambda c: c.data.reader == "petastorm",
        "for training with data.reader = petastorm, which opens, orders and deals out the files itself",
        "remove it, or use data.reader = native",
    ),
    Idle(
        ("data.petastorm.pool", "data.petastorm.workers", "data.petastorm.shuffle_rows"),
        lambda c: c.data.reader == "native",
        "with data.reader = native",
        "remove it (data.threads and data.window_row_groups are the native reader's), or set data.reader to petastorm",
    ),
    Idle(
        ("data.petastorm.shuffle_rows",),
        lambda c: c.data.reader == "petastorm" and not c.data.shuffle,
        "with data.shuffle = false",
        "remove it, or set data.shuffle to true",
    ),
    Idle(
        ("data.tail",),
        lambda c: c.data.mix is not None,
        "with a mix, which cuts whole batches out of all its parts",
        "remove it; data.mix.stop says when an epoch ends",
    ),
    Idle(
        ("data.mix.epoch_samples",),
        lambda c: c.data.mix is not None and c.data.mix.stop != "forever",
        "where data.mix.stop says when an epoch ends",
        "remove it, or set data.mix.stop to forever",
    ),
    Idle(("etl.split.shares",), _split_kind("time"), "on a split by time", "remove it; boundaries decide"),
    Idle(("etl.split.shares",), _split_kind("column"), "on a split by column", "remove it; the column decides"),
    Idle(
        ("etl.split.key", "etl.split.seed"),
        _split_kind("time", "column"),
        "but on a split by hash",
        "remove it, or set etl.split.kind to hash",
    ),
    Idle(
        ("model.inputs", "model.label"),
        lambda c: c.model.task == "language_model",
        "with model.task = 'language_model', which reads the column `tokens` and predicts it",
        "remove it, or name a task of your own (module:Class)",
    ),
    Idle(
        ("report.share_by",),
        lambda c: c.model.task != "binary",
        "where model.task is not binary: there is no positive share to show",
        "remove it",
    ),
    Idle(
        ("report.sample_prompt", "report.sample_tokens"),
        lambda c: c.model.task != "language_model",
        "where model.task is not language_model: no text is written",
        "remove it",
    ),
)


def idle_problems(config: RunConfig) -> list[str]:
    """A line for every key that was set and has no effect."""
    return [
        f"{key} = {value!r}: has no effect {idle.why}; {idle.remedy}"
        for idle in IDLE
        if idle.when(config)
        for key in idle.keys
        for value, default in _value_and_default(config, key)
        if value != default
    ]


def _value_and_default(config: RunConfig, key: str) -> Iterator[tuple[Any, Any]]:
    """Of a key by its path; nothing where a block above it is null."""
    *above, name = key.split(".")
    block: BaseModel | None = config
    for part in above:
        block = getattr(block, part) if block is not None else None
    if block is not None:
        yield getattr(block, name), type(block).model_fields[name].get_default(call_default_factory=True)


def uri_problems(config: RunConfig) -> list[str]:
    """Of every storage URI: what is wrong with it that is wrong wherever the job runs."""
    uris = {"storage.datasets": config.storage.datasets, "storage.runs": config.storage.runs, "dataset": config.dataset}
    if config.etl is not None:
        uris |= {f"etl.sources.{name}.path": source.path for name, source in config.etl.sources.items()}
    if config.data.mix is not None:
        uris |= {f"data.mix.parts.{i}.dataset": part.dataset for i, part in enumerate(config.data.mix.parts)}
    problems = []
    for key, uri in uris.items():
        try:
            check_uri(uri or "")
        except ValueError as error:
            if redact(uri or "") == uri:  # else it is said of every key in one place, below
                problems.append(f"{key}: {error}")
    return problems


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of everything that is not itself a non-empty block or list."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))


def secret_problems(config: RunConfig) -> list[str]:
    """A line for every value that is or holds a credential. `spark.conf` may: it is kept apart (SparkConfig)."""
    return [
        f"{key} {'is' if shown == HIDDEN else f'= {shown!r} holds'} a secret, {NO_SECRETS}"
        for key, value in leaves(config.model_dump(mode="json", exclude={"spark": {"conf"}}))
        if (shown := redacted(value, key)) != value
    ]


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
    return [
        *problems,
        *secret_problems(config),
        *must_beat_problems(config),
        *idle_problems(config),
        *uri_problems(config),
    ]


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
