"""Ranks find each other for XGBoost, whoever else connects to what they listen on."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
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

rank, world = map(int, sys.argv[1:3])
dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
peers = torch_peers(timedelta(seconds=60))

def gather(data):
    if data.startswith(b"{"):
        print("OPEN", flush=True, file=sys.__stdout__)  # sys.stdout is XGBoost's now
        sys.stdin.readline()  # until strangers have come
    return peers.gather(data)

print("BEFORE", flush=True)
sys.stdin.readline()
with connected(RankInfo(rank=rank, local_rank=rank, world_size=world, local_size=world), gather, 60.0):
    print("JOINED", flush=True)
    sys.stdin.readline()
    draw = np.random.default_rng(rank)
    rows = draw.normal(size=(300, 4)).astype(np.float32)
    data = xgboost.QuantileDMatrix(rows, (rows[:, 0] * rows[:, 1] > 0).astype(np.float32), nthread=1)
    trees = xgboost.train({"objective": "binary:logistic", "nthread": 1, "seed": 1}, data, 10)
print("TREES", trees.save_raw().hex(), flush=True)
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


def train(world: int, strangers_each: int = 0) -> list[str]:
    """Return each rank's trees. Strangers come to XGBoost's ports before the ranks join, and again once they have."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "OMP_NUM_THREADS": "1"}
    with ExitStack() as strangers:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(world)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        for rank in ranks:
            strangers.callback(rank.wait)
            strangers.callback(rank.kill)
        of_torch: list[set[int]] = []
        for word in ("BEFORE", "OPEN", "JOINED"):
            for rank in ranks:
                assert rank.stdout and rank.stdout.readline().strip() == word
            of_torch = of_torch or [ports_of(rank) for rank in ranks]
            for rank, known in zip(ranks, of_torch, strict=True):
                visit(strangers, ports_of(rank) - known, strangers_each)
            for rank in ranks:
                assert rank.stdin
                rank.stdin.write("go\n")
                rank.stdin.flush()
        said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world
    return [trees for _, trees in said]


@pytest.mark.parametrize(("world", "strangers"), [(2, 200), (3, 12)])
def test_strangers_at_each_port_of_xgboost_change_no_bit(world: int, strangers: int) -> None:
    assert train(world, strangers) == train(world)
