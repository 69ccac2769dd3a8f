"""Commands about runs and models that are there: promote, rollback, lineage, serve-check, export, audit, ..."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparkring.pipelines.cli.arguments import Commands, add_command, load
from sparkring.pipelines.run.exit_codes import Exit

if TYPE_CHECKING:
    from sparkring.conf.blocks.tracking import TrackingConfig


def add_commands(commands: Commands) -> None:
    _add_promotion(commands)
    text = "what a model, run or dataset was made of, and whether each source can still be read"
    examples = ["sparkring lineage models:/flights@champion", "sparkring lineage data/runs/flights/RUN --json"]
    lineage = add_command(commands, "lineage", _lineage, text, examples)
    what = "models:/<name>@<alias>, models:/<name>/<version>, a run's folder or a dataset's"
    lineage.add_argument("target", help=what)
    _add_registry(lineage)
    lineage.add_argument("--json", action="store_true", help="one JSON object instead of a screen")
    _add_reproduce(commands)
    text = "load a registered model in an environment made of its folder alone, and compare its recorded predictions"
    examples = ["sparkring serve-check models:/flights@champion"]
    check = add_command(commands, "serve-check", _serve_check, text, examples)
    check.add_argument("target", help="models:/<name>@<alias>, models:/<name>/<version> or an MLflow model's folder")
    _add_registry(check)
    text = "write a registered model as one file for other runtimes, and compare it with the model"
    examples = ["sparkring export models:/flights@champion --format onnx --out flights.onnx"]
    export = add_command(commands, "export", _export, text, examples)
    export.add_argument(
        "target", help="models:/<name>@<alias>, models:/<name>/<version>, an MLflow model's folder or a run's `model`"
    )
    _add_registry(export)
    text = "of a network pt2 (torch.export, the default) or onnx, of trees XGBoost's ubj (the default) or json"
    export.add_argument("--format", choices=["pt2", "onnx", "ubj", "json"], help=text)
    export.add_argument("--out", metavar="FILE", help="default: model.<format>; must not exist")
    text = "prove from a run's audit log that every row was consumed once per epoch"
    audit = add_command(commands, "audit", _audit, text, ["sparkring audit data/runs/flights/RUN"])
    audit.add_argument("run_folder", help="of a run with data.audit=true")
    audit.add_argument("--dataset", default="", help="where the dataset is (default: where the records say it was)")
    text = "train a run on parameter servers again, in one thread, from its event logs, and compare the bits"
    replay = add_command(commands, "replay-log", _replay_log, text, ["sparkring replay-log data/runs/flights/RUN"])
    replay.add_argument("run_folder", help="of a run with parallel.servers")
    replay.add_argument("--dataset", default="", help="where the dataset is (default: where the run says it was)")


def _add_registry(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("overrides", nargs="*", metavar="tracking.key=value", help="where the registry is")


def _add_promotion(commands: Commands) -> None:
    text = "move the alias (champion) to a version of the recipe's model, which no rule is asked about"
    examples = ["sparkring promote flights 12 --reason 'the last one lost a feature'"]
    promote = add_command(commands, "promote", _promote, text, examples)
    text = "move the alias (champion) to the version that had it before"
    back = add_command(commands, "rollback", _rollback, text, ["sparkring rollback flights --reason 'too slow'"])
    for sub in (promote, back):
        sub.add_argument("recipe", help="a name, or the path of a YAML file")
        if sub is promote:
            sub.add_argument("version", help="number of the version")
        sub.add_argument("overrides", nargs="*", metavar="key.path=value", help="win over the recipe")
        sub.add_argument("--reason", default="", metavar="TEXT", help="kept in the version's tags")


def _add_reproduce(commands: Commands) -> None:
    text = "train a finished run again, and compare its weights or metrics"
    examples = [
        "sparkring reproduce models:/flights@champion --dry-run",
        "sparkring reproduce data/runs/flights/RUN --check metrics --from sources",
    ]
    sub = add_command(commands, "reproduce", _reproduce, text, examples)
    sub.add_argument("target", help="a run's folder, models:/<name>@<alias> or models:/<name>/<version>")
    _add_registry(sub)
    text = (
        "bits: sha256 of the weights; metrics: scores within 1e-4, on other packages or processors too (default: bits)"
    )
    sub.add_argument("--check", choices=["bits", "metrics"], default="bits", help=text)
    text = "sources: build the run's dataset again first, of what was read, and compare it (default: dataset)"
    sub.add_argument("--from", dest="origin", choices=["dataset", "sources"], default="dataset", help=text)
    sub.add_argument("--dry-run", action="store_true", help="only say what differs from the run as it was")


def _promote(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.promotion.by_hand import promote_by_hand

    print(promote_by_hand(load(arguments).config, arguments.version, arguments.reason).text)
    return Exit.OK


def _rollback(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.promotion.by_hand import rollback

    print(rollback(load(arguments).config, arguments.reason).text)
    return Exit.OK


def _lineage(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.lineage.show import text, trace

    made = trace(arguments.target, _tracking(arguments))
    print(made.to_json() if arguments.json else text(made))
    return Exit.OK


def _reproduce(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.cli.reproduce import Request, reproduce

    request = Request(arguments.target, arguments.check, arguments.origin, arguments.dry_run)
    return reproduce(request, _tracking(arguments), print)


def _serve_check(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.model.check import serve_check

    return serve_check(arguments.target, _tracking(arguments), print)


def _export(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.model.export import export

    out = Path(arguments.out) if arguments.out else None
    return export(arguments.target, arguments.format, out, _tracking(arguments), print)


def _tracking(arguments: argparse.Namespace) -> TrackingConfig:
    """Return the tracking block of a command without a recipe: its overrides over the defaults."""
    from sparkring.conf.load import load_config

    return load_config("flights", arguments.overrides).config.tracking


def _replay_log(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.cli.replay_log import replay_log

    try:
        report = replay_log(arguments.run_folder, arguments.dataset, print)
    except (ValueError, OSError) as error:  # no such folder, no logs in it, or a file that is none
        print(f"sparkring: {error}", file=sys.stderr)
        return Exit.DATA
    print(report.describe())
    return Exit.OK if not report.different else Exit.DATA


def _audit(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.cli.audit import audit_run

    try:
        report = audit_run(arguments.run_folder, arguments.dataset)
    except (ValueError, OSError) as error:  # no such folder, no records in it, or a file that is none
        print(f"sparkring: {error}", file=sys.stderr)
        return Exit.DATA
    print("\n".join(report.lines()))
    return Exit.OK if report.ok else Exit.DATA
