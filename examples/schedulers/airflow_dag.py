"""One training per day from Airflow 3: it starts a command, and reads its exit code and its last line of output.

Airflow runs in an environment of its own, sparkring in another; the command is all they share. Copy this file into the
`dags` folder and edit the first three names, or set them in the environment of the workers.
"""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException
from airflow.timetables.interval import CronDataIntervalTimetable

SPARKRING = os.environ.get("SPARKRING", "sparkring")  # the command, of its own environment
FOLDER = os.environ.get("SPARKRING_FOLDER", ".")  # where relative paths of the recipe start
RECIPE = os.environ.get("SPARKRING_RECIPE", "clicks.yaml")
# Another try cannot change these: a wrong configuration, wrong data, a model that is not good enough.
FINAL = {2, 3, 6}


@task(retries=6, retry_delay=timedelta(minutes=10), execution_timeout=timedelta(hours=12))
def train(**context: Any) -> dict[str, Any]:
    """Run one date; what the command printed last becomes the task's return value in Airflow."""
    date = context["data_interval_start"].strftime("%Y-%m-%d")
    # On a timeout or `airflow tasks clear`, SIGTERM reaches the whole process group: a checkpoint is written, and the
    # next try goes on from it.
    done = subprocess.run([SPARKRING, "run", RECIPE, "--date", date], cwd=FOLDER, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads((done.stdout.splitlines() or ["{}"])[-1])
    if done.returncode in FINAL:
        raise AirflowFailException(f"exit code {done.returncode}: {result}")
    if done.returncode:  # 75: another process has this date, or what it waits for is missing; 4, 5: try again
        raise RuntimeError(f"exit code {done.returncode}: {result}")
    return result


with DAG(
    f"sparkring_{RECIPE.rpartition('/')[2].removesuffix('.yaml')}",
    # Not "@daily": Airflow 3 would make the date that of the trigger, and not the first moment of the finished day.
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2013, 3, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
):
    train()
