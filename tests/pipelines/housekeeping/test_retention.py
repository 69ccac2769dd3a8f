"""What gc lets go: each rule, and each reason for which something stays whatever the rules say."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sparkring.conf.blocks.retention import RetentionConfig
from sparkring.pipelines.housekeeping.retention import (
    Deletion,
    Inventory,
    Leftover,
    Pointer,
    StoredDataset,
    StoredPart,
    StoredRun,
    TrackedState,
    can_continue,
    decide,
    expendable_pointers,
    protect,
    run_created,
)
from sparkring.pipelines.tracking.pointers import AliasedModel

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOTHING = TrackedState()
ALL = RetentionConfig.model_validate({name: {"keep": 1} for name in RetentionConfig.model_fields})


def print_of(day: int) -> str:
    return f"{day:02x}" * 32


def run(day: int, **changes: Any) -> StoredRun:
    """The run of a day of February, on that day's dataset."""
    created = datetime(2026, 2, day, 3, tzinfo=UTC)
    values: dict[str, Any] = {
        "path": f"{created:%Y%m%d-%H%M%S}-0a", "fingerprint": print_of(day), "training_digest": "t",
        "status": "finished", "alive": False, "created": created, "bytes": 100, "checkpoints": {"checkpoints": 60},
        "predictions": {"predictions": 10},
    }  # fmt: skip
    return StoredRun(**(values | changes))


def dataset(day: int, *parts: int) -> StoredDataset:
    created, names = datetime(2026, 2, day, 2, tzinfo=UTC), frozenset(part(p).path for p in parts)
    return StoredDataset(f"r-{print_of(day)[:12]}", print_of(day), created, 20, names)


def part(day: int, letter: str = "a") -> StoredPart:
    interval = f"2026-02-{day:02d}"
    return StoredPart(
        f"parts/r/{interval}/{letter}", interval, datetime(2026, 2, day, 2, ord(letter) % 50, tzinfo=UTC), 7
    )


def gone(inventory: Inventory, tracked: TrackedState = NOTHING, rules: RetentionConfig = ALL) -> list[str]:
    return [d.path for d in decide(inventory, protect("r", inventory, tracked), rules, NOW)]


def rules(**changes: Any) -> RetentionConfig:
    return RetentionConfig.model_validate(changes)


def path(day: int, *more: str) -> str:
    return "/".join([run(day).path, *more])


def test_without_rules_nothing_goes() -> None:
    there = Inventory([dataset(1, 1)], [part(1), part(2)], [run(1), run(2)])
    assert gone(there, rules=RetentionConfig()) == []


def test_the_newest_stay_by_number() -> None:
    there = Inventory(runs=[run(day) for day in (3, 1, 2)])
    assert gone(there, rules=rules(runs={"keep": 2})) == [path(1)]
    assert gone(there, rules=rules(runs={"keep": 3})) == []


def test_the_young_stay_by_age() -> None:
    there = Inventory(runs=[run(day) for day in (1, 2, 3)])
    age = (NOW - run(2).created) / timedelta(days=1)
    assert gone(there, rules=rules(runs={"days": age + 0.001})) == [path(1)]
    assert gone(there, rules=rules(runs={"days": age})) == [path(2), path(1)]


def test_with_both_rules_what_either_keeps_stays() -> None:
    there = Inventory(runs=[run(day) for day in range(1, 8)])
    assert gone(there, rules=rules(runs={"keep": 2, "days": 26})) == [path(d) for d in (3, 2, 1)]
    assert gone(there, rules=rules(runs={"keep": 5, "days": 23})) == [path(d) for d in (2, 1)]


def test_a_reason_names_age_rank_and_keys() -> None:
    (deletion,) = decide(
        Inventory(runs=[run(1), run(2)]),
        protect("r", Inventory(), TrackedState()),
        rules(runs={"keep": 1, "days": 3}),
        NOW,
    )
    age = "28.4 days old (retention.runs.days = 3)"
    assert deletion.reason == f"{age}, number 2 from the newest (retention.runs.keep = 1)"
    assert (deletion.kind, deletion.root, deletion.bytes) == ("run", "runs", 100)


@pytest.mark.parametrize("alias", ["champion", "previous", "challenger", "of_a_colleague"])
def test_a_model_with_any_alias_keeps_its_run_its_dataset_and_the_parts_of_that(alias: str) -> None:
    there = Inventory([dataset(d, d) for d in (1, 2, 3)], [part(d) for d in (1, 2, 3)], [run(d) for d in (1, 2, 3)])
    tracked = TrackedState([AliasedModel("m", alias, f"r/{path(1)}", print_of(1))])
    assert gone(there, tracked) == [dataset(2).path, part(2).path, path(2)]


def test_an_alias_whose_run_is_gone_from_mlflow_keeps_every_run_on_its_dataset() -> None:
    there = Inventory([dataset(1)], (), [run(1), replace(run(1), path="20260201-040000-0b"), run(2)])
    tracked = TrackedState([AliasedModel("m", "champion", "", print_of(1))])
    assert gone(there, tracked) == []


def test_an_alias_on_a_model_of_another_recipe_keeps_the_dataset_alone() -> None:
    there = Inventory([dataset(1), dataset(2)], (), [run(1), run(2)])
    tracked = TrackedState([AliasedModel("m", "champion", f"other/{path(1)}", print_of(1))])
    assert gone(there, tracked) == [path(1)]


def test_a_tagged_run_stays_with_its_dataset() -> None:
    there = Inventory([dataset(1), dataset(2)], (), [run(1), run(2)])
    assert gone(there, TrackedState(tagged_jobs=[f"r/{path(1)}"])) == []
    assert gone(there, TrackedState(tagged_jobs=[f"other/{path(1)}"])) == [dataset(1).path, path(1)]


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_stays_with_its_dataset(status: str) -> None:
    there = Inventory([dataset(1), dataset(2)], (), [run(1, status=status), run(2)])
    assert gone(there) == []


@pytest.mark.parametrize(
    ("changes", "later", "continued"),
    [
        ({"status": "failed"}, {}, False),  # a later command finished the same training
        ({"status": "failed"}, {"training_digest": "u"}, True),
        ({"status": "failed"}, {"fingerprint": "f"}, True),
        ({"status": "failed"}, {"status": "failed"}, True),
        ({"status": "failed"}, {"path": "20260101-000000-0a"}, True),  # it finished before
        ({"status": "running", "alive": True}, {}, True),
        ({"status": "running", "alive": None}, {}, True),  # on a host that cannot be seen
        ({"status": "running", "alive": False}, {}, False),  # it was killed
        ({"status": "finished"}, {"status": "failed"}, False),
    ],
)
def test_a_run_is_continued_as_the_run_folders_choose(
    changes: dict[str, Any], later: dict[str, Any], continued: bool
) -> None:
    first = run(1, **changes)
    second = run(2, **({"fingerprint": print_of(1)} | later))
    assert can_continue(first, [first, second]) is continued


def test_a_dataset_that_a_running_job_or_another_recipe_uses_stays() -> None:
    there = Inventory([dataset(1), dataset(2), dataset(3)])
    assert gone(there) == [dataset(2).path, dataset(1).path]
    assert gone(there, TrackedState(live={"r/x": print_of(1)})) == [dataset(2).path]
    assert gone(replace(there, others={print_of(2): "of the run other/x"})) == [dataset(1).path]


def test_a_part_that_a_dataset_needs_stays_and_goes_with_it() -> None:
    there = Inventory([dataset(3, 1, 2, 3)], [part(d) for d in (1, 2, 3, 4)])
    assert gone(there) == []
    there = Inventory([dataset(3, 1, 2, 3), dataset(4, 2, 3, 4)], [part(d) for d in (1, 2, 3, 4)])
    assert gone(there) == [dataset(3).path, part(1).path]


def test_of_an_interval_only_the_newest_part_counts() -> None:
    there = Inventory(parts=[part(1), part(2, "a"), part(2, "b"), part(3)])
    assert gone(there, rules=rules(parts={"keep": 2})) == [part(2, "a").path, part(1).path]
    assert gone(there, rules=rules(parts={"keep": 3})) == [part(2, "a").path]
    assert gone(there, rules=rules(parts={"keep": 2, "days": 27.5})) == [part(1).path]


@pytest.mark.parametrize(
    ("there", "tracked"),
    [
        (Inventory(runs=[run(9, status="running", alive=True)]), TrackedState()),
        (Inventory(), TrackedState(live={"r/x": print_of(9)})),
        (Inventory(), TrackedState(live={"r/x": ""})),
        (Inventory(unreadable={"dataset": ["/d/r-1/_manifest.json"]}), TrackedState()),
        (Inventory(unreadable={"run": ["/r/1/run.json"]}), TrackedState()),
    ],
)
def test_no_part_goes_while_one_may_be_needed_by_a_dataset_that_is_not_known(
    there: Inventory, tracked: TrackedState
) -> None:
    parts = [part(1), part(2)]
    assert gone(replace(there, parts=parts), tracked) == []
    assert gone(Inventory(parts=parts)) == [part(1).path]


@pytest.mark.parametrize("tracked", [TrackedState(live={"r/x": ""}), TrackedState()])
def test_no_dataset_goes_while_one_may_be_needed_by_a_run_that_is_not_known(tracked: TrackedState) -> None:
    unreadable: dict[Any, list[str]] = {} if tracked.live else {"run": ["/r/1/run.json"]}
    assert gone(Inventory([dataset(1), dataset(2)], unreadable=unreadable), tracked) == []


def test_what_refers_goes_before_what_it_refers_to() -> None:
    there = Inventory([dataset(1, 1), dataset(2, 2)], [part(1), part(2)], [run(1), run(2)])
    assert gone(there) == [dataset(1).path, part(1).path, path(1)]


def test_checkpoints_and_predictions_have_rules_of_their_own() -> None:
    there = Inventory(runs=[run(1), run(2), run(3, checkpoints={"checkpoints": 0}), run(4)])
    found = rules(runs={"keep": 3}, checkpoints={"keep": 1}, predictions={"keep": 2})
    assert gone(there, rules=found) == [path(2, "predictions"), path(2, "checkpoints"), path(1)]
    aliased = TrackedState([AliasedModel("m", "champion", f"r/{path(2)}", print_of(2))])
    assert gone(there, aliased, found) == [path(1)]


def test_each_family_of_a_run_has_checkpoints_and_predictions_of_its_own() -> None:
    folders = {"checkpoints": {"checkpoints": 0, "trees/checkpoints": 5, "net/checkpoints": 6}}
    there = Inventory(runs=[run(1, predictions={"net/predictions": 1}, **folders), run(2)])
    found = gone(there, rules=rules(checkpoints={"keep": 1}, predictions={"keep": 1}))
    assert found == [path(1, name) for name in ("net/predictions", "trees/checkpoints", "net/checkpoints")]


def test_checkpoints_of_a_run_that_can_be_continued_stay() -> None:
    there = Inventory(runs=[run(1, status="interrupted"), run(2), run(3)])
    assert gone(there, rules=rules(checkpoints={"keep": 1})) == [path(2, "checkpoints")]


def test_what_an_earlier_gc_began_is_finished_unless_it_is_being_built_again() -> None:
    half = [
        Leftover("datasets", dataset(1).path, 5),
        Leftover("runs", path(1), 5),
        Leftover("datasets", part(1).path, 5),
    ]
    there = Inventory(leftovers=half)
    assert gone(there) == [dataset(1).path, path(1), part(1).path]
    building = TrackedState(live={"r/x": print_of(1)})
    assert gone(there, building) == [path(1)]
    elsewhere = TrackedState(live={"r/x": print_of(2)})
    assert gone(there, elsewhere) == [dataset(1).path, path(1)]


def test_pointers_go_with_their_checkpoints_and_where_those_are_gone() -> None:
    steps = [f"{run}/checkpoints/step-{step}" for run in ("a", "b", "ab") for step in (1, 2)]
    pointers = [Pointer(f"m-{path}", "checkpoint", path) for path in steps]
    deletions = [Deletion("run", "runs", "a", 1, ""), Deletion("dataset", "datasets", "b", 1, "")]
    found = {p.path: why for p, why in expendable_pointers(pointers, set(steps) - {steps[2]}, deletions)}
    assert found == {steps[0]: "a is deleted", steps[1]: "a is deleted", steps[2]: "its checkpoint is gone"}
    only = [
        Deletion("predictions", "runs", "a/predictions", 1, ""),
        Deletion("checkpoints", "runs", "b/checkpoints", 1, ""),
    ]
    assert [p.path for p, _ in expendable_pointers(pointers, set(steps), only)] == steps[2:4]


def test_the_age_of_a_run_is_in_its_name() -> None:
    assert run_created("20260201-030000-0a1b2c3d") == datetime(2026, 2, 1, 3, tzinfo=UTC)
    assert run_created("20261301-030000-0a1b2c3d") is None and run_created("dates") is None


def test_nothing_behind_a_symbolic_link_goes_and_a_linked_dataset_keeps_its_parts() -> None:
    runs, datasets = [run(day) for day in (1, 2, 3)], [dataset(1, 1), dataset(2, 2), dataset(3, 3)]
    found = Inventory(datasets, [part(day) for day in (1, 2, 3)], runs, [Leftover("datasets", "r-0", 1)])
    ours = decide(found, protect("r", found, NOTHING), ALL, NOW)
    places = {(deletion.root, deletion.path): "/a/link" for deletion in ours}
    assert {deletion.kind for deletion in ours} == {"dataset", "part", "run", "leftover"}
    assert decide(replace(found, links=places), protect("r", found, NOTHING), ALL, NOW) == []
    linked = replace(found, links={("datasets", datasets[0].path): "/a/link"})
    left = decide(linked, protect("r", linked, NOTHING), ALL, NOW)
    assert {d.path for d in ours} - {d.path for d in left} == {datasets[0].path, part(1).path}


def test_a_run_of_a_wrong_clock_stays_and_pushes_no_other_out() -> None:
    future = replace(run(9), path="99990101-000000-0a", created=datetime(9999, 1, 1, tzinfo=UTC))
    there = Inventory(runs=[run(1), run(2), future, run(3)])
    assert gone(there, rules=rules(runs={"keep": 1})) == [path(2), path(1)]
    assert gone(there, rules=rules(runs={"days": 1})) == [path(3), path(2), path(1)]
