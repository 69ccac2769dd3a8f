"""`sparkring train` on a Ray cluster of two nodes: to its end, and through the loss and the return of a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.errors import ConfigError
from sparkring.conf.load import load_config
from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from tests.helpers.namespaces import ROOT
from tests.pipelines.promotion.nights import write_dataset
from tests.pipelines.test_hosts import CLEAN, RECIPE, command, result_of, run, weights_of
from tests.waits import wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe and its dataset."""
    write_dataset(tmp_path / "dataset", ["a", "b", "c"], 5.0)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("runs: runs", f"runs: {tmp_path}/runs"))
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster on this machine: a head without room for ranks, and two nodes with room for one each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()


def variables(cluster: Any) -> dict[str, str]:
    return {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT), **CLEAN}


@pytest.mark.slow
def test_the_weights_are_those_of_the_same_job_on_one_host(folder: Path, cluster: Any) -> None:
    words = ["train.threads_per_rank=1"]
    done = run(folder, *words, "launch.on=ray", **variables(cluster))
    assert done.returncode in (Exit.OK, Exit.QUALITY), done.stderr[-3000:]
    on_ray = weights_of(folder)
    (folder / "runs").rename(folder / "runs-on-ray")
    done = run(folder, *words, "launch.on=hosts")
    assert done.returncode in (Exit.OK, Exit.QUALITY), done.stderr[-3000:]
    assert weights_of(folder) == on_ray


def test_a_cluster_without_room_is_named_with_what_it_has(folder: Path, cluster: Any) -> None:
    done = run(folder, "launch.on=ray", "launch.world=4", "launch.hosts_wait_s=0.1", **variables(cluster))
    assert done.returncode == Exit.RESOURCES
    assert "launch.world = 4 must fit" in done.stderr and "nodes there are 2 CPU" in done.stderr


def test_a_dataset_that_is_not_there_is_named_before_a_cluster_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    words = [f"dataset={folder}/nope", "launch.on=ray"]
    assert main(["train", f"{folder}/recipe.yaml", *words]) == Exit.DATA
    assert f"{folder}/nope: not a dataset: the folder does not exist" in capsys.readouterr().err


def test_ray_does_not_build_a_dataset(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch.on = 'ray': there is no Spark to build the dataset"):
        load_config(str(folder / "recipe.yaml"), ["launch.on=ray"])


def test_a_missing_ray_is_named_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", f"{folder}/recipe.yaml", f"dataset={folder}/dataset", "launch.on=ray"]) == Exit.USAGE
    expected = "launch.on = 'ray': needs Ray, which is not installed: pip install 'sparkring[ray]'"
    assert expected in capsys.readouterr().err


def test_a_job_trains_on_the_nodes_of_a_cluster(folder: Path, cluster: Any) -> None:
    done = run(folder, "launch.on=ray", **variables(cluster))
    assert done.returncode in (Exit.OK, Exit.QUALITY), done.stderr[-3000:]
    result = result_of(folder)
    assert (result.train.world, result.train.steps) == (2, 30) and "ring of 2 formed" in done.stderr


@pytest.mark.slow
def test_training_shrinks_when_a_node_is_lost_and_grows_when_one_comes(folder: Path, cluster: Any) -> None:
    words = ["launch.on=ray", "launch.min_world=1", "launch.backoff_s=0", "train.epochs=2000"]
    log = folder / "train.log"
    whole = command(folder, *words, "checkpoint.every_steps=500", "train.early_stopping=null")
    whole[2] = "from sparkring.pipelines.launch import recover\nrecover.SLOTS_WAIT_S = 1.0\n" + whole[2]
    with log.open("w") as output:
        started = subprocess.Popen(
            whole,
            env={**os.environ, **variables(cluster)},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def said(text: str, times: int = 1) -> None:
        wait_for(lambda: log.read_text().count(text) >= times or started.poll() is not None)
        assert log.read_text().count(text) >= times, log.read_text()[-3000:]

    try:
        said("training from step 0 to")
        cluster.remove_node(cluster.worker_nodes.copy().pop())
        said("going on with 1 rank")
        added = cluster.add_node(num_cpus=1)
        said("going on with 2 ranks")
        said("ring of 2 formed", times=2)
    finally:
        started.terminate()
        started.wait(120)
    cluster.remove_node(added)
    assert "the same command continues at the checkpoint of step" in log.read_text()
    with pytest.raises(ValueError, match="not enough values"):
        result_of(folder)  # it was stopped
