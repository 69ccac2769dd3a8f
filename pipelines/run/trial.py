"""What makes a run a trial: few rows, one epoch, names of its own, no notices and no alias."""

from __future__ import annotations

import json

from sparkring.conf.load import ConfigError, Resolved

SUFFIX = "-trial"
TAG = "sparkring.trial"


def trial_overrides(resolved: Resolved, limit_rows: int) -> list[str]:
    """Overrides of a recipe that make a run of it a trial. ConfigError where it has dates or intervals, or no etl.

    Name, experiment and registered model get SUFFIX, so no dataset, run or model of the recipe is touched. Nothing
    judges the model (`report.must_beat`, `promote`, `drift`), and no target of `notify` hears of it.
    """
    config = resolved.config
    if config.etl is None or config.etl.interval is not None or config.schedule is not None:
        why = "has no etl block" if config.etl is None else "has dates or intervals, which a trial has not"
        raise ConfigError(config.name, [f"--limit-rows: the recipe {why}"])
    tracking = config.tracking
    values = {
        "name": config.name + SUFFIX,
        "etl.limit_rows": limit_rows,
        "etl.one_per": None,
        "train.global_batch": trial_batch(config.train.global_batch, limit_rows),
        "tracking.experiment": (tracking.experiment or config.name) + SUFFIX,
        "tracking.registered_model": (tracking.registered_model or config.name) + SUFFIX,
        "tracking.tags": tracking.tags | {TAG: f"{limit_rows} rows"},
        "report.must_beat": [],
        "report.must_beat_trees": [],
        "promote": None,
        "drift": None,
        "notify.targets": [],
    }
    if resolved.origins.get("train.steps") != "command line":
        values |= {"train.epochs": 1, "train.steps": None}
        if config.optim.warmup_steps:
            values["optim.warmup_steps"] = 0  # there are fewer steps than that
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def trial_batch(global_batch: int, limit_rows: int) -> int:
    """The batch, halved until a few are in the rows, as long as it stays even: layouts divide it."""
    while global_batch * 8 > limit_rows and global_batch % 2 == 0 and global_batch > 2:
        global_batch //= 2
    return global_batch
