"""Ranks find each other for XGBoost, whoever else connects to what they listen on."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import cycle, islice

import psutil
import pytest

from tests.helpers.ports import unused_port

pytestmark = pytest.mark.ranks
MAGIC = struct.pack("=i", 0xFF99)
RANK = """
import json, sys
from datetime import timedelta
import numpy as np, torch.distributed as dist, xgboost
from sparkring.conf.rank_info import RankInfo
from sparkring.training.trees.collective import connected
from sparkring.training.worker.agreement import torch_peers

rank, limit_s = int(sys.argv[1]), 60.0
out = sys.stdout

def told(word):
    print(word, flush=True, file=out)  # sys.stdout is XGBoost's at times
    sys.stdin.readline()

while line := sys.stdin.readline():
    world, port = map(int, line.split())
    limit = timedelta(seconds=limit_s)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=limit)
    peers = torch_peers(limit)

    def gather(data):
        if data.startswith(b"{"):
            told("OPEN")  # until strangers have come
        return peers.gather(data)

    told("BEFORE")
    with connected(RankInfo(rank=rank, local_rank=rank, world_size=world, local_size=world), gather, limit_s):
        told("JOINED")
        draw = np.random.default_rng(rank)
        rows = draw.normal(size=(300, 4)).astype(np.float32)
        data = xgboost.QuantileDMatrix(rows, (rows[:, 0] * rows[:, 1] > 0).astype(np.float32), nthread=1)
        trees = xgboost.train({"objective": "binary:logistic", "nthread": 1, "seed": 1}, data, 10)
    dist.destroy_process_group()
    print(trees.save_raw().hex(), flush=True, file=out)
"""


def framed(message: dict[str, object]) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("=i", len(text)) + text


def as_rank(rank: int, world: int) -> bytes:
    """What a worker of XGBoost says to a tracker that it takes for its own."""
    named = {"rank": 0, "task_id": f"{rank:08d}", "world_size": -1}
    return MAGIC + framed(named) + framed({"cmd": 1, "error_port": 1, "port": 1})


SAYINGS = (
    b"",
    os.urandom(200),
    MAGIC + struct.pack("=i", 1 << 30) + b"{",  # half of a message
    as_rank(1, 2),
    MAGIC + framed({"rank": 0, "task_id": "00000000", "world_size": 2}) + framed({"cmd": 2}),  # an end
    struct.pack("=i", 1),  # an error, to a worker
    struct.pack("=i", -1),
)


def ports_of(rank: subprocess.Popen[str]) -> set[int]:
    """The ports on which a rank listens."""
    found = psutil.Process(rank.pid).net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def visit(strangers: ExitStack, ports: set[int], each: int) -> None:
    """Connect to ports with every saying in turn, and stay."""
    for port in ports:
        for saying in islice(cycle(SAYINGS), each):
            with suppress(OSError):  # sent away while it speaks, or too many wait at the port
                strangers.enter_context(one := socket.create_connection(("127.0.0.1", port), 0.5))
                one.sendall(saying)


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of all trainings: to import what ranks use takes longer than a training."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as ended:
        for rank in range(3):
            command = [sys.executable, "-c", RANK, str(rank)]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.append(ended.enter_context(process))
            ended.callback(process.kill)
        yield started


def tell(ranks: list[subprocess.Popen[str]], line: str) -> None:
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write(f"{line}\n")
        rank.stdin.flush()


def said(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Read the next line of each rank."""
    return [rank.stdout.readline().strip() for rank in ranks if rank.stdout]


def train(ranks: list[subprocess.Popen[str]], strangers_each: int = 0) -> list[str]:
    """Return each rank's trees. Strangers come to XGBoost's ports before the ranks join, and again once they have."""
    tell(ranks, f"{len(ranks)} {unused_port()}")
    of_torch: list[set[int]] = []
    with ExitStack() as strangers:
        for word in ("BEFORE", "OPEN", "JOINED"):
            assert said(ranks) == [word] * len(ranks)
            of_torch = of_torch or [ports_of(rank) for rank in ranks]
            for rank, known in zip(ranks, of_torch, strict=True):
                visit(strangers, ports_of(rank) - known, strangers_each)
            tell(ranks, "go")
        return said(ranks)


@pytest.mark.parametrize(("world", "strangers"), [(2, 200), (3, 12)])
def test_strangers_at_each_port_of_xgboost_change_no_bit(
    ranks: list[subprocess.Popen[str]], world: int, strangers: int
) -> None:
    undisturbed = train(ranks[:world])
    assert all(undisturbed) and train(ranks[:world], strangers) == undisturbed
