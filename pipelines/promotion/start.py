"""Where training begins if the recipe starts it from the champion: decided once for a run, and kept in its folder.

<run>/start.json    which version, or why from scratch
      start/        a copy of the version's model folder: the ranks read it wherever they are, and neither a
                    promotion nor a deletion in between changes where a resumed run had started
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Annotated

from sparkring.conf.blocks.warm_start import WarmStartConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.rules.families import of_family
from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, read, up_to
from sparkring.pipelines.promotion.champion import Champion, NotComparable
from sparkring.training.model.folder import copy_model_files
from sparkring.training.model.starting import change_since, starting_model
from sparkring.training.worker.result import WorkerResult

log = logging.getLogger(__name__)
START, START_FOLDER = "start.json", "start"
EPOCH_MONDAY = date(1969, 12, 29).toordinal()


@dataclass(frozen=True)
class StartDecision:
    """start.json: where a run begins."""

    __pydantic_config__ = CLOSED

    version: str | None  # of the champion that it starts from; None: from scratch
    why: str
    format: Annotated[int, up_to(1)] = 1

    @property
    def text(self) -> str:
        """In a line."""
        return f"from scratch: {self.why}" if self.version is None else f"from version {self.version}: {self.why}"

    def describe(self, train: WorkerResult) -> str:
        return self.text


def resolve_start(
    resolved: Resolved,
    manifest: DatasetManifest,
    run: Storage,
    day: str,
    champion: Callable[[], Champion | None],
) -> tuple[Resolved, StartDecision | None]:
    """Replace `warm_start.from` by the folder that this run starts from, or remove it; also return which.

    Args:
        resolved: configuration of the job; unchanged without `warm_start.from`.
        manifest: manifest of its dataset.
        run: folder of the run.
        day: date of the job as ISO text; for a job without one, the day it started.
        champion: reads the champion, or returns None. NotComparable if it cannot be read.
    """
    block = resolved.config.warm_start
    if block is None or block.model is not None:
        return resolved, None
    if run.exists(START):
        start = read(StartDecision, run, START)
        log.info("training starts %s (as it had started)", start.text)
    else:
        start = decide_start(resolved.config, block, manifest, run, day, champion)
        run.put_atomic(START, json.dumps(asdict(start), indent=1).encode())
        log.info("training starts %s", start.text)
    return with_start(resolved, run.at(START_FOLDER).uri if start.version is not None else None), start


def decide_start(
    config: RunConfig,
    block: WarmStartConfig,
    manifest: DatasetManifest,
    run: Storage,
    day: str,
    champion: Callable[[], Champion | None],
) -> StartDecision:
    """Decide where a new run starts, and copy the model it starts from.

    Args:
        config: configuration of the run.
        block: block `warm_start` of the recipe.
        manifest: manifest of the run's dataset.
        run: folder of the run, which gets the copy.
        day: date of the run, or today.
        champion: finds the version that has the alias.
    """
    if is_due(block.retrain_every, number_of(day, config)):
        return StartDecision(None, f"{day} is a date of warm_start.retrain_every = {block.retrain_every}")
    try:
        found = champion()
        if found is None:
            return StartDecision(None, f"no version has the alias {config.tracking.alias!r} yet")
        corrected = corrected_intervals(found.model.manifest, manifest)
        if corrected and block.after_correction == "scratch":
            shown = ", ".join(corrected[:5]) + (f" and {len(corrected) - 5} more" if len(corrected) > 5 else "")
            return StartDecision(None, f"version {found.version.version} was trained on {shown} as before a correction")
        folder = run.at(START_FOLDER)
        copy_model_files(found.folder, folder)
        own = of_family(replace_block(config, folder.uri), "net")
        assert own.warm_start is not None
        change = change_since(starting_model(own, own.warm_start), own, manifest)
    except (NotComparable, ValueError) as error:  # WarmStartError, StoredError
        return StartDecision(None, str(error))
    return StartDecision(found.version.version, "; ".join(change.changed) or "the same features")


def is_due(retrain_every: int | None, number: int) -> bool:
    """Return whether the interval with that number is trained from scratch."""
    return retrain_every is not None and number % retrain_every == 0


def number_of(day: str, config: RunConfig) -> int:
    """Return the interval's number, consecutive for consecutive intervals, run or not."""
    first, every = date.fromisoformat(day[:10]), "day"
    if config.etl is not None and config.etl.interval is not None:
        every = config.etl.interval.every
    if every == "month":
        return first.year * 12 + first.month
    days = first.toordinal() - EPOCH_MONDAY
    if every == "week":
        return days // 7
    hour = day[11:13]
    return days * 24 + int(hour) if hour.isdecimal() else days


def corrected_intervals(trained: DatasetManifest, now: DatasetManifest) -> list[str]:
    """List the intervals whose partition changed after the model was trained on it."""
    before = {part.interval: part.fingerprint for part in trained.parts}
    return [p.interval for p in now.parts if before.get(p.interval, p.fingerprint) != p.fingerprint]


def with_start(resolved: Resolved, model: str | None) -> Resolved:
    """Return the configuration with a folder for `from`; None removes the warm start."""
    return replace(resolved, config=replace_block(resolved.config, model))


def replace_block(config: RunConfig, model: str | None) -> RunConfig:
    """Replace the warm start of a configuration as `with_start` does."""
    assert config.warm_start is not None
    block = None if model is None else WarmStartConfig(model=model, new_values=config.warm_start.new_values)
    return config.model_copy(update={"warm_start": block})
