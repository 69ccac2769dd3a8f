"""What differs, what each difference means for the two checks, and when a run counts as reproduced."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sparkring.pipelines.lineage.compare import (
    Difference,
    blocking,
    differing_metrics,
    environment_differences,
    is_reproduced,
    metric_lines,
    run_differences,
)
from sparkring.pipelines.lineage.reproduce_record import Environment, ModuleFile, Record
from sparkring.training.worker.result import FailedAttempt
from tests.pipelines.results import rank_result, train_result

HERE = Environment(
    python="3.12.3",
    packages={"torch": "2.9.1", "numpy": "2.3.0", "requests": "2.0"},
    torch_build=["PyTorch built with:", "  - MKL 2024"],
    cpu_capability="AVX512",
    cpu_model="Xeon",
    cpu_flags=["avx2", "avx512f"],
    gpus=[],
    code={"sparkring.training": "a" * 64, "sparkring.conf": "b" * 64, "sparkring.pipelines": "c" * 64},
    modules={"my_net": ModuleFile(file="/home/my_net.py", sha256="d" * 64)},
)
RECORD = Record(environment=HERE, java="17", datasets={"/d": "e" * 64}, patch="", weights_sha256="f" * 64)


def other_code(**changed: str) -> dict[str, Any]:
    return {"code": HERE.code | {f"sparkring.{name}": value for name, value in changed.items()}}


def test_nothing_differs_from_the_same_environment() -> None:
    assert environment_differences(HERE, replace(HERE)) == []
    assert run_differences(train_result(), RECORD) == []


@pytest.mark.parametrize(
    ("now", "effect", "said"),
    [
        ({"packages": HERE.packages | {"torch": "2.9.2"}}, "bits", "torch: 2.9.1 -> 2.9.2; not the same environment"),
        ({"packages": {"torch": "2.9.1", "requests": "2.0"}}, "bits", "numpy: 2.3.0 -> not there"),
        ({"packages": HERE.packages | {"horovod": "0.28"}}, "bits", "horovod: not there -> 0.28"),
        ({"packages": HERE.packages | {"requests": "3.0"}}, "none", "requests: 2.0 -> 3.0; our training does no"),
        ({"torch_build": ["PyTorch built with:", "  - OpenBLAS"]}, "bits", "torch's build: - MKL 2024 -> - OpenBLAS"),
        ({"cpu_capability": "AVX2"}, "bits", "torch's CPU capability: AVX512 -> AVX2; bits can be equal only with the"),
        ({"cpu_flags": ["avx2"]}, "bits", "instruction set: with ['avx512f'] -> ; bits can be equal only"),
        ({"cpu_flags": ["amx_bf16", "avx2", "avx512f"]}, "bits", "instruction set:  -> with ['amx_bf16']"),
        ({"cpu_model": "EPYC"}, "none", "CPU: Xeon -> EPYC; of the same instruction set"),
        ({"python": "3.13.0"}, "none", "Python: 3.12.3 -> 3.13.0"),
        ({"gpus": ["H200"]}, "bits", "GPUs: none -> H200"),
        (other_code(training="9" * 64), "bits", "code sparkring.training: aaaaaaaaaaaa -> 999999999999; sparkring"),
        (other_code(conf="9" * 64), "bits", "code sparkring.conf"),
        (other_code(pipelines="9" * 64), "none", "code sparkring.pipelines"),
        ({"modules": {"my_net": ModuleFile(file="/home/my_net.py", sha256="9" * 64)}}, "training",
         "module my_net (/home/my_net.py): dddddddddddd -> 999999999999; your code is another"),
        ({"modules": {}}, "training", "module my_net (/home/my_net.py): dddddddddddd -> not there"),
    ],
)  # fmt: skip
def test_each_difference_is_named_with_what_it_means(now: dict[str, Any], effect: str, said: str) -> None:
    (found,) = environment_differences(HERE, replace(HERE, **now))
    assert found.effect == effect and said in found.line()


def test_another_torch_is_not_named_twice_by_its_build() -> None:
    now = replace(HERE, packages=HERE.packages | {"torch": "3"}, torch_build=["another"])
    assert [found.what for found in environment_differences(HERE, now)] == ["torch"]


def test_another_processor_of_another_instruction_set_promises_nothing() -> None:
    found = environment_differences(HERE, replace(HERE, cpu_model="EPYC", cpu_flags=["avx2"]))
    assert [each.what for each in found] == ["instruction set", "CPU"] and "only with the same" in found[1].why


def test_what_decides_most_comes_first() -> None:
    modules, packages = {"my_net": ModuleFile(file="x", sha256="9" * 64)}, {"torch": "3", "requests": "1", "numpy": "1"}
    found = environment_differences(HERE, replace(HERE, modules=modules, packages=packages))
    assert [each.what for each in found] == ["module my_net (x)", "numpy", "torch", "requests"]


def test_bits_are_refused_for_what_changes_bits_and_metrics_only_for_another_training() -> None:
    found = [Difference(effect, "", "", effect, "") for effect in ("training", "bits", "none")]
    assert [each.what for each in blocking(found, "bits")] == ["training", "bits"]
    assert [each.what for each in blocking(found, "metrics")] == ["training"]


def failed(world: int) -> FailedAttempt:
    return FailedAttempt(
        attempt=1, world=world, cause="crash", message="", step=3, steps_lost=0, decision="again", next_world=3
    )


def said_of(record: Record = RECORD, config: dict[str, Any] | None = None, **fields: Any) -> list[tuple[str, str]]:
    result = train_result(**fields)
    whole = {"name": "again", "dataset": "/d"} | (config or {})
    return [(each.effect, each.line()) for each in run_differences(replace(result, config=whole), record)]


def test_restarts_on_other_worlds_change_bits_and_those_on_the_same_do_not() -> None:
    assert said_of(attempts=2, failed_attempts=[failed(3)], train=rank_result(world=3)) == []
    ((effect, line),) = said_of(attempts=2, failed_attempts=[failed(4)], train=rank_result(world=3))
    assert effect == "bits" and line.startswith("ranks: 3 and 4 -> 3; it was restarted on other worlds")


def test_launches_of_earlier_commands_are_said_without_refusing() -> None:
    ((effect, line),) = said_of(attempts=4, failed_attempts=[failed(3)], train=rank_result(world=3))
    assert effect == "none" and line.startswith("2 launches; launched by earlier commands: bits are equal only if all")


def test_what_changed_between_two_commands_of_the_run_is_kept() -> None:
    assert said_of(replace(RECORD, changed=["torch"])) == [
        ("bits", "torch between two commands of the run; part of it was trained as it was before")
    ]


@pytest.mark.parametrize(
    ("blocks", "effects"),
    [
        ({"data": {"reader": "petastorm"}}, ["bits"]),
        ({"data": {"reader": "petastorm", "petastorm": {"workers": 1}}}, ["none"]),
        ({"data": {"reader": "petastorm", "petastorm": {"pool": "dummy"}}}, ["none"]),
        ({"spark": {"master": "spark://host:7077"}}, ["none"]),
        ({"spark": {"master": "local[4]"}}, []),
    ],
)
def test_settings_that_no_run_repeats_are_named(blocks: dict[str, Any], effects: list[str]) -> None:
    assert [effect for effect, _ in said_of(config=blocks)] == effects


def test_gpus_promise_no_bits_unless_the_run_was_on_the_processor() -> None:
    record = replace(RECORD, environment=replace(HERE, gpus=["H200"]))
    ((effect, line),) = said_of(record)
    assert effect == "none" and "bits may differ" in line
    assert said_of(record, config={"train": {"device": "cpu"}}) == []


@pytest.mark.parametrize(
    ("was", "now", "equal"),
    [
        (0.5, 0.5, True),
        (0.5, 0.5 + 0.9e-4, True),
        (0.5, 0.5 + 1.1e-4, False),
        (1000.0, 1000.09, True),
        (1000.0, 1000.11, False),
        (math.nan, math.nan, True),
        (math.nan, 0.5, False),
        (math.inf, math.inf, True),
    ],
)
def test_metrics_are_equal_within_a_ten_thousandth(was: float, now: float, equal: bool) -> None:
    assert (differing_metrics({"loss": was}, {"loss": now}) == []) == equal


def test_a_recorded_metric_that_is_gone_is_not_equal_and_one_that_newer_code_adds_is_no_difference() -> None:
    assert differing_metrics({"loss": 0.5, "auc": 0.7}, {"loss": 0.5}) == ["auc"]
    assert differing_metrics({"loss": 0.5}, {"loss": 0.5, "auc": 0.7}) == []
    assert metric_lines({"loss": 0.5, "old": 0.1}, {"loss": 0.5, "auc": 0.7}) == [
        "auc: recorded not there, now 0.7, new",
        "loss: recorded 0.5, now 0.5, equal",
        "old: recorded 0.1, now not there, differs",
    ]


def test_each_check_asks_for_its_own_equality() -> None:
    same, other = {"loss": 0.5}, {"loss": 0.6}
    assert is_reproduced("bits", ("a", "a"), (same, other)) and not is_reproduced("bits", ("a", "b"), (same, same))
    assert is_reproduced("metrics", ("a", "b"), (same, same)) and not is_reproduced(
        "metrics", ("a", "a"), (same, other)
    )
