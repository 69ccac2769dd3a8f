"""The run that holds a point per date of a recipe, and figures that MLflow shows with a slider over the dates."""

from __future__ import annotations

import re
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from PIL import Image

from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.tags import HISTORY
from sparkring.pipelines.tracking.views import NOTE, history_note

IMAGES = "images"  # where MLflow keeps images of a step


def history_run(client: MlflowClient, experiment: str, recipe: str) -> str:
    """Find or make the run; its id."""
    if found := client.search_runs([experiment], f"tags.`{HISTORY}` = '{recipe}'", max_results=1):
        return str(found[0].info.run_id)
    tags = {HISTORY: recipe, NOTE: history_note(recipe, experiment)}
    run = str(client.create_run(experiment, None, tags, f"{recipe} history").info.run_id)
    client.set_terminated(run)  # no process works on it
    return run


def log_values(client: MlflowClient, run: str, op: ops.History) -> None:
    """Log the date's values, unless they are the last ones logged for it: a rerun adds its own."""
    points = []
    for name, value in op.values.items():
        logged = [p for p in client.get_metric_history(run, name) if p.step == op.number]
        if not logged or max(logged, key=lambda p: p.timestamp).value != value:
            points.append(Metric(name, value, int(op.begins * 1000) + len(logged), op.number))
    client.log_batch(run, metrics=points)


def logged_images(client: MlflowClient, run: str) -> set[tuple[str, int, int]]:
    """Return key, step and milliseconds of every image of a run, from MLflow's `log_image` file names."""
    found = [re.split(r"[+%]", each.path.rpartition("/")[2]) for each in client.list_artifacts(run, IMAGES)]
    ours = [name for name in found if name[1:4:2] == ["step", "timestamp"]]
    return {(name[0].replace("~", "/"), int(name[2]), int(name[4])) for name in ours}


def log_figure(client: MlflowClient, run: str, op: ops.HistoryFigure, file: Path) -> None:
    """Log a PNG file as the date's image, unless this very operation has done so before; the latest is shown."""
    recorded_ms = int(op.at * 1000)
    if (op.name, op.step, recorded_ms) in logged_images(client, run):
        return
    with Image.open(file) as image:
        client.log_image(run, image, key=op.name, step=op.step, timestamp=recorded_ms)
