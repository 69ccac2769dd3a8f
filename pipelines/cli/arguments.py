"""What the groups of commands share: adding a command, types of arguments, loading the recipe.

A command imports what it runs in its own function: all commands wait for what modules of `cli` import at their top.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from sparkring.conf.errors import ConfigError
from sparkring.conf.recipes import recipe_names

if TYPE_CHECKING:
    from sparkring.conf.load import Resolved
    from sparkring.conf.schedule.dated import DateRequest
    from sparkring.training.planner.search import AskedLayout

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands, name: str, command: Command, text: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    """Add a command; its help ends with the examples.

    Args:
        commands: parser group to add it to.
        name: name of the command.
        command: function that runs the command.
        text: description shown in the help.
        examples: whole command lines for the help.
    """
    shown = "examples:\n" + "\n".join(f"  {example}" for example in examples)
    sub = commands.add_parser(
        name, help=text, description=text, epilog=shown, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub.set_defaults(command=command, parser=sub)
    return sub


def add_group(commands: Commands, name: str, text: str, metavar: str) -> tuple[argparse.ArgumentParser, Commands]:
    """Add a command that others stand below; `show_examples` completes its help."""
    group = commands.add_parser(name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    return group, group.add_subparsers(required=True, metavar=metavar)


def show_examples(group: argparse.ArgumentParser, commands: Commands) -> None:
    """End the help of a group with an example of each of its commands."""
    first = [str(command.epilog).splitlines()[1] for command in commands.choices.values()]
    group.epilog = "\n".join(["examples:", *first])


def add_recipe_command(
    commands: Commands, name: str, command: Command, text: str, examples: Sequence[str], default: str | None = None
) -> argparse.ArgumentParser:
    """Add a command that takes a recipe and overrides.

    Args:
        commands: parser group to add it to.
        name: name of the command.
        command: function that runs the command.
        text: description shown in the help.
        examples: whole command lines for the help.
        default: default recipe; None makes it required.
    """
    sub = add_command(commands, name, command, text, examples)
    known = f"a name ({', '.join(recipe_names())}) or the path of a YAML file"
    sub.add_argument("recipe", help=known, nargs="?" if default else None, default=default)
    sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="win over the recipe")
    return sub


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, at least 1")
    return int(text)


def new_file(text: str) -> Path:
    """Check that a file can be written, before the work whose result it will hold."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: cannot be written; give a file in a folder that is there")
    return path


def duration(text: str) -> int:
    from sparkring.conf.schedule.block import seconds

    try:
        found = seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be longer than nothing")
    return found


def asked_layout(text: str) -> AskedLayout:
    """Parse layouts such as `dp=64,tp=1,pp=8,offload=true,precision=bf16`; unnamed axes have 1 rank."""
    from sparkring.conf.clusters.cluster import Precision
    from sparkring.conf.schema import refuse_fp8
    from sparkring.training.parallel.mesh import AXES, Mesh
    from sparkring.training.planner.search import AskedLayout

    choices: dict[str, dict[str, Any]] = {
        "offload": {"true": True, "false": False},
        "precision": {each: each for each in get_args(Precision)},
    }
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        try:
            refuse_fp8(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
        if name in found:
            raise argparse.ArgumentTypeError(f"{text!r}: {name} is named twice")
        if value in choices.get(name, {}):
            found[name] = choices[name][value]
        elif name in AXES and value.isdecimal() and int(value) >= 1:
            found[name] = int(value)
        else:
            known = [*(f"{axis}=N" for axis in AXES), *(f"{key}={'|'.join(of)}" for key, of in choices.items())]
            rule = f"is not an axis and its size; write {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"{text!r}: {word!r} {rule}")
    others = {name: found.pop(name, None) for name in choices}
    return AskedLayout(Mesh(**found), **others)


def load(arguments: argparse.Namespace, date: DateRequest | None = None) -> Resolved:
    from sparkring.conf.load import load_config

    return load_config(arguments.recipe, arguments.overrides, date)


def load_undated(arguments: argparse.Namespace) -> Resolved:
    remedy = f"sparkring run {arguments.recipe} --date D, or see sparkring backfill"
    return checked_date(load(arguments), remedy)


def checked_date(resolved: Resolved, remedy: str) -> Resolved:
    """Raise ConfigError for a recipe with dates where none was given; `remedy`: the command that gives one."""
    if resolved.config.schedule is not None and resolved.interval is None:
        raise ConfigError(resolved.config.name, [f"schedule: this recipe has dates; give one: {remedy}"])
    return resolved
