"""What a sweep says: before it, in MLflow while it runs, and at its end. Pure functions."""

from __future__ import annotations

from sparkring.conf.plain_text import count_of, in_markdown
from sparkring.pipelines.sweep.space import SweepSpec, short
from sparkring.pipelines.sweep.study import Ended

MOST_SHOWN = 20  # trials in a description
COMPARE = "Select the trials below this run, then Compare: parallel coordinates show the keys beside the metric."


def describe_space(spec: SweepSpec, recipe: str, metric: str, mode: str, checked: str) -> list[str]:
    """Describe what a sweep would do, in lines.

    Args:
        spec: content of the sweep's file.
        recipe: name of the recipe.
        metric: metric of the validation split.
        mode: either min or max.
        checked: description of the checked corners.
    """
    width = max(map(len, spec.space))
    head = f"{recipe}: {count_of(spec.trials, 'trial')} for the {'highest' if mode == 'max' else 'lowest'} "
    return [
        f"{head}valid/{metric}; sampler {spec.sampler}, seed {spec.seed}, pruner {spec.pruner}",
        *(f"  {key:<{width}}  {searched.text}" for key, searched in spec.space.items()),
        f"checked: {checked}",
    ]


def trial_markdown(ended: list[Ended], metric: str, mode: str) -> list[str]:
    """Format the best trials as a Markdown table."""
    rows = [f"| trial | valid/{metric} | values |", "| --- | --- | --- |"]
    ranked = ranking(ended, mode)
    rows += [
        f"| {t.number} | {in_markdown(_outcome(t))} | {in_markdown(short(t.values))} |" for t in ranked[:MOST_SHOWN]
    ]
    rows += [f"| | | and {len(ranked) - MOST_SHOWN} more |"] if len(ranked) > MOST_SHOWN else []
    return [*rows, "", COMPARE]


def ranking(ended: list[Ended], mode: str) -> list[Ended]:
    """Complete trials first, the best one first; then pruned, then failed ones."""
    states = ("complete", "pruned", "failed")
    sign = -1 if mode == "max" else 1
    return sorted(ended, key=lambda t: (states.index(t.state), sign * (t.value or 0.0), t.number))


def trial_table(ended: list[Ended], metric: str) -> list[str]:
    """Format a line per trial, for the terminal."""
    return [f"trial {t.number:>3}  {metric} {_outcome(t):<10}  {short(t.values)}" for t in ended]


def _outcome(trial: Ended) -> str:
    if trial.state == "failed":
        return f"failed: {trial.why}"
    return "pruned" if trial.state == "pruned" else f"{trial.value:.6g}"
