"""The study of a sweep in Optuna: which values come next, which trials are pruned, what is known after a kill.

Its sqlite file survives the process. The values of a trial that a killed process has left are tried again first, by a
trial that continues it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from sparkring.pipelines.sweep.space import Searched, SweepSpec, Values

WHY, CONTINUES, STEPS = "why", "continues", "steps"  # user attributes of a trial
FILE = "study.db"
State = Literal["complete", "pruned", "failed"]
STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A trial that has ended. value: the best of its validation metric; None: it failed. why: it failed."""

    number: int
    values: Values
    state: State
    value: float | None = None
    why: str = ""


class Study:
    """One sweep's trials, in a folder on a local disk. Used by one process at a time."""

    def __init__(self, folder: Path, spec: SweepSpec, mode: Literal["min", "max"]) -> None:
        """Open or create the study; half-done trials of a killed process come first.

        Args:
            folder: folder that holds it.
            spec: space, seed, sampler and pruner.
            mode: direction of the metric.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.spec, self.mode = spec, mode
        self._study = optuna.create_study(
            storage=RDBStorage(f"sqlite:///{folder / FILE}"),
            study_name="sweep",
            direction="maximize" if mode == "max" else "minimize",
            pruner=_pruner(spec),
            load_if_exists=True,
        )
        # Begun again from the seed alone, the sampler would draw the same values after each start.
        self._study.sampler = _sampler(spec, spec.seed + len(self._study.trials))
        for left in self._study.get_trials(states=(TrialState.RUNNING,)):
            self._replace(left)

    def _replace(self, left: FrozenTrial) -> None:
        waiting = self._study.get_trials(states=(TrialState.WAITING,))
        if left.params and left.number not in [trial.user_attrs.get(CONTINUES) for trial in waiting]:
            attributes = {CONTINUES: left.number, STEPS: left.user_attrs.get(STEPS, [])}
            self._study.enqueue_trial(left.params, attributes)
        self._study.tell(left.number, state=TrialState.FAIL)

    def ended(self) -> list[Ended]:
        """List all trials but the replaced ones, by number."""
        trials = self._study.get_trials(deepcopy=False)
        replaced = {trial.user_attrs.get(CONTINUES) for trial in trials}
        return [_ended(t) for t in trials if t.state in STATES and t.params and t.number not in replaced]

    def best(self) -> Ended | None:
        """Return the best complete trial; the first of equal ones."""
        sign = -1 if self.mode == "max" else 1
        complete = [trial for trial in self.ended() if trial.state == "complete" and trial.value is not None]
        return min(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def next(self) -> Trial:
        """Begin a trial."""
        return Trial(self._study, self._study.ask(), self.spec.space)


class Trial:
    """A trial that runs: its values, and what its evaluations say."""

    def __init__(self, study: optuna.Study, trial: optuna.Trial, space: Mapping[str, Searched]) -> None:
        self._study, self._trial, self.number = study, trial, trial.number
        self.values: Values = {key: _suggest(trial, key, searched) for key, searched in space.items()}
        self.continues: int | None = trial.user_attrs.get(CONTINUES)
        self._steps: list[int] = list(trial.user_attrs.get(STEPS, []))

    def falls_behind(self, step: int, value: float) -> bool:
        """Record an evaluation; return whether the pruner ends the trial.

        Trials are compared at the same number of evaluations, since a step of another batch is another amount of work.
        An evaluation repeated after a checkpoint keeps its number.
        """
        if step not in self._steps:
            self._steps.append(step)
            self._trial.set_user_attr(STEPS, self._steps)
        if not math.isfinite(value):
            return False
        self._trial.report(value, self._steps.index(step) + 1)
        return self._trial.should_prune()

    def complete(self, value: float) -> None:
        """End it with its best value."""
        self._study.tell(self._trial, value)

    def prune(self) -> None:
        """End it with its last value, which the sampler learns from too."""
        self._study.tell(self._trial, state=TrialState.PRUNED)

    def fail(self, why: str) -> None:
        """End it without a value; it is not tried again."""
        self._trial.set_user_attr(WHY, why)
        self._study.tell(self._trial, state=TrialState.FAIL)


def _ended(trial: FrozenTrial) -> Ended:
    return Ended(trial.number, dict(trial.params), STATES[trial.state], trial.value, trial.user_attrs.get(WHY, ""))


def _suggest(trial: optuna.Trial, key: str, searched: Searched) -> Any:
    if searched.choices is not None:
        return trial.suggest_categorical(key, searched.choices)
    low, high, step = searched.low, searched.highest, searched.step
    assert low is not None, "checked by Searched"
    if searched.is_whole:
        return trial.suggest_int(key, int(low), int(high), step=int(step or 1), log=searched.log)
    return trial.suggest_float(key, low, high, step=step, log=searched.log)


def _sampler(spec: SweepSpec, seed: int) -> optuna.samplers.BaseSampler:
    if spec.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _pruner(spec: SweepSpec) -> optuna.pruners.BasePruner:
    if spec.pruner == "median":
        return optuna.pruners.MedianPruner()
    return optuna.pruners.HyperbandPruner() if spec.pruner == "hyperband" else optuna.pruners.NopPruner()
