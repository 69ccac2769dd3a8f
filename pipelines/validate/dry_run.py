"""Say what a run would read, build, train and record, without Spark and without writing anything."""

from __future__ import annotations

from collections.abc import Iterator

from sparkring.conf.config import RunConfig
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import open_storage
from sparkring.etl.examine import Examined
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.etl_step import pins_without_spark
from sparkring.pipelines.model.plan import pinned_without_spark
from sparkring.pipelines.run.runs import Runs, training_digest

HASHED_BYTES = 1 << 30  # of sources, up to which a dry run reads them to find the dataset


def describe_run(config: RunConfig, examined: Examined) -> Iterator[str]:
    """Yield a line for each part of a run. `examined`: the recipe's tables."""
    yield from _read(config, examined)
    yield _built(config, examined)
    yield from _trained(config)
    yield from _recorded(config)


def _read(config: RunConfig, examined: Examined) -> Iterator[str]:
    for name, source in config.etl.sources.items() if config.etl else ():
        where = source.place
        size = ""
        if name in examined.files:
            rows = f", {count_of(examined.rows[name], 'row', ',')}" if name in examined.rows else ""
            interval = config.etl.interval if config.etl else None
            part = " in the last interval" if interval and name in interval.sources else ""
            size = f": {count_of(examined.files[name], 'file', ',')}, {examined.bytes[name] / 1e6:,.1f} MB{rows}{part}"
        yield f"read     {name} ({where}){size}"


def _built(config: RunConfig, examined: Examined) -> str:
    if config.dataset is not None:
        return f"dataset  {config.dataset}"
    assert config.etl is not None
    folder = open_storage(config.storage.datasets).at(f"{config.name}-<fingerprint>").uri
    what = f"dataset  {folder}: {count_of(len(config.etl.features), 'feature')} of {config.etl.rows!r}"
    if not pins_without_spark(config) or sum(examined.bytes.values()) > HASHED_BYTES:
        return f"{what}; whether it is built already is found when its tables are read"
    sources = pinned_without_spark(config)
    if sources is not None and etl_step.find(config, etl_step.wanted_fingerprint(config, sources)) is not None:
        return f"{what}; is built already"
    why = etl_step.why_built(config, sources) if sources is not None else ""
    return f"{what}; would be built{f': {why}' if why else ''}"


def _trained(config: RunConfig) -> Iterator[str]:
    train, trees, ranks = config.train, config.trees, count_of(config.launch.world, "rank")
    length = count_of(train.steps, "step") if train.steps is not None else count_of(train.epochs or 1, "epoch")
    if "trees" in config.model.families:
        yield (
            f"train    trees of XGBoost as {config.model.task}: at most {count_of(trees.rounds, 'round')} over all "
            f"rows on {ranks}"
        )
    if "net" in config.model.families:
        yield (
            f"train    {config.model.factory} as {config.model.task}: {length} of "
            f"{count_of(train.global_batch, 'row')} a step on {ranks}, {train.device}"
        )
    held = f"scored on {train.test_split!r}" if train.test_split else "not scored on held-out rows"
    which = "family and step " if len(config.model.families) > 1 else ""
    yield f"judge    {which}chosen by {train.best_metric} on {train.valid_split!r}, {held}"


def _recorded(config: RunConfig) -> Iterator[str]:
    tracking, runs = config.tracking.named(config.name), Runs(config.storage.runs, config.name)
    going = [r for r in runs.records() if r.status != "finished" and r.training_digest == training_digest(config)]
    begun = f"; may continue {going[-1].folder}" if going and config.checkpoint.resume else ""
    yield f"run      {runs.storage.uri}{begun}"
    if config.tracking.enabled:
        yield (
            f"MLflow   {tracking.store_uri}: experiment {tracking.experiment!r}, model {tracking.registered_model!r}, "
            f"alias {tracking.alias!r}"
        )
