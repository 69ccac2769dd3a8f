"""A rank's output: rates, and lines that wait for the driver."""

from __future__ import annotations

import os
import threading
import time

import pytest

from sparkring.training.launch.host import logpump
from sparkring.training.launch.host.logpump import LogPump, RateLimit, last_state


def test_the_rate_limit_passes_its_rate_and_survives_a_clock_that_stands() -> None:
    limit = RateLimit(10.0, burst_s=1.0)
    assert limit.allow(100, 0.0) == 10
    assert limit.allow(100, 0.0) == 0
    assert limit.allow(100, 0.5) == 5
    assert limit.allow(100, 100.0) == 10
    assert limit.allow(100, 50.0) == 0


def test_without_a_limit_every_line_is_passed_and_who_prints_waits() -> None:
    ours, theirs = os.pipe()
    taken: list[str] = []
    door = threading.Event()

    def take(lines: list[str]) -> None:
        door.wait(30)
        taken.extend(lines)

    def write() -> None:
        with os.fdopen(theirs, "w") as out:
            out.writelines(f"line {i}\n" for i in range(50_000))
            out.write("z" * 5000)

    pump, writer = LogPump(ours, None, take), threading.Thread(target=write)
    pump.start()
    writer.start()
    writer.join(0.3)
    assert writer.is_alive(), "a pipe's worth at most is printed ahead of who takes it"
    door.set()
    pump.join(30)
    writer.join(30)
    assert taken == [*(f"line {i}" for i in range(50_000)), "z" * 4096 + " ... 904 characters more"]
    assert list(pump.last) == taken[-100:]


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (b"half a line", (b"", b"half a line")),
        (b"\r 1%", (b"", b" 1%")),  # written before its state, as tqdm does
        (b"\r 1%\r 2%\r 3%", (b" 2%", b" 3%")),
        (b"1%\r2%\r", (b"1%", b"2%\r")),  # written behind it
        (b"1%\r    \r2", (b"1%", b"2")),  # a bar that is wiped
        (b"line of a Windows program\r", (b"", b"line of a Windows program\r")),
        (b"", (b"", b"")),
    ],
)
def test_the_newest_whole_state_of_a_progress_bar_is_found(rest: bytes, expected: tuple[bytes, bytes]) -> None:
    assert last_state(rest) == expected


def wait_for(condition: threading.Event) -> None:
    assert condition.wait(120), "what was waited for did not come"


@pytest.mark.parametrize("piece", ["\r{0:3d}%", "{0:3d}%\r", "."], ids=["tqdm", "behind", "dots"])
@pytest.mark.parametrize("lines_per_s", [None, 1000.0])
def test_output_that_ends_no_line_is_reported_while_it_is_printed(
    piece: str, lines_per_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are progress: a script that draws a bar does not hang. Its states are lines, fewer than were drawn."""
    monkeypatch.setattr(logpump, "PARTIAL_S", 0.1)
    ours, theirs = os.pipe()
    taken: list[list[str]] = []
    thrice = threading.Event()

    def take(lines: list[str]) -> None:
        taken.append(lines)
        if len(taken) == 3:
            thrice.set()

    pump = LogPump(ours, lines_per_s, take)
    pump.start()
    drawn = 0
    with os.fdopen(theirs, "wb", buffering=0) as out:
        while not thrice.is_set() and drawn < 60_000:
            out.write(piece.format(drawn % 100).encode())
            drawn += 1
            time.sleep(0.002)
        wait_for(thrice)
        out.write(b"done\r\nnext line\r\n")
    pump.join(60)
    shown = [line for lines in taken for line in lines]
    assert shown[-1] == "next line" and shown[-2].endswith("done")
    assert len(taken) < drawn, "not every state is passed on"
    assert all(line.endswith("%") for line in shown[:-2]), "whole states only"
    assert len(shown) == 2 if piece == "." else len(shown) >= 4
