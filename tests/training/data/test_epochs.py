"""One integer says where a run stands, for every reader."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.training.data.epochs import EpochSteps


@given(st.integers(1, 1000), st.integers(1, 90), st.integers(0, 9), st.data())
def test_consumed_samples_find_every_step_again(samples: int, gb: int, epoch: int, data: st.DataObject) -> None:
    epochs = EpochSteps(samples, gb)
    step = data.draw(st.integers(0, epochs.steps - 1))
    after = (epoch, step + 1) if step + 1 < epochs.steps else (epoch + 1, 0)
    (found, *_) = epochs.ranges(epochs.consumed_after(epoch, step))
    assert (found.epoch, found.first, found.stop) == (*after, epochs.steps)


def test_steps_go_on_across_epochs() -> None:
    epochs = EpochSteps(48, 10)  # 5 steps; the last consumes 8 samples
    assert list(epochs.ranges(2 * 48 + 30)) == [(2, 3, 5)]
    assert list(epochs.ranges(2 * 48 + 30, 9)) == [(2, 3, 5), (3, 0, 5), (4, 0, 2)]
    assert list(epochs.ranges(2 * 48 + 30, 2)) == [(2, 3, 5)] and list(epochs.ranges(2 * 48 + 30, 1)) == [(2, 3, 4)]
    assert list(epochs.ranges(3 * 48, 1)) == [(3, 0, 1)]
    assert list(epochs.ranges(3 * 48, 0)) == []


def test_a_run_of_another_batch_size_repeats_the_batch_it_is_in(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(EpochSteps(100, 20).ranges(170)) == [(1, 3, 5)]
    assert "170 consumed samples are not whole global batches of 20: the last 10 are read again" in caplog.text
