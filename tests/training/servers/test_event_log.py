"""Events survive 8 bytes, and a changed file is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.training.servers.event_log import (
    MAX_CLOCK,
    MAX_LAG,
    MAX_TRIES,
    MAX_WORKERS,
    Kind,
    LogHeader,
    PushEvent,
    decode,
    encode,
    unpack,
)

EVENTS = st.builds(
    PushEvent,
    st.sampled_from(Kind),
    st.integers(0, MAX_WORKERS - 1),
    st.integers(0, MAX_TRIES - 1),
    st.integers(0, MAX_CLOCK - 1),
    st.integers(0, MAX_LAG - 1),
)
HEADER = LogHeader(attempt=1, server=0, servers=1, workers=2, begin=0, end=5, bound=0, damp=False, digest="d")


@given(st.lists(EVENTS, max_size=20))
def test_a_push_takes_eight_bytes_and_comes_back_as_it_was(events: list[PushEvent]) -> None:
    data = encode(HEADER, events)
    assert len(data.partition(b"\n")[2]) == 8 * len(events)
    assert decode(data, "file").events == tuple(events)
    assert all(unpack(event.packed()) == event for event in events)


@pytest.mark.parametrize("changed", [{"worker": MAX_WORKERS}, {"clock": MAX_CLOCK}, {"lag": MAX_LAG}, {"attempt": 64}])
def test_an_event_that_does_not_fit_is_refused(changed: dict[str, int]) -> None:
    fields = {"worker": 1, "attempt": 0, "clock": 1, "lag": 0} | changed
    with pytest.raises(ValueError, match="does not fit in the event log"):
        PushEvent(Kind.APPLIED, **fields).packed()


def test_a_file_that_is_cut_or_of_an_unknown_kind_is_named() -> None:
    data = encode(HEADER, [PushEvent(Kind.APPLIED, 1, 0, 1, 0)])
    with pytest.raises(ValueError, match=r"some/file: .* not a multiple of 8"):
        decode(data[:-1], "some/file")
    with pytest.raises(ValueError, match="some/file"):
        decode(data[:-1] + b"\xff", "some/file")
    with pytest.raises(ValueError, match="some/file, first line"):
        decode(b"{}\n", "some/file")
