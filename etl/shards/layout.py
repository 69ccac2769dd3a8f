"""Decide the number and size of shards and where the stored order is cut: pure functions of ints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from sparkring.conf.plain_text import count_of
from sparkring.etl.errors import EtlError

ROW_GROUP = 16384
ROW_GROUP_BYTES = 8 << 20
SMALLEST_ROW_GROUP = 1024
ROW_GROUPS_WANTED = 128  # a small split still gets enough row groups to shuffle over ranks
SHARDS_WANTED = 8  # a small split still is written and read by several at once
HASH_BITS = 64
COUNTED_BITS = 12  # buckets that rows are counted in while they are checked, before their number is known
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


NEVER = Cut((1 << 63) - 1, (1 << 63) - 1)


def row_group_rows(rows: int, row_bytes: float) -> int:
    """Return the rows per row group: 16,384; fewer if rows are wide (8 MiB) or few (128 groups, 1,024 rows or more)."""
    by_bytes = _power_of_two(int(ROW_GROUP_BYTES / max(row_bytes, 1)))
    by_rows = max(_power_of_two(rows // ROW_GROUPS_WANTED), SMALLEST_ROW_GROUP)
    return max(1, min(ROW_GROUP, by_bytes, by_rows))


def shard_count(rows: int, row_bytes: float, target_bytes: int) -> int:
    """Return how many files of about `target_bytes` to write, at least 8 if each gets 16,384 rows."""
    by_bytes = -(-int(rows * row_bytes) // target_bytes)
    return max(1, by_bytes, min(SHARDS_WANTED, rows // ROW_GROUP))


def next_depth(depth: int, rows: int, cuts: int) -> int:
    """Choose how many leading hash bits to count rows by next.

    In the opened buckets of `depth` bits (0: all) there are `rows` rows and `cuts` starts of shards. Whole hashes once
    the rows are few, else as many buckets as the driver may hold. The first pass takes just enough bits: with more
    buckets, counting shuffles nearly every row.
    """
    if depth == 0:
        return min(max((rows * cuts // EXPECTED_HASHES).bit_length(), 8), BUCKET_BITS)
    if rows <= max(MOST_HASHES, 2 * cuts):
        return HASH_BITS
    return min(depth + max(4, BUCKET_BITS - (cuts - 1).bit_length()), HASH_BITS)


def _power_of_two(value: int) -> int:
    return 1 << max(value.bit_length() - 1, 0)


def plan_shards(rows_by_split: dict[str, int], shards_by_split: dict[str, int]) -> list[Shard]:
    """Plan the shards of every split, equal in size to within one row. EtlError for more shards than rows."""
    plan = []
    for split, rows in rows_by_split.items():
        count = shards_by_split[split]
        if count > rows:
            raise EtlError(
                f"etl.shard.shards.{split} = {count}: the split has only {count_of(rows, 'row')}; ask for fewer files"
            )
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


@dataclass(frozen=True)
class CutTable:
    """The cuts of all splits by the bucket of leading bits that they are in, so that a row is compared with few.

    Buckets of all splits are numbered through. `shifts` and `zeros`, by split: by how many bits a hash is shifted for
    its bucket, and the number of the bucket of hash 0. `before`, by bucket: the number of the shard that its first row
    is in. `levels`: of the first cut in each bucket, of the second and so on, the hashes and the rows of equal hash
    before it; NEVER where the bucket has no more.
    """

    shifts: list[int]
    zeros: list[int]
    before: list[int]
    levels: list[tuple[list[int], list[int]]]

    def sql(self, split: str, value: str, rank: str) -> str:
        """Return SQL for a row's shard number; its length grows only with the shard starts in one bucket.

        `split`, `value` and `rank` name the columns of the split's number, of the row's hash and of its 1-based rank
        among equal hashes.
        """
        shift, zero = (f"{_constant(numbers, 'int')}[{split}]" for numbers in (self.shifts, self.zeros))
        bucket = f"[int(shiftright({value}, {shift})) + {zero}]"
        terms = [_constant(self.before, "int") + bucket]
        for values, belows in self.levels:
            at, below = (_constant(numbers, "bigint") + bucket for numbers in (values, belows))
            terms.append(f"int({value} > {at} OR ({value} = {at} AND {rank} > {below}))")
        return " + ".join(terms)


def _constant(numbers: Sequence[int], kind: str) -> str:
    """Return an SQL array as one text, because an array of literals would be a plan node per number."""
    return f"cast(split('{','.join(map(str, numbers))}', ',') AS array<{kind}>)"


def cut_table(cuts: Sequence[Sequence[Cut]], firsts: Sequence[int]) -> CutTable:
    """Arrange the cuts of each split, which rise; `firsts`: the number of each split's first shard."""
    shifts, zeros, before, near = list[int](), list[int](), list[int](), list[list[Cut]]()
    for places, first in zip(cuts, firsts, strict=True):
        bits = max(len(places).bit_length(), 1)  # so a bucket has one cut or two, and more only where keys repeat
        mine: list[list[Cut]] = [[] for _ in range(1 << bits)]
        for cut in places:
            mine[(cut.value >> (HASH_BITS - bits)) + (1 << bits - 1)].append(cut)
        shifts.append(HASH_BITS - bits)
        zeros.append(len(near) + (1 << bits - 1))
        before += [first + n for n in accumulate(map(len, mine[:-1]), initial=0)]
        near += mine
    padded = zip_longest(*near, fillvalue=NEVER)
    # A hash without a cut inside has no places, and rank 0, which is behind a cut before the hash.
    levels = [([cut.value for cut in level], [cut.below or -1 for cut in level]) for level in padded]
    return CutTable(shifts, zeros, before, levels)
