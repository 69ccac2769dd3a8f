"""Which ranks are on one host."""

from __future__ import annotations

import pytest

from sparkring.training.parallel.averaging.hosts import cut_hosts


def test_hosts_begin_at_their_first_rank_and_may_differ_in_size() -> None:
    assert cut_hosts([0, 1, 0, 1]) == [[0, 1], [2, 3]]
    assert cut_hosts([0, 1, 2, 0]) == [[0, 1, 2], [3]]
    assert cut_hosts([0]) == [[0]]


@pytest.mark.parametrize("local_ranks", [[1, 0], [0, 0, 1, 1], [0, 2]])
def test_ranks_of_a_host_that_are_not_consecutive_are_refused(local_ranks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not consecutive.*groups=rank"):
        cut_hosts(local_ranks)
