"""Register a model in processes that are killed after their first, second, ... of CALLS to the store: `... ROOT`.

Then replay their journals, give the same command again, and print what the store holds, a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

# Before the forks: all that a store imports takes each of them seconds.
import mlflow.pyfunc
import mlflow.store.model_registry.sqlalchemy_store
import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
from mlflow import MlflowClient
from sqlalchemy.orm import configure_mappers

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.journal import Journal
from sparkring.pipelines.tracking.store.sink import MlflowSink, replay

CALLS = ("create_logged_model", "finalize_logged_model", "create_model_version", "set_registered_model_alias")
FINISHED = 7


def main() -> None:
    configure_mappers()
    settings = TrackingConfig(experiment="kills", root=sys.argv[1])
    (Path(sys.argv[1]) / "data").mkdir(parents=True)
    (Path(sys.argv[1]) / "data" / "model.json").write_text('{"factor": 3.0}')
    for number in count(1):
        if register_in_child(settings, number, kill_after=number) == FINISHED:
            break
    replay(settings)
    client = MlflowClient(settings.store_uri, registry_uri=settings.store_uri)
    experiment = client.get_experiment_by_name("kills").experiment_id
    for job in range(1, number + 1):
        register(settings, job)
        print(json.dumps(stored(client, experiment, job)))


def stored(client: MlflowClient, experiment: str, job: int) -> list[Any]:
    """What the store holds of a job: models, their status, outputs of its run, versions, the alias' version, files."""
    (run,) = client.search_runs([experiment], f"tags.`sparkring.job` = 'j{job}'")
    models = client.search_logged_models([experiment], f"name = 'final-{job}'")
    versions = client.search_model_versions(f"name = 'm{job}'")
    alias = client.get_model_version_by_alias(f"m{job}", "champion").version
    outputs, files = run.outputs.model_outputs, client.list_artifacts(run.info.run_id)
    return [len(models), str(models[0].status), len(outputs), len(versions), int(alias), len(files)]


def register_in_child(settings: TrackingConfig, job: int, kill_after: int) -> int | None:
    """The child's exit code; None where it was killed."""
    if (pid := os.fork()) == 0:
        made = count(1)

        def killing(call: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                result = call(*args, **kwargs)
                if next(made) == kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return run

        for name in CALLS:
            setattr(MlflowClient, name, killing(getattr(MlflowClient, name)))
        register(settings, job)
        os._exit(FINISHED)
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def register(settings: TrackingConfig, job: int) -> None:
    """What a job does that goes on with the run of an earlier one, where there is one."""
    journal = Journal.create(Path(settings.root), f"k{job}")
    tags = {"sparkring.job": f"j{job}"}
    journal.append(ops.StartRun(key="job", at=time.time(), name="n", parent=None, resume=True, tags=tags))
    data = journal.add_file(Path(settings.root) / "data", "data")
    journal.append(
        ops.Model(
            key="job", at=time.time(), file=data, inputs=[], outputs=[], tags={}, params={},
            alias="champion", step=1, sha256="5" * 64, name=f"final-{job}", registered_model=f"m{job}",
            loader_module="tiny_loader",
        )
    )  # fmt: skip
    try:
        MlflowSink(settings, journal).drain()
    except KeyboardInterrupt:
        journal.close(delete=False)
        raise
    journal.close(delete=True)


if __name__ == "__main__":
    main()
