"""MLflow's pages of a recipe's newest job, in a real browser: what they show.

Its screenshots are those of docs/how-to/tracking.md.

    make demo
    python benchmarks/tracking_pages.py flights --pictures docs/pictures

`sparkring ui` serves the store that the recipe names, and a headless Chromium opens the list of jobs, the newest
finished job, its part `train` and the version of the model that it registered. Ends with exit code 1 where a page does
not show what it should. Needs `chromium` on PATH.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from browser import Browser, served
from mlflow import MlflowClient
from night_pages import CHARTS, Page, shows, take_pictures

from sparkring.conf.load import load_config
from sparkring.pipelines.tracking.store.registry import MODEL_VERSION
from sparkring.pipelines.tracking.tags import RECIPE
from sparkring.pipelines.tracking.ui import pages
from sparkring.pipelines.tracking.views import TRAINING


def pages_of(recipe: str, client: MlflowClient, found: dict[str, str], experiment: str, model: str) -> list[Page]:
    """The pages of the newest finished job, and what must be on them.

    Args:
        recipe: its name.
        client: of the store.
        found: links as `sparkring ui` logs them.
        experiment: id.
        model: registered name.
    """
    wanted = f"tags.`{RECIPE}` = '{recipe}' and attributes.status = 'FINISHED'"
    job = client.search_runs([experiment], wanted, order_by=["attributes.start_time DESC"])[0]
    child = f"tags.`mlflow.parentRunId` = '{job.info.run_id}' and tags.`sparkring.key` = 'train'"
    training = client.search_runs([experiment], child)[0].info
    version, name = job.data.tags[MODEL_VERSION].rpartition("/")[2], str(job.info.run_name)
    runs = f"#/experiments/{experiment}/runs"
    return [
        Page("jobs", found["runs"], (name, "test/auc"), picture="tracking_jobs.png"),
        Page("job", f"{runs}/{job.info.run_id}?{TRAINING}", (name, f"version {version}"), picture="tracking_job.png"),
        Page(
            "training", f"{runs}/{training.run_id}/model-metrics?{TRAINING}", (str(training.run_name), "loss"),
            ready=CHARTS, picture="tracking_training.png",
        ),
        Page(
            "model version", f"#/models/{model}/versions/{version}?{TRAINING}", (f"Version {version}", "Limits", "auc"),
            picture="tracking_version.png",
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name or file")
    parser.add_argument("--pictures", type=Path, required=True, help="write screenshots into this folder")
    arguments = parser.parse_args()
    config = load_config(arguments.recipe).config
    tracking = config.tracking.named(config.name)
    client, found = MlflowClient(tracking.store_uri), pages(tracking, config.name)
    experiment = client.get_experiment_by_name(str(tracking.experiment)).experiment_id
    opened = pages_of(config.name, client, found, experiment, str(tracking.registered_model))
    with served(arguments.recipe, Path(tracking.root)) as (address, _), Browser() as browser:
        for page in opened:
            print(f"{page.name}: {shows(browser, address, page):.2f} s")
        take_pictures(address, opened, arguments.pictures)


if __name__ == "__main__":
    main()
