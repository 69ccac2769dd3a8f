"""No rank holds the whole model when it starts, loads or exports, but where its strategy says so."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases_memory import LARGE

from training.models.gpt import GPT
from training.models.initial import record_model

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SLACK = 40 * 2**20  # what allocators keep, buffers of sockets and files
PIPE = {"pp": 2, "micro_batches": 2}
CASES: dict[str, tuple[dict[str, Any], float]] = {  # case -> settings, and its share of the weights on one rank
    "ring": ({"engine": "torch"}, 1),
    "zero3": ({"zero": 3}, 1 / 4),
    "tensor-pipeline": ({**PIPE, "tp": 2}, 0.3),  # stages are not quite equal
    "pipeline-zero2": ({**PIPE, "zero": 2}, 0.3),
}


def test_a_start_and_an_export_need_a_ranks_own_part_and_one_parameter(launch: Any) -> None:
    values = record_model(lambda: GPT(**LARGE), 0).values.values()
    sizes = [value.dtype.itemsize * math.prod(value.size) for value in values]
    total, largest = sum(sizes), max(sizes)
    assert total > 1.5 * (total / 4 + largest + SLACK), "else a whole model would not be seen"
    cases = {name: {"engine": "torch", **settings} for name, (settings, _) in CASES.items()}
    cases["made whole"] = {"engine": "torch", "zero": 3, "whole": True}
    wrong = []
    for rank, found in enumerate(launch(4, "cases_memory:peaks", {"cases": cases})):
        assert found.pop("made whole")["start"] > 0.8 * total, "the measure sees a model that is made whole"
        for name, grown in found.items():
            one = largest + SLACK
            most = {"start": CASES[name][1] * total + one, "export": one, "load": one}
            wrong += [f"{name} {rank}: {what} {grown[what]:,}" for what in grown if grown[what] > most[what]]
    assert not wrong, f"{wrong}; weights {total:,}, largest {largest:,}"
