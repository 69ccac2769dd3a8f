"""Where shards begin: exact for any histogram of hashes, against the naive answer."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.etl.errors import EtlError
from sparkring.etl.shards.layout import (
    BUCKET_BITS,
    HASH_BITS,
    MOST_HASHES,
    Cut,
    CutTable,
    cut_table,
    locate,
    next_depth,
    plan_shards,
    row_group_rows,
    shard_count,
)


@given(st.integers(1, 500), st.integers(1, 500))
def test_shards_cover_the_split_and_differ_by_one_row_at_most(rows, count):
    if count > rows:
        with pytest.raises(EtlError, match=r"etl\.shard\.shards\.train"):
            plan_shards({"train": rows}, {"train": count})
        return
    plan = plan_shards({"train": rows}, {"train": count})
    sizes = [s.rows for s in plan]
    assert sum(sizes) == rows and max(sizes) - min(sizes) <= 1 and len(plan) == count
    assert [s.first for s in plan] == [sum(sizes[:i]) for i in range(count)]


@settings(max_examples=300)
@given(st.lists(st.integers(-64, 63), min_size=1, max_size=200), st.integers(1, 20), st.lists(st.integers(0, 6)))
def test_cuts_put_every_row_into_the_shard_of_its_global_index(hashes, count, shifts):
    """Hashes of 7 bits, few distinct, so that shards begin inside ties most of the time; level by level."""
    count = min(count, len(hashes))
    shards = plan_shards({"train": len(hashes)}, {"train": count})
    starts = [s.first for s in shards][1:]
    opened, above = {0: 0}, None
    for shift in [*sorted(set(shifts), reverse=True), 0]:
        inside = [h for h in hashes if above is None or h >> above in opened]
        buckets = sorted(Counter(h >> shift for h in inside).items())
        counts = [(0 if above is None else b >> (above - shift), b, n) for b, n in buckets]
        found = locate(opened, counts, starts)
        opened, above = dict(found), shift
    places = [Cut(value, start - before) for start, (value, before) in zip(starts, found, strict=True)]
    seen: Counter[int] = Counter()
    for index, value in enumerate(sorted(hashes)):
        seen[value] += 1
        expected = next(i for i, s in enumerate(shards) if s.first <= index < s.first + s.rows)
        assert sum((c.value, c.below) < (value, seen[value]) for c in places) == expected


@pytest.mark.parametrize("rows", [1, 10**4, 10**6, 10**8, 10**9, 10**10])
@pytest.mark.parametrize("row_bytes", [8, 100, 2000])
def test_the_driver_sees_few_buckets_and_few_hashes_whatever_the_rows(rows, row_bytes):
    """Of hashes that are spread evenly, and all different: how many each pass counts."""
    cuts = min(shard_count(rows, row_bytes, 64 << 20), rows)
    depth, inside, buckets, passes = 0, rows, cuts, 0
    while depth < HASH_BITS:
        above, depth = depth, next_depth(depth, inside, buckets)
        opened = buckets if above else 1
        seen = inside if depth == HASH_BITS else min(inside, opened << (depth - above))
        assert seen <= max(1 << BUCKET_BITS, MOST_HASHES, 16 * cuts)
        buckets = min(cuts, 1 << depth)
        inside, passes = min(inside, -(-rows * buckets >> depth)), passes + 1
    assert passes == 2 if rows <= 10**8 and row_bytes <= 100 else passes <= 6


def evaluate(table: CutTable, split: int, value: int, rank: int) -> int:
    """What the SQL says; that Spark agrees: tests/spark/test_etl_shard.py."""
    bucket = (value >> table.shifts[split]) + table.zeros[split]
    past = [(values[bucket], belows[bucket]) < (value, rank) for values, belows in table.levels]
    return table.before[bucket] + sum(past)


NEAR = st.integers(-5, 5) | st.sampled_from([-(1 << 63), 1 - (1 << 63), -(1 << 62), 1 << 62, (1 << 63) - 1])
CUTS = st.lists(st.tuples(NEAR, st.integers(0, 3)), max_size=9)


@given(st.lists(CUTS, min_size=1, max_size=4), NEAR, st.integers(1, 4))
def test_the_table_of_cuts_gives_the_number_of_cuts_before_the_row(raw, value, rank):
    cuts = [[Cut(v, b) for v, b in sorted(set(split))] for split in raw]
    table = cut_table(cuts, firsts := [7 + 20 * split for split in range(len(cuts))])
    for split, (places, first) in enumerate(zip(cuts, firsts, strict=True)):
        expected = first + sum((c.value, c.below) < (value, rank) for c in places)
        assert evaluate(table, split, value, rank) == expected
        if not any(c.below for c in places if c.value == value):  # rows of such a hash are not ranked
            assert evaluate(table, split, value, 0) == expected


def test_the_sql_of_a_hundred_times_the_shards_compares_as_often():
    levels = []
    for count in (300, 30_000):
        places = [Cut((i << 64) // count - (1 << 63), 0) for i in range(1, count)]
        levels.append(len(cut_table([places], [0]).levels))
    assert levels[0] <= 2 and levels[1] <= 2


def test_sizes_depend_on_the_data_only_and_stay_sane():
    assert row_group_rows(20_000_000, 100) == 16384
    assert row_group_rows(1000, 8) == 1024
    assert row_group_rows(10_000_000, 3 * 224 * 224) == 32  # images: about 5 MB a group
    assert shard_count(20_000_000, 100, 64 << 20) == 30
    assert shard_count(10_000, 8, 64 << 20) == 1
    assert shard_count(300_000, 8, 64 << 20) == 8
