"""The command line: what is asked, and the commands that need no more than one file: audit, replay-log, reproduce."""

from sparkring.training.launch.host.search_path import put_library_first

put_library_first()  # before anything of Python's library is imported that a user's file may be named as

from sparkring.pipelines.cli.entry import console, main, parse, parser  # noqa: E402

__all__ = ["console", "main", "parse", "parser"]
