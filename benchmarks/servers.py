"""Parameter servers: small and large pulls beside torch's RPC and Gloo's send and receive, and steps by bound.

`python benchmarks/servers.py pulls` and `python benchmarks/servers.py bounds`; each prints a table of the medians of
interleaved runs. Two processes on loopback, one thread each; with `bounds` four workers and two servers, whose steps
take a lognormal time (sigma 0.5, mean 20 ms), once with one worker that is three times as slow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from machine import measured_with, publish
from torch import nn

from sparkring.training.servers.client import Client, Gradient, cut_gradient, global_squares
from sparkring.training.servers.definition import Definition
from sparkring.training.servers.server import Server, ServerPlace
from sparkring.training.tables.table import TableSpec

SECRET, DIM = b"s" * 32, 16
SECONDS = 2.0  # of a measurement


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named] or [nn.Parameter(torch.zeros(1))], lr=1.0)


def serve(port: Any, server: int, servers: int, workers: int) -> None:
    torch.set_num_threads(1)
    made = Server(ServerPlace(server, servers, workers, 1, SECRET), sgd)
    port.send(made.port)
    made.run()


class Servers:
    """Server processes."""

    def __init__(self, servers: int, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ports, self.processes = [], []
        for server in range(servers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, server, servers, workers), daemon=True)
            process.start()
            self.ports.append(ours.recv())
            self.processes.append(process)

    def __enter__(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", port) for port in self.ports]

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def per_second(act: Callable[[], object]) -> float:
    for _ in range(20):
        act()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        act()
        calls += 1
    return calls / (time.perf_counter() - began)


# --- pulls -----------------------------------------------------------------------------------------------------------


def ours(rows: int) -> float:
    """Rows of 16 floats looked up by id, over the servers' protocol."""
    with Servers(1, 1) as addresses:
        client = Client(addresses, SECRET, 0, 1, 30.0)
        client.define(Definition(1, {}, "float32", (TableSpec("t", DIM, 0.1),)))
        ids = np.sort(np.random.default_rng(0).choice(10**6, rows, replace=False)).astype(np.int64)
        found = per_second(lambda: client.look_up([ids]))
        client.close()
    return found


STORE: dict[str, torch.Tensor] = {}


def rpc_rows(ids: torch.Tensor) -> torch.Tensor:
    if "t" not in STORE:
        STORE["t"] = torch.zeros(10**6, DIM)
    return STORE["t"][ids]


def rpc_server(address: str) -> None:

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, num_worker_threads=4)
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=options)
    rpc.shutdown()


def torch_rpc(rows: int) -> float:
    """The same rows of a tensor, over torch.distributed.rpc, in processes of their own: it cannot be begun twice."""
    context = multiprocessing.get_context("spawn")
    result: Any = context.Queue()
    with tempfile.NamedTemporaryFile() as file:
        address = f"file://{file.name}-rpc"
        processes = [
            context.Process(target=rpc_server, args=(address,)),
            context.Process(target=rpc_client, args=(address, rows, result)),
        ]
        for process in processes:
            process.start()
        found = result.get(timeout=120)
        for process in processes:
            process.join(20)
            process.kill()
    return float(found)


def rpc_client(address: str, rows: int, result: Any) -> None:

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, num_worker_threads=4)
    rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=options)
    ids = torch.randint(0, 10**6, (rows,))
    result.put(per_second(lambda: rpc.rpc_sync("server", rpc_rows, args=(ids,))))
    rpc.shutdown()


def gloo_server(address: str, rows: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=1, world_size=2)
    table, ids = torch.zeros(10**6, DIM), torch.empty(rows, dtype=torch.int64)
    while True:
        dist.recv(ids, src=0)
        if int(ids[0]) < 0:
            return
        dist.send(table[ids], dst=0)


def gloo(rows: int) -> float:
    context = multiprocessing.get_context("spawn")
    result: Any = context.Queue()
    with tempfile.NamedTemporaryFile() as file:
        address = f"file://{file.name}-gloo"
        server = context.Process(target=gloo_server, args=(address, rows))
        client = context.Process(target=gloo_client, args=(address, rows, result))
        server.start()
        client.start()
        found = result.get(timeout=120)
        for process in (client, server):
            process.join(20)
            process.kill()
    return float(found)


def gloo_client(address: str, rows: int, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=2)
    ids, answer = torch.randint(0, 10**6, (rows,)), torch.empty(rows, DIM)

    def act() -> None:
        dist.send(ids, dst=1)
        dist.recv(answer, src=1)

    found = per_second(act)
    dist.send(torch.full((rows,), -1), dst=1)
    result.put(found)


def pulls(rounds: int) -> str:
    ways: dict[str, Callable[[int], float]] = {"these servers": ours, "torch RPC": torch_rpc, "Gloo": gloo}
    sizes = (64, 1024, 16384)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for rows in sizes:
            for name, way in ways.items():
                found.setdefault((name, rows), []).append(way(rows))
    lines = [f"| rows of {DIM} floats | " + " | ".join(ways) + " |", "|" + "---|" * (len(ways) + 1)]
    for rows in sizes:
        rates = [statistics.median(found[name, rows]) for name in ways]
        cells = [f"{rate:,.0f} pulls/s, {rate * rows * DIM * 4 / 1e6:,.0f} MB/s" for rate in rates]
        lines.append(f"| {rows:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- bounds ----------------------------------------------------------------------------------------------------------

WORKERS, SERVERS, CLOCKS, ELEMENTS = 4, 2, 60, 10_000
MEAN_S, SIGMA = 0.02, 0.5


def worker(number: int, addresses: list[tuple[str, int]], bound: int | None, slow: bool, seconds: Any) -> None:
    torch.set_num_threads(1)
    client = Client(addresses, SECRET, number, WORKERS, 60.0)
    given = Definition(WORKERS, {"w": [ELEMENTS]}, "float32", (), 1.0, bound)
    client.define(given)
    client.round(-1, "main", 0, b"")
    if number == 0:
        client.begin(0)
    client.round(-1, "main", 1, b"")
    draw = np.random.default_rng(number)
    began = time.perf_counter()
    for clock in range(CLOCKS):
        pulled = client.pull(clock, 0, [])
        time.sleep(MEAN_S * draw.lognormal(-(SIGMA**2) / 2, SIGMA) * (3 if slow and number == 0 else 1))
        gradient = Gradient(pulled.weights * 0.01, frozenset(), [], [], 1.0, 0.1)
        frames = client.push(cut_gradient(gradient, given, number, clock, 0, pulled.versions))
        if bound == 0:
            global_squares(frames)
            client.settle(clock, 1.0)
    seconds.put(time.perf_counter() - began)


def steps_per_second(bound: int | None, slow: bool) -> float:
    """Steps of all workers together, until the last is done."""
    context = multiprocessing.get_context("spawn")
    seconds: Any = context.Queue()
    with Servers(SERVERS, WORKERS) as addresses:
        processes = [context.Process(target=worker, args=(n, addresses, bound, slow, seconds)) for n in range(WORKERS)]
        for process in processes:
            process.start()
        spent = [seconds.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    return sum(CLOCKS / each for each in spent)


def bounds(rounds: int) -> str:
    cases = [(bound, slow) for slow in (False, True) for bound in (0, 1, 3, None)]
    found: dict[Any, list[float]] = {}
    for _ in range(rounds):
        for case in cases:
            found.setdefault(case, []).append(steps_per_second(*case))
    lines = ["| steps/s of four workers, by bound | 0 | 1 | 3 | none |", "|---|---|---|---|---|"]
    for slow in (False, True):
        cells = [f"{statistics.median(found[bound, slow]):.0f}" for bound in (0, 1, 3, None)]
        lines.append(
            f"| {'one of them three times as slow' if slow else 'lognormal times'} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["pulls", "bounds"])
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is taken")
    parser.add_argument("--out", type=Path, help="write the result there too")
    arguments = parser.parse_args()
    table = {"pulls": pulls, "bounds": bounds}[arguments.what](arguments.rounds)
    publish(f"{measured_with('torch')}\n\n{table}\n", arguments.out)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    main()
