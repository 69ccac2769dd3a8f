"""A round is answered once all have taken part, and again to one that was replaced."""

from __future__ import annotations

from sparkring.training.servers.rounds import START, RoundKey, Rounds


def test_the_first_value_of_a_worker_counts_and_answers_come_in_their_order() -> None:
    rounds, key = Rounds(2), RoundKey(START, "main", 0)
    rounds.give(key, 1, b"one")
    assert rounds.answers(key) is None
    rounds.give(key, 0, b"zero")
    rounds.give(key, 1, b"from its replacement")
    assert rounds.answers(key) == [b"zero", b"one"]


def test_rounds_of_the_start_are_kept_and_others_until_a_later_scope_is_complete() -> None:
    rounds, start = Rounds(1), RoundKey(START, "main", 0)
    rounds.give(start, 0, b"s")
    rounds.give(RoundKey(4, "main", 0), 0, b"a")
    rounds.give(RoundKey(3, "written", 0), 0, b"other channel")
    assert rounds.last_scope("main", 0) == 4 and rounds.last_scope("none", 0) == START
    rounds.give(RoundKey(7, "main", 0), 0, b"b")
    assert rounds.answers(RoundKey(4, "main", 0)) is None
    assert rounds.answers(RoundKey(3, "written", 0)) == [b"other channel"] and rounds.answers(start) == [b"s"]
