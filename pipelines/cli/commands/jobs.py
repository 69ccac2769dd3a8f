"""Commands that run a job, a part of one or many: run, etl, train, predict, sweep, backfill; and status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkring.conf.errors import ConfigError
from sparkring.pipelines.cli.arguments import (
    Commands,
    add_command,
    add_recipe_command,
    checked_date,
    count,
    duration,
    load,
    load_undated,
)
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.installed import has_spark

if TYPE_CHECKING:
    from sparkring.conf.load import Resolved
    from sparkring.conf.schedule.dated import DateRequest
    from sparkring.training.launch.join.placement import Placement

log = logging.getLogger(__name__)


def add_commands(commands: Commands) -> None:
    _add_run(commands)
    _add_backfill(commands)
    _add_status(commands)
    text = "build the dataset, or find that it exists"
    add_recipe_command(commands, "etl", _etl, text, ["sparkring etl flights"])
    text = (
        "train on the dataset (which must exist) and report; without Spark where torchrun, srun, mpirun or ssh has "
        "started it on each host of several, or pyspark is not installed"
    )
    examples = [
        "sparkring train flights optim.lr=1e-3 train.epochs=5",
        "sparkring train flights dataset=s3://bucket/datasets/flights-0123456789ab launch.on=hosts",
        "sparkring train flights dataset=/shared/flights-0123456789ab launch.world=16",
        "sparkring train flights dataset=s3://bucket/datasets/flights-0123456789ab launch.on=ray",
    ]
    add_recipe_command(commands, "train", _train, text, examples)
    text = "score the rows of the recipe's `predict` block; model=URI is short for predict.model=URI"
    examples = [
        "sparkring predict mine.yaml",
        "sparkring predict mine.yaml model=models:/mine/3",
        "sparkring predict mine.yaml --date 2013-03-01",
    ]
    predict = add_recipe_command(commands, "predict", _predict, text, examples)
    predict.add_argument("--date", metavar="D", help="of a recipe with dates")
    _add_sweep(commands)


def _add_sweep(commands: Commands) -> None:
    text = "train a recipe with other values of some keys, which Optuna chooses for the best validation metric"
    examples = ["sparkring sweep mine.yaml space.yaml --dry-run", "sparkring sweep mine.yaml space.yaml train.epochs=2"]
    sub = add_command(commands, "sweep", _sweep, text, examples)
    sub.add_argument("recipe", help="a name, or the path of a YAML file")
    sub.add_argument("space", help="YAML file: the keys, their ranges or choices, and how many trials")
    sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="win over the recipe, in every trial")
    text = "list the space, check the recipe at its corners, and stop; starts no Spark"
    sub.add_argument("--dry-run", action="store_true", help=text)


def _add_run(commands: Commands) -> None:
    text = "etl, train and report in one Spark application"
    examples = [
        "sparkring run flights",
        "sparkring run mine.yaml --dry-run",
        "sparkring run mine.yaml --limit-rows 10000",
        "sparkring run mine.yaml optim.lr=1e-3 launch.world=4",
        "sparkring run nightly.yaml --date 2013-03-01",
    ]
    sub = add_recipe_command(commands, "run", _run, text, examples)
    sub.add_argument("--date", default="", metavar="D", help="start of the data interval, of a recipe with a schedule")
    sub.add_argument("--data-interval-start", default="", metavar="T", help="the same, as an instant")
    sub.add_argument("--data-interval-end", default="", metavar="T", help="must be where the date's interval ends")
    sub.add_argument("--rerun", action="store_true", help="although the date is done")
    text = "find what is wrong, say what would be read, built, trained and recorded, and stop; starts no Spark"
    sub.add_argument("--dry-run", action="store_true", help=text)
    text = "a trial of every part on about so many rows, for one epoch, under names of its own; the alias stays"
    sub.add_argument("--limit-rows", type=count, metavar="N", help=text)


def _add_backfill(commands: Commands) -> None:
    text = "run the dates of a range, one after another"
    examples = [
        "sparkring backfill nightly.yaml --from-date 2013-03-01 --to-date 2013-03-14 --dry-run",
        "sparkring backfill nightly.yaml --from-date 2013-03-01 --to-date 2013-03-14 --reprocess failed",
    ]
    sub = add_recipe_command(commands, "backfill", _backfill, text, examples)
    sub.add_argument("--from-date", required=True, metavar="A", help="first date")
    sub.add_argument("--to-date", required=True, metavar="B", help="last date")
    text = "dates that have an entry: none of them, those that failed, or those that are done too (default: none)"
    sub.add_argument("--reprocess", choices=["none", "failed", "completed"], default="none", help=text)
    text = "on the dataset of each date, of the last date, or of none (default: each)"
    sub.add_argument("--train", choices=["each", "last", "none"], default="each", help=text)
    sub.add_argument("--run-backwards", action="store_true", help="the newest date first")
    sub.add_argument("--dry-run", action="store_true", help="show what would be done")
    sub.add_argument("--promote", action="store_true", help="let models get the alias, which else stays where it is")


def _add_status(commands: Commands) -> None:
    text = "show a recipe's last dates; exit code 1 where they are too old"
    examples = ["sparkring status nightly.yaml", "sparkring status nightly.yaml --last 3 --max-age 26h --json"]
    sub = add_recipe_command(commands, "status", _status, text, examples)
    sub.add_argument("--last", type=count, default=14, metavar="N", help="dates shown (default: 14)")
    sub.add_argument("--max-age", type=duration, metavar="T", help="of the newest success, such as 26h")
    sub.add_argument("--json", action="store_true", help="one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    from sparkring.conf.schedule.dated import DateRequest

    request = DateRequest(arguments.date, arguments.data_interval_start, arguments.data_interval_end)
    dated = bool(request.date or request.start or request.end or arguments.rerun)
    if arguments.limit_rows is not None and dated:
        raise ConfigError(arguments.recipe, ["--limit-rows: a trial has no date; leave --date out"])
    if arguments.limit_rows is not None:
        from sparkring.pipelines.run.trial import trial_overrides

        base = load(arguments)
        arguments.overrides = [*arguments.overrides, *trial_overrides(base, arguments.limit_rows)]
    if arguments.dry_run:
        return _dry_run(load(arguments, request) if dated else load_undated(arguments))
    if dated:
        return _run_date(arguments, request)
    return _run_job(arguments, trial=arguments.limit_rows is not None)


def _dry_run(resolved: Resolved) -> int:
    from sparkring.pipelines.validate.dry_run import describe_run
    from sparkring.pipelines.validate.recipe import validate
    from sparkring.pipelines.validate.tables import examine

    config = resolved.config
    validate(config).raise_any(config.name)
    print("\n".join(describe_run(config, examine(config))))
    return Exit.OK


def _run_date(arguments: argparse.Namespace, request: DateRequest) -> int:
    from sparkring.pipelines.cli.exits import exit_code
    from sparkring.pipelines.schedule.date_job import DateOptions
    from sparkring.pipelines.schedule.run_date import run_date

    options = DateOptions(exit_code, rerun=arguments.rerun)
    return _announced(load(arguments, request), lambda resolved: run_date(resolved, options, print))


def _backfill(arguments: argparse.Namespace) -> int:
    from sparkring.conf.schedule.dated import DateRequest
    from sparkring.pipelines.cli.exits import exit_code
    from sparkring.pipelines.schedule.backfill import BackfillRequest, backfill

    request = BackfillRequest(
        arguments.from_date,
        arguments.to_date,
        arguments.reprocess,
        arguments.train,
        backwards=arguments.run_backwards,
        dry_run=arguments.dry_run,
        promote=arguments.promote,
    )

    def load_date(ds: str) -> Resolved:
        return load(arguments, DateRequest(ds))

    def work(resolved: Resolved) -> int:
        return backfill(resolved, load_date, request, exit_code, print)

    resolved = _load_scheduled(arguments)
    return work(resolved) if request.dry_run else _announced(resolved, work, arguments.to_date)


def _status(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.schedule.ledger import Ledger
    from sparkring.pipelines.schedule.status import status_text

    config = _load_scheduled(arguments).config
    assert config.schedule is not None
    ledger = Ledger(config.storage.runs, config.name)
    code, text = status_text(config.schedule, ledger, arguments.last, arguments.max_age, arguments.json)
    print(text)
    return code


def _load_scheduled(arguments: argparse.Namespace) -> Resolved:
    resolved = load(arguments)
    if resolved.config.schedule is None:
        raise ConfigError(arguments.recipe, ["schedule: this recipe has none, so it has no dates; add the block"])
    return resolved


def _run_job(arguments: argparse.Namespace, trial: bool) -> int:
    return _announced(load_undated(arguments), partial(_do_job, etl=True, trial=trial))


def _do_job(resolved: Resolved, etl: bool, trial: bool = False) -> int:
    from sparkring.pipelines.context.context import PERSONAL, TrialPublication
    from sparkring.pipelines.job.job import run_job

    return run_job(resolved, etl=etl, publication=TrialPublication() if trial else PERSONAL)


def _etl(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.job.etl_job import run_etl

    return _announced(load_undated(arguments), run_etl)


def _train(arguments: argparse.Namespace) -> int:
    given = tuple(arguments.overrides)
    resolved = load_undated(arguments)
    if resolved.config.launch.on == "ray":
        from sparkring.pipelines.job.on_ray import train_on_ray

        return _announced(resolved, train_on_ray)
    placement = _placement(resolved)
    if placement is None:
        return _announced(resolved, partial(_do_job, etl=False))
    arguments.overrides = [*arguments.overrides, "launch.on=hosts"]
    return _train_on_hosts(replace(load_undated(arguments), overrides=given), placement)


def _placement(resolved: Resolved) -> Placement | None:
    """Return this host's place among the job's hosts; None if the job runs on Spark."""
    from sparkring.training.launch.join.placement import ALONE, find_placement, overlooked_hosts

    on = resolved.config.launch.on
    if on == "spark":
        return None
    try:
        found, overlooked = find_placement(os.environ), overlooked_hosts(os.environ)
    except ValueError as error:
        raise ConfigError(resolved.config.name, [f"launch.on = {on!r}: {error}"]) from error
    if overlooked:
        log.warning("%s", overlooked)
    return found if on == "hosts" or found is not ALONE or not has_spark() else None


def _train_on_hosts(resolved: Resolved, placement: Placement) -> int:
    from sparkring.pipelines.cli.exits import exit_code
    from sparkring.pipelines.job.hosts import train_on_hosts
    from sparkring.pipelines.run.signals import ended_by_signals

    def work(resolved: Resolved) -> int:
        return train_on_hosts(resolved, placement, exit_code)

    if placement.rank:  # host 0 speaks for the job
        with ended_by_signals():
            return work(resolved)
    return _announced(resolved, work)


def _announced(resolved: Resolved, work: Callable[[Resolved], int], ds: str | None = None) -> int:
    from sparkring.pipelines.run.signals import ended_by_signals

    with ended_by_signals():
        return _do_announced(resolved, work, ds)


def _do_announced(resolved: Resolved, work: Callable[[Resolved], int], ds: str | None) -> int:
    """Do a job's work, and tell the targets of `notify` how it ended. `ds`: its date; None: that of the recipe."""
    from sparkring.conf.blocks.notify import notify_problems
    from sparkring.pipelines.cli.exits import exit_code
    from sparkring.pipelines.tracking.openlineage.driver import check_installed

    check_installed(resolved.config.tracking)
    if problems := notify_problems(resolved.config.notify, os.environ):
        raise ConfigError(resolved.config.name, problems)
    if not resolved.config.notify.targets:
        return work(resolved)
    from sparkring.pipelines.housekeeping.notify import announce

    command, ds = ["sparkring", *sys.argv[1:]], ds or (resolved.interval.ds if resolved.interval else None)
    try:
        code = work(resolved)
    except BaseException as error:
        announce(resolved.config, exit_code(error), command, error, ds)
        raise
    announce(resolved.config, code, command, ds=ds)
    return code


def _predict(arguments: argparse.Namespace) -> int:
    from sparkring.conf.schedule.dated import DateRequest
    from sparkring.pipelines.predict.job import run_predict

    arguments.overrides = [f"predict.{word}" if word.startswith("model=") else word for word in arguments.overrides]
    request = DateRequest(arguments.date) if arguments.date else None
    resolved = checked_date(load(arguments, request), f"sparkring predict {arguments.recipe} --date D")
    return _announced(resolved, partial(run_predict, ds=resolved.interval.ds if resolved.interval else None))


def _sweep(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.sweep.space import check_installed, read_spec

    check_installed()
    from sparkring.conf.load import load_config
    from sparkring.pipelines.sweep.job import check_sweep, describe_sweep, run_sweep

    spec, resolved = read_spec(arguments.space), load(arguments)
    sweep, checked = check_sweep(
        resolved, lambda more: load_config(arguments.recipe, [*arguments.overrides, *more]), spec
    )
    print("\n".join(describe_sweep(sweep, checked)), flush=True)
    return Exit.OK if arguments.dry_run else _announced(resolved, lambda _: run_sweep(sweep, print))
