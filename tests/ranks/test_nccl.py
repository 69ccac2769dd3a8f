"""NCCL when a rank dies. That layouts over NCCL are one process, the other tests of this folder say on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.problem import RANKS_ON

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS_ON == "cpu", reason="ranks are on the CPU here: NCCL was not checked (make test-gpu)"),
]


def test_closing_after_a_failure_aborts_nccl_at_once(launch: Any, tmp_path: Path) -> None:
    """Without an abort the close waits for the collective timeout, of five minutes."""
    own_result = str(tmp_path / "run0" / "1.pt")
    assert launch(2, "cases_nccl:abandoned", {"own_result": own_result}, timeout_s=200)[0] == "closed"
