"""GPUs as Spark's resources, with a discovery script that pretends: one visible device per rank, profiles per stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import json, os, sys
from pyspark.sql import SparkSession
from sparkring.pipelines.launch.barrier import LaunchOptions, run_barrier, training_profile
from sparkring.pipelines.launch.preflight import slots
from sparkring.training.launch.job import JobSpec
script = sys.argv[1]
settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1", "spark.executor.resource.gpu.amount": "2",
    "spark.executor.resource.gpu.discoveryScript": script, "spark.worker.resource.gpu.amount": "2",
    "spark.worker.resource.gpu.discoveryScript": script, "spark.task.resource.gpu.amount": "1"}
builder = SparkSession.builder.master("local-cluster[1,2,1024]")
for key, value in settings.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
def entry(ctx):
    return [os.environ.get("CUDA_VISIBLE_DEVICES"), ctx.local_rank, ctx.local_size]
def run(stage=LaunchOptions(), **options):
    return run_barrier(spark, JobSpec(entry, preload=(), **options), 2, lambda e: None, options=stage).results
found = {"own": run(), "host": run(visible_devices="host")}
profile = training_profile(cpus_per_rank=1, gpus_per_rank=1)
found["profile"] = run(LaunchOptions(profile=profile))
wide = [training_profile(2), training_profile(1, 2)]
found["slots"] = [slots(spark, asked) for asked in (None, profile, *wide)]
print("RESULT " + json.dumps(found))
spark.stop()
"""


@pytest.mark.slow  # which devices a rank sees is decided in tests/training/launch/test_topology.py
@pytest.mark.spark
@pytest.mark.ranks
def test_ranks_see_the_devices_spark_gave_their_task(tmp_path: Path) -> None:
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["4", "7"]}\'\n')
    script.chmod(0o755)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(script)], capture_output=True, text=True, cwd=root, env=env, timeout=400
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    for way in ("own", "profile"):
        assert sorted(row[0] for row in found[way]) == ["4", "7"], found
        assert [row[1:] for row in found[way]] == [[0, 2], [1, 2]]
    assert found["slots"] == [2, 2, 1, 1]  # two cores, two GPUs
    (devices,) = {row[0] for row in found["host"]}  # a script picks its own by LOCAL_RANK
    assert sorted(devices.split(",")) == ["4", "7"]
