"""The command line: `entry` runs a command, and each group of commands has a module."""

from sparkring.pipelines.cli.entry import main, parse, parser
from sparkring.pipelines.cli.exits import exit_code

__all__ = ["exit_code", "main", "parse", "parser"]
