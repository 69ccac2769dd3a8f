"""How petastorm's shards divide a dataset among ranks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.manifest import DatasetManifest
from sparkring.training.data.petastorm_adapter.dataset import equal_steps, row_group_rows, rows_per_shard


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 200))
def test_every_rank_takes_as_many_steps_as_the_smallest_shard_fills(groups: list[int], size: int, gb: int) -> None:
    try:
        shards = rows_per_shard(groups, size)
        steps = equal_steps(shards, gb)
    except ValueError:
        assert len(groups) < size or gb < size or any(rows < -(-gb // size) for rows in rows_per_shard(groups, size))
        return
    shares = [gb * (r + 1) // size - gb * r // size for r in range(size)]
    assert sum(shards) == sum(groups) and all(steps * share <= rows for share, rows in zip(shares, shards, strict=True))
    assert any((steps + 1) * share > rows for share, rows in zip(shares, shards, strict=True))


def test_row_groups_are_counted_in_petastorms_order(dataset: DatasetManifest, tmp_path: Path) -> None:
    assert row_group_rows(f"file://{tmp_path}/data-test") == [30, 30, 10, 25, 30, 5]
