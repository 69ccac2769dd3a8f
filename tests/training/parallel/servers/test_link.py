"""Where a rank that takes another's place may go on, and where nobody knows what the other had done."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sparkring.training.parallel.servers.link import MAIN, PART, ServerLink
from sparkring.training.servers.client import Client
from sparkring.training.servers.rounds import START

GATHER = "gather 0"


class Kept:
    """What the first server knows of rounds: by channel, the latest scope in which the rank that died took part."""

    def __init__(self, **scopes: int) -> None:
        self.scopes = {MAIN: START, PART: START, GATHER: START} | scopes

    def last_scope(self, channel: str, worker: int | None = None, connection: Any = None) -> int:
        return self.scopes[channel]

    def open_channel(self) -> None:
        return None


def link(kept: Kept) -> ServerLink:
    return ServerLink(cast(Client, kept), 1, 3)


@pytest.mark.parametrize(
    ("meets", "scopes"),
    [(False, {}), (False, {MAIN: 20}), (False, {MAIN: 10, PART: 10}), (True, {MAIN: 10, PART: 10})],
)
def test_a_rank_takes_the_place_of_one_that_died_before_a_meeting_or_after_it(
    meets: bool, scopes: dict[str, int]
) -> None:
    found = link(Kept(**scopes))
    found.go_on(10, meets)
    assert found.begun


@pytest.mark.parametrize(("meets", "scopes"), [(False, {MAIN: 10}), (True, {}), (True, {MAIN: 5, PART: 5})])
def test_a_rank_that_died_while_ranks_met_or_was_the_first_to_come_there_is_not_replaced(
    meets: bool, scopes: dict[str, int]
) -> None:
    with pytest.raises(RuntimeError, match="rank 1 died at the synchronization point after step 10"):
        link(Kept(**scopes)).go_on(10, meets)


@pytest.mark.parametrize("last", range(-1, 6))
def test_a_rank_that_died_between_the_rounds_of_a_checkpoint_is_not_replaced(last: int) -> None:
    """A checkpoint is three rounds behind training, which are numbered on through the attempt."""
    found = link(Kept(**{GATHER: last}))
    found.open_gather(behind=3)
    if (last + 1) % 3 == 0:
        found.go_on(10, False)
    else:
        with pytest.raises(RuntimeError, match="rank 1 died while a checkpoint was written"):
            found.go_on(10, False)
