"""Checkpoints of several ranks: saved and loaded by other worlds, with a full disk, a dead rank, or ranks apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from tests.ranks.conftest import Launch
from tests.ranks.problem import RANKS_ON

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(RANKS_ON != "cpu", reason="its ranks talk over Gloo"),
]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(launch: Launch, tmp_path: Path) -> Run:
    """Run a world; the answers of the ranks (an empty one of a rank that died)."""

    def ranks(mode: str, world: int, expected: list[int] | None = None) -> list[dict[str, Any]]:
        (codes,) = launch(1, "cases_checkpoint:forked", {"mode": mode, "folder": str(tmp_path), "world": world})
        assert codes == (expected or [0] * world)
        paths = [tmp_path / f"{mode}-{world}-{rank}.json" for rank in range(world)]
        return [json.loads(path.read_text()) if path.exists() else {} for path in paths]

    return ranks


def test_saved_by_three_ranks_loaded_by_three_two_and_one(run: Run, tmp_path: Path) -> None:
    saved = run("save", 3)
    shards = sorted((tmp_path / "checkpoints" / "step-2").rglob("*.safetensors"))
    assert [s.name for s in shards] == [f"rank-{r:05d}.safetensors" for r in range(3)]
    sizes = [s.stat().st_size for s in shards]
    assert max(sizes) < 0.6 * sum(sizes)  # every rank wrote a part
    for world in (3, 2, 1):
        for rank, loaded in enumerate(run("load", world)):
            assert loaded["trainer"] == {"cursor": 8}
            if rank == 0:
                assert loaded["whole"] == saved[0]["whole"]  # bit-equal: JSON of float64 is exact
            assert loaded["rank_state"] == ({"rank": rank} if world == 3 else None)
            assert loaded["random"] == (saved[rank]["random"] if world == 3 else None)


def test_one_full_disk_fails_all_ranks_and_leaves_no_checkpoint(run: Run) -> None:
    for answer in run("full", 2):
        assert len(answer["errors"]) == 1 and "rank 1 of 2: OSError" in answer["errors"][0]
        assert "rank 0" not in answer["errors"][0]
        assert answer["after_error"] is None and answer["after_good"] == 2


def test_a_rank_killed_while_writing_leaves_the_one_before(run: Run, tmp_path: Path) -> None:
    answers = run("dies", 2, expected=[0, -9])
    assert answers[0]["error"] is not None
    info = Checkpointer(open_storage(str(tmp_path / "checkpoints"))).latest()
    assert info is not None and info.step == 1 and info.world == 2


def test_ranks_at_different_steps_are_refused(run: Run) -> None:
    for answer in run("other", 2):
        assert "different steps: [0, 1]" in answer["error"]
