"""Parameter servers beside others: pulls beside torch's RPC and Gloo, and samples per second by bound beside a ring.

`python benchmarks/servers.py pulls` asks one process for what another holds: rows of 16 floats by id, of a table of a
million, and 16 MiB of dense weights. `python benchmarks/servers.py bounds` has four workers and two servers, and a
gradient of 400 kB. As there are more workers than cores, a sleep stands for the computing: lognormal, sigma 0.5, its
mean 20 ms for 32 rows; in half of the cases one worker's is three times as long. Of n + 1 workers with one backup n
share the global batch, so their parts are larger. Both print the medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from machine import measured_with, publish
from torch import nn

from sparkring.training.servers.backup import StepOutcome
from sparkring.training.servers.client import Client, Gradient, cut_gradient, global_squares, statuses
from sparkring.training.servers.definition import Definition
from sparkring.training.servers.messages import ShardStatus
from sparkring.training.servers.server import Server, ServerPlace
from sparkring.training.tables.table import TableSpec

SECRET = b"s" * 32
FORK = multiprocessing.get_context("fork")  # torch is imported once; nothing of it runs in this process
Addresses = list[tuple[str, int]]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named] or [nn.Parameter(torch.zeros(1))], lr=1.0)


def serve(port: Any, server: int, servers: int, workers: int) -> None:
    torch.set_num_threads(1)
    made = Server(ServerPlace(server, servers, workers, 1, SECRET), sgd)
    port.send(made.port)
    made.run()


@contextmanager
def processes(*calls: tuple[Callable[..., None], tuple[Any, ...]]) -> Iterator[None]:
    """Run functions in processes of their own, which are killed at the end."""
    started = [FORK.Process(target=function, args=args, daemon=True) for function, args in calls]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:  # all at once: one that misses another complains
            process.kill()
        for process in started:
            process.join()


@contextmanager
def serving(servers: int, workers: int) -> Iterator[Addresses]:
    pipes = [FORK.Pipe() for _ in range(servers)]
    with processes(*[(serve, (theirs, n, servers, workers)) for n, (_, theirs) in enumerate(pipes)]):
        yield [("127.0.0.1", ours.recv()) for ours, _ in pipes]


# --- pulls -----------------------------------------------------------------------------------------------------------

ROWS, DIM, DENSE = 10**6, 16, 1 << 22  # of the table; values of a row; floats of the dense part
PULLS = (64, 1024, 16384, 0)  # rows; 0: the dense part
PULLS_S = 1.5  # of a measurement


def per_second(act: Callable[[], object]) -> float:
    for _ in range(5):
        act()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < PULLS_S:
        act()
        calls += 1
    return calls / (time.perf_counter() - began)


def drawn_ids(rows: int) -> np.ndarray:
    return np.sort(np.random.default_rng(0).choice(ROWS, rows, replace=False)).astype(np.int64)


def our_rates(rates: Any) -> None:
    """A client of one server with the table, and of one with the dense part."""
    torch.set_num_threads(1)
    table = (TableSpec("t", DIM, 0.1),)
    found = []
    for shapes, tables, kinds in (({}, table, PULLS[:-1]), ({"w": [DENSE]}, (), PULLS[-1:])):
        with serving(1, 2) as addresses:
            client = Client(addresses, SECRET, 0, 2, 60.0)
            client.define(Definition(2, shapes, "float32", tables, backup=1))  # so a pull may be repeated
            for ids in np.split(np.arange(ROWS), 10) if tables else ():
                client.begin_table(0, ids, np.zeros((len(ids), DIM), np.float32))
            client.begin(0)
            for rows in kinds:
                wanted = [drawn_ids(rows)] if tables else []
                found.append(per_second(lambda client=client, wanted=wanted: client.pull(0, 0, wanted)))
            client.close()
    rates.send(found)


class Held:
    """What the process that is asked by RPC holds."""

    rows = torch.zeros(0, DIM)
    dense = torch.zeros(0)


def rpc_pull(ids: torch.Tensor) -> torch.Tensor:
    return Held.rows[ids] if len(ids) else Held.dense


def rpc_rates(rates: Any, address: str, rank: int) -> None:
    torch.set_num_threads(1)
    Held.rows, Held.dense = torch.zeros(ROWS, DIM), torch.zeros(DENSE)
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, num_worker_threads=4)
    rpc.init_rpc(f"{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        wanted = [torch.from_numpy(drawn_ids(rows)) for rows in PULLS]
        rates.send([per_second(lambda ids=ids: rpc.rpc_sync("1", rpc_pull, args=(ids,))) for ids in wanted])
    time.sleep(60)


def gloo_rates(rates: Any, address: str, rank: int) -> None:
    """Ids and rows as plain messages, whose sizes both sides know."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    table, dense, found = torch.zeros(ROWS, DIM), torch.zeros(DENSE), []
    for rows in PULLS:
        ids = torch.from_numpy(drawn_ids(max(rows, 1)))
        answer = torch.empty(rows, DIM) if rows else torch.empty(DENSE)

        def ask(ids: torch.Tensor = ids, answer: torch.Tensor = answer) -> None:
            dist.send(ids, dst=1)
            dist.recv(answer, src=1)

        if rank == 0:
            found.append(per_second(ask))
            dist.send(torch.full_like(ids, -1), dst=1)
            continue
        while True:
            dist.recv(ids, src=0)
            if int(ids[0]) < 0:
                break
            dist.send(table[ids] if rows else dense, dst=0)
    if rank == 0:
        rates.send(found)
    time.sleep(60)


def rates_of(function: Callable[..., None]) -> list[float]:
    """Pulls per second of each of PULLS."""
    ours, theirs = FORK.Pipe()
    if function is our_rates:
        process = FORK.Process(target=our_rates, args=(theirs,))  # it has children
        process.start()
        found: list[float] = ours.recv()
        process.join()
        return found
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        with processes(*[(function, (theirs, address, rank)) for rank in range(2)]):
            return list(ours.recv())


def pulls(rounds: int) -> str:
    ways = {"these servers": our_rates, "torch.distributed.rpc": rpc_rates, "Gloo send and receive": gloo_rates}
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(rates_of(way))
    lines = ["| one pull | " + " | ".join(ways) + " |", "|" + "---|" * (len(ways) + 1)]
    for number, rows in enumerate(PULLS):
        size = (rows * DIM or DENSE) * 4
        rates = [statistics.median(each[number] for each in found[name]) for name in ways]
        cells = [f"{rate:,.0f} a second, {rate * size / 1e6:,.0f} MB/s" for rate in rates]
        lines.append(f"| {f'{rows:,} rows' if rows else '16 MiB dense'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- bounds ----------------------------------------------------------------------------------------------------------

WORKERS, SERVERS, ELEMENTS, PART_ROWS = 4, 2, 100_000, 32
MEAN_S, SIGMA, SLOW = 0.02, 0.5, 3
WARM_S, WINDOW_S = 0.7, 2.5


@dataclass(frozen=True)
class Case:
    """How workers train. bound: -1: a ring, None: no bound. slow: whether worker 0 is, all the time."""

    bound: int | None
    backup: int = 0
    slow: bool = False

    @property
    def name(self) -> str:
        if self.bound == -1:
            return "ring"
        return f"backup {self.backup}" if self.backup else f"bound {'none' if self.bound is None else self.bound}"


def computing(case: Case, worker: int) -> Callable[[], None]:
    """Sleeps for as long as a worker computes one part."""
    draw = np.random.default_rng(worker)
    mean_s = MEAN_S * WORKERS / (WORKERS - case.backup) * (SLOW if case.slow and worker == 0 else 1)
    return lambda: time.sleep(mean_s * draw.lognormal(-(SIGMA**2) / 2, SIGMA))


def ring_worker(case: Case, worker: int, address: str, steps: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=worker, world_size=WORKERS)
    compute, gradient = computing(case, worker), torch.zeros(ELEMENTS)
    while True:
        compute()
        dist.all_reduce(gradient)
        steps[worker] += 1


def served_worker(case: Case, worker: int, addresses: Addresses, steps: Any) -> None:
    torch.set_num_threads(1)
    client = Client(addresses, SECRET, worker, WORKERS, 60.0)
    given = Definition(WORKERS, {"w": [ELEMENTS]}, "float32", bound=case.bound, backup=case.backup)
    client.define(given)
    client.round(-1, "main", 0, b"")
    if worker == 0:
        client.begin(0)
    client.round(-1, "main", 1, b"")
    compute = computing(case, worker)
    while True:
        one_step(client, given, worker, steps[worker], compute)
        steps[worker] += 1


def one_step(client: Client, given: Definition, worker: int, step: int, compute: Callable[[], None]) -> None:
    """What training/parallel/servers does in a step, with a gradient that costs nothing."""
    has_gradient = False
    if not given.backup or client.take(step, 1 << 20) is not None:
        pulled = client.pull(step, 0, [])
        compute()
        gradient = Gradient(pulled.weights * 0.01, frozenset(), [], [], 1.0, 0.1)
        frames = client.push(cut_gradient(gradient, given, worker, step, 0, pulled.versions))
        if given.synchronous and not given.backup:
            global_squares(frames)
            client.settle(step, 1.0)
        has_gradient = ShardStatus.LATE not in statuses(frames)
    while given.backup and not isinstance(chosen := client.choose(step, has_gradient), StepOutcome):
        if client.add_up(step, chosen) is not None:
            client.settle(step, 1.0)
            client.made(step, 1.0, None)


def samples_per_second(case: Case) -> float:
    steps = FORK.Array("q", WORKERS, lock=False)
    with tempfile.TemporaryDirectory() as folder, serving(SERVERS, WORKERS) as addresses:
        worker, where = (ring_worker, f"file://{folder}/store") if case.bound == -1 else (served_worker, addresses)
        with processes(*[(worker, (case, number, where, steps)) for number in range(WORKERS)]):
            while not min(steps):
                time.sleep(0.01)
            time.sleep(WARM_S)
            before, began = sum(steps), time.perf_counter()
            time.sleep(WINDOW_S)
            made, spent = sum(steps) - before, time.perf_counter() - began
    return made * PART_ROWS / spent  # a step of all workers is of WORKERS * PART_ROWS rows, with a backup too


def bounds(rounds: int) -> str:
    ways = [Case(-1), Case(0), Case(0, backup=1), Case(1), Case(3), Case(10), Case(None)]
    cases = [Case(way.bound, way.backup, slow) for slow in (False, True) for way in ways]
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(samples_per_second(case))
    names = " | ".join(way.name for way in ways)
    lines = [f"| samples/s of {WORKERS} workers | {names} |", "|" + "---|" * (len(ways) + 1)]
    for slow in (False, True):
        cells = [f"{statistics.median(found[case]):,.0f}" for case in cases if case.slow == slow]
        name = f"one worker {SLOW} times as slow" if slow else "all equally fast"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=["pulls", "bounds"])
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is taken")
    parser.add_argument("--out", type=Path, help="write the result there too")
    arguments = parser.parse_args()
    tables = [{"pulls": pulls, "bounds": bounds}[what](arguments.rounds) for what in arguments.what]
    publish("\n\n".join([measured_with("torch", "numpy"), *tables]) + "\n", arguments.out)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    main()
