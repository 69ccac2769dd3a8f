from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer

PROGRAM = Path(__file__).with_name("ranks_program.py")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.ranks


def launch(mode: str, world: int, folder: Path, expected: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    """Run a world; the answers of the ranks (an empty one of a rank that died)."""
    base = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), mode, str(folder)], env=base | {"RANK": str(r)}, cwd=ROOT)
        for r in range(world)
    ]
    try:
        codes = tuple(rank.wait(timeout=180) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == (expected or (0,) * world)
    paths = [folder / f"{mode}-{world}-{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in paths]


def test_saved_by_three_ranks_loaded_by_three_two_and_one(tmp_path: Path) -> None:
    saved = launch("save", 3, tmp_path)
    shards = sorted((tmp_path / "checkpoints" / "step-2").rglob("*.safetensors"))
    assert [s.name for s in shards] == [f"rank-{r:05d}.safetensors" for r in range(3)]
    sizes = [s.stat().st_size for s in shards]
    assert max(sizes) < 0.6 * sum(sizes)  # every rank wrote a part
    for world in (3, 2, 1):
        for rank, loaded in enumerate(launch("load", world, tmp_path)):
            assert loaded["trainer"] == {"cursor": 8}
            if rank == 0:
                assert loaded["whole"] == saved[0]["whole"]  # bit-equal: JSON of float64 is exact
            assert loaded["rank_state"] == ({"rank": rank} if world == 3 else None)
            assert loaded["random"] == (saved[rank]["random"] if world == 3 else None)


def test_one_full_disk_fails_all_ranks_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    for answer in launch("full", 2, tmp_path):
        assert len(answer["errors"]) == 1 and "rank 1 of 2: OSError" in answer["errors"][0]
        assert "rank 0" not in answer["errors"][0]
        assert answer["after_error"] is None and answer["after_good"] == 2


def test_a_rank_killed_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    answers = launch("dies", 2, tmp_path, expected=(0, -9))
    assert answers[0]["error"] is not None
    info = Checkpointer(open_storage(str(tmp_path / "checkpoints"))).latest()
    assert info is not None and info.step == 1 and info.world == 2


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    for answer in launch("other", 2, tmp_path):
        assert "different steps: [0, 1]" in answer["error"]
