"""The file of a sweep: which keys of a recipe are searched, where, for which metric. Pure, but for reading the file.

metric: auc                                     # of the validation split; default: the recipe's train.best_metric
trials: 20
space:
  optim.lr: {low: 1e-4, high: 1e-1, log: true}
  model.args.width: {low: 16, high: 128, step: 16}
  optim.name: {choices: [adamw, sgd]}
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PositiveInt, ValidationError, model_validator

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, parse_yaml
from sparkring.conf.schema import NonNegativeInt, Strict

BLOCKS = ("model", "optim", "train", "data")  # whose keys may be searched: the dataset and the world are shared
SETTLED = {
    "train.valid_split": "all trials are compared on the same rows",
    "train.test_split": "trials are not scored on the test rows; a run of the best recipe is",
    "train.best_metric": "it is what the sweep optimizes; give `metric`",
    "train.best_mode": "it follows from the metric; of one of your own give `mode`",
}
MOST_CORNERS = 64
Scalar = bool | int | float | str | None
Values = dict[str, Scalar]


class Searched(Strict):
    """Where one key's value is looked for: in a range, or among choices."""

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None
    choices: list[Scalar] | None = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if self.choices is not None:
            if (self.low, self.high, self.log, self.step) != (None, None, False, None):
                raise ValueError("choices stand alone; leave low, high, log and step out")
            if len({json.dumps(value) for value in self.choices}) < 2:
                raise ValueError(f"choices = {self.choices}: has fewer than two different values; nothing is searched")
            return self
        if self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        if not self.low < self.high:
            raise ValueError(f"low = {self.low}, high = {self.high}: the range is empty; low must be below high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError(f"log = true: low = {self.low} must be above 0, and step left out")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise ValueError(f"step = {self.step}: must be above 0 and at most high - low, {self.high - self.low}")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step) if value is not None)

    @property
    def ends(self) -> list[Scalar]:
        """The outermost values; all choices."""
        return self.choices if self.choices is not None else [self.low, self.highest]

    @property
    def highest(self) -> int | float:
        """The highest value on the grid of `step`."""
        assert self.low is not None and self.high is not None, "checked above"
        if self.step is None:
            return self.high
        return self.low + int((self.high - self.low) / self.step + 1e-9) * self.step

    @property
    def text(self) -> str:
        if self.choices is not None:
            return f"one of {json.dumps(self.choices)}"
        how = ", log" if self.log else f", step {self.step}" if self.step is not None else ""
        return f"{self.low} to {self.high}{how}"


class SweepSpec(Strict):
    """The file as a whole."""

    space: Annotated[dict[str, Searched], Field(min_length=1)]
    metric: str | None = Field(None, description="None: the recipe's train.best_metric")
    mode: Literal["min", "max"] | None = Field(None, description="None: as the metric of that name is")
    trials: PositiveInt = Field(20, description="in all, failed and pruned ones included")
    seed: NonNegativeInt = Field(0, description="of the sampler")
    sampler: Literal["tpe", "random"] = "tpe"
    pruner: Literal["median", "hyperband", "none"] = Field("median", description="ends trials that fall behind")


def check_installed() -> None:
    """Raise ConfigError where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("sweep", ["needs Optuna, which is not installed: pip install 'sparkring[sweep]'"])


def read_spec(path: str) -> SweepSpec:
    """Read the file of a sweep. ConfigError with every problem."""
    try:
        values, _ = parse_yaml(Path(path).read_text(encoding="utf-8"))
        return SweepSpec.model_validate(values)
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(path, [f"not valid YAML: {error}"]) from error
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False)
        ]
        raise ConfigError(path, list(dict.fromkeys(lines))) from None


def key_problems(spec: SweepSpec) -> list[str]:
    """List keys that may not be searched."""
    problems = []
    for key in spec.space:
        if why := SETTLED.get(key):
            problems.append(f"space.{key}: cannot be searched: {why}")
        elif key.partition(".")[0] not in BLOCKS:
            problems.append(
                f"space.{key}: cannot be searched: trials share the dataset, the Spark session and the ranks; search "
                f"keys of {', '.join(BLOCKS)}"
            )
    return problems


def objective(spec: SweepSpec, config: RunConfig) -> tuple[str, Literal["min", "max"]]:
    """Return the validation metric and its direction. ConfigError if unknown."""
    train = config.train
    metric = spec.metric or train.best_metric
    known = config.model.kind.directions.get(metric)
    if spec.mode is not None:
        if known is not None and known != (spec.mode == "max"):
            better = "more" if known else "less"
            raise ConfigError(config.name, [f"mode = {spec.mode!r}: of {metric!r} {better} is better; leave mode out"])
        return metric, spec.mode
    if known is not None:
        return metric, "max" if known else "min"
    if metric == train.best_metric:
        return metric, train.best_mode
    problem = f"metric = {metric!r}: is none of the task {config.model.task!r} whose direction is known; give mode"
    raise ConfigError(config.name, [problem])


def corners(space: Mapping[str, Searched]) -> tuple[list[Values], bool]:
    """Combine outermost values; also return whether these are all: not above MOST_CORNERS.

    Above it: all first values, all last values, and each end of each key with the first values of the others.
    """
    ends = {key: searched.ends for key, searched in space.items()}
    count = 1
    for values in ends.values():
        count *= len(values)
    if count <= MOST_CORNERS:
        return [dict(zip(ends, values, strict=True)) for values in itertools.product(*ends.values())], True
    first = {key: values[0] for key, values in ends.items()}
    last = {key: values[-1] for key, values in ends.items()}
    return [first, last, *({**first, key: value} for key, values in ends.items() for value in values[1:])], False


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Format values of keys as on a command line."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def short(values: Mapping[str, Any]) -> str:
    """Shorten keys to their last word if unique: `lr=0.01 width=32`."""
    words = [key.rpartition(".")[2] for key in values]
    names = [word if words.count(word) == 1 else key for key, word in zip(values, words, strict=True)]
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values()]
    return " ".join(f"{name}={''.join(text.split())}" for name, text in zip(names, texts, strict=True))
