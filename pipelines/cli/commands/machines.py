"""Commands for the machines that jobs run on: launch, netcheck, package."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from sparkring.conf.errors import ConfigError
from sparkring.pipelines.cli.arguments import Commands, add_command, add_recipe_command, count, load
from sparkring.pipelines.run.exit_codes import Exit

FLAGS = ("-h", "--help", "-m", "--module")  # options of `launch` without a value


def add_commands(commands: Commands) -> None:
    _add_launch(commands)
    text = "measure the network between the hosts the recipe would train on"
    examples = ["sparkring netcheck mine.yaml launch.world=8 spark.master=spark://host:7077"]
    add_recipe_command(commands, "netcheck", _netcheck, text, examples)
    text = "write the code archive and main file for spark-submit"
    package = add_command(commands, "package", _package, text, ["sparkring package --out dist/sparkring.zip"])
    package.add_argument("--out", default="dist/sparkring.zip", help="file (default: dist/sparkring.zip)")


def _add_launch(commands: Commands) -> None:
    text = "run any script as torchrun would, its ranks on the slots of Spark"
    examples = [
        "sparkring launch --world 4 train.py --epochs 3",
        "sparkring launch --world 8 --min-world 4 --max-attempts 3 --master spark://host:7077 train.py",
        "sparkring launch --world 2 -m package.train --epochs 3",
    ]
    sub = add_command(commands, "launch", _launch, text, examples)
    sub.add_argument("--world", type=count, metavar="N", help="ranks; default: the cores of this machine")
    sub.add_argument("--min-world", type=count, metavar="N", help="continue with as few where hosts fail")
    sub.add_argument("--max-attempts", type=count, default=1, metavar="N", help="failures in a row (default: 1)")
    sub.add_argument("--hang-timeout", type=float, metavar="S", help="without output or progress; default: no limit")
    sub.add_argument("--master", metavar="URL", help="of Spark; default: this machine, or what spark-submit says")
    sub.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting; may be repeated"
    )
    sub.add_argument("--files", action="append", default=[], metavar="PATH", help="hidden file or folder to take along")
    sub.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    sub.add_argument("script", help="path of the script; the working directory travels with it")
    sub.add_argument("words", nargs="*", metavar="args", help="the script's own arguments: all that follows it")


def split_launch(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into (words of ours, the script's own arguments).

    Everything behind the script of `launch` is the script's, whatever it looks like, so argparse must not see it: it
    takes `--m=5` for an abbreviation of an option of ours. Other commands have no such words.
    """
    command = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    if command is None or words[command] != "launch":
        return list(words), []
    i = command + 1
    while i < len(words) and words[i].startswith("-") and words[i] != "--":
        i += 1 if words[i] in FLAGS or "=" in words[i] else 2
    i += i < len(words) and words[i] == "--"
    return list(words[: i + 1]), list(words[i + 1 :])


def _launch(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from sparkring.conf.blocks.launch import LaunchConfig
    from sparkring.conf.blocks.spark import SparkConfig
    from sparkring.pipelines.launch.script import NAME, launch
    from sparkring.pipelines.run.spark_settings import VARIABLE, submitted
    from sparkring.training.launch.host.processes import usable_cores

    elsewhere = arguments.master or submitted() or VARIABLE in os.environ
    if arguments.world is None and elsewhere:
        raise ConfigError(NAME, ["--world: say how many ranks; a cluster's slots come one by one"])
    if bare := [word for word in arguments.conf if "=" not in word[1:]]:
        raise ConfigError(NAME, [f"--conf {word}: must be KEY=VALUE" for word in bare])
    try:
        limits = LaunchConfig(
            world=arguments.world or usable_cores(),
            min_world=arguments.min_world,
            max_attempts=arguments.max_attempts,
            hang_timeout_s=arguments.hang_timeout,
            log_lines_per_s=None,
        )
        settings = dict(word.partition("=")[::2] for word in arguments.conf)
        spark_config = SparkConfig(master=arguments.master, conf=settings)
    except ValidationError as error:
        raise ConfigError(NAME, [_problem(each) for each in error.errors()]) from error
    launch(arguments.script, arguments.words, limits, spark_config, arguments.files, arguments.module)
    return Exit.OK


def _problem(error: Any) -> str:
    """Format a pydantic error in one line."""
    key = ".".join(str(part) for part in error["loc"])
    value = f"{key} = {error['input']!r}: " if key else ""
    return value + str(error["msg"]).removeprefix("Value error, ")


def _netcheck(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.launch.barrier import launch_options
    from sparkring.pipelines.launch.netcheck import netcheck
    from sparkring.pipelines.run.spark import spark_session

    config = load(arguments).config
    with spark_session(config.name, config.spark, config.launch) as spark:
        options, compress = launch_options(config.launch), config.parallel.compress
        print(netcheck(spark, config.launch.world, options=options, compress=compress).text())
    return Exit.OK


def _package(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from sparkring.pipelines.run.package import write_archive

    archive = write_archive(Path(arguments.out))
    main = archive.with_name("sparkring_job.py")
    main.write_text("import sys\n\nfrom sparkring.pipelines.cli import console\n\nsys.exit(console())\n")
    print(f"spark-submit --py-files {archive} {main} run RECIPE")
    return Exit.OK
