from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkring.conf.load import load_config
from sparkring.pipelines.context.context import JobContext
from sparkring.pipelines.run.runs import Runs


def test_an_attempt_is_counted_in_the_run_folder_before_it_begins(tmp_path: Path) -> None:
    resolved = load_config("flights", [f"storage.runs={tmp_path}"])
    runs, nothing = Runs(str(tmp_path), "flights"), object()
    unused: Any = nothing
    with runs.begin(resolved.config, "f" * 64) as (record, _):
        job = JobContext(resolved, "c0ffee", unused, unused, runs, record, unused)
        job.count_attempt(3)
    assert runs.read(record.folder).attempts == 3 and record.attempts == 0
    assert job.folder.uri == f"{runs.storage.uri}/{record.folder}" and job.config is resolved.config
