"""Ranks whose weights are on servers, each server a process of its own beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch, BatchShare
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.models.task import Task
from sparkring.training.parallel.batching import part_bounds, slice_batch
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.servers.backup import BackupStrategy
from sparkring.training.parallel.servers.link import ServersAt
from sparkring.training.parallel.servers.strategy import ServersStrategy
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.servers.server import Server, ServerPlace
from tests.ranks.cases_cost import loopback_bytes
from tests.ranks.cases_tables import ROWS, STEPS, OnlyTables, Rating, Recommender, rating_batch
from tests.ranks.problem import full_state, on_device, rank_device, rank_part

SECRET = b"0123456789abcdef" * 2
MEETING = 10  # steps between meetings of backup workers
COST_DIM, COST_WIDTH, COST_IDS, COST_STEPS = 16, 1 << 15, 10_000, 3
Make = Callable[[Any], torch.optim.Optimizer]


def serve(folder: Path, server: int, servers: int, workers: int, make: Make) -> dict[str, Any]:
    """Be a server until the ranks are done; returns how it ended."""
    place = ServerPlace(server, servers, workers, 1, SECRET, open_storage(str(folder / "events")))
    found = Server(place, make)
    (folder / f"port{server}.tmp").write_text(str(found.port))
    (folder / f"port{server}.tmp").rename(folder / f"port{server}")

    def end() -> None:
        while len(list(folder.glob("done*"))) < workers:
            time.sleep(0.02)
        found.close()

    threading.Thread(target=end, daemon=True).start()
    found.run()
    return {"served": True}


@contextmanager
def at_servers(folder: Path, rank: int, servers: int) -> Iterator[ServersAt]:
    """Where the servers are, once they all listen; they end when every rank has left."""
    ports = [folder / f"port{server}" for server in range(servers)]
    for port in ports:
        wait_for(port)
    try:
        yield ServersAt([("127.0.0.1", int(port.read_text())) for port in ports], SECRET)
    finally:
        (folder / f"done{rank}").touch()


def optimizer_of(case: dict[str, Any]) -> Make:
    config = OptimConfig(name=case.get("optimizer", "sgd"), weight_decay=case.get("decay", 0.0))
    return lambda named: build_optimizer(named, config)


def make_recommending(rank: int, world: int, case: dict[str, Any], dtype: torch.dtype, at: ServersAt | None) -> Any:
    """`at`: None for one process without servers."""
    settings = TableSettings(TablesConfig(**case.get("tables", {})), 11, str(dtype).removeprefix("torch."), 5.0)
    servers = {"servers": {"per_host": 1, **case.get("servers", {})}} if at is not None else {}
    parallel = ParallelConfig(engine="torch", **servers, **case.get("parallel", {}))
    info = RankInfo(rank, world, rank, world)
    device = rank_device(rank, world)
    strategy = build_strategy(parallel, info, device, clip_norm=0.5, tables=settings, servers=at)
    torch.manual_seed(7)
    model = Recommender() if case.get("dense", True) else OnlyTables()
    strategy.prepare(model.to(dtype), Rating(), optimizer_of(case))
    strategy.begin(0)
    return strategy


def trained(strategy: MeshStrategy, dtype: torch.dtype, uneven: bool = False) -> dict[str, Any]:
    """Norms, losses, dense weights, outputs and this rank's part of each table; a bad step in between."""
    norms, skipped, losses = [], [], []
    for step in range(STEPS):
        batch = rating_batch(step, dtype)
        if step == 5:  # a row of the first rank
            batch.columns["y"][1] = torch.nan
        loss = strategy.forward_backward(rank_part(batch, strategy, uneven))
        info = strategy.step(1e-2)
        norms.append(info.grad_norm)
        skipped.append(info.skipped)
        losses.append(float(loss))
        if step == 12:  # ranks meet, and go on
            with strategy.averaged():
                strategy.meeting.sum_over_data(torch.ones(2, dtype=torch.float64))
    with strategy.averaged():
        outputs = strategy.evaluate(rank_part(rating_batch(99, dtype), strategy, uneven))
        losses = strategy.meeting.sum_over_data(torch.tensor(losses, dtype=torch.float64)).tolist()
        dense = full_state(strategy)
        tables = strategy.tables.tables
        dumps = {name: vars(table.table.dump(table.own_buckets)) for name, table in tables.items()}
    return {
        "norms": norms,
        "skipped": skipped,
        "losses": losses,
        "dense": dense,
        "outputs": outputs,
        "tables": dumps,
        "counts": strategy.meeting.server_counts(),
    }


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


def part_of(part: BatchShare, parts: int, dtype: torch.dtype) -> Batch:
    """The rows of a part, of `parts` in a global batch; one row of the first is not finite at clock 5."""
    batch = rating_batch(part.clock, dtype)
    if part.clock == 5:
        batch.columns["y"][1] = torch.nan
    return replace(slice_batch(batch, *part_bounds(batch.rows, parts)[part.stream]), part=part)


def backed(rank: int, world: int, case: dict[str, Any], at: ServersAt, folder: Path) -> dict[str, Any]:
    """Train with backup workers; parts that counted. Between two meetings the last rank is late once."""
    dtype = torch.float64
    strategy = make_recommending(rank, world, case, dtype, at)
    assert isinstance(strategy, BackupStrategy)
    counted: dict[int, tuple[int, int]] = {}  # step -> clock, stream
    norms = []
    for step in range(STEPS):
        part = strategy.take(min(STEPS, (step // MEETING + 1) * MEETING))
        batch = Batch({}, 0, ROWS, 0) if part is None else on_device(part_of(part, strategy.parts, dtype), strategy)
        strategy.forward_backward(batch)
        if step % MEETING == 0:  # the last rank takes its part before the others begin, and is late with it
            if rank == world - 1:
                (folder / f"taken-{step}").touch()
            wait_for(folder / (f"past-{step}" if rank == world - 1 else f"taken-{step}"))
        info = strategy.step(1e-2)
        if rank == 0 and step % MEETING == 3:
            (folder / f"past-{step - 3}").touch()
        norms.append(info.grad_norm)
        if part is not None and info.counted:
            counted[step] = (part.clock, part.stream)
    with strategy.averaged():
        dense = full_state(strategy)
        tables = strategy.tables.tables
        dumps = {name: vars(table.table.dump(table.own_buckets)) for name, table in tables.items()}
    counts = strategy.meeting.server_counts()
    strategy.close()
    return {"norms": norms, "counted": counted, "dense": dense, "tables": dumps, "counts": counts}


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """By case: what training gives on this rank; the last `servers` processes are the servers."""
    results: dict[str, Any] = {}
    servers = payload["servers"]
    ranks = world - servers
    for name, case in payload["cases"].items():
        folder = Path(payload["tmp"]) / f"{ranks} {name}"
        folder.mkdir(exist_ok=True)
        if rank >= ranks:
            results[name] = serve(folder, rank - ranks, servers, ranks, optimizer_of(case))
            continue
        dtype = getattr(torch, case.get("dtype", "float64"))
        with at_servers(folder, rank, servers) as at:
            if case.get("servers", {}).get("backup"):
                results[name] = backed(rank, ranks, case, at, folder)
                continue
            strategy = make_recommending(rank, ranks, case, dtype, at)
            assert isinstance(strategy, ServersStrategy)
            results[name] = trained(strategy, dtype, case.get("uneven", False))
            strategy.close()
    return results


class Preferences(nn.Module):
    """A dense block of 2 MiB, and rows of 16 values."""

    def __init__(self) -> None:
        super().__init__()
        self.users = SparseEmbedding("user", COST_DIM)
        self.dense = nn.Linear(COST_DIM, COST_WIDTH)

    def forward(self, columns: dict[str, Any]) -> torch.Tensor:
        return self.dense(self.users(columns["user"])[:64]).square().mean()


class Constant(Task):
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns,)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return outputs.expand(len(columns["user"]))


def quiet_bytes(strategy: ServersStrategy) -> int:
    """Sent over the loopback interface, when all ranks are here and the wire is quiet."""
    strategy.link.wait_for_all()
    time.sleep(0.2)
    count = loopback_bytes()
    strategy.link.wait_for_all()
    return count


def cost(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """By case: bytes per rank and step on the wire and as training counts them, beside the formula."""
    results: dict[str, Any] = {}
    servers = payload["servers"]
    ranks = world - servers
    for name, case in payload["cases"].items():
        folder = Path(payload["tmp"]) / f"cost {ranks} {servers} {name}"
        folder.mkdir(exist_ok=True)
        if rank >= ranks:
            results[name] = serve(folder, rank - ranks, servers, ranks, optimizer_of({}))
            continue
        with at_servers(folder, rank, servers) as at:
            results[name] = one_cost(rank, ranks, case, at)
    return results


def one_cost(rank: int, world: int, case: dict[str, Any], at: ServersAt) -> dict[str, float]:
    tables = TableSettings(TablesConfig(), 11, "float32", 5.0)
    parallel = ParallelConfig(engine="torch", servers={"per_host": 1, **case})
    strategy = build_strategy(
        parallel, RankInfo(rank, world, rank, world), rank_device(rank, world), clip_norm=0.5, tables=tables, servers=at
    )
    assert isinstance(strategy, ServersStrategy)
    model = Preferences()
    strategy.prepare(model, Constant(), optimizer_of({}))
    strategy.begin(0)
    make = torch.Generator().manual_seed(rank)
    ids = torch.randint(-(1 << 62), 1 << 62, (COST_IDS,), generator=make).repeat(2)  # each in two rows
    before = quiet_bytes(strategy)
    for step in range(COST_STEPS):
        strategy.forward_backward(Batch({"user": ids}, 2 * COST_IDS, 2 * COST_IDS * world, (step + 1) * 2 * COST_IDS))
        strategy.step(1e-3)
    after = quiet_bytes(strategy)
    counted = strategy.measure()["sent_bytes dp x cp"]
    strategy.close()
    dense = 4 * sum(parameter.numel() for parameter in model.dense.parameters())
    row = 4 * COST_DIM
    return {
        "wire": (after - before) / world / COST_STEPS,
        "formula": 2 * dense + COST_IDS * (16 + 2 * row),
        "counted": counted,
        "sent": dense + COST_IDS * (16 + row),
    }
