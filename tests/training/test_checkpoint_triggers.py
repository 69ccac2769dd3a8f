"""When a checkpoint is written: every so many steps or seconds, at an improvement, when asked for, and at the end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.loop import LoopSettings, TrainerState, fit

STEPS, LOSSES = 24, (5.0, 4.0, 6.0, 3.0)  # of the validations at steps 6, 12, 18, 24
NEVER = LoopSettings(epochs=None, steps=STEPS, log_every_steps=3, eval_every_steps=6)


class World:
    """Reader, strategy and driver of a training whose steps take one second each, by the loop's own clock."""

    steps_per_epoch, waited_s = STEPS, 0.0
    meter = SimpleNamespace(take=dict)

    def __init__(self, asked_at: int | None = None):
        self.now, self.asked_at, self.saved = 0.0, asked_at, list[int]()

    def batches(self, epoch: int, step: int, count: int) -> Any:
        return (SimpleNamespace(global_rows=1, cursor=i + 1) for i in range(step, step + count))

    def forward_backward(self, batch: Any) -> torch.Tensor:
        self.now += 1.0
        return torch.tensor(0.0)

    def step(self, lr: float) -> Any:
        return SimpleNamespace(grad_norm=0.0, skipped=False, first_bad_rank=None)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def heartbeat(self, *_: Any) -> None: ...
    def metrics(self, *_: Any) -> None: ...
    def should_stop(self) -> bool:
        return False

    def should_checkpoint(self) -> bool:
        """As a signal's request: True once."""
        asked = self.asked_at is not None and self.now >= self.asked_at
        self.asked_at = None if asked else self.asked_at
        return asked

    def save(self, state: TrainerState, metric: float | None) -> None:
        self.saved.append(state.step)


@pytest.mark.parametrize(
    ("how", "asked_at", "saved"),
    [
        ({}, None, [24]),  # the end always
        ({"checkpoint_every_steps": 10}, None, [10, 20, 24]),
        ({"checkpoint_every_s": 7.0}, None, [7, 14, 21, 24]),  # ranks agree on it once a second
        ({"checkpoint_on_best": True}, None, [6, 12, 24]),
        ({}, 4, [4, 24]),  # asked for: at the next step on which all ranks agree, once
        ({"checkpoint_every_steps": 12, "checkpoint_every_s": 7.0}, None, [7, 12, 19, 24]),  # seconds since the last
    ],
)
def test_when_a_checkpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], asked_at: int | None, saved: list[int]
) -> None:
    world: Any = World(asked_at)
    monkeypatch.setattr("training.loop.time", SimpleNamespace(monotonic=lambda: world.now))
    fit(
        world,
        world,
        lambda step: {"loss": LOSSES[step // 6 - 1]},
        lambda step: 0.1,
        world.save,
        world,
        replace(NEVER, **how),
        TrainerState(),
    )
    assert world.saved == saved
