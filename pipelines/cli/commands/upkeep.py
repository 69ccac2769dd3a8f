"""Commands for what jobs leave behind: report, ui, replay, gc."""

from __future__ import annotations

import argparse

from sparkring.pipelines.cli.arguments import Commands, add_recipe_command, load
from sparkring.pipelines.run.exit_codes import Exit


def add_commands(commands: Commands) -> None:
    text = "draw the report of the recipe's last run again"
    add_recipe_command(commands, "report", _report, text, ["sparkring report flights"])
    text = "serve the MLflow UI on the recipe's store, on this machine only"
    ui = add_recipe_command(
        commands, "ui", _ui, text, ["sparkring ui", "sparkring ui mine.yaml --port 5001"], "flights"
    )
    ui.add_argument("--port", type=int, default=5000, help="on this machine (default: 5000)")
    text = "send to the tracking server what earlier jobs could not"
    add_recipe_command(commands, "replay", _replay, text, ["sparkring replay mine.yaml"])
    text = "delete what the recipe's `retention` lets go; what is needed stays"
    gc = add_recipe_command(commands, "gc", _gc, text, ["sparkring gc mine.yaml --dry-run"])
    gc.add_argument("--dry-run", action="store_true", help="only name what would be deleted")


def _report(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.report.report import redraw

    print(redraw(load(arguments)))
    return Exit.OK


def _ui(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.tracking.ui import serve_ui

    config = load(arguments).config
    return serve_ui(config.tracking.named(config.name), config.name, arguments.port)


def _replay(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.tracking.client import client_limits
    from sparkring.pipelines.tracking.openlineage.driver import replay_events
    from sparkring.pipelines.tracking.store.sink import replay

    config = load(arguments).config
    try:
        with client_limits(config.tracking):
            journals, operations = replay(config.tracking.named(config.name))
    finally:
        events = replay_events(config.tracking)
    also = f", and {events} OpenLineage events" if events else ""
    print(f"sent {operations} operations that {journals} jobs had left in {config.tracking.root}{also}")
    return Exit.OK


def _gc(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.housekeeping.gc import collect_garbage

    return collect_garbage(load(arguments).config, arguments.dry_run, print)
