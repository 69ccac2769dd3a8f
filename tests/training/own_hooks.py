"""Hooks as users write them; they write what they see into the file that OWN_HOOKS_FILE of the environment names."""

from __future__ import annotations

import dataclasses
import json
import os
import random

import numpy as np
import torch

from sparkring.training.hooks import CheckpointSeen, EvaluationSeen, Hook, StepSeen


class Notes(Hook):
    """Notes everything, and does what must not change training."""

    def _note(self, seen: StepSeen | EvaluationSeen | CheckpointSeen) -> None:
        line = {"kind": type(seen).__name__, "pid": os.getpid(), **dataclasses.asdict(seen)}
        with open(os.environ["OWN_HOOKS_FILE"], "a") as file:
            file.write(json.dumps(line) + "\n")
        random.seed(1)
        np.random.rand(5)
        torch.rand(5)
        torch.set_grad_enabled(False)

    def on_step(self, seen: StepSeen) -> None:
        self._note(seen)

    def on_evaluation(self, seen: EvaluationSeen) -> None:
        self._note(seen)
        seen.metrics.clear()

    def on_checkpoint(self, seen: CheckpointSeen) -> None:
        self._note(seen)


class Ends(Hook):
    """Fails at an evaluation."""

    def on_evaluation(self, seen: EvaluationSeen) -> None:
        share = 1 / (seen.step - seen.step)
        raise AssertionError(share)


class WithArguments(Hook):
    def __init__(self, path: str) -> None:
        self.path = path


class Refuses(Hook):
    def __init__(self) -> None:
        raise OSError("no such channel")
