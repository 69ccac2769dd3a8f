"""Every message and event: it crosses the channel as it was, and what is not its form is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from sparkring.training.launch.channel.frames import ProtocolError, decode, encode
from sparkring.training.launch.messages import (
    MAX_LOG_LINES,
    FromForkServer,
    FromRankToAgent,
    LogLines,
    RankMetrics,
    Stacks,
    ToAgent,
    ToDriver,
    ToForkServer,
    ToRank,
    WindowTiming,
)
from sparkring.training.launch.topology import Child
from tests.training.launch.examples import EVENTS, MESSAGES, example

EVERY = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)


def fields_of(message: Any) -> dict[str, Any]:
    """The JSON object that travels."""
    return dict(json.loads(encode(message)[4:]))


@EVERY
def test_a_message_arrives_as_it_was_sent(kind: type) -> None:
    message = example(kind)
    assert decode(encode(message, 5)[4:]) == (message, 5)
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), "who sends it to whom"


@EVERY
def test_an_unknown_a_missing_and_a_wrong_field_are_refused(kind: type) -> None:
    good = fields_of(example(kind))
    damaged = [{**good, "unknown": 1}]
    for field in dataclasses.fields(kind):
        damaged.append({**good, field.name: {"an": ["object", 1.5, None]}})
        if field.default is dataclasses.MISSING:
            damaged.append({name: value for name, value in good.items() if name != field.name})
    for fields in damaged:
        if {"an": ["object", 1.5, None]} in (fields.get("payload"), fields.get("data")):
            continue  # the payload of a start, and the data of an event, are any JSON object
        with pytest.raises(ProtocolError, match=kind.__name__):
            decode(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (LogLines(Child("rank", 0), 1, ("x",) * (MAX_LOG_LINES + 1)), "LogLines: lines: at most 1,000 long, not 1,001"),
        (LogLines(Child("rank", 0), 1, ("x" * 10_000,)), "LogLines: lines: at most 4,160 long, not 10,000"),
        (Stacks(0, 1, "x" * 300_000), "Stacks: text: at most 200,000 long"),
        (RankMetrics(0, 1, 2, {"a": 10**400}, None), "RankMetrics: values: a number that fits into 64 bits"),
        (RankMetrics(0, 1, True, {}, None), "RankMetrics: step: int, not bool"),
    ],
)
def test_a_value_over_its_bound_is_refused_by_name(message: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(encode(message)[4:])


def test_not_a_number_and_infinity_are_values_of_metrics() -> None:
    found, _ = decode(encode(RankMetrics(0, 1, 2, {"loss": float("inf"), "step": 3}, None))[4:])
    assert found.values == {"loss": float("inf"), "step": 3.0}


def test_metrics_without_a_timing_are_refused() -> None:
    """Straggler detection lives on it: a field that is renamed, or left out by a report, must not turn it off."""
    good = fields_of(RankMetrics(0, 1, 2, {}, WindowTiming(0.5, 0.1, 0.0, 0.0, {}, {}, {})))
    assert decode(json.dumps(good).encode())[0].timing.busy_s == 0.4
    del good["timing"]["wait_s"]
    with pytest.raises(ProtocolError, match="RankMetrics: timing: without wait_s"):
        decode(json.dumps(good).encode())
    del good["timing"]
    with pytest.raises(ProtocolError, match="RankMetrics: without timing"):
        decode(json.dumps(good).encode())
    with pytest.raises(TypeError, match="timing"):
        RankMetrics(0, 1, 2, {"perf/step_s": 0.5, "perf/wait_s": 0.1})  # type: ignore[call-arg]


def test_every_event_can_be_made_and_compared() -> None:
    assert all(example(kind) == example(kind) for kind in EVENTS)


def test_no_message_is_without_a_receiver() -> None:
    received = {kind for side in (ToDriver, ToAgent, ToRank, ToForkServer, FromForkServer) for kind in get_args(side)}
    assert received == set(MESSAGES)
    assert set(get_args(FromRankToAgent)) <= set(get_args(ToDriver))
