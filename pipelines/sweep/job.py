"""`sparkring sweep`: trials of one recipe on one dataset, in one Spark application and below one run in MLflow.

    <runs>/<recipe>-sweep/study-<digest>/study.db    Optuna's; with it the same command continues after a kill
                                         best.yaml   the recipe with the best trial's values
    <runs>/<recipe>-sweep/<run folder of each trial>

A trial is trained and validated as a run is; it is not scored on the test rows and registers no model.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pyspark.sql import SparkSession

from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.manifest import DatasetManifest, read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.rule import Rule, find_problems, refuse
from sparkring.conf.secrets import redact
from sparkring.conf.storage import lock_file, open_storage, unlock
from sparkring.etl.examine import Examined
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.job import train_step
from sparkring.pipelines.job.job import note_end
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.problems import Problems
from sparkring.pipelines.run.runs import Runs, RunTaken
from sparkring.pipelines.run.spark import session_on_demand
from sparkring.pipelines.sweep.show import describe_space, trial_markdown, trial_table
from sparkring.pipelines.sweep.space import SweepSpec, as_overrides, corners, key_problems, objective, short
from sparkring.pipelines.sweep.study import Ended, Study, Trial
from sparkring.pipelines.tracking.checkout import git_commit, shown_command
from sparkring.pipelines.tracking.describe import job_note, reason_line
from sparkring.pipelines.tracking.tags import COMMIT, FINGERPRINT
from sparkring.pipelines.tracking.tracker import JOB, Tracker, run_label
from sparkring.pipelines.tracking.views import NOTE
from sparkring.pipelines.validate.folders import DATASETS, JOB_FOLDERS, check_folders, storage_problems
from sparkring.pipelines.validate.recipe import against_problems, check_against, check_foreseen, recipe_problems
from sparkring.pipelines.validate.tables import examine, table_problems
from sparkring.training.checkpoint.layout import CHECKPOINTS
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.worker.result import WorkerResult

log = logging.getLogger("sparkring")
SUFFIX = "-sweep"  # of the name that trials have, so that nothing takes them for runs of the recipe
BEST = "best.yaml"
PARENT = "mlflow.parentRunId"  # tag by which MLflow shows a run below another
FAILS = (WorkerFailed, ConfigError)  # of these values; any other error would end the next trial too
Load = Callable[[list[str]], Resolved]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep. load: gives the recipe with further overrides."""

    base: Resolved
    load: Load
    spec: SweepSpec
    metric: str
    mode: Literal["min", "max"]

    def trial_config(self, values: dict[str, Any]) -> Resolved:
        """Return the configuration of a trial. ConfigError if the values do not fit."""
        config = self.base.config
        settled: dict[str, Any] = {
            "name": config.name + SUFFIX,
            "train.best_metric": self.metric,
            "train.best_mode": self.mode,
            "train.test_split": None,
            "report.must_beat": [],
            "report.must_beat_trees": [],
            "report.share_by": [],
            "promote": None,
            "drift": None,
            "tracking.experiment": config.tracking.experiment or config.name,
            "tracking.registered_model": config.tracking.registered_model or config.name,
        }
        return self.load(as_overrides(settled | values))


def describe_sweep(sweep: Sweep, checked: str) -> list[str]:
    """Describe what the sweep would do, in lines. `checked`: the checked corners."""
    return describe_space(sweep.spec, sweep.base.config.name, sweep.metric, sweep.mode, checked)


SWEEP: tuple[Rule[RunConfig], ...] = (  # what a recipe may not have in a sweep
    refuse(
        ("model.family",),
        lambda c: c.model.family == "both",
        "model.family = 'both': a trial trains one family",
        "set it to net or trees, or search it: {{model.family: {{choices: [net, trees]}}}} in the space",
    ),
    refuse(
        ("schedule",),
        lambda c: c.schedule is not None,
        "schedule: a sweep has no date",
        "take a copy of the recipe without it",
    ),
    refuse(
        ("warm_start.from", "warm_start.model"),
        lambda c: c.warm_start is not None and c.warm_start.model is None,
        "warm_start.from: is decided for a run of the recipe",
        "name the model by warm_start.model",
    ),
    refuse(
        ("storage.runs",),
        lambda c: not open_storage(c.storage.runs).is_local,
        "storage.runs = {0.storage.runs!r}: a sweep's sqlite file needs a folder on a local disk",
    ),
)


def check_sweep(base: Resolved, load: Load, spec: SweepSpec) -> tuple[Sweep, str]:
    """Check the space, and the recipe at its corners, without Spark; the sweep, and what was checked in words.

    Raises one error with every problem.
    """
    config = base.config
    if problems := [*key_problems(spec), *find_problems(SWEEP, config)]:
        raise ConfigError(config.name, problems)
    sweep = Sweep(base, load, spec, *objective(spec, config))
    places, is_all = corners(spec.space)
    examined, known = examine(config), config.dataset and read_manifest(open_storage(config.dataset))
    at: dict[str, list[str]] = {}  # problem -> corners that have it
    for values in places:
        for line in _problems_at(sweep, values, examined, known or None):
            at.setdefault(line, []).append(short(values))
    found = recipe_problems(config)
    everywhere = Problems(data=examined.problems, resources=found.resources) + storage_problems(config)
    (everywhere + Problems([_placed(line, at[line], len(places)) for line in at])).raise_any(config.name)
    text = (
        f"all {count_of(len(places), 'corner')}"
        if is_all
        else f"{len(places)} of the corners, each end of each key among them"
    )
    return sweep, text


def _problems_at(
    sweep: Sweep, values: dict[str, Any], examined: Examined, known: DatasetManifest | None
) -> Sequence[str]:
    """List problems with the recipe at these values. `known`: dataset that it names."""
    try:
        config = sweep.trial_config(values).config
    except ConfigError as error:
        return error.problems
    found = [*recipe_problems(config).recipe, *table_problems(config, examined).recipe]
    return found or ([] if known is None else against_problems(config, known))


def _placed(line: str, places: list[str], count: int) -> str:
    """Prefix a problem with the first corner that has it, unless all have."""
    if len(places) == count:
        return line
    return f"at {places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}: {line}"


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> int:
    """Run the trials that are left to run; returns the exit code. The last line of output is JSON.

    Raises what a trial raises that is not of its values alone. `say`: takes a line for stdout.
    """
    config = sweep.base.config
    check_folders(config, JOB_FOLDERS)
    with session_on_demand(config.name, config.spark, config.launch) as session:
        sources = etl_step.pin(config, session)
        fingerprint = etl_step.wanted_fingerprint(config, sources)
        found = etl_step.find(config, fingerprint)
        if found is None:
            check_folders(config, [DATASETS])
            check_foreseen(config, etl_step.foresee(session(), config, sources))
        name = f"study-{identity(sweep, fingerprint)[:12]}"
        folder = Path(open_storage(config.storage.runs).at(config.name + SUFFIX).path(name))
        with alone(folder):
            study, run_id = Study(folder, sweep.spec, sweep.mode), None
            if len(study.ended()) < sweep.spec.trials:
                commit, tracking = git_commit(Path(__file__).parent) or "", config.tracking.named(config.name)
                job, tags = f"{config.name}{SUFFIX}/{name}", {COMMIT: commit, FINGERPRINT: fingerprint}
                title, label = f"{config.name} sweep", run_label(None)
                with Tracker(tracking, job, title, tags, resume=True, label=label) as tracker:
                    describe_parent(tracker, sweep)
                    if found is None:
                        found = etl_step.build(session(), sweep.base, sources, commit, tracker, trained=True)
                    check_against(config, found)
                    parent = Parent(tracker, commit, found, session)
                    while len(study.ended()) < sweep.spec.trials:
                        run_trial(sweep, study.next(), parent)
                        report_trials(tracker, sweep, study.ended())
                    record_best(tracker, sweep, study.best())
                    run_id = tracker.run_id(timeout_s=1.0)
            code, found_best = conclude(sweep, study, folder)
    for each in trial_table(study.ended(), sweep.metric):
        say(each)
    say(json.dumps(found_best | {"mlflow_run_id": run_id}))
    return code


@dataclass(frozen=True)
class Parent:
    """What trials share."""

    tracker: Tracker
    commit: str
    dataset: etl_step.Dataset
    session: Callable[[], SparkSession]


def identity(sweep: Sweep, fingerprint: str) -> str:
    """Hash what makes trials comparable, except their number: more may be requested later."""
    spec = sweep.spec.model_dump(mode="json", exclude={"trials"})
    blocks = {"name", "model", "optim", "train", "data", "warm_start"}
    config = sweep.base.config.model_dump(mode="json", include=blocks)
    return digest([spec, config, sweep.metric, sweep.mode, fingerprint])


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the sweep's lock. RunTaken where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_file(folder / ".lock")
    if lock is None:
        raise RunTaken(f"{folder}: another process runs this sweep; wait for it")
    try:
        yield
    finally:
        unlock(lock)


def run_trial(sweep: Sweep, trial: Trial, parent: Parent) -> None:
    """Train one trial, and tell the study how it ended. One that a signal ends is left to the next command."""
    shown = short(trial.values)
    again = f", which continues trial {trial.continues}" if trial.continues is not None else ""
    log.info("trial %d%s: %s", trial.number, again, shown)
    try:
        train = train_trial(sweep, trial, parent)
    except FAILS as error:
        log.error("trial %d failed: %s", trial.number, error)
        trial.fail(redact(reason_line(str(error))))
        return
    value = train.best_value
    if not train.finished:
        trial.prune()
        log.info("trial %d was pruned at step %d", trial.number, train.steps)
    elif value is None or not math.isfinite(value):
        trial.fail(f"valid/{sweep.metric} was never a number")
        log.error("trial %d failed: valid/%s was never a number", trial.number, sweep.metric)
    else:
        trial.complete(value)
        log.info("trial %d: valid/%s %.6g", trial.number, sweep.metric, value)


def train_trial(sweep: Sweep, trial: Trial, parent: Parent) -> WorkerResult:
    """Train in a run folder of its own, below the sweep's run in MLflow; a half-done one continues."""
    resolved = sweep.trial_config(trial.values)
    config, runs = resolved.config, Runs(resolved.config.storage.runs, resolved.config.name)

    def falls_behind(step: int, metrics: dict[str, float]) -> bool:
        value = metrics.get(f"valid/{sweep.metric}")
        return value is not None and trial.falls_behind(step, value)

    parent_run = parent.tracker.run_id(timeout_s=10.0)
    tags = {COMMIT: parent.commit} | ({PARENT: parent_run} if parent_run else {})
    name = f"trial {trial.number} {short(trial.values)}"
    with runs.begin(config, parent.dataset.manifest.fingerprint, others="none") as (record, continued):
        try:
            job_id = f"{config.name}/{record.folder}"
            with Tracker(config.tracking, job_id, name, tags, continued) as tracker:
                tracker.params(JOB, trial.values)
                check_against(config, parent.dataset)
                spark = parent.session()
                job = JobContext(resolved, parent.commit, spark, tracker, runs, record, parent.dataset)
                watch = train_step.TrainingWatch(falls_behind, keeps_checkpoints=False)
                trained, _ = train_step.train(job, watch=watch)
                record_scores(tracker, sweep.metric, trained.train)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            note_end(runs, record, "interrupted" if stopped else "failed")
            raise
        runs.update(record.folder, status="finished")
        runs.at(record).delete(CHECKPOINTS)  # of a trial that has ended nothing continues
    return trained.train


def record_scores(tracker: Tracker, metric: str, train: WorkerResult) -> None:
    """Record the best value of a trial: its only metric, which a comparison then shows first."""
    if train.best_value is not None:
        tracker.metrics(JOB, train.steps, {f"valid/{metric}": train.best_value})
    if not train.finished:
        tracker.tags(JOB, {"sparkring.pruned": f"at step {train.steps}"})


# --- what is shown


def describe_parent(tracker: Tracker, sweep: Sweep) -> None:
    """Record the space and the settings of the search."""
    spec, config = sweep.spec, sweep.base.config
    space = {f"space.{key}": searched.text for key, searched in spec.space.items()}
    settings = {"metric": f"valid/{sweep.metric}", "mode": sweep.mode}
    settings |= {name: str(getattr(spec, name)) for name in ("seed", "sampler", "pruner")}
    tracker.params(JOB, settings | space)
    tracker.tags(JOB, {NOTE: job_note(config.description, shown_command(sys.argv))})
    tracker.artifact_json(JOB, sweep.base.as_dict(), "config.json")
    tracker.artifact(JOB, yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False), "space.yaml")


def report_trials(tracker: Tracker, sweep: Sweep, ended: list[Ended]) -> None:
    """Record the last trial's value, and the table of all so far."""
    last = ended[-1]
    if last.state == "complete" and last.value is not None:
        tracker.metrics(JOB, last.number, {f"valid/{sweep.metric}": last.value})
    note = "\n".join(trial_markdown(ended, sweep.metric, sweep.mode))
    tracker.tags(JOB, {NOTE: "\n\n".join(filter(None, [sweep.base.config.description.strip(), note]))})


def record_best(tracker: Tracker, sweep: Sweep, best: Ended | None) -> None:
    """Record which trial is the best, and its recipe."""
    if best is not None:
        tracker.artifact(JOB, best_recipe(sweep, best), BEST)
        tracker.tags(JOB, {"sparkring.best_trial": str(best.number)})


def conclude(sweep: Sweep, study: Study, folder: Path) -> tuple[int, dict[str, Any]]:
    """Write the best trial's recipe; the exit code, and what came of the sweep."""
    ended, best = study.ended(), study.best()
    counts = {state: sum(t.state == state for t in ended) for state in ("complete", "pruned", "failed")}
    code = Exit.OK if best is not None else Exit.TRAINING
    found: dict[str, Any] = {"exit_code": int(code), "study": str(folder), "trials": counts, "best": None}
    if best is None:
        log.error("no trial was completed: %s", "; ".join(sorted({t.why for t in ended if t.why})))
        return code, found
    path = folder / BEST
    path.write_text(best_recipe(sweep, best))
    found["best"] = {"number": best.number, "value": best.value, "values": best.values, "recipe": str(path)}
    log.info("the best is trial %d: %s; train it: sparkring run %s", best.number, short(best.values), path)
    return code, found


def best_recipe(sweep: Sweep, best: Ended) -> str:
    """Return the recipe with the values of a trial, as YAML without defaults."""
    config: RunConfig = sweep.load(as_overrides(best.values)).config
    settled = {"best_metric": sweep.metric, "best_mode": sweep.mode}
    chosen = config.model_copy(update={"train": config.train.model_copy(update=settled)})
    values = chosen.model_dump(mode="json", exclude_defaults=True)
    head = f"# {config.name} with the values of trial {best.number}: valid/{sweep.metric} {best.value:.6g}\n"
    return head + yaml.safe_dump(values, sort_keys=False)
