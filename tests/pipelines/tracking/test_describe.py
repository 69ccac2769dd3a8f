from __future__ import annotations

from dataclasses import replace

import pytest

from sparkring.conf.manifest import DataFile, DatasetManifest
from sparkring.conf.plain_text import code_in_markdown
from sparkring.pipelines.tracking.checkout import shown_command, source_name, source_tags
from sparkring.pipelines.tracking.describe import (
    CARD_BEGINS,
    FAILED,
    LONGEST_CARD,
    VERSION,
    changes,
    job_note,
    main_scores,
    model_card,
    reason_line,
    score_table,
    with_card,
    with_headline,
    without_headline,
)
from sparkring.pipelines.tracking.points import shown_name
from sparkring.pipelines.tracking.store.registry import described
from sparkring.pipelines.tracking.tags import DECISION, REASON
from sparkring.training.worker.result import MODEL
from tests.helpers.datasets import manifest_of, unread_file
from tests.pipelines.results import train_result

BEFORE = {"optim.lr": "0.1", "train.epochs": "2", "train.seed": "0", "fingerprint": "a" * 64, "tracking.root": "here"}
ROWS = {"test": 400, "train": 32_000}
CONFIG = {"name": "shop", "dataset": "/datasets/shop"}
SCORED = train_result(
    name="shop", config=CONFIG,
    scores={MODEL: {"loss": 0.25, "auc": 0.75, "positive_share": 0.5}, "majority rate": {"loss": 0.5}},
    unseen={"carrier": 1200}, missing={"logistic regression": "no scalar feature"},
)  # fmt: skip


def _file(split: str, rows: int) -> DataFile:
    return unread_file(split, rows, f"data/{split}.parquet")


def manifest() -> DatasetManifest:
    return manifest_of(
        files=tuple(_file(split, rows) for split, rows in ROWS.items()), format_version=2, name="shop", features={}
    )


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, ""),
        ({"optim.lr": "0.05"}, "lr=0.05"),
        ({"optim.lr": "0.05", "train.epochs": "9", "tracking.root": "there"}, "lr=0.05 epochs=9"),
        ({"train.epochs": "9", "fingerprint": "b" * 64}, "data=bbbbbbbb epochs=9"),
        ({"optim.lr": "1", "train.epochs": "9", "train.seed": "1", "data.tail": "pad", "model.task": "binary"},
         "lr=1 epochs=9 seed=1 +2"),
        ({"optim.betas": "[0.8, 0.9]"}, "betas=[0.8,0.9]"),
        ({"model.factory": "a.module.of.some.length:Model"}, "factory=a.module.of.some.lengt.."),
        ({"date": "2024-03-01", "fingerprint": "b" * 64, "etl.rows": "other"}, ""),
    ],
)  # fmt: skip
def test_a_runs_name_ends_in_what_differs_from_the_run_before(changed: dict[str, str], shown: str) -> None:
    assert changes(BEFORE | changed, BEFORE) == shown


def test_a_key_that_is_back_at_its_default_is_in_the_name() -> None:
    assert changes(BEFORE, BEFORE | {"model.args.dropout": "0.2"}) == "dropout=default"


def test_a_card_has_rows_scores_beside_baselines_how_to_load_limits_and_the_report() -> None:
    parts = model_card(SCORED, SCORED, manifest(), ["carrier", "x"]).split("\n\n")
    scores, table, data, load, known, report = parts  # what a reader wants first is first
    assert scores == f"{CARD_BEGINS}of the split test"
    assert data == "**Data** rows by split: train 32,000, test 400; dataset `aaaaaaaaaaaa` in `/datasets/again`"
    assert table.splitlines() == [
        "|  | loss | auc |", "| --- | --- | --- |", "| this model | 0.2500 | 0.7500 |", "| majority rate | 0.5000 |  |",
    ]  # fmt: skip
    assert f'load_model("models:/shop/{VERSION}")`; rows are raw, with `carrier`, `x`' in load
    assert known == (
        "**Limits** scored on the rows of `test` only; no comparison with logistic regression: no scalar feature; test "
        "rows with a value that no training row has, or too few: `carrier` 1,200"
    )
    assert "run folder `/runs/again/1`, code `c0ffee`" in report
    long = replace(SCORED, missing={"logistic regression": "x" * 9000})
    assert len(model_card(long, long, manifest(), [])) == LONGEST_CARD < 5000
    assert score_table(replace(SCORED, scores={MODEL: {}})) == ""
    assert "| 2e-12 |" in score_table(replace(SCORED, scores={MODEL: {"loss": 2e-12}}))


def test_the_headline_has_the_first_scores_of_the_model() -> None:
    scores = {"test/loss": 0.5, "test/positive_share": 0.1, "test/majority_rate/loss": 9.0, "test/auc": 0.75}
    assert main_scores(scores) == ": auc 0.7500, loss 0.5000"
    assert main_scores({"test/loss": 2e-12}) == ": loss 2e-12"
    assert main_scores({}) == main_scores({"test/a/b": 1.0}) == ""


def test_a_description_keeps_its_words_under_headlines_that_change() -> None:
    note = with_headline(job_note(" Late flights ", "sparkring run flights"), f"{FAILED}no room", FAILED)
    assert note == f"{FAILED}no room\n\nLate flights\n\n`sparkring run flights`"
    assert with_headline(note, f"{FAILED}again", FAILED) == note.replace("no room", "again")
    assert without_headline(note, FAILED) == "Late flights\n\n`sparkring run flights`"
    assert without_headline("Late flights\n\nmore", FAILED) == "Late flights\n\nmore"
    carded = with_card(note, f"{CARD_BEGINS}1")
    assert carded == f"{note}\n\n{CARD_BEGINS}1" and with_card(carded, f"{CARD_BEGINS}2") == f"{note}\n\n{CARD_BEGINS}2"
    assert with_card(f"{note}\n\n**Data** rows", f"{CARD_BEGINS}2") == f"{note}\n\n{CARD_BEGINS}2", "an older card"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no room\nand more", "no room"), ("", ""), ("shop: 1 problem", "shop: 1 problem"),
        ("shop: 2 problems\n  - train.steps = 0: too few\n  - more", "shop: 2 problems: train.steps = 0: too few"),
    ],
)  # fmt: skip
def test_why_something_failed_is_a_line(message: str, line: str) -> None:
    assert reason_line(message) == line


def test_a_versions_decision_stands_above_its_card_and_a_users_words_stay() -> None:
    card, first, second = f"{CARD_BEGINS}rows", {DECISION: "held", REASON: "drift"}, {DECISION: "promoted"}
    assert described("", {}, first) == "held: drift" and described(card, {}, first) == f"held: drift\n\n{card}"
    assert described(f"held: drift\n\n{card}", first, second) == f"promoted\n\n{card}"
    assert described("**Data** rows", {}, first) == "held: drift\n\n**Data** rows", "an older card"
    assert described("Ann has looked at it", {}, first) is None
    assert described(f"Ann's\n\n{card}", first, second) is None


def test_who_ran_what_is_in_mlflows_own_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    words = ["/usr/bin/sparkring", "run", "recipes/shop.yaml", "a.b=/x y", "--date", "2024-03-01"]
    assert source_name(words) == "sparkring run shop.yaml --date 2024-03-01"
    assert shown_command(words) == "sparkring run recipes/shop.yaml 'a.b=/x y' --date 2024-03-01"
    tags = source_tags(words, "c0ffee+changes")
    assert (tags["mlflow.user"], tags["mlflow.source.type"]) == ("ann", "LOCAL")
    assert (tags["mlflow.source.git.commit"], tags["mlflow.source.git.dirty"]) == ("c0ffee", "true")
    assert source_tags(words, "c0ffee")["mlflow.source.git.dirty"] == "false"
    assert "mlflow.source.git.commit" not in source_tags(words, "")


def test_what_is_not_about_the_model_is_a_system_metric() -> None:
    names = ["train/loss", "valid/auc", "test/champion/loss", "rows/in", "perf/step_s", "cost/core_hours_etl"]
    assert [shown_name(name) for name in names] == [*names[:4], "system/perf/step_s", "system/cost/core_hours_etl"]


HOSTILE = "x`](https://evil.example) | <b>\x1b[2J\n\n# y"


def test_names_and_errors_change_nothing_of_a_card() -> None:
    scores = {MODEL: {"auc": 0.5}, HOSTILE: {"auc": 0.4}}
    result = train_result(missing={HOSTILE: HOSTILE}, unseen={HOSTILE: 3}, scores=scores)
    card = model_card(result, result, manifest(), [HOSTILE])
    as_code = code_in_markdown(HOSTILE)
    assert as_code in card and "\x1b" not in card and "\n# y" not in card
    rest = card.replace(as_code, "")
    assert "](https" not in rest.replace(r"\](https", "") and "<b>" not in rest
    assert {line.count("|") for line in score_table(result).splitlines()} == {3}
