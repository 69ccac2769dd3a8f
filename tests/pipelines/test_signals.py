"""What signals ask of a job whose ranks run."""

from __future__ import annotations

import os
import signal

import pytest

from sparkring.pipelines.signals import obeying_signals
from sparkring.training.launch.attempt import Control
from sparkring.training.launch.failure import Cancelled
from sparkring.training.launch.messages import KillRank, StopTraining, WriteCheckpoint


def test_a_signal_asks_for_a_checkpoint_and_training_goes_on() -> None:
    control = Control()
    before = signal.getsignal(signal.SIGUSR1)
    with obeying_signals(control, grace_s=60):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert control.pending() == [WriteCheckpoint()] and not control.stopping
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("number", "left"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_the_first_signal_asks_for_an_end_and_the_second_makes_it(
    number: signal.Signals, left: type[BaseException]
) -> None:
    control = Control()
    with pytest.raises(left), obeying_signals(control, grace_s=60):
        os.kill(os.getpid(), number)
        assert control.pending() == [StopTraining()] and control.stopping
        os.kill(os.getpid(), number)
        assert control.pending() == [KillRank()]
        raise Cancelled("as the attempt does")


def test_the_grace_time_ends_what_does_not_end() -> None:
    control = Control()
    with pytest.raises(SystemExit) as caught, obeying_signals(control, grace_s=0.01):
        os.kill(os.getpid(), signal.SIGTERM)
        while not control.cancelled:
            signal.sigtimedwait([], 0.01)
    assert caught.value.code == 143


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    control = Control()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with obeying_signals(control, grace_s=60):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not control.stopping and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
