"""`sparkring`: the command line. Thin: parses, calls one function, turns errors into one message and an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import gc
import logging
import os
import select
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from sparkring.conf.plain_text import for_terminal
from sparkring.conf.secrets import RedactingFormatter, redact
from sparkring.pipelines.cli.arguments import Command, add_command
from sparkring.pipelines.cli.commands import jobs, machines, models, planning, recipes, upkeep
from sparkring.pipelines.run.exit_codes import RESULT_LOG, Exit
from sparkring.training.launch.host.search_path import shadowed_modules

log = logging.getLogger("sparkring")
STDOUT = 1  # its file descriptor
OBJECTS = 50_000  # made between two collections of garbage
IMPORTED = 2_000_000  # made before the first: what a command imports stays


def console() -> int:
    """Run `main` as the script `sparkring`, in a process that ends with it."""
    ending = _Ending()
    atexit.register(ending.leave)  # first, so that it runs after what commands register
    have_home()
    ending.code = main()
    return ending.code


def have_home() -> None:
    """Give a user id without a name and without HOME, as a container may have, a home folder of this process.

    Libraries look for their settings there; without one they fail, or look in a folder `~` of the working directory.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        from sparkring.pipelines.run.scratch import open_scratch  # imports pyarrow, and is seldom needed

        home = open_scratch("home")
        os.environ["HOME"] = str(home.path)
        atexit.register(home.close)


class _Ending:
    """The end of the process: at once, where Python would take every object of torch and pyarrow apart (0.6 s)."""

    code: int | None = None  # None: `main` ended with an exception, which Python reports

    def leave(self) -> None:
        if self.code is None:
            return
        logging.shutdown()
        with contextlib.suppress(OSError):  # `main` has written standard output, and reports what it could not
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self.code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code (pipelines/run/exit_codes.py)."""
    try:
        with _few_collections():
            return _run_command(parse(argv))
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python writes what is left when it ends
        return Exit.PIPE


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage seldom: imports make objects that stay, which Python would go through every 700 of them."""
    before = gc.get_threshold()

    def after_imports(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            gc.callbacks.remove(after_imports)
            gc.set_threshold(OBJECTS, *before[1:])

    gc.callbacks.append(after_imports)
    gc.set_threshold(IMPORTED, *before[1:])
    try:
        yield
    finally:
        if after_imports in gc.callbacks:
            gc.callbacks.remove(after_imports)
        gc.set_threshold(*before)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log above progress bars, where there are any: a line must not end up behind one.

    py4j writes the frames of a Ctrl-C to the root logger.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        of_py4j = record.name == "root" and f"{os.sep}py4j{os.sep}" in record.pathname
        return not of_py4j and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")  # commands that show none do not import it
        if bars is None:
            super().emit(record)
            return
        with bars.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class PlainOutput:
    """Standard output through `for_terminal`: what a command shows may have been named by others."""

    def __init__(self, under: TextIO) -> None:
        self._under = under

    def write(self, text: str) -> int:
        self._under.write(for_terminal(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Overrides may stand behind options too, where argparse alone does not look for them."""
    top = parser()
    ours, of_script = machines.split_launch(sys.argv[1:] if argv is None else argv)
    arguments, rest = top.parse_known_args(ours)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}{_nearest_option(rest, arguments.parser)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    if of_script:
        arguments.words = of_script
    return arguments


def _nearest_option(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Suggest the nearest known option for the first option among the words, if similar."""
    known = [option for action in command._actions for option in action.option_strings]
    given = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _run_command(arguments: argparse.Namespace) -> int:
    handler = LogHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.DEBUG if arguments.verbose else logging.INFO, handlers=[handler])
    if handler in logging.getLogger().handlers:  # else the caller has set up its own logging
        results = logging.StreamHandler(cast(TextIO, PlainOutput(sys.stdout)))
        results.setFormatter(RedactingFormatter("%(message)s"))
        logging.getLogger(RESULT_LOG).addHandler(results)
        logging.getLogger(
            RESULT_LOG
        ).propagate = False  # what a command gives goes to standard output, and its log to standard error
    for noisy in ("mlflow.store", "alembic", "matplotlib", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its retries: who asked says once that a server is away
    # Copies of errors that we report ourselves, for -v alone: py4j's and MLflow's, with frames and SQL.
    for twin in ("py4j", "mlflow.store.db.utils"):
        logging.getLogger(twin).setLevel(logging.INFO if arguments.verbose else logging.CRITICAL)
    if files := shadowed_modules():
        named = f"{', '.join(files[:3])}{' ...' if len(files) > 3 else ''}"
        log.warning("%s: Python's own modules of these names are imported; rename what the recipe is to import", named)
    try:
        command: Command = arguments.command
        with contextlib.redirect_stdout(PlainOutput(sys.stdout)):
            code = int(command(arguments))
        print(end="", flush=True)  # what cannot be written is an error here, and not after this function
        return code
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            raise
        # Errors of every part of the product, which only commands that fail need.
        from sparkring.pipelines.cli.exits import exit_code, message
        from sparkring.training.launch.failure import WorkerFailed

        failure = exit_code(error)
        if arguments.verbose or failure is Exit.BUG:
            print(for_terminal(redact(traceback.format_exc())), file=sys.stderr, end="")
            if isinstance(error, WorkerFailed):
                print(f"in {error.child}:\n{for_terminal(redact(error.failure.traceback))}", file=sys.stderr)
        print(f"sparkring: {for_terminal(redact(message(error)))}", file=sys.stderr)
        return failure


def _reader_has_gone() -> bool:
    """Return whether standard output is a pipe whose reader has gone, as after `| head`."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="sparkring",
        description="One Spark application from raw tables to a tracked model.",
        epilog="examples:\n  sparkring init table --data houses.csv --label price\n  sparkring run flights\n\n"
        "Every command has examples of its own: sparkring run --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=ShowVersion, nargs=0, help="show the installed version, and stop")
    top.add_argument("-v", "--verbose", action="store_true", help="debug log, and tracebacks of every error")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    for group in (jobs, recipes, planning, models, upkeep, machines):
        group.add_commands(commands)
    text = "write the completion of commands, options and keys for your shell to standard output"
    examples = ["sparkring completion bash > ~/.sparkring.bash", "sparkring completion zsh > ~/.sparkring.zsh"]
    shell = add_command(commands, "completion", _completion, text, examples)
    shell.add_argument("shell", choices=["bash", "zsh"], help="then source the file in ~/.bashrc or ~/.zshrc")
    return top


def _completion(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.cli.completion import completion

    print(completion(parser(), arguments.shell), end="")
    return Exit.OK


class ShowVersion(argparse.Action):
    """Print the installed version and end; only then is it looked for, among all installed packages."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        try:
            print(f"sparkring {metadata.version('sparkring')}")
        except metadata.PackageNotFoundError:  # code that Spark ships as a zip has none
            print("sparkring, not installed")
        parser.exit()
