"""Choose the parameters that MLflow shows of a run; its artifact config.json holds the whole configuration.

MLflow sends every parameter of every run to the browser, so a list of a year's runs must not carry all of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sparkring.conf.load import Resolved
from sparkring.conf.secrets import redacted

PARAM_CHARACTERS = 6000  # MLflow's limits
KEY_CHARACTERS = 250
MOST_PARAMS = 40  # of a run
# Shown also at their defaults. `name` and `storage.runs` are read back (fetch.py).
ALWAYS = (
    "name",
    "storage.runs",
    "date",
    "fingerprint",
    "model.factory",
    "model.task",
    "optim.name",
    "optim.lr",
    "train.epochs",
    "train.steps",
    "train.global_batch",
    "train.seed",
    "parallel.engine",
    "parallel.zero",
    "launch.world",
)
# Of other keys, those of earlier blocks first; blocks that are not named here come last.
BLOCKS = ("warm_start", "model", "optim", "train", "data", "parallel", "launch", "dataset", "etl", "schedule")
# Texts of any length, and what the fingerprint stands for.
LEFT_OUT = ("description", "etl.sources", "etl.views", "etl.checks", "etl.features")


def run_params(resolved: Resolved, fingerprint: str, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Pick a run's parameters, key path -> value: MOST_PARAMS at most, the most telling first.

    Args:
        resolved: configuration of the run.
        fingerprint: fingerprint of the dataset.
        leave_out: blocks that are not the run's.
    """
    config = resolved.config
    facts = {"fingerprint": fingerprint} | ({"date": resolved.interval.ds} if resolved.interval else {})
    known = facts | flat_values(config.model_dump(mode="json", exclude=set(leave_out)))
    given = flat_values(config.model_dump(mode="json", exclude=set(leave_out), exclude_defaults=True))
    searched = {key for key, origin in resolved.origins.items() if origin == "command line"}
    return {key: known[key] for key in telling_keys(known, given, searched)}


def telling_keys(known: Collection[str], given: Iterable[str], searched: Collection[str]) -> list[str]:
    """Choose the keys to show, at most MOST_PARAMS.

    Args:
        known: every key, in the configuration's order.
        given: those that are not at their defaults.
        searched: those of the command line, which differ between runs of one recipe; a list's items have keys too.
    """
    varied = {key for key in known if any(key == s or s.startswith(f"{key}.") for s in searched)}
    others = (varied | set(given)) & set(known) - set(ALWAYS)
    kept = [key for key in known if key in others and (key in varied or not _within(key, LEFT_OUT))]
    kept.sort(key=lambda key: (key not in varied, _rank(key)))
    return [*(key for key in ALWAYS if key in known), *kept][:MOST_PARAMS]


def _within(key: str, blocks: Iterable[str]) -> bool:
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def _rank(key: str) -> int:
    block = key.partition(".")[0]
    return BLOCKS.index(block) if block in BLOCKS else len(BLOCKS)


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to `a.b.c` -> value; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flat_values(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def flat_params(values: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a nested configuration to `a.b.c` -> text: redacted, lists as JSON, cut to MLflow's limits.

    Redacted here, where a number behind `n_token` is still a number and not a text.
    """
    flat: dict[str, str] = {}
    for name, value in flat_values(values).items():
        shown = redacted(value, name)
        text = shown if isinstance(shown, str) else json.dumps(shown, default=str)
        flat[name[:KEY_CHARACTERS]] = text if len(text) <= PARAM_CHARACTERS else text[: PARAM_CHARACTERS - 3] + "..."
    return flat
