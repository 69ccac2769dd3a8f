"""Every request and reply crosses as it was; what is cut, longer or damaged is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import pytest

from sparkring.training.data.batch import BatchShare
from sparkring.training.servers.codec import codec_of, pack, unpack
from sparkring.training.servers.messages import (
    AddUpReply,
    AddUpRequest,
    ChooseReply,
    ChosenShare,
    GradientSum,
    MadeStep,
    PushReply,
    PushRequest,
    Refused,
    ShardStatus,
    TakeReply,
)
from tests.training.servers.examples import SERVER_MESSAGES, server_message

FULL = [
    PushRequest(1, 2, 0, 7, 0.1, 1e-300, (), (3, 1 << 40)),
    PushReply(ShardStatus.LATE, GradientSum(2.5, None)),
    PushReply(ShardStatus.APPLIED, None),
    ChooseReply((), MadeStep(math.inf, False, 0)),
    AddUpRequest(5, (ChosenShare(0, BatchShare(5, 0)), ChosenShare(3, BatchShare(4, 1)))),
    TakeReply(None),
    Refused("größer als 3"),
]


@pytest.mark.parametrize(
    "message", [*map(server_message, SERVER_MESSAGES), *FULL], ids=lambda message: type(message).__name__
)
def test_a_message_arrives_as_it_was_sent_and_no_other_length_is_one(message: Any) -> None:
    data = pack(message)
    assert unpack(type(message), data) == message == unpack(type(message), memoryview(data))
    with pytest.raises(ValueError, match=rf"{type(message).__name__} of {len(data)} bytes, and 1 more"):
        unpack(type(message), data + b"\0")
    for length in range(len(data)):
        with pytest.raises(ValueError):
            unpack(type(message), data[:length])


def test_a_float_keeps_its_bits() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF4_0000_0000_0001))[0]  # not a number, with a payload
    for value in (odd, -0.0, 5e-324, 0.1):
        found = unpack(AddUpReply, pack(AddUpReply(GradientSum(value, None)))).sum.squares
        assert struct.pack("<d", found) == struct.pack("<d", value)


def test_a_count_takes_no_memory_before_its_entries_have_come() -> None:
    data = pack(AddUpRequest(5, ()))
    with pytest.raises(ValueError, match="4,294,967,295 entries in 0 bytes"):
        unpack(AddUpRequest, data[:-4] + b"\xff" * 4)
    with pytest.raises(ValueError, match="no Refused: "):
        unpack(Refused, struct.pack("<I", 1) + b"\xff")
    with pytest.raises(ValueError, match="9 is not a valid ShardStatus"):
        unpack(PushReply, struct.pack("<q?", 9, False))


def test_a_value_or_a_type_that_no_message_has_is_refused() -> None:
    with pytest.raises(struct.error):
        pack(TakeReply(BatchShare(1 << 63, 0)))

    @dataclass(frozen=True)
    class Odd:
        values: dict[str, int]

    with pytest.raises(TypeError, match="no type of a message's field"):
        codec_of(dict[str, int])
