"""The command line: what is asked, and the commands that need no more than one file: audit, replay-log, reproduce."""

from sparkring.pipelines.cli.entry import main, parse, parser

__all__ = ["main", "parse", "parser"]
