"""Decide the number and size of shards and where the stored order is cut: pure functions of ints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkring.etl.errors import EtlError

ROW_GROUP = 16384
ROW_GROUP_BYTES = 8 << 20
SMALLEST_ROW_GROUP = 1024
ROW_GROUPS_WANTED = 128  # a small split still gets enough row groups to shuffle over ranks
SHARDS_WANTED = 8  # a small split still is written and read by several at once
HASH_BITS = 64
BUCKET_BITS = 18  # the driver sees 2^18 buckets at once, or 16 per file,
EXPECTED_HASHES, MOST_HASHES = 1 << 17, 1 << 18  # and so many hashes, whatever the number of rows


@dataclass(frozen=True)
class Shard:
    """File `index` of a split: rows [first, first + rows) of the split's stored order."""

    split: str
    index: int
    first: int
    rows: int


@dataclass(frozen=True)
class Cut:
    """A shard begins with the row of hash `value` that has `below` rows of the same hash before it."""

    value: int
    below: int


def row_group_rows(rows: int, row_bytes: float) -> int:
    """Rows per row group: 16,384, fewer when rows are wide (8 MiB) or few (128 groups, but not under 1,024 rows)."""
    by_bytes = _power_of_two(int(ROW_GROUP_BYTES / max(row_bytes, 1)))
    by_rows = max(_power_of_two(rows // ROW_GROUPS_WANTED), SMALLEST_ROW_GROUP)
    return max(1, min(ROW_GROUP, by_bytes, by_rows))


def shard_count(rows: int, row_bytes: float, target_bytes: int) -> int:
    """Files of about `target_bytes`, at least 8 where each holds 16,384 rows."""
    by_bytes = -(-int(rows * row_bytes) // target_bytes)
    return max(1, by_bytes, min(SHARDS_WANTED, rows // ROW_GROUP))


def next_depth(depth: int, rows: int, cuts: int) -> int:
    """Leading bits of the hash to count rows by next, where `rows` rows lie in the opened buckets of `depth` bits (or,
    at 0, in all) and `cuts` shards begin: whole hashes once those are few, else as many buckets as the driver may see.

    At first no more bits than make them few: more buckets cost, for counting becomes a shuffle of nearly every row.
    """
    if depth == 0:
        return min(max((rows * cuts // EXPECTED_HASHES).bit_length(), 8), BUCKET_BITS)
    if rows <= max(MOST_HASHES, 2 * cuts):
        return HASH_BITS
    return min(depth + max(4, BUCKET_BITS - (cuts - 1).bit_length()), HASH_BITS)


def _power_of_two(value: int) -> int:
    return 1 << max(value.bit_length() - 1, 0)


def plan_shards(rows_by_split: dict[str, int], shards_by_split: dict[str, int]) -> list[Shard]:
    """Shards of every split, sizes differing by one at most. Raises EtlError for more shards than rows."""
    plan = []
    for split, rows in rows_by_split.items():
        count = shards_by_split[split]
        if count > rows:
            raise EtlError(f"etl.shard.shards.{split} = {count}: the split has only {rows} rows; ask for fewer files")
        edges = [rows * i // count for i in range(count + 1)]
        plan += [Shard(split, i, edges[i], edges[i + 1] - edges[i]) for i in range(count)]
    return plan


def locate(
    opened: dict[int, int], counts: Sequence[tuple[int, int, int]], starts: Sequence[int]
) -> list[tuple[int, int]]:
    """Find for every start its bucket and the rows before that bucket.

    opened: rows before each bucket of the level above that a shard begins in; counts: (bucket above, bucket, rows) of
    those, in rising order; starts: the global indices where shards begin, rising.
    """
    found: list[tuple[int, int]] = []
    current, before = None, 0
    for above, bucket, rows in counts:
        if above != current:
            current, before = above, opened[above]
        while len(found) < len(starts) and before <= starts[len(found)] < before + rows:
            found.append((bucket, before))
        before += rows
    if len(found) < len(starts):
        raise EtlError(
            f"a shard was to begin at row {starts[len(found)]} of {before}: the rows changed between two passes over "
            "them; a source changed while it was read, or a view is not deterministic"
        )
    return found


def shard_sql(places: Sequence[Cut], first: int, value: str, rank: str) -> str:
    """SQL for the number of a row's shard, `first` for the shard before the first cut: a balanced tree of CASEs.

    `value` and `rank` name the columns of the row's hash and of its 1-based place among equal hashes.
    """
    if not places:
        return str(first)
    middle = len(places) // 2
    cut = places[middle]
    below = f"{value} < {cut.value}L"
    if cut.below:
        below = f"({below} OR ({value} = {cut.value}L AND {rank} <= {cut.below}))"
    left = shard_sql(places[:middle], first, value, rank)
    right = shard_sql(places[middle + 1 :], first + middle + 1, value, rank)
    return f"CASE WHEN {below} THEN {left} ELSE {right} END"
