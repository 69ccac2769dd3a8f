"""What makes a run a trial: few rows, one epoch, names of its own, no notices and no alias."""

from __future__ import annotations

import json

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.rule import Rule, find_problems, refuse

SUFFIX = "-trial"
TAG = "sparkring.trial"

TRIAL: tuple[Rule[RunConfig], ...] = (  # what a recipe may not have in a trial
    refuse(("etl",), lambda c: c.etl is None, "--limit-rows: the recipe has no etl block"),
    refuse(
        ("etl.interval", "schedule"),
        lambda c: c.schedule is not None or (c.etl is not None and c.etl.interval is not None),
        "--limit-rows: the recipe has dates or intervals, which a trial has not",
    ),
)


def trial_overrides(resolved: Resolved, limit_rows: int) -> list[str]:
    """Return the overrides that make a trial run. ConfigError for dates or intervals, or without etl.

    Name, experiment and registered model get SUFFIX, so no dataset, run or model of the recipe is touched. Nothing
    judges the model (`report.must_beat`, `promote`, `drift`), and no target of `notify` is notified.
    """
    config = resolved.config
    if problems := find_problems(TRIAL, config):
        raise ConfigError(config.name, problems)
    tracking = config.tracking
    values = {
        "name": config.name + SUFFIX,
        "etl.limit_rows": limit_rows,
        "etl.one_per": None,
        "train.global_batch": trial_batch(config.train.global_batch, limit_rows),
        "tracking.experiment": (tracking.experiment or config.name) + SUFFIX,
        "tracking.registered_model": (tracking.registered_model or config.name) + SUFFIX,
        "tracking.tags": tracking.tags | {TAG: f"{count_of(limit_rows, 'row')}"},
        "report.must_beat": [],
        "report.must_beat_trees": [],
        "report.must_beat_guess": False,
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
    """Halve the batch until a few fit in the rows, as long as it stays even: layouts divide it."""
    while global_batch * 8 > limit_rows and global_batch % 2 == 0 and global_batch > 2:
        global_batch //= 2
    return global_batch
