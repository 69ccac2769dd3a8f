"""The command line: `entry` runs a command, and each group of commands has a module."""

from sparkring.pipelines.cli.entry import main, parse, parser

__all__ = ["main", "parse", "parser"]
