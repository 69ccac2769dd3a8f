"""A rank's output: rates, and lines that wait for the driver."""

from __future__ import annotations

import os
import threading

from sparkring.training.launch.host.logpump import LogPump, RateLimit


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
