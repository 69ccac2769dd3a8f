"""Hooks: code of the user's that looks on while a model trains (train.hooks), and sees plain values.

They run on rank 0, in the training thread, between two steps; a step's loss is summed over the ranks for them, where
ranks synchronize in each step anyway. A hook cannot change training: it gets no model and no tensor, and random states
and gradient mode are put back after it.
"""

from __future__ import annotations

import inspect
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkring.conf.errors import first_line
from sparkring.conf.references import load_setting
from sparkring.training.checkpoint.rng import capture_rng, restore_rng


@dataclass(frozen=True)
class StepSeen:
    """A step that was made."""

    step: int  # since the run began, this one included
    epoch: float  # finished epochs and the fraction of this one, as in the charts
    consumed_samples: int  # over all ranks and epochs
    loss: float  # mean over the rows of the global batch; under parallel.averaging over those of rank 0
    lr: float
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite, and no rank stepped
    world: int  # ranks of this attempt


@dataclass(frozen=True)
class EvaluationSeen:
    """An evaluation of the validation split."""

    step: int
    metrics: dict[str, float]  # a copy
    best_step: int | None  # by train.best_metric, this one included
    best_value: float | None


@dataclass(frozen=True)
class CheckpointSeen:
    """A checkpoint that can be loaded now."""

    step: int
    uri: str
    bytes: int


class Hook:
    """Base of every hook; made without arguments, on rank 0, once for each attempt. Each method may be left out.

    After a crash training continues from a checkpoint, so a step may be seen twice.
    """

    def on_step(self, seen: StepSeen) -> None:
        """Handle a step. With this method, ranks add up their losses at each step, for which a GPU waits.

        Not under parallel.averaging, where ranks do not synchronize in each step.
        """

    def on_evaluation(self, seen: EvaluationSeen) -> None:
        """Handle an evaluation of the validation split."""

    def on_checkpoint(self, seen: CheckpointSeen) -> None:
        """Handle a complete checkpoint, at the first step after its background write, or at the end."""


class HookFailed(RuntimeError):
    """A hook of the user's raised an exception; the message has its place."""


class Hooks:
    """The hooks of this rank: rank 0's, none on the others."""

    def __init__(self, references: Sequence[str], is_rank_0: bool) -> None:
        """Import the classes, and on rank 0 make them. HookFailed where one cannot be made."""
        classes = [(reference, hook_class(reference)) for reference in references]
        self.sees_steps = any(cls.on_step is not Hook.on_step for _, cls in classes)  # the same on every rank
        self._committed: deque[CheckpointSeen] = deque()  # the thread that writes adds to it
        self._hooks = [(reference, _make(reference, cls)) for reference, cls in classes] if is_rank_0 else []

    def stepped(self, seen: StepSeen) -> None:
        self._call("on_step", seen)

    def evaluated(self, seen: EvaluationSeen) -> None:
        self._call("on_evaluation", seen)

    def committed(self, seen: CheckpointSeen) -> None:
        """Record a checkpoint, from any thread; `deliver` passes it on."""
        self._committed.append(seen)

    def deliver(self) -> None:
        """Show the checkpoints that were completed since."""
        while self._committed:
            self._call("on_checkpoint", self._committed.popleft())

    def _call(self, method: str, seen: Any) -> None:
        if not self._hooks:
            return
        state = capture_rng()
        with torch.no_grad():  # also puts back what a hook sets
            for reference, hook in self._hooks:
                try:
                    getattr(hook, method)(seen)
                except Exception as error:
                    raise HookFailed(
                        f"train.hooks: {reference}.{method} failed at step {seen.step}: {_where(error)}"
                    ) from error
        restore_rng(state)


def _make(reference: str, cls: type[Hook]) -> Hook:
    state = capture_rng()
    try:
        return cls()
    except Exception as error:
        raise HookFailed(f"train.hooks: {reference} cannot be made: {_where(error)}") from error
    finally:
        restore_rng(state)


def _where(error: Exception) -> str:
    """Describe the error in a line, with the innermost line of code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({frame.filename}:{frame.lineno}, in {frame.name})"


def hook_class(reference: str) -> type[Hook]:
    """Return the class that an entry of train.hooks names; ValueError for anything else."""
    found = load_setting(reference, "train.hooks")
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise ValueError(
            f"train.hooks = {reference!r}: is {found!r}, not a class derived from sparkring.training.hooks.Hook"
        )
    return found


def hook_problems(references: Sequence[str]) -> list[str]:
    """List why hooks cannot be used, as far as known without making them."""
    problems = []
    for reference in references:
        try:
            inspect.signature(hook_class(reference)).bind()
        except ValueError as error:
            problems.append(str(error))
        except TypeError as error:
            problems.append(f"train.hooks = {reference!r}: is made without arguments: {error}")
        except Exception as error:  # the module's own code runs
            problems.append(
                f"train.hooks = {reference!r}: its import fails: {type(error).__name__}: {first_line(error)}"
            )
    return problems
