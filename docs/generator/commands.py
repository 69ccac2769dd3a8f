"""The page of commands and options, from the command line's parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from generator.source import cell, code, table
from sparkring.pipelines.cli import parser


def commands(top: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, bool]]:
    """(words, parser, whether others stand below it) of every command, in the order of the help."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                below = list(commands(choice))
                yield choice.prog, choice, bool(below)
                yield from below


def options(command: argparse.ArgumentParser) -> list[list[str]]:
    """(name, default, help) of every argument and option."""
    rows = []
    for action in command._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = action.metavar or (action.dest.upper() if action.option_strings and action.nargs != 0 else "")
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        shown = f"{names} {value}" if action.option_strings and value else names
        default = "" if action.default in (None, False, argparse.SUPPRESS, []) else code(str(action.default))
        help_ = (action.help or "") % {**vars(action), "prog": command.prog} if action.help else ""
        choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
        rows.append([code(shown), default, cell(help_ + choices)])
    return rows


def page() -> str:
    """The whole page."""
    top = parser()
    text = [
        "# Commands\n",
        f"{top.description} Every command ends with one of these [exit codes](exit_codes.md).\n",
        "Options before the command:\n",
        table(["option", "default", "meaning"], options(top)),
    ]
    for words, command, has_below in commands(top):
        text += [f"## {words}\n", f"{command.description}\n"]
        if not has_below:
            rows = options(command)
            text += [table(["argument", "default", "meaning"], rows)] if rows else []
            text += [f"```\n{command.epilog}\n```\n"] if command.epilog else []
    return "\n".join(text)
