"""Which host of a job this is, by the variables of what has started it: one table, and what is refused."""

from __future__ import annotations

import re

import pytest

from sparkring.training.launch.join.placement import ALONE, Placement, expand_nodes, find_placement, overlooked_hosts

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
}
BY_HAND = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
TRAIN_JOB = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "29400"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SRUN = {
    "SLURM_JOB_ID": "10321",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08],big1",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "h0",
}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, ALONE),
        ({"SLURM_JOB_ID": "5", "SLURM_NODEID": "0"}, ALONE),  # a batch script, which srun has not started
        ({"RANK": "1", "WORLD_SIZE": "2"}, ALONE),  # left in a shell
        (TORCHRUN, Placement("torchrun", 1, 3, "h0", 29501, rank_key="GROUP_RANK")),
        (TORCHRUN | BY_HAND, Placement("torchrun", 1, 3, "10.0.0.1", 4001, rank_key="GROUP_RANK")),
        (BY_HAND, Placement("variables", 1, 2, "10.0.0.1", 4000)),
        (SRUN | BY_HAND, Placement("variables", 1, 2, "10.0.0.1", 4000)),
        ({"NODE_RANK": "0", "NNODES": "1"}, Placement("variables", 0, 1, "127.0.0.1", 29500)),
        ({"NODE_RANK": "1", "NNODES": "2:4", "MASTER_ADDR": "h0"}, Placement("variables", 1, 4, "h0", 29500)),
        (TRAIN_JOB, Placement("variables", 0, 2, "job-0", 29400, rank_key="PET_NODE_RANK")),
        (PYTORCH_JOB, Placement("variables", 1, 2, "job-master-0", 23456, rank_key="RANK")),
        (SRUN, Placement("srun", 2, 3, "gpu07", 20321, ("gpu07", "gpu08", "big1"), "SLURM_NODEID")),
        (
            SRUN | {"MASTER_ADDR": "ib-gpu07", "MASTER_PORT": "4000"},
            Placement("srun", 2, 3, "ib-gpu07", 4000, ("gpu07", "gpu08", "big1"), "SLURM_NODEID"),
        ),
        (
            {"SLURM_STEP_ID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"},
            Placement("srun", 1, 2, "10.0.0.9", 20007, (), "SLURM_NODEID"),
        ),
        (MPIRUN, Placement("mpirun", 1, 2, "h0", 29500, rank_key="OMPI_COMM_WORLD_RANK")),
    ],
)
def test_a_host_finds_its_place_by_the_variables_of_what_started_it(env: dict[str, str], found: Placement) -> None:
    assert find_placement(env) == found


def test_a_job_of_several_hosts_that_srun_has_not_started_is_told() -> None:
    assert overlooked_hosts({}) == overlooked_hosts(SRUN) == overlooked_hosts({"SLURM_NNODES": "1"}) == ""
    said = overlooked_hosts({"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "4"})
    assert "has given this job 4 hosts" in said and "srun --ntasks-per-node=1" in said


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (TORCHRUN | {"LOCAL_RANK": "1"}, "LOCAL_RANK = '1': `sparkring train` is started once on each host"),
        (SRUN | {"SLURM_LOCALID": "3"}, "start it by `srun --ntasks-per-node=1`"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "mpirun --map-by ppr:1:node"),
        (BY_HAND | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set: 2 hosts need the address of the first one"),
        (TRAIN_JOB | {"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({key: value for key, value in MPIRUN.items() if key != "MASTER_ADDR"}, "MASTER_ADDR is not set"),
        ({"NODE_RANK": "0"}, "NODE_RANK = '0': NNODES, the number of hosts, is not set"),
        (
            {"RANK": "1", "MASTER_ADDR": "h0"},
            "RANK = '1': WORLD_SIZE, the number of hosts, is not set",
        ),  # trained alone
        (BY_HAND | {"NODE_RANK": "2"}, "NODE_RANK = '2': the job is of 2 hosts, numbered from 0"),
        (BY_HAND | {"NODE_RANK": "first"}, "NODE_RANK = 'first': must be a whole number, 0 or more"),
        (BY_HAND | {"NODE_RANK": "-1"}, "NODE_RANK = '-1': must be a whole number, 0 or more"),
        (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT = 70000: a port from 1 to 65534"),
        ({"SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}, "the first host is not known"),
    ],
)
def test_variables_that_do_not_fit_are_named_with_what_to_do(env: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        find_placement(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-011,2]-ib,login", ["n008-ib", "n009-ib", "n010-ib", "n011-ib", "n2-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_slurms_short_form_of_hosts_is_written_out(text: str, hosts: list[str]) -> None:
    assert expand_nodes(text) == hosts
