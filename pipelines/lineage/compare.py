"""What differs between the run as it was and here, what that means, and whether it was reproduced. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sparkring.conf.plain_text import count_of
from sparkring.pipelines.lineage.reproduce_record import Environment, ModuleFile, Record
from sparkring.training.worker.result import TrainResult

Check = Literal["bits", "metrics"]
Effect = Literal["training", "bits", "none"]
"""training: another model would be trained, so no check is worth its time. bits: the same training, with other last
bits, so metrics can be compared. none: weights do not depend on it, or only a user's own code can make them."""

TOLERANCE = 1e-4
SUMS = (
    "torch",
    "numpy",
    "pyarrow",
    "horovod",
    "xgboost",
    "xgboost-cpu",
)  # packages that compute, or that decode what is computed on
TRAINS = ("sparkring.conf", "sparkring.training")
GONE = "not there"


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was when the run was trained."""

    what: str
    was: str
    now: str
    effect: Effect
    why: str

    def line(self) -> str:
        change = f": {self.was} -> {self.now}" if self.was or self.now else ""
        return f"{self.what}{change}; {self.why}"


def blocking(differences: Iterable[Difference], check: Check) -> list[Difference]:
    """Return the differences that prevent the check."""
    effects = {"training", "bits"} if check == "bits" else {"training"}
    return [each for each in differences if each.effect in effects]


def environment_differences(was: Environment, now: Environment) -> list[Difference]:
    """List the differences to another environment, the most important first."""
    return [
        *module_differences(was.modules, now.modules),
        *code_differences(was.code, now.code),
        *package_differences(was.packages, now.packages),
        *_torch_build(was, now),
        *_processor(was, now),
        *_other("Python", was.python, now.python, "none", "sums are not made in Python, unless your module makes some"),
        *_other(
            "GPUs", ", ".join(was.gpus), ", ".join(now.gpus), "bits", "another GPU, or none, adds in another order"
        ),
    ]


def module_differences(was: Mapping[str, ModuleFile], now: Mapping[str, ModuleFile]) -> list[Difference]:
    """List the user's modules with changed code, or that are on one side only."""
    found = []
    for name in sorted(was.keys() | now.keys()):
        before, here = was.get(name), now.get(name)
        if (before and before.sha256) != (here and here.sha256):
            files = here or before
            assert files is not None, "of one of both"
            why = (
                "your code is another, so the model may be too; restore the file (see the run's commit and diff.patch)"
            )
            hashes = [each.sha256[:12] if each else GONE for each in (before, here)]
            found.append(Difference(f"module {name} ({files.file})", hashes[0], hashes[1], "training", why))
    return found


def code_differences(was: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """List our packages with changed code."""
    found = []
    for name in sorted(was.keys() | now.keys()):
        trains = name in TRAINS
        why = "sparkring's own training code is another; check out the run's commit" if trains else "trains no weights"
        hashes = [each[:12] if each else GONE for each in (was.get(name), now.get(name))]
        found += _other(f"code {name}", hashes[0], hashes[1], "bits" if trains else "none", why)
    return found


def package_differences(was: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """List distributions of another version, or that are on one side only."""
    found = []
    for name in sorted(was.keys() | now.keys(), key=lambda name: (name not in SUMS, name)):
        computes = name in SUMS
        why = "not the same environment: it computes, and another version rounds differently"
        why = why if computes else "our training does no arithmetic in it; your module may"
        found += _other(name, was.get(name, GONE), now.get(name, GONE), "bits" if computes else "none", why)
    return found


def _torch_build(was: Environment, now: Environment) -> list[Difference]:
    if was.torch_build == now.torch_build or was.packages.get("torch") != now.packages.get("torch"):
        return []
    before = [line.strip() for line in was.torch_build if line not in now.torch_build]
    here = [line.strip() for line in now.torch_build if line not in was.torch_build]
    shown, own = (" | ".join(lines)[:200] for lines in (before, here))
    return [Difference("torch's build", shown, own, "bits", "the same version, built otherwise: it rounds differently")]


def _processor(was: Environment, now: Environment) -> list[Difference]:
    bits = "bits can be equal only with the same instruction set"
    found = _other("torch's CPU capability", was.cpu_capability, now.cpu_capability, "bits", bits)
    lost, gained = (sorted({*a} - {*b}) for a, b in ((was.cpu_flags, now.cpu_flags), (now.cpu_flags, was.cpu_flags)))
    if lost or gained:
        found.append(
            Difference(
                "instruction set", f"with {lost}" if lost else "", f"with {gained}" if gained else "", "bits", bits
            )
        )
    same_set = "of the same instruction set: bits are usually equal, which nobody promises"
    return found + _other("CPU", was.cpu_model, now.cpu_model, "none", same_set if not found else bits)


def _other(what: str, was: str, now: str, effect: Effect, why: str) -> list[Difference]:
    """Return the difference between two values as a list; [] if equal.

    Args:
        what: subject of the values.
        was: recorded value; empty for none.
        now: present value; empty for none.
        effect: effect of the difference on a repeated training.
        why: reason for the effect.
    """
    return [] if was == now else [Difference(what, was or "none", now or "none", effect, why)]


def run_differences(result: TrainResult, record: Record) -> list[Difference]:
    """List what a single command from the first to the last step would not repeat in the run."""
    config, world = result.run_config(), result.train.world
    found = [
        Difference(f"{what} between two commands of the run", "", "", "bits", "part of it was trained as it was before")
        for what in record.changed
    ]
    worlds = sorted({attempt.world for attempt in result.failed_attempts} | {world})
    if len(worlds) > 1:
        why = (
            f"it was restarted on other worlds; from the first step on {count_of(world, 'rank')}, sums are made in "
            "another order"
        )
        found.append(Difference("ranks", " and ".join(map(str, worlds)), str(world), "bits", why))
    launches = 1 if result.choice is None or result.choice.winner == "trees" else 2  # of both families, trees first
    if (unknown := result.attempts - len(result.failed_attempts) - launches) > 0:
        why = (
            f"launched by earlier commands: bits are equal only if all had {count_of(world, 'rank')}, which is not "
            "recorded"
        )
        found.append(Difference(f"{unknown} launches", "", "", "none", why))
    if config.data.reader == "petastorm":
        many = config.data.petastorm.pool != "dummy" and config.data.petastorm.workers > 1
        why = "row groups come in no fixed order" if many else "what petastorm reads is not compared"
        found.append(Difference("data.reader = petastorm", "", "", "bits" if many else "none", why))
    if record.environment.gpus and config.train.device != "cpu":
        why = "some kernels add in no fixed order, so bits may differ although nothing else does"
        found.append(Difference("GPUs", "", "", "none", why))
    if config.spark.master is not None and not config.spark.master.startswith("local"):
        why = "the environment was recorded on the driver; that of the ranks' hosts is not known"
        found.append(Difference(f"spark.master = {config.spark.master}", "", "", "none", why))
    return found


def differing_metrics(was: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """List the recorded metrics that differ by more than TOLERANCE, relative to values above 1.

    A metric only in `now` comes from newer code, and does not count.
    """
    return [name for name in sorted(was) if not _close(was[name], now.get(name))]


def _close(was: float, now: float | None) -> bool:
    if now is None:
        return False
    if math.isfinite(was) and math.isfinite(now):
        return abs(was - now) <= TOLERANCE * max(1.0, abs(was))
    return was == now or (math.isnan(was) and math.isnan(now))


def is_reproduced(
    check: Check, weights: tuple[str, str], scores: tuple[Mapping[str, float], Mapping[str, float]]
) -> bool:
    """Return whether what is checked is equal. `weights`: sha256 recorded and now; `scores`: metrics likewise."""
    return weights[0] == weights[1] if check == "bits" else not differing_metrics(*scores)


def metric_lines(was: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Format each metric as recorded and now, and whether they are equal within TOLERANCE."""
    other = dict.fromkeys(differing_metrics(was, now), "differs") | dict.fromkeys(now.keys() - was.keys(), "new")
    return [
        f"{name}: recorded {was.get(name, GONE)}, now {now.get(name, GONE)}, {other.get(name, 'equal')}"
        for name in sorted(was.keys() | now.keys())
    ]
