"""Frames: bounds, streams cut anywhere, and bytes that are no message."""

from __future__ import annotations

import json
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.training.launch.channel.frames import (
    MAX_FRAME_BYTES,
    FrameParser,
    ProtocolError,
    SocketChannel,
    decode,
    encode,
)
from sparkring.training.launch.messages import (
    ChildEvent,
    ChildForked,
    KillChildren,
    Message,
    RankResult,
    StopTraining,
    ToForkServer,
    ToRank,
)
from sparkring.training.launch.topology import Child

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), json_values, max_size=5), st.integers(1, 64))
def test_messages_come_back_as_they_were_however_the_stream_is_cut(data: dict, step: int) -> None:
    messages: list[Message] = [ChildEvent(Child("rank", 0), 1, "x", data), KillChildren("rank")]
    stream, parser = b"".join(map(encode, messages)), FrameParser(MAX_FRAME_BYTES)
    pieces = [stream[i : i + step] for i in range(0, len(stream), step)]
    assert [decode(body)[0] for piece in pieces for body in parser.feed(piece)] == messages


def body_of(message: Message) -> bytes:
    (body,) = FrameParser(MAX_FRAME_BYTES).feed(encode(message))
    return bytes(body)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The body of a message, a piece of it replaced."""
    kinds = [KillChildren("rank"), ChildEvent(Child("rank", 0), 1, "x", {"a": [1.5, None]}), StopTraining()]
    body = body_of(draw(st.sampled_from(kinds)))
    start = draw(st.integers(0, len(body)))
    return body[:start] + draw(st.binary(max_size=3)) + body[start + draw(st.integers(0, 3)) :]


@settings(max_examples=500)
@given(st.binary(max_size=300) | damaged())
def test_the_parser_takes_any_bytes_and_raises_only_its_own_error(body: bytes) -> None:
    try:
        message, _ = decode(body)
    except ProtocolError:
        return
    assert decode(body_of(message))[0] == message, "what is taken is a message, which can be sent again"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"1" * 10_000,
        b"{}",
        b'{"kind":1}',
        b"null",
        b"\xff\xfe",
        b'{"kind":"a"',
        b'{"kind":"NoSuchKind"}',
        b'{"kind":"KillChildren","role":"rank","extra":1}',
        b'{"kind":"KillChildren","role":"rank","n":-1}',
        b'{"kind":"KillChildren","role":"rank","n":true}',
    ],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


def test_a_side_accepts_its_own_messages_only() -> None:
    body = encode(KillChildren("rank"))[4:]
    assert decode(body, ToForkServer) == (KillChildren("rank"), 0)
    with pytest.raises(ProtocolError, match="a message of kind 'KillChildren' is not accepted here"):
        decode(body, ToRank)


def test_a_number_travels_beside_the_fields() -> None:
    body = encode(ChildForked(Child("rank", 0), 7), 3)[4:]
    assert json.loads(body) == {"kind": "ChildForked", "child": {"role": "rank", "index": 0}, "pid": 7, "n": 3}
    assert decode(body) == (ChildForked(Child("rank", 0), 7), 3)


@pytest.mark.parametrize("value", ['"\\ud800"', '"a\\u0000"', '"a\\nb"', '""', '"' + "x" * 513 + '"', "1", "null"])
def test_the_name_in_a_hello_can_be_printed_and_compared(value: str) -> None:
    with pytest.raises(ProtocolError, match="Hello: agent: "):
        decode(b'{"kind": "Hello", "agent": %s, "secret": "x"}' % value.encode())


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(ProtocolError, match="frame of"):
        list(FrameParser(MAX_FRAME_BYTES).feed(struct.pack(">I", length)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">I", length))
        with pytest.raises(ProtocolError, match="frame of"):
            SocketChannel(ours, Message).receive()


def test_too_large_a_message_names_its_kind() -> None:
    with pytest.raises(ValueError, match="a RankResult message of"):
        encode(RankResult(0, 1, "json", "x" * MAX_FRAME_BYTES))


def test_a_value_that_is_not_json_is_the_senders_error() -> None:
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        encode(ChildEvent(Child("rank", 0), 1, "x", {"a": {1}}))


def test_frames_cross_a_socket_pair() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        SocketChannel(ours, Message).send(StopTraining())
        assert SocketChannel(theirs, ToRank).receive() == StopTraining()
