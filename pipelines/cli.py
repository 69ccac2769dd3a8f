"""`sparkring`: the command line. Thin: parses, calls one function, turns errors into one message and an exit code."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import TypeAlias

from sparkring.conf.blocks.housekeeping import notify_problems
from sparkring.conf.load import ConfigError, Resolved, json_schema, leaves, load_config, recipe_names
from sparkring.conf.schedule.block import seconds
from sparkring.conf.schedule.dated import DateRequest
from sparkring.conf.secrets import RedactingFormatter, redact
from sparkring.conf.stored import StoredError
from sparkring.etl.errors import EtlError
from sparkring.pipelines.exit_codes import Exit
from sparkring.pipelines.schedule.errors import TryLater
from sparkring.pipelines.tracking.rules import StoreUnreachable
from sparkring.pipelines.validate.trial import trial_overrides
from sparkring.training.launch.failure import Cancelled, LaunchError, WorkerFailed

EXITS: list[tuple[type[BaseException], Exit]] = [
    (ConfigError, Exit.USAGE),
    (StoredError, Exit.DATA),
    (EtlError, Exit.DATA),
    (WorkerFailed, Exit.TRAINING),
    (LaunchError, Exit.RESOURCES),
    (TryLater, Exit.TRY_LATER),
    (StoreUnreachable, Exit.RESOURCES),
    (Cancelled, Exit.TERMINATED),
    (KeyboardInterrupt, Exit.INTERRUPTED),
]
STDOUT = 1  # its file descriptor
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code (pipelines/exit_codes.py)."""
    try:
        return _run_command(parse(argv))
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python writes what is left when it ends
        return Exit.PIPE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Overrides may stand behind options too, where argparse alone does not look for them."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _run_command(arguments: argparse.Namespace) -> int:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.DEBUG if arguments.verbose else logging.INFO, handlers=[handler])
    for noisy in ("py4j", "mlflow.store", "alembic", "matplotlib", "fsspec", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for twin in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):  # JSON twins of errors we report ourselves
        logging.getLogger(twin).setLevel(logging.CRITICAL)
    try:
        command: Command = arguments.command
        code = int(command(arguments))
        print(end="", flush=True)  # what cannot be written is an error here, and not after this function
        return code
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            raise
        failure = exit_code(error)
        if arguments.verbose or failure is Exit.BUG:
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
            if isinstance(error, WorkerFailed):
                print(f"in rank {error.rank}:\n{redact(error.failure.traceback)}", file=sys.stderr)
        print(f"sparkring: {redact(message(error))}", file=sys.stderr)
        return failure


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nothing reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_code(error: BaseException) -> Exit:
    """The code for an error, by its type."""
    if isinstance(error, SystemExit):
        return Exit(error.code) if error.code in set(Exit) else Exit.BUG
    for kinds, code in EXITS:
        if isinstance(error, kinds):
            return code
    return Exit.RESOURCES if _no_room(error) else Exit.BUG


def message(error: BaseException) -> str:
    """The error's message; a full disk's with its remedy."""
    if not _no_room(error):
        return str(error) or "interrupted"
    return (
        f"{error}: make room there, or point the storage or tracking key of that folder elsewhere; then give the same "
        "command again, which goes on from the last checkpoint"
    )


def _no_room(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in NO_ROOM


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="sparkring", description="One Spark application from raw tables to a tracked model."
    )
    top.add_argument("--version", action="version", version=_version())
    top.add_argument("-v", "--verbose", action="store_true", help="debug log, and tracebacks of every error")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    _add_dated_run(commands)
    _add_backfill(commands)
    _add_status(commands)
    _add_recipe(commands, "etl", _etl, "build the dataset, or find that it exists")
    _add_recipe(commands, "train", partial(_run_job, etl=False), "train on the dataset (which must exist) and report")
    text = "score the rows of the recipe's `predict` block; model=URI is short for predict.model=URI"
    _add_recipe(commands, "predict", _predict, text).add_argument("--date", metavar="D", help="of a recipe with dates")
    _add_recipe(commands, "report", _report, "draw the report of the recipe's last run again")
    _add_recipe(commands, "replay", _replay, "send to the tracking server what earlier jobs could not")
    gc = _add_recipe(commands, "gc", _gc, "delete what the recipe's `retention` lets go; what is needed stays")
    gc.add_argument("--dry-run", action="store_true", help="only name what would be deleted")
    _add_promotion(commands)
    config = commands.add_parser("config", help="show, validate or describe a configuration")
    what = config.add_subparsers(required=True, metavar="WHAT")
    _add_recipe(what, "show", _config_show, "resolved values, each with where it came from")
    text = "find what is wrong with a recipe, its code, tables and storage, without Spark; every problem at once"
    validate = _add_recipe(what, "validate", _config_validate, text)
    validate.add_argument("--no-tables", action="store_true", help="only the recipe and its code: the tables are away")
    _add(what, "schema", _config_schema, "JSON schema of a recipe, for editors")
    plan = commands.add_parser("plan", help="what a parallel block costs").add_subparsers(required=True, metavar="WHAT")
    _add_recipe(plan, "show", _plan, "mesh, memory per rank, bytes per step, bubble; starts nothing")
    audit = _add(commands, "audit", _audit, "prove from a run's audit log that every row was consumed once per epoch")
    audit.add_argument("run_folder")
    audit.add_argument("--dataset", default="", help="where the dataset is (default: where the records say it was)")
    text = "what a model, run or dataset was made of, and whether each source can still be read"
    lineage = _add(commands, "lineage", _lineage, text)
    lineage.add_argument(
        "target", help="models:/<name>@<alias>, models:/<name>/<version>, a run's folder or a dataset's"
    )
    lineage.add_argument("overrides", nargs="*", metavar="tracking.key=value", help="where the registry is")
    lineage.add_argument("--json", action="store_true", help="one JSON object instead of a screen")
    _add_sweep(commands)
    _add_reproduce(commands)
    text = "load a registered model in an environment made of its folder alone, and compare its recorded predictions"
    check = _add(commands, "serve-check", _serve_check, text)
    check.add_argument("target", help="models:/<name>@<alias>, models:/<name>/<version> or an MLflow model's folder")
    check.add_argument("overrides", nargs="*", metavar="tracking.key=value", help="where the registry is")
    _add_launch(commands)
    _add_recipe(commands, "netcheck", _netcheck, "measure the network between the hosts the recipe would train on")
    package = _add(commands, "package", _package, "write the code archive and main file for spark-submit")
    package.add_argument("--out", default="dist/sparkring.zip", help="file (default: dist/sparkring.zip)")
    text = "serve the MLflow UI on the recipe's store, on this machine only"
    _add_recipe(commands, "ui", _ui, text, default="flights").add_argument("--port", type=int, default=5000)
    return top


def _version() -> str:
    """The installed version; code that Spark ships as a zip has none."""
    try:
        return f"sparkring {metadata.version('sparkring')}"
    except metadata.PackageNotFoundError:
        return "sparkring, not installed"


def _add(commands: Commands, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=command)
    return sub


def _add_recipe(
    commands: Commands, name: str, command: Command, text: str, default: str | None = None
) -> argparse.ArgumentParser:
    """Add a command that takes a recipe and overrides.

    Args:
        commands: to add it to.
        name: of the command.
        command: the function.
        text: for the help.
        default: recipe; None: it must be given.
    """
    sub = _add(commands, name, command, text)
    known = f"a name ({', '.join(recipe_names())}) or the path of a YAML file"
    sub.add_argument("recipe", help=known, nargs="?" if default else None, default=default)
    sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="win over the recipe")
    return sub


def _add_dated_run(commands: Commands) -> None:
    sub = _add_recipe(commands, "run", _run, "etl, train and report in one Spark application")
    sub.add_argument("--date", default="", metavar="D", help="start of the data interval, of a recipe with a schedule")
    sub.add_argument("--data-interval-start", default="", metavar="T", help="the same, as an instant")
    sub.add_argument("--data-interval-end", default="", metavar="T", help="must be where the date's interval ends")
    sub.add_argument("--rerun", action="store_true", help="although the date is done")
    text = "find what is wrong, say what would be read, built, trained and recorded, and stop; starts no Spark"
    sub.add_argument("--dry-run", action="store_true", help=text)
    text = "a trial of every part on about so many rows, for one epoch, under names of its own; the alias stays"
    sub.add_argument("--limit-rows", type=_count, metavar="N", help=text)


def _add_backfill(commands: Commands) -> None:
    sub = _add_recipe(commands, "backfill", _backfill, "run the dates of a range, one after another")
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
    sub = _add_recipe(commands, "status", _status, "show a recipe's last dates; exit code 1 where they are too old")
    sub.add_argument("--last", type=_count, default=14, metavar="N", help="dates shown (default: 14)")
    sub.add_argument("--max-age", type=_duration, metavar="T", help="of the newest success, such as 26h")
    sub.add_argument("--json", action="store_true", help="one JSON object")


def _add_promotion(commands: Commands) -> None:
    text = "move the alias (champion) to a version of the recipe's model, which no rule is asked about"
    promote = _add(commands, "promote", _promote, text)
    back = _add(commands, "rollback", _rollback, "move the alias (champion) to the version that had it before")
    for sub in (promote, back):
        sub.add_argument("recipe", help="a name, or the path of a YAML file")
        if sub is promote:
            sub.add_argument("version", help="number of the version")
        sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="win over the recipe")
        sub.add_argument("--reason", default="", metavar="TEXT", help="kept in the version's tags")


def _add_sweep(commands: Commands) -> None:
    text = "train a recipe with other values of some keys, which Optuna chooses for the best validation metric"
    sub = _add(commands, "sweep", _sweep, text)
    sub.add_argument("recipe", help="a name, or the path of a YAML file")
    sub.add_argument("space", help="YAML file: the keys, their ranges or choices, and how many trials")
    sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="win over the recipe, in every trial")
    text = "list the space, check the recipe at its corners, and stop; starts no Spark"
    sub.add_argument("--dry-run", action="store_true", help=text)


def _add_reproduce(commands: Commands) -> None:
    sub = _add(commands, "reproduce", _reproduce, "train a finished run again, and compare its weights or metrics")
    sub.add_argument("target", help="a run's folder, models:/<name>@<alias> or models:/<name>/<version>")
    sub.add_argument("overrides", nargs="*", metavar="tracking.key=value", help="where the registry is")
    text = (
        "bits: sha256 of the weights; metrics: scores within 1e-4, on other packages or processors too (default: bits)"
    )
    sub.add_argument("--check", choices=["bits", "metrics"], default="bits", help=text)
    text = "sources: build the run's dataset again first, of what was read, and compare it (default: dataset)"
    sub.add_argument("--from", dest="origin", choices=["dataset", "sources"], default="dataset", help=text)
    sub.add_argument("--dry-run", action="store_true", help="only say what differs from the run as it was")


def _add_launch(commands: Commands) -> None:
    sub = _add(commands, "launch", _launch, "run any script as torchrun would, its ranks on the slots of Spark")
    sub.add_argument("--world", type=_count, metavar="N", help="ranks; default: the cores of this machine")
    sub.add_argument("--min-world", type=_count, metavar="N", help="go on with as few where hosts fail")
    sub.add_argument("--max-attempts", type=_count, default=1, metavar="N", help="failures in a row (default: 1)")
    sub.add_argument("--hang-timeout", type=float, metavar="S", help="without output or progress; default: no limit")
    sub.add_argument("--master", metavar="URL", help="of Spark; default: this machine, or what spark-submit says")
    sub.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting; may be repeated"
    )
    sub.add_argument("--files", action="append", default=[], metavar="PATH", help="hidden file or folder to take along")
    sub.add_argument("script", help="path of the script; the working directory travels with it")
    sub.add_argument("words", nargs=argparse.REMAINDER, metavar="args", help="the script's own arguments")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, at least 1")
    return int(text)


def _duration(text: str) -> int:
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _launch(arguments: argparse.Namespace) -> int:
    from sparkring.conf.blocks.launch import LaunchConfig
    from sparkring.conf.blocks.spark import SparkConfig
    from sparkring.pipelines.launch.script import NAME, launch
    from sparkring.pipelines.spark import submitted

    elsewhere = arguments.master or submitted()
    if arguments.world is None and elsewhere:
        raise ConfigError(NAME, ["--world: say how many ranks; a cluster's slots come one by one"])
    settings = dict(word.partition("=")[::2] for word in arguments.conf)
    limits = LaunchConfig(
        world=arguments.world or len(os.sched_getaffinity(0)),
        min_world=arguments.min_world,
        max_attempts=arguments.max_attempts,
        hang_timeout_s=arguments.hang_timeout,
        log_lines_per_s=None,
    )
    launch(
        arguments.script, arguments.words, limits, SparkConfig(master=arguments.master, conf=settings), arguments.files
    )
    return Exit.OK


def _load(arguments: argparse.Namespace) -> Resolved:
    return load_config(arguments.recipe, arguments.overrides)


def _run(arguments: argparse.Namespace) -> int:
    request = DateRequest(arguments.date, arguments.data_interval_start, arguments.data_interval_end)
    dated = bool(request.date or request.start or request.end or arguments.rerun)
    if arguments.limit_rows is not None and dated:
        raise ConfigError(arguments.recipe, ["--limit-rows: a trial has no date; leave --date out"])
    if arguments.limit_rows is not None:
        base = _load(arguments)
        arguments.overrides = [*arguments.overrides, *trial_overrides(base, arguments.limit_rows)]
    if arguments.dry_run:
        return _dry_run(
            load_config(arguments.recipe, arguments.overrides, request) if dated else _load_undated(arguments)
        )
    if dated:
        return _run_date(arguments, request)
    return _run_job(arguments, etl=True, trial=arguments.limit_rows is not None)


def _dry_run(resolved: Resolved) -> int:
    from sparkring.pipelines.validate.dry_run import describe_run
    from sparkring.pipelines.validate.recipe import validate
    from sparkring.pipelines.validate.tables import examine

    config = resolved.config
    validate(config).raise_any(config.name)
    print("\n".join(describe_run(config, examine(config))))
    return Exit.OK


def _run_date(arguments: argparse.Namespace, request: DateRequest) -> int:
    from sparkring.pipelines.schedule.run_date import DateOptions, run_date

    options = DateOptions(exit_code, rerun=arguments.rerun)
    resolved = load_config(arguments.recipe, arguments.overrides, request)
    return _announced(resolved, lambda resolved: run_date(resolved, options, print))


def _backfill(arguments: argparse.Namespace) -> int:
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

    def load(ds: str) -> Resolved:
        return load_config(arguments.recipe, arguments.overrides, DateRequest(ds))

    def work(resolved: Resolved) -> int:
        return backfill(resolved, load, request, exit_code, print)

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
    resolved = _load(arguments)
    if resolved.config.schedule is None:
        raise ConfigError(arguments.recipe, ["schedule: this recipe has none, so it has no dates; add the block"])
    return resolved


def _load_undated(arguments: argparse.Namespace) -> Resolved:
    remedy = f"sparkring run {arguments.recipe} --date D, or see sparkring backfill"
    return _checked_date(_load(arguments), remedy)


def _checked_date(resolved: Resolved, remedy: str) -> Resolved:
    """Raise ConfigError for a recipe with dates where none was given; `remedy`: the command that gives one."""
    if resolved.config.schedule is not None and resolved.interval is None:
        raise ConfigError(resolved.config.name, [f"schedule: this recipe has dates; give one: {remedy}"])
    return resolved


def _run_job(arguments: argparse.Namespace, etl: bool, trial: bool = False) -> int:
    def work(resolved: Resolved) -> int:
        from sparkring.pipelines.context import JobHooks
        from sparkring.pipelines.job import run_job

        return run_job(resolved, etl=etl, hooks=JobHooks(may_promote=not trial))

    return _announced(_load_undated(arguments), work)


def _etl(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.etl_job import run_etl

    return _announced(_load_undated(arguments), run_etl)


def _announced(resolved: Resolved, work: Callable[[Resolved], int], ds: str | None = None) -> int:
    """Do a job's work, and tell the targets of `notify` how it ended. `ds`: its date; None: that of the recipe."""
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
    from sparkring.pipelines.predict.job import run_predict

    words = [f"predict.{word}" if word.startswith("model=") else word for word in arguments.overrides]
    request = DateRequest(arguments.date) if arguments.date else None
    remedy = f"sparkring predict {arguments.recipe} --date D"
    resolved = _checked_date(load_config(arguments.recipe, words, request), remedy)
    return _announced(resolved, partial(run_predict, ds=resolved.interval.ds if resolved.interval else None))


def _report(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.report.report import redraw

    print(redraw(_load(arguments)))
    return Exit.OK


def _promote(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.promotion.by_hand import promote_by_hand

    print(promote_by_hand(_load(arguments).config, arguments.version, arguments.reason).text)
    return Exit.OK


def _rollback(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.promotion.by_hand import rollback

    print(rollback(_load(arguments).config, arguments.reason).text)
    return Exit.OK


def _config_show(arguments: argparse.Namespace) -> int:
    resolved = _load(arguments)
    rows = [(key, json.dumps(value), resolved.origins[key]) for key, value in leaves(resolved.as_dict())]
    widths = [min(max(len(row[i]) for row in rows), 60) for i in range(2)]
    for key, value, origin in rows:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    print(f"digest {resolved.digest}")
    return Exit.OK


def _config_validate(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.validate.recipe import validate

    resolved = _load(arguments)
    validate(resolved.config, tables=not arguments.no_tables).raise_any(arguments.recipe)
    print(f"{arguments.recipe}: valid, digest {resolved.digest}")
    return Exit.OK


def _config_schema(_: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=1))
    return Exit.OK


def _plan(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.plan import layout_problems_of, show_plan

    config = _load(arguments).config
    if problems := layout_problems_of(config):
        raise ConfigError(arguments.recipe, problems)
    print(show_plan(config))
    return Exit.OK


def _audit(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.audit import audit_run

    try:
        report = audit_run(arguments.run_folder, arguments.dataset)
    except (ValueError, OSError) as error:  # no such folder, no records in it, or a file that is none
        print(f"sparkring: {error}", file=sys.stderr)
        return Exit.DATA
    print("\n".join(report.lines()))
    return Exit.OK if report.ok else Exit.DATA


def _lineage(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.lineage import text, trace

    tracking = _load(argparse.Namespace(recipe="flights", overrides=arguments.overrides)).config.tracking
    made = trace(arguments.target, tracking)
    print(made.to_json() if arguments.json else text(made))
    return Exit.OK


def _reproduce(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.reproduce.job import Request, reproduce

    tracking = _load(argparse.Namespace(recipe="flights", overrides=arguments.overrides)).config.tracking
    return reproduce(Request(arguments.target, arguments.check, arguments.origin, arguments.dry_run), tracking, print)


def _sweep(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.sweep.space import check_installed, read_spec

    check_installed()
    from sparkring.pipelines.sweep.job import check_sweep, describe_sweep, run_sweep

    spec, resolved = read_spec(arguments.space), _load(arguments)
    sweep, checked = check_sweep(
        resolved, lambda more: load_config(arguments.recipe, [*arguments.overrides, *more]), spec
    )
    print("\n".join(describe_sweep(sweep, checked)), flush=True)
    return Exit.OK if arguments.dry_run else _announced(resolved, lambda _: run_sweep(sweep, print))


def _serve_check(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.portable.check import serve_check

    tracking = _load(argparse.Namespace(recipe="flights", overrides=arguments.overrides)).config.tracking
    return serve_check(arguments.target, tracking, print)


def _netcheck(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.launch.barrier import launch_options
    from sparkring.pipelines.launch.netcheck import netcheck
    from sparkring.pipelines.spark import spark_session

    config = _load(arguments).config
    with spark_session(config.name, config.spark, config.launch) as spark:
        print(netcheck(spark, config.launch.world, options=launch_options(config.launch)).text())
    return Exit.OK


def _package(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sparkring.pipelines.package import write_archive

    archive = write_archive(Path(arguments.out))
    main = archive.with_name("sparkring_job.py")
    main.write_text("import sys\n\nfrom sparkring.pipelines.cli import main\n\nsys.exit(main())\n")
    print(f"spark-submit --py-files {archive} {main} run RECIPE")
    return Exit.OK


def _ui(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.tracking.ui import serve_ui

    config = _load(arguments).config
    return serve_ui(config.tracking.named(config.name), config.name, arguments.port)


def _gc(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.housekeeping.gc import collect_garbage

    return collect_garbage(_load(arguments).config, arguments.dry_run, print)


def _replay(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.tracking.mlflow_store import replay
    from sparkring.pipelines.tracking.openlineage.driver import replay_events
    from sparkring.pipelines.tracking.rules import client_limits

    config = _load(arguments).config
    try:
        with client_limits(config.tracking):
            journals, operations = replay(config.tracking.named(config.name))
    finally:
        events = replay_events(config.tracking)
    also = f", and {events} OpenLineage events" if events else ""
    print(f"sent {operations} operations that {journals} jobs had left in {config.tracking.root}{also}")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
