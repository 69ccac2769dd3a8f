"""examples/clusters: commands, settings and manifests that are taken, and executors for all ranks from the start."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.validate import validate_parameters

from sparkring.conf.config import RunConfig
from sparkring.pipelines.cli import parse
from sparkring.training.launch.host.info import NCCL_SHM_BYTES_PER_RANK
from tests.ci.test_docs import setting_exists

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/clusters"
SCRIPTS = sorted(path.name for pattern in ("*.sh", "*.sbatch") for path in EXAMPLES.glob(pattern))
SHELL = {"SLURM_NNODES": "4", "SLURM_CPUS_PER_TASK": "4", "KUBERNETES_API": "h:443", "IMAGE": "image"}


def manifest(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def dataproc() -> tuple[dict[str, str], list[str]]:
    text = (EXAMPLES / "dataproc.sh").read_text()
    properties = "".join(re.findall(r"^properties\+?=(.*)$", text, re.MULTILINE))
    return dict(pair.split("=", 1) for pair in properties.split(",")), text.partition("\n  -- ")[2].split()


def databricks() -> tuple[dict[str, str], list[str]]:
    job = manifest("databricks.yml")["resources"]["jobs"]["sparkring"]
    cluster = job["job_clusters"][0]["new_cluster"]
    assert "autoscale" not in cluster
    settings = {
        **cluster["spark_conf"],
        "spark.executor.cores": "4",
        "spark.executor.instances": cluster["num_workers"],
    }
    return settings, job["tasks"][0]["spark_python_task"]["parameters"]


def emr_serverless() -> tuple[dict[str, str], list[str]]:
    submit = json.loads((EXAMPLES / "emr_serverless.json").read_text())["jobDriver"]["sparkSubmit"]
    return settings_of(shlex.split(submit["sparkSubmitParameters"])), submit["entryPointArguments"]


def script(name: str) -> tuple[dict[str, str], list[str]]:
    """What its `spark-submit` is given, with the shell's variables filled in."""
    text = re.sub(r"\\\n", " ", (EXAMPLES / name).read_text())
    (line,) = re.findall(r"^(?:exec )?spark-submit (.*)$", text, re.MULTILINE)
    line = re.sub(r"\$\{?(\w+)(?::\?[^}]*)?\}?", lambda found: SHELL.get(found[1], found[1]), line.rstrip("& "))
    words = [word for word in shlex.split(line) if word not in ("$@", "@")]
    main = next(index for index, word in enumerate(words) if word.endswith("sparkring_job.py"))
    return settings_of(words[:main]), words[main + 1 :]


def settings_of(words: list[str]) -> dict[str, str]:
    """The settings behind `--conf`."""
    pairs = [after for word, after in itertools.pairwise(words) if word == "--conf"]
    return dict(pair.split("=", 1) for pair in pairs)


PLATFORMS = {
    "yarn": lambda: script("yarn.sh"),
    "kubernetes": lambda: script("kubernetes.sh"),
    "slurm": lambda: script("slurm.sbatch"),
    "databricks": databricks,
    "emr_serverless": emr_serverless,
    "dataproc": dataproc,
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_runs_a_command_with_settings_that_exist(platform: str) -> None:
    _, words = PLATFORMS[platform]()
    arguments = parse([word for word in words if word != '"$@"'])
    keys = [override.partition("=")[0] for override in arguments.overrides]
    assert arguments.recipe.endswith("recipe.yaml") and "launch.world" in keys
    assert [key for key in keys if key.split(".")[0] not in RunConfig.model_fields or not setting_exists(key)] == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_rank_has_an_executor_of_its_own_from_the_start(platform: str) -> None:
    settings, words = PLATFORMS[platform]()
    overrides = dict(word.split("=", 1) for word in words if "=" in word)
    assert settings["spark.dynamicAllocation.enabled"] == "false"
    # On SLURM a worker is an executor, and there is one for each host.
    assert str(settings.get("spark.executor.instances", SHELL["SLURM_NNODES"])) == overrides["launch.world"]
    cpus = overrides.get("launch.cpus_per_rank") or settings["spark.task.cpus"]
    assert cpus == settings["spark.executor.cores"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_takes_a_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(EXAMPLES / name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_amazon_takes_the_job_run() -> None:
    """As its own client checks it: names, types and lengths."""
    client = boto3.client("emr-serverless", region_name="eu-west-1")
    shape = client.meta.service_model.operation_model("StartJobRun").input_shape
    request = json.loads((EXAMPLES / "emr_serverless.json").read_text())
    assert request.keys() <= shape.members.keys()
    assert (
        request["jobDriver"]["sparkSubmit"].keys() <= shape.members["jobDriver"].members["sparkSubmit"].members.keys()
    )
    validate_parameters({**request, "clientToken": "token"}, shape)


def test_pods_have_the_shared_memory_of_a_rank_and_the_time_of_its_last_checkpoint() -> None:
    settings, words = script("kubernetes.sh")
    spec = manifest("kubernetes_executor.yaml")["spec"]
    (volume,), (mount,) = spec["volumes"], spec["containers"][0]["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
    assert volume["emptyDir"]["medium"] == "Memory"
    assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30 >= NCCL_SHM_BYTES_PER_RANK
    (grace,) = [float(word.partition("=")[2]) for word in words if word.startswith("launch.grace_s=")]
    assert grace < spec["terminationGracePeriodSeconds"]
    assert settings["spark.decommission.enabled"] == "true"  # Spark's preStop hook
    for role in ("driver", "executor"):
        assert (EXAMPLES / settings[f"spark.kubernetes.{role}.podTemplateFile"]).is_file()


def test_the_gang_is_the_driver_and_all_executors() -> None:
    settings, _ = script("kubernetes.sh")
    of_driver, of_executor = (
        manifest(f"kubernetes_{role}.yaml")["metadata"]["annotations"] for role in ("driver", "executor")
    )
    groups = {group["name"]: group for group in json.loads(of_driver["yunikorn.apache.org/task-groups"])}
    assert of_driver["yunikorn.apache.org/task-group-name"] in groups
    executors = groups[of_executor["yunikorn.apache.org/task-group-name"]]
    assert executors["minMember"] == int(settings["spark.executor.instances"])
    assert executors["minResource"]["cpu"] == settings["spark.executor.cores"]
    memory = sum(int(settings[f"spark.executor.{key}"].removesuffix("g")) for key in ("memory", "memoryOverhead"))
    assert executors["minResource"]["memory"] == f"{memory}Gi"
