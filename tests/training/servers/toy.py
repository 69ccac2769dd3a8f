"""A small problem whose gradients are functions of (worker, clock) and of what was pulled, and servers for it."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkring.conf.storage import open_storage
from sparkring.training.servers.client import Client, Gradient, Pulled, cut_gradient, global_squares, statuses
from sparkring.training.servers.definition import Definition
from sparkring.training.servers.event_log import LogFile, decode
from sparkring.training.servers.messages import ShardStatus
from sparkring.training.servers.replay import Workers
from sparkring.training.servers.server import Server, ServerPlace
from sparkring.training.servers.shard import ServerShard
from sparkring.training.tables.hashing import Ids
from sparkring.training.tables.table import TableSpec
from sparkring.training.tables.update_rules import UpdateRule

SECRET = b"s" * 32
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (5, 7), "bias": (7,), "gain": ()}
ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())
LR = 0.05


def make_optimizer(named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    groups = [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() <= 1]}]
    return torch.optim.AdamW([group for group in groups if group["params"]] or groups, lr=1.0, weight_decay=0.1)


def make_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named] or [nn.Parameter(torch.zeros(0))], lr=1.0)


def definition(workers: int, rule: str = "rowwise_adagrad", **settings: Any) -> Definition:
    tables = (
        TableSpec("users", 4, 0.3, 3, UpdateRule(rule), "float64"),
        TableSpec("items", 2, 0.1, 3, dtype="float64"),
    )  # type: ignore[arg-type]
    return Definition(workers, {k: list(v) for k, v in SHAPES.items()}, "float64", tables, 2.0, **settings)


def ids_of(worker: int, clock: int) -> list[Ids]:
    """Half of the ids are known, the others new in every clock and shared between workers."""
    draw = np.random.default_rng([worker, clock])
    known = draw.integers(-15, 15, 6) * (2**57 - 1)
    return [np.unique(np.concatenate([known, clock * 10 + np.arange(3)])), np.unique(draw.integers(0, 40, 5))]


def gradient_of(worker: int, clock: int, pulled: Pulled) -> Gradient:
    draw = torch.Generator().manual_seed(1000 * worker + clock)
    dense = pulled.weights * 0.3 + torch.randn(ELEMENTS, generator=draw, dtype=torch.float64)
    rows = [np.sin(row * 3 + worker) + 0.1 * clock % 7 + float(dense[0]) for row in pulled.rows]
    absent = frozenset({"gain"}) if (worker + clock) % 5 == 0 else frozenset[str]()
    if absent:
        dense[-1] = 0
    squares = float(dense.square().sum()) + sum(float(np.square(row).sum()) for row in rows)
    return Gradient(dense, absent, ids_of(worker, clock), rows, math.sqrt(squares), LR / (1 + clock % 3))


def factor_of(squares: float, finite: bool = True) -> float:
    """Clipped to a norm of 3."""
    return min(1.0, 3 / (math.sqrt(squares) + 1e-6)) if finite else math.nan


WORKERS = Workers(ids_of, lambda one, pulled: gradient_of(one.worker, one.clock, pulled), factor_of)


def at_once(client: Client, clock: int) -> None:
    """Push a gradient as soon as it is computed."""


def run_clock(
    client: Client,
    clock: int,
    attempt: int = 0,
    twice: bool = False,
    before_push: Callable[[Client, int], None] = at_once,
) -> list[ShardStatus]:
    """One clock of a worker, computed again while a server rejects it; `twice`: the push is sent again."""
    while True:
        pulled = client.pull(clock, attempt, ids_of(client.worker, clock))
        gradient = gradient_of(client.worker, clock, pulled)
        before_push(client, clock)
        pushes = cut_gradient(gradient, client.definition, client.worker, clock, attempt, pulled.versions)
        frames = client.push(pushes)
        if client.definition.synchronous:
            squares, _ = global_squares(frames)
            client.settle(clock, factor_of(squares))
        if twice:
            again = statuses(client.push(pushes))
            assert all(s in (ShardStatus.REPEATED, ShardStatus.REJECTED) for s in again), again
        found = statuses(frames)
        if ShardStatus.REJECTED not in found:
            return found
        attempt += 1


@contextmanager
def servers(count: int, workers: int, events: Path | None = None, make: Any = make_optimizer) -> Iterator[list[Server]]:
    """Real servers on loopback, in threads of this process."""
    folder = open_storage(str(events)) if events is not None else None
    made = [Server(ServerPlace(n, count, workers, 1, SECRET, folder), make) for n in range(count)]
    threads = [threading.Thread(target=_run, args=(server,)) for server in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for server in made:
            server.close()
        for thread in threads:
            thread.join()


def _run(server: Server) -> None:
    try:
        server.run()
    except Exception as error:
        server.ended_with = error  # type: ignore[attr-defined]


def connect(made: Sequence[Server], worker: int, given: Definition) -> Client:
    client = Client([("127.0.0.1", server.port) for server in made], SECRET, worker, given.workers, 60.0)
    client.define(given)
    return client


def start_weights() -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def run_all(
    made: Sequence[Server], given: Definition, clocks: int, body: Callable[[Client, int], Any] = run_clock
) -> list[Client]:
    """All workers' clocks, each in a thread of its own; ends at a cut with the logs written."""
    clients = [connect(made, worker, given) for worker in range(given.workers)]
    clients[0].load_dense(start_weights(), {})
    clients[0].begin(0)
    errors: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            for clock in range(clocks):
                body(client, clock)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    clients[0].write_logs(clocks)
    return clients


def jittered(
    twice_share: float, straggler: int | None, before_push: Callable[[Client, int], None] = at_once
) -> Callable[[Client, int], Any]:
    """Clocks of lognormal length, one worker three times as slow, some pushes sent twice."""

    def body(client: Client, clock: int) -> None:
        draw = random.Random(f"0 {client.worker} {clock}")
        pause_s = 0.002 * draw.lognormvariate(0, 0.8) * (3 if client.worker == straggler else 1)

        def late(client: Client, clock: int) -> None:
            time.sleep(pause_s)
            before_push(client, clock)

        run_clock(client, clock, 0, draw.random() < twice_share, late)

    return body


def read_logs(folder: Path, clocks: int, count: int) -> list[LogFile]:
    names = [folder / f"attempt-00001/clocks-00000000-{clocks:08d}/server-{n:05d}.events" for n in range(count)]
    return [decode(name.read_bytes(), str(name)) for name in names]


def fresh_shards(given: Definition, count: int, make: Any = make_optimizer) -> list[ServerShard]:
    shards = [ServerShard(given, number, count, make) for number in range(count)]
    edges = np.cumsum([0, *(len(shard.weights) for shard in shards)])
    for shard, start in zip(shards, edges[:-1], strict=True):
        shard.weights.copy_(start_weights()[start : start + len(shard.weights)])
        shard.begin(0)
    return shards
