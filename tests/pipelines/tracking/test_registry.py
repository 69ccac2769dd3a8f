"""Aliases of versions: pure decisions, and a real sqlite store."""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.stored import StoredError
from sparkring.pipelines import cli
from sparkring.pipelines.promotion.by_hand import promote_by_hand, rollback
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.tracking.alias import Version, refuse_move
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.journal import Journal
from sparkring.pipelines.tracking.ops import Model, Promote, StartRun
from sparkring.pipelines.tracking.store.registry import (
    CHALLENGER,
    EARLIER,
    PREVIOUS,
    Registry,
    decided,
    earlier_decisions,
)
from sparkring.pipelines.tracking.store.sink import replay
from sparkring.pipelines.tracking.tags import DATE, DECISION, NO_CHAMPION, REASON, WEIGHTS
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.pipelines.tracking.views import NOTE
from sparkring.training.worker.result import Decision, Promotion
from tests.pipelines.tracking.test_mlflow_store import begun, client_of, quick, tiny_model

OURS = Version("m", "5", at_ms=500, date="2024-03-05")


def current(**changes: Any) -> Version:
    return replace(Version("m", "3", at_ms=300, date="2024-03-03"), **changes)


@pytest.mark.parametrize(
    ("now", "ours", "judged_against", "refused"),
    [
        (None, OURS, None, None),
        (None, OURS, NO_CHAMPION, None),
        (current(), OURS, "3", None),
        (current(), OURS, None, None),
        (current(date=None), OURS, "3", None),
        (current(date="2024-03-05"), OURS, "3", None),  # the same date again
        (replace(OURS), OURS, "3", None),  # sent twice
        (current(), OURS, "2", "champion is on version 3 now, and the model was judged against 2"),
        (current(), OURS, NO_CHAMPION, "champion is on version 3 now, and the model was judged against none"),
        (None, OURS, "3", "champion is on version none now, and the model was judged against 3"),
        (current(date="2024-03-06"), OURS, "3", "older: champion stays on version 3, of the later date 2024-03-06"),
        (current(date="2024-03-05T01"), OURS, "3", "older: champion stays on version 3, of the later date"),
        (current(date="2024-03-06"), OURS, "2", "older: champion stays on version 3, of the later date 2024-03-06"),
        # a date decides, however late the older one was registered; without one, the time of registration
        (current(at_ms=9000), OURS, "3", None),
        (current(date="2024-03-05", at_ms=9500), OURS, "3", "older: champion stays on version 3, 9 s younger"),
        (current(at_ms=9500, date=None), OURS, "3", "older: champion stays on version 3, 9 s younger"),
        (current(at_ms=9500), replace(OURS, date=None), "3", "older: champion stays on version 3, 9 s younger"),
    ],
)
def test_an_alias_moves_forward_and_from_what_was_judged(
    now: Version | None, ours: Version, judged_against: str | None, refused: str | None
) -> None:
    found = refuse_move("champion", now, ours, judged_against)
    if refused is None:
        assert found is None
    else:
        assert found is not None and found.older == refused.startswith("older: ")
        assert found.why.startswith(refused.removeprefix("older: "))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


def settings(store: Path, name: str, **changes: Any) -> TrackingConfig:
    return quick(store, registered_model=name, **changes)


def job(
    tracking: TrackingConfig,
    folder: Path,
    date: str | None,
    judged_against: str | None,
    decision: Decision = "promoted",
    weights: str = "7" * 64,
) -> None:
    """What a job records of its model: registered, then what was decided of it."""
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_text('{"factor": 2}')
    assert tracking.registered_model is not None
    name = f"{tracking.registered_model} {date} {weights}"
    with Tracker(tracking, job=name, name="flights") as tracker, tracker.part("evaluate"):
        tags = {WEIGHTS: weights} | ({DATE: date} if date else {})
        tracker.model("evaluate", folder, tiny_model(tracking.registered_model, weights, alias=None, tags=tags))
        promotion = Promotion(decision=decision, reasons=["so it is"], alias="champion")
        tracker.promote("evaluate", tracking.registered_model, "champion", promotion, judged_against)


def aliases(tracking: TrackingConfig) -> dict[str, str]:
    assert tracking.registered_model is not None
    found = client_of(tracking).get_registered_model(tracking.registered_model).aliases
    return {name: str(version) for name, version in found.items()}


def tags(tracking: TrackingConfig, version: str) -> tuple[Decision | None, str]:
    found = Registry(tracking).version(version)
    assert found is not None
    return decided(found)


def test_nights_move_the_alias_forward_and_keep_the_one_before(store: Path, tmp_path: Path) -> None:
    tracking, model = settings(store, "nights"), tmp_path / "model"
    job(tracking, model, "2024-03-03", NO_CHAMPION, weights="1" * 64)
    assert aliases(tracking) == {"champion": "1"}
    job(tracking, model, "2024-03-04", "1", "rejected", weights="2" * 64)
    assert aliases(tracking) == {"champion": "1", CHALLENGER: "2"}
    assert tags(tracking, "2") == ("rejected", "so it is")
    client = client_of(tracking)
    assert client.get_model_version("nights", "2").description == "2024-03-04 rejected: so it is"
    client.update_model_version("nights", "2", "Ann has looked at it")
    Registry(tracking).tag("2", {DECISION: "promoted", REASON: "by hand"})
    Registry(tracking).tag("2", {DECISION: "rejected", REASON: "so it is"})
    assert client.get_model_version("nights", "2").description == "Ann has looked at it"
    job(tracking, model, "2024-03-05", "1", weights="3" * 64)
    assert aliases(tracking) == {"champion": "3", PREVIOUS: "1", CHALLENGER: "2"}
    job(tracking, model, "2024-03-04", "3", weights="4" * 64)  # a backfill
    assert aliases(tracking) == {"champion": "3", PREVIOUS: "1", CHALLENGER: "2"}
    assert tags(tracking, "4") == (
        "older_date", "champion stays on version 3, of the later date 2024-03-05; so it is"
    )  # fmt: skip
    job(tracking, model, "2024-03-06", "1", weights="5" * 64)  # judged against a version that is not it any more
    assert aliases(tracking)["champion"] == "3" and aliases(tracking)[CHALLENGER] == "5"
    decision, why = tags(tracking, "5")
    assert decision == "held" and why.startswith("champion is on version 3 now, and the model was judged against 1")
    job(tracking, model, "2024-03-05", "3", weights="3" * 64)  # the end of night 3 again, after a kill
    assert aliases(tracking)["champion"] == "6" and aliases(tracking)[PREVIOUS] == "1"
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`sparkring.decision` = 'rejected'")
    assert {run.data.tags["sparkring.key"] for run in found} == {"job", "evaluate"}
    assert {run.data.tags["sparkring.champion_before"] for run in found} == {"1"}
    link = "#/models/nights/versions/2?workflowType=machine_learning"
    assert {run.data.tags[NOTE] for run in found} == {f"[nights version 2]({link}) rejected: so it is"}
    found = client.search_model_versions("name = 'nights' and tags.`sparkring.decision` = 'promoted'")  # type: ignore[assignment]
    assert {str(version.version) for version in found} == {"1", "3", "6"}  # type: ignore[attr-defined]


def left_behind(store: Path, name: str, date: str, judged_against: str, weights: str) -> None:
    """The journal of a job whose tracking server was away: its model, and that it is to be promoted."""
    journal = Journal.create(store, f"left-{date}")
    at = time.time()
    model = journal.add_file(b'{"factor": 2}', "model.json")
    info = tiny_model(name, weights, alias=None, tags={DATE: date, WEIGHTS: weights})
    for op in (
        begun(f"left {date}"),
        StartRun(key="evaluate", at=at, name="evaluate", parent="job", resume=False, tags={}),
        Model(key="evaluate", at=at, file=model.rpartition("/")[0], **vars(info)),
        Promote(
            key="evaluate",
            at=at,
            registered_model=name,
            alias="champion",
            decision="promoted",
            reason="",
            judged_against=judged_against,
        ),
    ):
        journal.append(op)
    journal.state["settings"] = {"experiment": "tests", "uri": None}
    journal.done(0)
    journal.close(delete=False)


def test_a_replay_moves_the_alias_by_the_same_rules(store: Path, tmp_path: Path) -> None:
    """The server was away for three nights, all judged against version 1, which the first of them replaces."""
    tracking = settings(store, "away")
    job(tracking, tmp_path / "model", "2024-03-03", NO_CHAMPION, weights="1" * 64)
    for number, date in enumerate(("2024-03-05", "2024-03-04", "2024-03-06"), 2):
        left_behind(store, "away", date, "1", str(number) * 64)
        time.sleep(0.01)  # journals are sent oldest first
    assert aliases(tracking) == {"champion": "1"}
    assert replay(tracking)[0] == 3
    assert aliases(tracking) == {"champion": "2", PREVIOUS: "1", CHALLENGER: "4"}
    assert [tags(tracking, version)[0] for version in "234"] == ["promoted", "older_date", "held"]


def test_a_store_that_is_away_is_waited_for_no_longer_than_it_says(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = quick(tmp_path, uri=f"http://127.0.0.1:{free.getsockname()[1]}", request_timeout_s=1)
    tracker = Tracker(away, job="away", name="flights")
    try:
        assert not tracker.settled(timeout_s=3600.0, away_s=0.5)
        with pytest.raises(StoreUnreachable):
            Registry(settings(tmp_path, "away", uri=away.uri)).with_alias("champion")
    finally:
        tracker.close(timeout_s=10.0)


def test_what_another_job_does_in_between_is_seen(store: Path, tmp_path: Path, monkeypatch: Any) -> None:
    tracking, model = settings(store, "race"), tmp_path / "model"
    for number in "123":
        job(tracking, model, None, NO_CHAMPION, "rejected", weights=number * 64)
    registry = Registry(tracking)
    ours = registry.version("3")
    assert ours is not None
    genuine = MlflowClient.set_registered_model_alias

    def overtaken(self: MlflowClient, name: str, alias: str, version: str) -> None:
        genuine(self, name, alias, version)
        genuine(self, name, alias, "2")

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", overtaken)
    refusal = registry.move("champion", ours, NO_CHAMPION)
    assert refusal is not None and "was set on version 2 by another job at the same time" in refusal.why


def test_by_hand_and_back(store: Path, tmp_path: Path, capsys: Any) -> None:
    tracking, model = settings(store, "hands"), tmp_path / "model"
    recipe = tmp_path / "hands.yaml"
    recipe.write_text(f"name: hands\ndataset: somewhere\ntracking: {{root: {store}, experiment: tests}}\n")
    config = load_config(str(recipe)).config
    job(tracking, model, "2024-03-03", NO_CHAMPION, weights="1" * 64)
    with pytest.raises(ConfigError, match="no version of 'hands' has the alias 'previous'; say which"):
        rollback(config, "")
    job(tracking, model, "2024-03-04", "1", "held", weights="2" * 64)
    assert cli.main(["promote", str(recipe), "2", "--reason", "looked at it"]) == Exit.OK
    assert capsys.readouterr().out == "hands: champion is version 2 (was version 1, now 'previous')\n"
    assert aliases(tracking) == {"champion": "2", PREVIOUS: "1"}
    assert tags(tracking, "2") == ("promoted", "by hand: looked at it")
    assert cli.main(["rollback", str(recipe), "--reason", "late planes"]) == Exit.OK
    assert aliases(tracking) == {"champion": "1", PREVIOUS: "2"}
    assert tags(tracking, "1") == ("promoted", "rollback from version 2: late planes")
    assert tags(tracking, "2") == ("rolled_back", "rolled back to version 1: late planes")
    rollback(config, "")
    assert aliases(tracking) == {"champion": "2", PREVIOUS: "1"}
    assert client_of(tracking).get_model_version("hands", "2").tags[EARLIER].splitlines() == [
        "rolled_back: rolled back to version 1: late planes", "promoted: by hand: looked at it", "held: so it is"
    ]  # fmt: skip
    client_of(tracking).set_registered_model_alias("hands", PREVIOUS, "2")
    with pytest.raises(ConfigError, match="version 2, which is 'champion' too, of 'hands' has the alias 'previous'"):
        rollback(config, "")
    for version, why in (
        ("9", "has no version '9'"),
        ("x", "has no version 'x'"),
        ("2", "has the alias 'champion' al"),
    ):
        with pytest.raises(ConfigError, match=why):
            promote_by_hand(config, version, "")
    assert cli.main(["promote", str(recipe), "9"]) == Exit.USAGE


def test_by_hand_makes_no_store(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"name: r\ndataset: somewhere\ntracking: {{root: {tmp_path / 'none'}}}\n")
    with pytest.raises(ConfigError, match="there is no store yet; run `sparkring run r` first"):
        promote_by_hand(load_config(str(recipe)).config, "1", "")
    assert not (tmp_path / "none").exists()


def test_a_version_deleted_by_hand_takes_its_alias_along(store: Path, tmp_path: Path) -> None:
    tracking, model = settings(store, "deleted"), tmp_path / "model"
    job(tracking, model, "2024-03-03", NO_CHAMPION, weights="1" * 64)
    client_of(tracking).delete_model_version("deleted", "1")
    registry = Registry(tracking)
    assert registry.with_alias("champion") is None and registry.version("1") is None


def test_files_deleted_by_hand_are_named(store: Path, tmp_path: Path) -> None:
    tracking, model = settings(store, "files"), tmp_path / "model"
    job(tracking, model, "2024-03-03", NO_CHAMPION, weights="1" * 64)
    registry = Registry(tracking)
    found = registry.with_alias("champion")
    assert found is not None
    folder = registry.fetch(found, tmp_path)
    assert folder.exists("model.json")
    shutil.rmtree(found.source.removeprefix("file://"))
    (tmp_path / "again").mkdir()
    with pytest.raises(StoredError, match=r"version 1 of 'files' .*: its files cannot be read: "):
        registry.fetch(found, tmp_path / "again")


def test_a_decision_sent_twice_is_no_earlier_one() -> None:
    held = {DECISION: "held", REASON: "away"}
    assert earlier_decisions({}, held) == earlier_decisions(held, held) == {}
    assert earlier_decisions(held, {NOTE: "a tag of another kind"}) == {}
    assert earlier_decisions(held | {EARLIER: "rejected"}, {DECISION: "held"}) == {EARLIER: "held: away\nrejected"}
