"""No rank holds the whole model when it starts, loads or exports, but where its strategy says so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkring.training.models.gpt import GPT
from sparkring.training.models.initial import record_model
from tests.ranks.cases_memory import LARGE
from tests.ranks.problem import RANKS_ON

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(RANKS_ON != "cpu", reason="the memory of processes is looked at, not that of GPUs"),
]
MB = 2**20
# Blocks of 4 MB values are drawn and files read in, and rest; on a busy machine pages of libraries come back meanwhile.
SLACK = {"start": 16 * MB, "load": 10 * MB, "export": MB}
CASES: dict[str, tuple[dict[str, Any], float]] = {  # case -> settings, and its share of the weights on one rank
    "ring": ({}, 1),
    "zero3": ({"zero": 3}, 1 / 4),
    "tensor-pipeline": ({"pp": 2, "micro_batches": 2, "tp": 2}, 0.3),  # stages are not quite equal
    "pipeline-zero2": ({"pp": 2, "micro_batches": 2, "zero": 2}, 0.3),
}


def test_a_start_and_an_export_need_a_ranks_own_part_and_one_parameter(launch: Any) -> None:
    values = record_model(lambda: GPT(**LARGE), 0).values.values()
    sizes = [value.dtype.itemsize * math.prod(value.size) for value in values]
    total, largest = sum(sizes), max(sizes)
    assert total > 1.5 * (total / 4 + largest + SLACK["start"]), "else a whole model would not be seen"
    cases = {name: settings for name, (settings, _) in CASES.items()} | {"made whole": {"zero": 3}}
    wrong = []
    for rank, found in enumerate(launch(4, "cases_memory:peaks", {"cases": cases})):
        assert found.pop("made whole")["start"] > 0.8 * total, "the measure sees a model that is made whole"
        for name, grown in found.items():
            # values are made by rows; an export puts one parameter together, from pieces of at most its half
            most = {"start": CASES[name][1] * total, "export": 0 if rank else 1.5 * largest, "load": largest / 4}
            wrong += [
                f"{name} {rank}: {what} {grown[what]:,}" for what in grown if grown[what] > most[what] + SLACK[what]
            ]
    assert not wrong, f"{wrong}; weights {total:,}, largest {largest:,}"
