"""Sparse tables: rates of one core, memory of many rows, and a step over a slow link beside the dense ring.

usage: python benchmarks/sparse_tables.py rates [--rows 10000000] [--out FILE]
       unshare --net python benchmarks/sparse_tables.py link [--rate 200mbit] [--steps 40] [--out FILE]  (root, Linux)
       unshare --net python benchmarks/sparse_tables.py lag [--rate 200mbit] [--steps 40] [--out FILE]  (root, Linux)

`link`: two ranks, each in a network namespace behind a token bucket. Ids are the bigrams of tokens in the standard
library's sources, in their order, 8,192 to a rank and step; the model is a row of 16 and a linear layer that tells
whether a name follows. `dense` has the same rows as a parameter. `all-gather` is what Horovod does with a sparse
gradient: every rank's ids and row gradients as they are, to every rank. `replicate` is ours: made distinct first.

`lag`: the same with 65,536 ids to a rank and step, and a forward pass that sleeps for as long as a step without it
takes: computation on a device, which leaves the host's cores to the tables. Rounds of all cases, one after the other.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import measured_with, publish
from strategies import Namespaces, environment
from strategies_rank import sent_bytes
from torch import distributed, nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.data.features.xxhash64 import hash_whole
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.tables.id_map import IdMap
from sparkring.training.tables.table import Table, TableSpec, summed
from sparkring.training.tables.update_rules import Kind, UpdateRule
from sparkring.training.tasks import BinaryTask

DIM, PUSH, PER_RANK, WARM_UP = 16, 65_536, 8_192, 3
ROUNDS = 3
KINDS: tuple[Kind, ...] = ("sgd", "rowwise_adagrad", "adam")
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "all-gather": {},
    "replicate": {"place": "replicate"},
    "shard, fp32": {},
    "shard, bf16": {"wire": "bf16"},
}
LAGS: dict[str, dict[str, Any]] = {f"lag {lag}": {"lag": lag} for lag in range(3)}


def push_rate(kind: Kind, pushes: int = 12) -> float:
    """Gradients a CPU second: duplicates summed, rows read, updated and written; the median push."""
    rng, table = np.random.default_rng(0), Table(TableSpec("t", DIM, 0.25, rule=UpdateRule(kind)))
    grads, seconds = rng.standard_normal((PUSH, DIM)).astype(np.float32), []
    batches = [hash_whole(rng.zipf(1.2, PUSH)) for _ in range(pushes)]
    for turn in range(2):
        for ids in batches:
            began = time.process_time()
            table.push(*summed(ids, grads), 0.1)
            seconds += [time.process_time() - began] if turn else []
    return PUSH / statistics.median(seconds)


def map_rates(ids: int = 5_000_000) -> tuple[float, float]:
    """Inserts and look-ups of uniform ids a CPU second."""
    keys, places = hash_whole(np.arange(ids)), IdMap()
    began = time.process_time()
    for start in range(0, ids, PUSH):
        part = keys[start : start + PUSH]
        places.insert(part, np.arange(start, start + len(part), dtype=np.int32))
    inserted = time.process_time() - began
    asked = np.random.default_rng(0).permutation(keys)[:1_000_000]
    began = time.process_time()
    places.find(asked)
    return ids / inserted, len(asked) / (time.process_time() - began)


def memory(rows: int) -> tuple[float, float, float]:
    """Bytes a row that the process took more, at the end and at its peak, and CPU seconds."""
    page, grads = resource.getpagesize(), np.ones((PUSH, DIM), np.float32)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    table = Table(TableSpec("t", DIM, 0.25))
    before, began = resident(), time.process_time()
    for start in range(0, rows, PUSH):
        ids = hash_whole(np.arange(start, min(start + PUSH, rows)))
        table.push(ids, grads[: len(ids)], 0.1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (resident() - before) / rows, (peak - before) / rows, time.process_time() - began


def rates(rows: int) -> str:
    torch.set_num_threads(1)
    at_end, peak, seconds = memory(rows)
    inserts, finds = map_rates()
    lines = [f"| push of {PUSH:,} zipf(1.2) gradients, {kind} | {push_rate(kind) / 1e6:.1f} M/s |" for kind in KINDS]
    lines += [f"| map: inserts of 5 M uniform ids | {inserts / 1e6:.1f} M/s |"]
    lines += [f"| map: look-ups among them | {finds / 1e6:.1f} M/s |"]
    lines += [f"| memory of {rows:,} rows of {DIM} and row-wise Adagrad | {at_end:.0f} bytes a row |"]
    lines += [f"| the same, peak | {peak:.0f} bytes a row |", f"| CPU until then | {seconds:.0f} s |"]
    return "| one core, CPU seconds | |\n|---|---|\n" + "\n".join(lines) + "\n"


def bigrams(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the first `most` pairs of neighboring tokens, and whether a name follows each."""
    code_of: dict[str, int] = {}
    numbers: list[int] = []
    kinds: list[bool] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            found = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
        except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
            continue
        numbers += [code_of.setdefault(token.string, len(code_of)) for token in found]
        kinds += [token.type == tokenize.NAME for token in found]
        if len(numbers) > most + 2:
            break
    codes = hash_whole(np.array(numbers))
    pairs = hash_whole(codes[:-2] ^ np.roll(codes, -1)[:-2] << 1)
    return pairs[:most], np.array(kinds[2:], bool)[:most]


class Follows(nn.Module):
    """Whether a name follows a bigram, by a row of its own: of a table, or of a parameter with `rows` of them."""

    def __init__(self, rows: int | None, computes_s: float = 0.0) -> None:
        super().__init__()
        self.computes_s = computes_s
        self.rows = SparseEmbedding("pair", DIM) if rows is None else nn.Embedding(rows, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        time.sleep(self.computes_s)
        out: torch.Tensor = self.head(self.rows(pair)).squeeze(1)
        return out


def prepared(model: Follows, task: BinaryTask, tables: TablesConfig, clip_norm: float | None = None) -> MeshStrategy:
    """Our own strategy, as the rank that the environment says."""
    info = RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0, 1)
    settings = TableSettings(tables, lr_share=5.0)
    strategy = build_strategy(
        ParallelConfig(engine="torch"), info, torch.device("cpu"), clip_norm=clip_norm, tables=settings
    )
    strategy.prepare(model, task, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    return strategy


def strategy_step(case: str, task: BinaryTask, rows: int | None) -> Callable[[Batch], None]:
    """A step of our own strategies."""
    strategy = prepared(Follows(rows), task, TablesConfig(**CASES[case]))

    def step(batch: Batch) -> None:
        strategy.forward_backward(batch)
        strategy.step(0.01)

    return step


def all_gather_step(task: BinaryTask, rows: int | None) -> Callable[[Batch], None]:
    """A step on a gradient per row of the batch, gathered from all ranks as it is and added up on each."""
    distributed.init_process_group("gloo")
    model, world = Follows(rows), distributed.get_world_size()
    assert isinstance(model.rows, nn.Embedding)
    table = model.rows.weight.detach()

    def step(batch: Batch) -> None:
        ids = batch.columns["pair"]
        pulled = table[ids].requires_grad_()
        losses = task.loss(model.head(pulled).squeeze(1), batch.columns)
        (losses.sum() / batch.global_rows).backward()
        all_ids = [torch.empty_like(ids) for _ in range(world)]
        all_grads = [torch.empty_like(pulled) for _ in range(world)]
        distributed.all_gather(all_ids, ids)
        distributed.all_gather(all_grads, pulled.grad)
        for parameter in model.head.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.data.sub_(0.01 * parameter.grad)
            parameter.grad = None
        table.index_add_(0, torch.cat(all_ids), torch.cat(all_grads), alpha=-0.05)

    return step


def rank_of_link(case: str, rank: int, world: int, steps: int) -> None:
    """One rank: prints seconds per step, rows and bytes sent as JSON."""
    torch.set_num_threads(1)
    wanted = (steps + WARM_UP) * world * PER_RANK
    pairs, follows = bigrams(3_000_000)
    codes = np.unique(pairs, return_inverse=True)[1]
    ids = np.resize(codes if case in ("dense", "all-gather") else pairs, wanted)
    labels = np.resize(follows, wanted)
    rows = int(codes.max()) + 1 if case in ("dense", "all-gather") else None
    task = BinaryTask(["pair"], "label", ["pair"])
    step_of = all_gather_step(task, rows) if case == "all-gather" else strategy_step(case, task, rows)
    before, began = 0, 0.0
    for step in range(steps + WARM_UP):
        start = (step * world + rank) * PER_RANK
        part = slice(start, start + PER_RANK)
        columns = {"pair": torch.from_numpy(ids[part]), "label": torch.from_numpy(labels[part]).float()}
        batch = Batch(columns, PER_RANK, PER_RANK * world, (step + 1) * world * PER_RANK)
        if step == WARM_UP:
            before, began = sent_bytes(), time.perf_counter()
        step_of(batch)
    ms, mib = 1000 * (time.perf_counter() - began) / steps, (sent_bytes() - before) / steps / 2**20
    print(json.dumps({"ms": ms, "mib": mib, "ids": int(codes.max()) + 1}), flush=True)
    distributed.destroy_process_group()


def rank_of_lag(case: str, ids_file: str, computes_s: float, clip_norm: float | None, steps: int) -> None:
    """One rank: prints seconds per step, of them those waited for rows, and bytes sent as JSON."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stored = np.load(ids_file)
    pairs, follows = stored["pairs"], stored["follows"]
    wanted = (steps + WARM_UP) * world * PUSH
    ids, labels = torch.from_numpy(np.resize(pairs, wanted)), torch.from_numpy(np.resize(follows, wanted)).float()
    model = Follows(None, computes_s)
    strategy = prepared(model, BinaryTask(["pair"], "label", ["pair"]), TablesConfig(**LAGS[case]), clip_norm)

    def batches() -> Iterator[Batch]:
        for step in range(steps + WARM_UP):
            part = slice((step * world + rank) * PUSH, (step * world + rank + 1) * PUSH)
            yield Batch({"pair": ids[part], "label": labels[part]}, PUSH, PUSH * world, (step + 1) * world * PUSH)

    for number, batch in enumerate(strategy.ahead(batches())):
        if number == WARM_UP:
            before, waited_s, began = sent_bytes(), strategy.tables.waited_s, time.perf_counter()
        strategy.forward_backward(batch)
        strategy.step(0.01)
    strategy.tables.drain()
    ms, mib = 1000 * (time.perf_counter() - began) / steps, (sent_bytes() - before) / steps / 2**20
    print(json.dumps({"ms": ms, "mib": mib, "waited_ms": 1000 * (strategy.tables.waited_s - waited_s) / steps}))
    strategy.close()


def run_ranks(spaces: Namespaces, words: Sequence[str], world: int) -> list[dict[str, Any]]:
    """What each rank printed last."""
    ranks = [
        subprocess.Popen(
            spaces.command(rank, [sys.executable, __file__, *words]),
            env=environment(rank, world, False),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    return [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]


def lag(rate: str, steps: int, ids_file: str, world: int = 2) -> str:
    pairs, follows = bigrams(3_000_000)
    np.savez(ids_file, pairs=pairs, follows=follows)
    spaces = Namespaces(world, rate)

    def measured(case: str, computes_ms: float, clip_norm: float) -> dict[str, float]:
        words = ["rank-of-lag", "--case", case, "--steps", str(steps), "--ids", ids_file]
        words += ["--computes-ms", str(computes_ms), "--clip-norm", str(clip_norm)]
        found = run_ranks(spaces, words, world)
        return {key: max(each[key] for each in found) for key in found[0]}

    cases = {(case, clip): list[dict[str, float]]() for clip in (0.0, 1.0) for case in LAGS}
    try:
        alone = statistics.median(measured("lag 0", 0.0, 0.0)["ms"] for _ in range(ROUNDS))
        for _ in range(ROUNDS):
            for case, clip in cases:
                cases[case, clip].append(measured(case, alone, clip))
    finally:
        spaces.close()
    lines = []
    for (case, clip), rounds in cases.items():
        ms, waited, mib = ([each[key] for each in rounds] for key in ("ms", "waited_ms", "mib"))
        name = f"{case}, optim.clip_norm {clip if clip else 'null'}"
        spread = f"{min(ms):.0f} to {max(ms):.0f}"
        lines.append(
            f"| {name} | {statistics.median(ms):.0f} ({spread}) | {statistics.median(waited):.0f} | {max(mib):.2f} |"
        )
    head = f"{PUSH:,} rows a rank and step, {world} ranks, {rate}, {steps} steps, median of {ROUNDS} rounds"
    told = f"Without computation a step takes {alone:.0f} ms, and so long sleeps the forward pass of the cases."
    table = "| case | ms a step | of them waited for tables | MiB sent a rank and step |\n|---|---|---|---|\n"
    return f"{head}. {told}\n\n{table}" + "\n".join(lines) + "\n"


def link(rate: str, steps: int, world: int = 2) -> str:
    lines, dense = [], 0.0
    spaces = Namespaces(world, rate)
    try:
        for case in CASES:
            found = run_ranks(spaces, ["rank", "--case", case, "--steps", str(steps)], world)
            ms, mib = (max(each[key] for each in found) for key in ("ms", "mib"))
            dense = dense or ms
            lines.append(f"| {case} | {ms:.0f} | {mib:.3f} | {dense / ms:.1f} |")
    finally:
        spaces.close()
    head = f"{found[0]['ids']:,} ids, {PER_RANK:,} rows a rank and step, {world} ranks, {rate}, mean of {steps} steps"
    table = "| case | ms a step | MiB sent a rank and step | times as fast as dense |\n|---|---|---|---|\n"
    return f"{head}:\n\n{table}" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "link", "rank", "lag", "rank-of-lag"])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--ids", help=argparse.SUPPRESS)
    parser.add_argument("--computes-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--clip-norm", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "rank":
        rank_of_link(given.case, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given.steps)
        return
    if given.what == "rank-of-lag":
        rank_of_lag(given.case, given.ids, given.computes_ms / 1000, given.clip_norm or None, given.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "lag":
            found = lag(given.rate, given.steps, f"{folder}/ids.npz")
        else:
            found = rates(given.rows) if given.what == "rates" else link(given.rate, given.steps)
    publish(f"# Sparse tables: {given.what}\n\n{measured_with('torch', 'numpy')}\n\n{found}", given.out)


if __name__ == "__main__":
    main()
