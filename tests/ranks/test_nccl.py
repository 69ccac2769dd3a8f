"""NCCL between two GPUs. Skipped below two, and the skip says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.cases_ring import one_process
from tests.ranks.problem import worst_difference

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="fewer than two CUDA devices: NCCL between ranks was not checked"
    ),
]


def test_every_data_parallel_strategy_over_nccl_equals_one_process_on_the_cpu(launch: Any) -> None:
    cases = {f"zero {level}": {"engine": "torch", "zero": level} for level in range(4)}
    found = launch(2, "cases_nccl:many", {"cases": cases})
    for name in cases:
        assert {rank[name]["engine"] for rank in found} == {"torch-nccl"}
        assert worst_difference([rank[name] for rank in found], one_process()) < 1e-9, name


@pytest.mark.horovod
def test_horovods_ring_over_nccl_equals_one_process_on_the_cpu(launch: Any) -> None:
    import horovod.torch

    if not horovod.torch.nccl_built():
        pytest.skip("this Horovod was built without NCCL (make setup GPU=1): its ring was not checked on GPUs")
    found = launch(2, "cases_nccl:many", {"cases": {"ring": {"engine": "horovod"}}}, engine="horovod")
    assert worst_difference([rank["ring"] for rank in found], one_process()) < 1e-9


def test_closing_after_a_failure_aborts_nccl_at_once(launch: Any, tmp_path: Path) -> None:
    """Without an abort the close waits for the collective timeout, of five minutes."""
    own_result = str(tmp_path / "run0" / "1.pt")
    assert launch(2, "cases_nccl:abandoned", {"own_result": own_result}, timeout_s=200)[0] == "closed"
