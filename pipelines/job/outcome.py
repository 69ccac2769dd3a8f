"""The last words of a job: scores next to the baselines, the model's version, the report, and what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.plain_text import score_text
from sparkring.conf.rules.recipe import RECIPE
from sparkring.conf.rules.rule import find_problems
from sparkring.conf.secrets import redact
from sparkring.pipelines.evaluation.baselines.baseline import beside_baselines
from sparkring.pipelines.run.trial import TAG
from sparkring.training.worker.result import TrainResult, WorkerResult


@dataclass(frozen=True)
class ModelPlace:
    """Where the model is. `text`: for a person; `uri`: `models:/<name>/<version>`, empty where it has no version."""

    text: str
    uri: str = ""
    has_alias: bool = False


def ended_line(train: WorkerResult, config: RunConfig, is_part: bool = False) -> str:
    """Describe where training ended, and which step's weights the model has. `is_part`: it is a blend's network."""
    unit = "round" if config.model.is_trees else "step"
    at = f"ended at {unit} {train.steps}"
    if train.stopped_early:
        at += f", early: {_patience(config)}"
    best = train.best_value if train.exported_step == train.best_step else None
    why = "" if best is None else f", the best by {config.train.best_metric} ({score_text(best)})"
    return f"{at}; {'its weights are those' if is_part else 'the model is that'} of {unit} {train.exported_step}{why}"


def _patience(config: RunConfig) -> str:
    """Describe what ended training early."""
    stop = config.train.early_stopping
    if config.model.is_trees:
        return f"no better {config.train.best_metric} in {config.trees.early_stopping_rounds} rounds"
    return f"no better {stop.metric} in {stop.patience} evaluations" if stop is not None else "it had stopped improving"


def score_table(scores: Mapping[str, Mapping[str, float]], title: str) -> list[str]:
    """Format a table: a row per model, a column per metric; missing metrics stay blank."""
    names = list(dict.fromkeys(name for values in scores.values() for name in values))
    rows = [[title, *names]]
    rows += [[model, *(score_text(v[n]) if n in v else "" for n in names)] for model, v in scores.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


def outcome(result: TrainResult, resolved: Resolved, model: ModelPlace) -> str:
    """Describe the outcome of a job, for a person who reads the end of its output."""
    if result.choice is not None:
        resolved = resolved.of_family(result.choice.winner)
    config, recipe = resolved.config, shlex.quote(resolved.recipe)
    split = config.train.test_split or config.train.valid_split
    local_ui = f"sparkring ui {recipe}   (MLflow experiment {config.tracking.named(config.name).experiment!r})"
    facts = {
        "family": "" if result.choice is None else result.choice.describe(),
        "verdict": verdict_line(result, config),
        "model": model.text,
        "report": f"{result.run}/report.html",
        "browse": result.tracking_url or local_ui if config.tracking.enabled else "",
        **suggested_commands(result, resolved, model),
        "reader": "" if config.model.is_trees else reader_advice(result, config),
        "time": _time_line(result.timings),
    }
    shown = {name: text for name, text in facts.items() if text}
    width = max(map(len, shown))
    lines = [*score_table(result.scores, f"{split} split"), ""]
    lines += [f"{name.ljust(width)}  {text}" for name, text in shown.items()]
    of_blend = "a blend; its network " * result.is_blend
    head = f"{config.name}: {of_blend}{ended_line(result.train, config, result.is_blend)}"
    return "\n".join([head, "", *(f"  {line}".rstrip() for line in lines)])


def verdict_line(result: TrainResult, config: RunConfig) -> str:
    """Compare the model with trees and the best other baseline, and add cautions; may be ""."""
    return "; but ".join(filter(None, ["; ".join(beside_baselines(result, config.model)), *result.cautions]))


def reader_advice(result: TrainResult, config: RunConfig) -> str:
    """Suggest a change if ranks waited long for rows; "" otherwise."""
    from sparkring.pipelines.model.fed import stall_advice  # with torch

    return stall_advice(result.per_step_s, config.train.global_batch, config.data.threads or 1)


def suggested_commands(result: TrainResult, resolved: Resolved, model: ModelPlace) -> dict[str, str]:
    """Return commands to run after a job, by purpose, without secrets."""
    commands = {
        "longer": longer_command(result, resolved),
        "trees": trees_command(result, resolved),
        "next": next_command(resolved, model),
    }
    return {name: redact(command) for name, command in commands.items() if command}


def longer_command(result: TrainResult, resolved: Resolved) -> str:
    """Return the command for training twice as long, if the last evaluation was the best; else "".

    Not for a trial, which is short on purpose, nor for a date, whose recipe decides for all dates.
    """
    config, train = resolved.config, resolved.config.train
    evaluations = len(result.history.get(f"valid/{train.best_metric}", ()))
    if not _is_whole(resolved) or evaluations < 2 or result.train.best_step != result.train.steps:
        return ""
    limit = f"train.steps={2 * train.steps}" if train.steps is not None else f"train.epochs={2 * (train.epochs or 1)}"
    if config.model.is_trees:
        limit = f"trees.rounds={2 * config.trees.rounds}"
    return f"{_again(resolved, limit)}   (the last evaluation was the best)"


def trees_command(result: TrainResult, resolved: Resolved) -> str:
    """Return the command for training trees, if certainly better than this network; else ""."""
    config, gap = resolved.config, result.trees_gap
    if gap is None or not gap.is_worse or config.model.is_trees or result.choice or not _is_whole(resolved):
        return ""
    of_trees = config.model_copy(update={"model": config.model.model_copy(update={"family": "trees"})})
    if find_problems(RECIPE, of_trees):
        return ""
    return f"{_again(resolved, 'model.family=trees')}   (trains trees instead)"


def _is_whole(resolved: Resolved) -> bool:
    """Return whether a run is neither a trial nor for a date."""
    return TAG not in resolved.config.tracking.tags and resolved.interval is None


def _again(resolved: Resolved, setting: str) -> str:
    """Return the command of this run, with another setting."""
    verb, key = "run" if resolved.config.etl is not None else "train", setting.partition("=")[0]
    kept = [word for word in resolved.overrides if word.partition("=")[0] != key]
    return shlex.join(["sparkring", verb, resolved.recipe, *kept, setting])


def next_command(resolved: Resolved, model: ModelPlace) -> str:
    """Return the next command: the whole run after a trial, else predictions or a model check; or ""."""
    config, recipe = resolved.config, resolved.recipe
    if TAG in config.tracking.tags:
        return shlex.join(["sparkring", "run", recipe])
    date = ["--date", resolved.interval.ds] if resolved.interval is not None else []
    if config.predict is not None and (model.has_alias or config.predict.model is not None):
        return shlex.join(["sparkring", "predict", recipe, *date])
    if not model.uri:
        return ""
    if config.predict is not None:  # another model has the alias, or none
        return shlex.join(["sparkring", "predict", recipe, f"model={model.uri}", *date])
    usual = TrackingConfig()
    where = {"uri": config.tracking.uri, "root": config.tracking.root}
    given = [f"tracking.{key}={value}" for key, value in where.items() if value != getattr(usual, key)]
    return shlex.join(["sparkring", "serve-check", model.uri, *given])


def _time_line(timings: Mapping[str, float]) -> str:
    parts = {name.removesuffix("_s"): value for name, value in timings.items()}
    total = parts.pop("total", sum(parts.values()))
    return f"{total:.0f} s: " + ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
