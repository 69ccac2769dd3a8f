"""What a person reads of a run, a model and an experiment in MLflow: names, descriptions in Markdown. Pure functions.

name            `flights 2013-03-01 lr=0.05`: the recipe, its date or minute, what differs from its last run
description     first line: the version it registered, or why it failed; then the recipe's own words, the model card
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import code_in_markdown, in_markdown, score_text
from sparkring.conf.tasks import POSITIVE_SHARE
from sparkring.pipelines.tracking.views import TRAINING, scores_of
from sparkring.training.worker.result import MODEL, Evaluated, RunIdentity

VERSION = "<version>"  # in a card: the number that the registry will give
CARD_BEGINS = "**Scores** "
CARD = re.compile(r"\*\*(Scores|Data)\*\* ")  # begins one; with the data those of before 0.2
FAILED = "**failed**: "
LONGEST_CARD = 3500  # characters; MLflow takes 5,000 for a version's description
MOST_CHANGES, MOST_CHARACTERS = 3, 24  # in a run's name
# Blocks that say where and how things are kept, not what was trained.
NOT_COMPARED = ("name", "storage", "tracking", "spark", "notify", "schedule", "retention", "report", "date")


def changes(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Describe briefly how parameters of two runs differ: `lr=0.05 epochs=2 data=1f0c22aa`; "" if equal.

    At most MOST_CHANGES keys, by their last word. A key only in `before` is at its default now. Between dates the data
    and the date's values in `etl` always differ, and are left out.
    """
    dated = "date" in now
    keys = [key for key in dict.fromkeys([*now, *before]) if now.get(key) != before.get(key)]
    keys = [key for key in keys if key.partition(".")[0] not in NOT_COMPARED]
    if dated:
        keys = [key for key in keys if key != "fingerprint" and not key.startswith("etl.")]
    elif "fingerprint" in keys:  # says what a change of etl means, once
        keys = ["fingerprint", *(key for key in keys if key != "fingerprint")]
    shown = [_change(key, now.get(key, "default")) for key in keys[:MOST_CHANGES]]
    more = [f"+{len(keys) - MOST_CHANGES}"] if len(keys) > MOST_CHANGES else []
    return " ".join(shown + more)


def _change(key: str, value: str) -> str:
    if key == "fingerprint":
        return f"data={value[:8]}"
    text = "".join(value.split())
    return f"{key.rpartition('.')[2]}={text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 2] + '..'}"


def with_headline(note: str, headline: str, replaces: str) -> str:
    """Add a first line to the description; one that starts with `replaces` is replaced."""
    return "\n\n".join(filter(None, [headline, without_headline(note, replaces)]))


def without_headline(note: str, begins: str) -> str:
    """Remove the first paragraph of the description if it starts with `begins`."""
    first, _, rest = note.partition("\n\n")
    return rest if first.startswith(begins) else note


def with_card(note: str, card: str) -> str:
    """Append the card to the description, replacing an earlier card."""
    return "\n\n".join(filter(None, [CARD.split(note, 1)[0].strip(), card]))


def reason_line(message: str) -> str:
    """Return a failure's reason in a line: the first line, or the first problem if that only counts them."""
    first, *others = message.splitlines() or [""]
    counts_only = first.endswith((" problem", " problems")) and others
    return f"{first}: {others[0].strip(' -')}" if counts_only else first


def version_link(model: str, version: str) -> str:
    """Link a registered version to its page."""
    return f"[{in_markdown(model)} version {version}](#/models/{model}/versions/{version}?{TRAINING})"


def main_scores(scores: Mapping[str, float]) -> str:
    """Format the model's first scores for a headline, `: auc 0.7756, loss 0.5723`; "" without scores."""
    shown = [
        f"{name} {score_text(scores[f'test/{name}'])}" for name in scores_of(scores) if name != POSITIVE_SHARE.name
    ]
    return f": {', '.join(shown[:MOST_CHANGES])}" if shown else ""


def job_note(description: str, command: str) -> str:
    """Describe a starting job: the recipe's own words, and the command."""
    return "\n\n".join(filter(None, [description.strip(), code_in_markdown(command)]))


def experiment_note() -> str:
    """Describe a new experiment; links of each recipe follow."""
    return (
        "A line per job, with its scores (`test/..`), model and version; its parts `etl`, `train`, `evaluate` are "
        "below it. Curves (`train/..`, `valid/..`) are in the part `train`, seconds and costs among its system metrics."
    )


def registered_note(config: RunConfig) -> str:
    """Describe the registered model: its versions, the aliases, how to load one."""
    name, alias = config.tracking.named(config.name).registered_model, config.tracking.alias
    about = config.description.strip()
    return (
        f"{f'{about}. ' if about else ''}Versions are models of the recipe `{config.name}` ({config.model.task}).\n\n"
        f"- `{alias}` is the version in use, `previous` the one before it, `challenger` the last that was judged and "
        f'not promoted\n- `mlflow.pyfunc.load_model("models:/{name}@{alias}")` predicts from raw rows'
    )


def model_card(run: RunIdentity, evaluated: Evaluated, manifest: DatasetManifest, raw: Sequence[str]) -> str:
    """Return the model card of a version: scores next to baselines, data, loading, limits, report.

    `raw`: names of the raw columns that the model takes.
    """
    config = run.run_config()
    tracking = config.tracking.named(config.name)
    table, split = score_table(evaluated), config.train.test_split or config.train.valid_split
    named = sorted(manifest.splits.items(), key=lambda split: (split[0] != "train", split[0]))
    splits = ", ".join(f"{in_markdown(name)} {info.rows:,}" for name, info in named)
    load = (
        f'**Load** `mlflow.pyfunc.load_model("models:/{tracking.registered_model}/{VERSION}")`; rows are raw, with '
        f"{', '.join(map(code_in_markdown, raw))}"
    )
    commit = f", code `{run.commit[:12]}`" if run.commit else ""
    folder, dataset = code_in_markdown(run.run), code_in_markdown(run.dataset)
    report = f"**Report** `report.html` among the artifacts of the job's run; run folder {folder}{commit}"
    parts = [
        f"{CARD_BEGINS}{f'of the split {in_markdown(split)}' if table else 'none'}",
        table,
        f"**Data** rows by split: {splits}; dataset `{run.fingerprint[:12]}` in {dataset}",
        load,
        "**Limits** " + "; ".join(limits(config, evaluated)),
        report,
    ]
    card = "\n\n".join(filter(None, parts))
    return card if len(card) <= LONGEST_CARD else card[: LONGEST_CARD - 3] + "..."


def score_table(evaluated: Evaluated) -> str:
    """Format scores of the model next to the baselines' as a Markdown table; "" without scores."""
    names = [name for name in evaluated.scores.get(MODEL, {}) if name != POSITIVE_SHARE.name]
    if not names:
        return ""
    rows = [["", *names]]
    for model, scores in evaluated.scores.items():
        rows.append([model, *(score_text(scores[name]) if name in scores else "" for name in names)])
    first, *others = ("| " + " | ".join(map(in_markdown, row)) + " |" for row in rows)
    return "\n".join([first, "| " + " | ".join(["---"] * (len(names) + 1)) + " |", *others])


def limits(config: RunConfig, evaluated: Evaluated) -> list[str]:
    """List what to know before using the model, one clause each."""
    split = config.train.test_split
    found = [
        f"scored on the rows of {code_in_markdown(split)} only"
        if split
        else "scored on the validation rows, which chose it"
    ]
    found += [f"no comparison with {in_markdown(name)}: {in_markdown(why)}" for name, why in evaluated.missing.items()]
    if evaluated.unseen:
        values = ", ".join(f"{code_in_markdown(name)} {rows:,}" for name, rows in evaluated.unseen.items())
        found.append(f"test rows with a value that no training row has, or too few: {values}")
    return found
