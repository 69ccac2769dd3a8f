"""Every layout begins with the same weights of a file (model.start)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.cases_start import expected, write_file
from tests.ranks.layouts import TWO

pytestmark = pytest.mark.ranks
NAMES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload", "tp", "cp", "1f1b", "interleaved")
LAYOUTS = {name: {"engine": "torch", **TWO[name]} for name in NAMES}
HOROVOD = {"ring": {"engine": "horovod"}, "zero1": {"engine": "horovod", "zero": 1}}


@pytest.mark.parametrize(
    ("engine", "cases"), [("torch", LAYOUTS), pytest.param("horovod", HOROVOD, marks=pytest.mark.slow)]
)
def test_every_layout_begins_with_the_values_of_the_file(
    launch: Any, tmp_path: Path, engine: str, cases: dict[str, Any]
) -> None:
    write_file(str(tmp_path))
    wanted = expected(str(tmp_path))
    begun = launch(2, "cases_start:begun", {"cases": cases, "file": str(tmp_path)}, engine=engine)[0]
    assert set(begun) == set(cases)
    for name, state in begun.items():
        assert set(state) == set(wanted)
        assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == [], name
