"""The buckets of a split by hash."""

from sparkring.conf.split_hash import share_edges


def test_shares_become_edges_of_a_million_buckets():
    assert share_edges([0.7, 0.1, 0.2]) == [700_000, 800_000, 1_000_000]
    assert share_edges([1 / 3] * 3) == [333_333, 666_667, 1_000_000]
