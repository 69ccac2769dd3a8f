"""The run with a point per date, and its figures, in a real store."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from mlflow import MlflowClient
from PIL import Image

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.store.history_run import log_figure, logged_images
from sparkring.pipelines.tracking.tracker import Tracker

STEPS = (0, 1)


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, "png")
    return file.getvalue()


def test_a_figure_of_each_date_is_an_image_with_a_slider(tmp_path: Path) -> None:
    """One image per date and figure, though its operation is sent twice after a kill; a rerun adds its own."""
    settings = TrackingConfig(experiment="tests", root=str(tmp_path), system_metrics=False)
    for step in STEPS:
        with Tracker(settings, job=f"h{step}", name="shop") as tracker:
            tracker.history_figure("shop", step, "test/calibration", picture(step))
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("tests").experiment_id
    (found,) = client.search_runs([experiment], "tags.`sparkring.history` = 'shop'")
    run = found.info.run_id
    files = [each.path for each in client.list_artifacts(run, "images")]
    assert sorted(Path(file).suffix for file in files) == [".png", ".png", ".webp", ".webp"]
    assert found.info.run_name == "shop history" and "mlflow.loggedImages" in found.data.tags

    def images() -> list[tuple[str, int, int]]:
        return sorted(logged_images(client, run))

    assert [(name, step) for name, step, _ in images()] == [("test/calibration", step) for step in STEPS]
    file, recorded = tmp_path / "c.png", images()[0][2] / 1000 + 0.0002
    file.write_bytes(picture(1))
    again = ops.HistoryFigure(key="job", at=recorded, recipe="shop", step=0, name="test/calibration", file="x/c.png")
    log_figure(client, run, again, file)
    assert len(client.list_artifacts(run, "images")) == len(files), "sent a second time, shown once"
    log_figure(client, run, replace(again, at=recorded + 60), file)
    assert [step for _, step, _ in images()] == [0, 0, 1]
