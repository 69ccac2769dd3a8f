"""`sparkring train` without Spark: on one host to its end, on hosts made of network namespaces through a kill."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.errors import ConfigError
from sparkring.conf.load import load_config
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import read
from sparkring.pipelines.cli import main
from sparkring.pipelines.cli.commands import jobs
from sparkring.pipelines.cli.exits import exit_code, message
from sparkring.pipelines.job.hosts import (
    dataset_of,
    find_secret,
    follow,
    join_options,
    recipe_digest,
    room_problems,
    unanswered,
)
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.training.launch.join.hosts import JoinedHosts, JoinOptions
from sparkring.training.launch.join.placement import ALONE, Placement
from sparkring.training.launch.messages import Bye
from sparkring.training.worker.result import TrainResult
from tests.helpers.namespaces import ROOT, Hosts, hosts_of_one_machine
from tests.pipelines.promotion.nights import write_dataset
from tests.waits import wait_for

RECIPE = """
name: nightly
etl:
  sources: {t: {path: nowhere.csv, format: csv, columns: {x: double, late: boolean}}}
  rows: t
  features: {x: {kind: numeric}}
  label: late
model: {args: {width: 4, blocks: 1, bumps: 2}}
train: {epochs: 2, global_batch: 20}
optim: {lr: 0.01}
parallel: {engine: torch}
tracking: {enabled: false}
storage: {runs: runs}
"""
NO_SPARK = """
import sys

class NoSpark:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoSpark())
"""
CONSOLE = f"""{NO_SPARK}
from sparkring.pipelines.cli import console
sys.exit(console())
"""
VALIDATE_AND_PLAN = f"""{NO_SPARK}
from sparkring.pipelines.cli import console, main
words = sys.argv[2:4]  # the recipe and its dataset
print("CODES", int(main(["config", "validate", *words])), int(main(["plan", "show", *words])), flush=True)
sys.exit(console())
"""
CLEAN = {"OMP_NUM_THREADS": "1", "SPARKRING_SECRET": "a secret of enough letters"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe and its dataset."""
    write_dataset(tmp_path / "dataset", ["a", "b", "c"], 5.0)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("runs: runs", f"runs: {tmp_path}/runs"))
    return tmp_path


def command(folder: Path, *words: str) -> list[str]:
    """`sparkring train` in a Python that has no pyspark."""
    return [
        *(sys.executable, "-c", CONSOLE, "train", str(folder / "recipe.yaml"), f"dataset={folder}/dataset"),
        *words,
    ]


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return execute(command(folder, *words), folder, **variables)


def execute(line: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **CLEAN, **variables}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def result_of(folder: Path) -> TrainResult:
    (summary,) = folder.glob("runs/nightly/*/summary.json")
    return read(TrainResult, open_storage(str(summary.parent)), summary.name)


def weights_of(folder: Path) -> str:
    (weights,) = folder.glob("runs/nightly/*/model/weights.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def test_one_host_checks_plans_and_trains_to_the_report_where_pyspark_is_not_installed(folder: Path) -> None:
    whole = command(folder, "tracking.enabled=true", f"tracking.root={folder}/mlflow")
    whole[2] = VALIDATE_AND_PLAN
    done = execute(whole, folder)
    assert done.returncode in (Exit.OK, Exit.QUALITY), done.stderr[-3000:]
    assert "CODES 0 0" in done.stdout.splitlines(), done.stdout + done.stderr
    result = result_of(folder)
    assert result.train.steps == 30 and result.train.world == 2 and result.version
    assert {"majority rate", "logistic regression (scikit-learn)"} <= result.scores.keys()
    assert len([*folder.glob("runs/nightly/*/report.html")]) == 1


def host_variables(hosts: Hosts, rank: int) -> dict[str, str]:
    """What srun sets on each host."""
    nodes = ",".join(hosts.address(each) for each in range(hosts.count))
    found = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
    return found | {"SLURM_STEP_NUM_NODES": str(hosts.count), "SLURM_STEP_NODELIST": nodes} | CLEAN


def test_training_goes_on_when_everything_of_a_host_is_killed(folder: Path) -> None:
    whole = command(
        folder,
        "launch.min_world=1",
        "launch.backoff_s=0",
        "train.epochs=10",
        "report.baselines=false",
        "report.must_beat_guess=false",
    )
    whole[2] = "from sparkring.training.launch import attempt\nattempt.NO_ANSWER_S = 2.0\n" + whole[2]
    with hosts_of_one_machine("srk", 2) as hosts:
        logs = [folder / f"host{rank}.log" for rank in range(2)]
        started = [hosts.start(rank, whole, host_variables(hosts, rank), log) for rank, log in enumerate(logs)]
        wait_for(lambda: "training from step 0 to" in logs[0].read_text() or started[0].poll() is not None)
        hosts.kill(1)
        code = started[0].wait(600)
        started[1].wait(60)
    assert code in (Exit.OK, Exit.QUALITY), logs[0].read_text()[-3000:]
    result = result_of(folder)
    (failed,) = result.failed_attempts
    assert (failed.cause, failed.world, failed.next_world, failed.decision) == ("lost", 2, 1, "shrink")
    assert hosts.address(1) in failed.message
    assert result.train.world == 1 and result.train.steps == 150


@pytest.mark.slow
def test_hosts_learn_that_host_0_has_ended_while_they_wait_or_before_they_came(folder: Path) -> None:
    """Killed: of three hosts one never comes. Failed, its dataset away: one waits for it, one comes after."""
    lasting = "from sparkring.training.launch.join import hosts\nhosts.FAREWELL_S = 300.0\n"
    with hosts_of_one_machine("srw", 3) as hosts:

        def start(rank: int, *words: str) -> subprocess.Popen[bytes]:
            line = command(folder, "launch.world=3", *words)
            line[2] = lasting + line[2]
            return hosts.start(rank, line, host_variables(hosts, rank), folder / f"host{rank}.log")

        first, second = start(0), start(1)
        wait_for(lambda: hosts.are_connected(0, 1) or second.poll() is not None)
        hosts.kill(0)
        assert (second.wait(60), first.wait(60)) == (Exit.RESOURCES, -9)
        assert (
            "the driver has ended: nobody listens at its port any more; look at" in (folder / "host1.log").read_text()
        )

        second = start(1)
        wait_for(lambda: "host 1 of 3" in (folder / "host1.log").read_text())
        first = start(0, "dataset=nowhere")
        wait_for(lambda: first.poll() is not None or second.poll() is not None)
        third = start(2)
        codes = [one.wait(120) for one in (first, second, third)]
    assert codes == [Exit.DATA] * 3
    for rank in (1, 2):
        assert "nowhere: not a dataset: the folder does not exist" in (folder / f"host{rank}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("started_by", ["torchrun", "srun"])
def test_two_hosts_train_the_weights_of_the_same_job_on_spark(started_by: str, folder: Path) -> None:
    """Of as many threads for each rank: Spark's two ranks share one host's cores."""
    words, launcher = ["train.threads_per_rank=1"], Path(sys.executable).with_name("torchrun")
    with hosts_of_one_machine("srt", 2) as hosts:
        started = []
        for rank in range(2):
            torchrun = [
                *(str(launcher), "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", "--no-python"),
                *(f"--master-addr={hosts.address(0)}", "--master-port=29617"),
            ]
            before = torchrun if started_by == "torchrun" else []
            variables = CLEAN if started_by == "torchrun" else host_variables(hosts, rank)
            log = folder / f"host{rank}.log"
            started.append(hosts.start(rank, [*before, *command(folder, *words)], variables, log))
        codes = [one.wait(600) for one in started]
    allowed = (Exit.OK, Exit.QUALITY) if started_by == "srun" else (Exit.OK,)
    assert set(codes) <= {*allowed}, (folder / "host0.log").read_text()[-3000:]
    ours = weights_of(folder)
    (folder / "runs").rename(folder / "runs-on-hosts")
    on_spark = [sys.executable, "-m", "sparkring.pipelines.cli", *command(folder, *words, "launch.on=spark")[3:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **CLEAN}
    done = subprocess.run(on_spark, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode in (Exit.OK, Exit.QUALITY), done.stderr[-3000:]
    assert weights_of(folder) == ours


def test_a_command_that_needs_spark_names_the_extra_where_pyspark_is_missing() -> None:
    error = ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
    assert exit_code(error) == Exit.USAGE
    assert message(error).endswith("this command needs Spark, which is not installed: pip install 'sparkring[spark]'")
    assert exit_code(ModuleNotFoundError("No module named 'mine'", name="mine")) == Exit.BUG


@pytest.mark.parametrize(
    ("env", "has_spark", "on", "found"),
    [
        ({}, True, "auto", None),
        ({}, False, "auto", ALONE),
        ({}, True, "hosts", ALONE),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "h"}, True, "spark", None),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "h"}, True, "auto", Placement("variables", 0, 2, "h", 29500)),
    ],
)
def test_training_is_on_spark_unless_hosts_or_a_missing_pyspark_say_otherwise(
    env: dict[str, str], has_spark: bool, on: str, found: Placement | None, folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(jobs, "has_spark", lambda: has_spark)
    monkeypatch.setattr(os, "environ", env)
    resolved = load_config(str(folder / "recipe.yaml"), ["etl=null", "dataset=d", f"launch.on={on}"])
    assert jobs._placement(resolved) == found


def test_a_dataset_on_the_command_line_takes_the_place_of_the_recipes_etl_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(jobs, "_announced", lambda resolved, work: seen.append(resolved) or Exit.OK)
    words = argparse.Namespace(recipe=str(folder / "recipe.yaml"), overrides=["dataset=d", "launch.on=spark"])
    assert jobs._train(words) == Exit.OK
    assert seen[0].config.etl is None and seen[0].config.dataset == "d"
    assert seen[0].overrides == ("dataset=d", "launch.on=spark")


def test_a_dataset_that_is_not_there_ends_the_job_as_on_spark_before_hosts_are_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code was that of hosts which do not fit together."""
    monkeypatch.setattr(JoinedHosts, "gather", lambda hosts, least: pytest.fail("hosts were waited for"))
    words = [f"dataset={folder}/nope", "launch.on=hosts"]
    assert main(["train", str(folder / "recipe.yaml"), *words]) == Exit.DATA
    assert f"{folder}/nope: not a dataset: the folder does not exist" in capsys.readouterr().err


def test_hosts_do_not_build_a_dataset(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch.on = 'hosts': there is no Spark to build the dataset"):
        load_config(str(folder / "recipe.yaml"), ["launch.on=hosts"])


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "there is no secret by which 2 hosts know each other; make one by `openssl rand -hex 32`"),
        ({"SPARKRING_SECRET": "short"}, "SPARKRING_SECRET has 5 characters, and 16 are the least"),
        ({"SPARKRING_SECRET_FILE": "/no/such"}, "names a file that cannot be read ([Errno 2] No such file"),
    ],
)
def test_several_hosts_need_a_secret(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_secret(env, 2)
    assert said in str(error.value) and "short" not in str(error.value)
    assert find_secret(env, 1) is None


def test_the_secret_is_read_from_a_file_or_a_variable(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    assert find_secret({"SPARKRING_SECRET_FILE": str(tmp_path / "secret")}, 2) == "0123456789abcdef"
    assert find_secret({"SPARKRING_SECRET": "0123456789abcdef"}, 2) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "variable", "said"),
    [
        (" \n", "", "of SPARKRING_SECRET_FILE is empty; make one by `openssl"),
        ("0123456789abcdef\n", "fedcba9876543210", "SPARKRING_SECRET is another secret than the file"),
        ("0123456789abcdef\n", "0123456789abcdef\n", ""),
    ],
)
def test_an_empty_file_and_two_secrets_are_named(tmp_path: Path, text: str, variable: str, said: str) -> None:
    """Of an empty file the error was that there is no secret; of two the file's was taken without a word."""
    (tmp_path / "secret").write_text(text)
    env = {"SPARKRING_SECRET_FILE": str(tmp_path / "secret"), "SPARKRING_SECRET": variable}
    if not said:
        assert find_secret(env, 2) == text.strip()
        return
    with pytest.raises(ConfigError) as error:
        find_secret(env, 2)
    assert said in str(error.value) and "0123456789abcdef" not in str(error.value)


def test_a_world_that_the_hosts_have_no_room_for_is_refused() -> None:
    assert room_problems(LaunchConfig(world=4), 2, 2) == []
    (line,) = room_problems(LaunchConfig(world=5), 2, 2)
    assert line.startswith("launch.world = 5: 2 hosts with launch.ranks_per_host = 2: there is room for 4 ranks; set")


def test_a_host_joins_with_what_it_was_started_with(folder: Path) -> None:
    def resolved(*words: str) -> Any:
        given = ["etl=null", f"dataset={folder}/dataset", "launch.on=hosts", *words]
        return load_config(str(folder / "recipe.yaml"), given)

    place = Placement("variables", 1, 2, "h0", 29500)
    options = join_options(resolved("launch.world=3", "launch.port=4000"), place, CLEAN)
    assert (options.ranks, options.placement.port, options.secret) == (2, 4000, CLEAN["SPARKRING_SECRET"])
    assert len(options.dataset) == 64 and not options.problem
    assert recipe_digest(resolved()) == recipe_digest(resolved("launch.interface=eth1"))
    assert recipe_digest(resolved()) != recipe_digest(resolved("optim.lr=0.02"))
    (folder / "dataset/_manifest.json").unlink()
    fingerprint, problem = dataset_of(resolved().config)
    assert fingerprint == "" and problem.startswith(f"dataset = '{folder}/dataset': ")


def test_a_host_says_once_that_no_driver_answers_yet(caplog: pytest.LogCaptureFixture) -> None:
    """It waited without a word."""
    options = JoinOptions(Placement("variables", 1, 2, "h0", 29500), "r", "d", "", 1, (), wait_s=300.0)
    for have_come, lines in ((False, 1), (True, 0)):
        caplog.clear()
        answers = iter([False, False, True])
        agents = SimpleNamespace(wait=lambda _, found=answers: next(found), have_come=have_come, result=Bye)
        assert follow(agents, 10.0, unanswered(options)) == 0  # type: ignore[arg-type]
        assert len(caplog.messages) == lines
    assert unanswered(options).startswith("no driver at h0:29500 so far: host 0 has not started yet, or has ended")
