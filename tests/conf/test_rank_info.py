"""A rank's position is one process by default and survives JSON."""

from __future__ import annotations

import json

from sparkring.conf.rank_info import RankInfo


def test_the_default_position_is_that_of_one_process() -> None:
    assert RankInfo() == RankInfo(0, 1, 0, 1, 0, 1, 0, 1)


def test_a_position_survives_json() -> None:
    info = RankInfo(5, 8, 1, 2, 2, 4, 2, 4)
    assert RankInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
