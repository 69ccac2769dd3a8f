"""The command line: what is asked, and the commands that need no more than one file: audit, replay-log, reproduce."""

from sparkring.pipelines.cli.entry import console, main, parse, parser

__all__ = ["console", "main", "parse", "parser"]
