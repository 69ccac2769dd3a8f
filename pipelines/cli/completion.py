"""Make the shell's completion from the parser itself: commands, options, choices, recipes, keys of overrides."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from sparkring.conf.config import RunConfig
from sparkring.conf.recipes import recipe_names

SHELLS = ("bash", "zsh")
FUNCTION = """\
# Completion of sparkring for {shell}. Made by: sparkring completion {shell}
{first}_sparkring() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command="" word i words="" overrides=""
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${{COMP_WORDS[i]}}
    case "${{command:+$command }}$word" in
      {paths}) command="${{command:+$command }}$word" ;;
    esac
  done
  case "$command $prev" in
{choices}
  esac
  if [ -z "$words" ]; then
    case "$command" in
{words}
    esac
  fi
  case "$overrides $cur" in
    "all "*.*) words="$words {keys}" ;;
    "tracking "*.*) words="$words {tracking}" ;;
    "all "*) words="$words {blocks}" ;;
    "tracking "*) words="$words tracking." ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  if [ -n "$overrides" ]; then COMPREPLY+=($(compgen -f -- "$cur")); fi
  case "${{COMPREPLY[0]}}" in
    *= | *.) if type compopt > /dev/null 2>&1; then compopt -o nospace; fi ;;
  esac
}}
complete -o default -F _sparkring sparkring
"""
ZSH = "autoload -Uz compinit bashcompinit && compinit -u && bashcompinit\n"


def completion(top: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of the command line for a shell (SHELLS)."""
    parsers = dict(_parsers(top, ""))
    words, choices = [], []
    for path, parser in parsers.items():
        words.append(f'      "{path}") words="{" ".join(_words(parser))}"{_overrides(parser)} ;;')
        for action in parser._actions:
            if action.option_strings and action.choices:
                names = " | ".join(f'"{path} {name}"' for name in action.option_strings)
                choices.append(f'    {names}) words="{" ".join(map(str, action.choices))}" ;;')
    keys = [f"{key}=" for key in setting_keys(RunConfig)]
    return FUNCTION.format(
        shell=shell,
        first=ZSH if shell == "zsh" else "",
        paths=" | ".join(f'"{path}"' for path in parsers if path),
        choices="\n".join(choices),
        words="\n".join(words),
        keys=" ".join(keys),
        tracking=" ".join(key for key in keys if key.startswith("tracking.")),
        blocks=" ".join(dict.fromkeys(key.partition(".")[0] + "." if "." in key else key for key in keys)),
    )


def _parsers(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each parser with the words that lead to it."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _parsers(inner, f"{path} {name}".strip())


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """List the possible next words: options, subcommands, choices, and built-in recipes."""
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings or map(str, action.choices or ())
        found += recipe_names() if action.dest == "recipe" else []
    return found


def _overrides(parser: argparse.ArgumentParser) -> str:
    metavar = next((str(action.metavar) for action in parser._actions if action.dest == "overrides"), "")
    return "" if not metavar else " overrides=tracking" if metavar.startswith("tracking.") else " overrides=all"


def setting_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the paths of a recipe's keys, blocks opened; what users name themselves, such as sources, is not."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        kinds = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
        blocks = [kind for kind in kinds if _is_block(kind)]
        key = f"{prefix}{field.alias or name}"
        if len(blocks) == 1:
            yield from setting_keys(blocks[0], f"{key}.")
        else:
            yield key


def _is_block(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
