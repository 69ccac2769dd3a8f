"""Predict layouts of a text recipe on this machine before they run, run them, and compare.

usage (root, Linux): unshare --net python benchmarks/plan_here.py [--out benchmarks/results/plan_here_2core_<yyyymm>.md]
[--keep FOLDER]   (clusters and measured steps are kept there, and what is there is not measured again)

`sparkring plan measure`'s measurement runs on the ranks of each link and gives a cluster's file; the planner predicts
each layout's step from it; then the layout trains with the product's own strategy: one thread per rank, AdamW,
clipping, the median of the steps after the first ones. On loopback all ranks are one machine of all cores; with a
limited link each network namespace is a machine of its own, whose ranks share its core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import measured_with, publish
from benchmarks.strategies import Namespaces, as_table
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import cluster_text, load_cluster
from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.rank_info import RankInfo
from sparkring.pipelines.launch.measure import cluster_of, measure
from sparkring.pipelines.launch.netcheck import summarize
from sparkring.pipelines.model.fed import step_seconds
from sparkring.training.data.batch import Batch
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.batching import part_bounds, slice_batch
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.engine import choose_engine
from sparkring.training.parallel.mesh import resolve_mesh
from sparkring.training.parallel.process_groups import start_process_group
from sparkring.training.planner import Workload

CPU, TIMEOUT = torch.device("cpu"), timedelta(minutes=2)
WARM_UP, STEPS, STEPS_S = 4, 9, 6.0  # steps before the measured ones; least steps, and seconds of them
BURST = "64kb"  # that a limited link lets through at once: no more than a switch's port has
APART = 0.15  # layouts whose steps differ by more must be ranked right


@dataclass(frozen=True)
class Recipe:
    """A GPT, and the batches it trains on."""

    model: dict[str, int]
    tokens: int
    rows: int


@dataclass(frozen=True)
class Machines:
    """Ranks, the link between the machines that they are on, and the machines: 1 is this machine, on loopback."""

    ranks: int
    link: str
    count: int

    @property
    def name(self) -> str:
        """Of what is measured: loopback is, with as many ranks as there may be."""
        return "loopback" if self.count == 1 else f"{self.ranks} ranks on {self.count} machines, {self.link}"

    def info(self, rank: int) -> RankInfo:
        per = self.ranks // self.count
        return RankInfo(rank, self.ranks, rank % per, per, rank // per, self.count, rank // per, self.count)


RECIPES = {
    "text": Recipe({"vocab": 2048, "width": 192, "layers": 4, "heads": 4}, tokens=128, rows=16),
    # never run while the formulas were written
    "wide": Recipe({"vocab": 512, "width": 384, "layers": 4, "heads": 6}, tokens=64, rows=16),
}
ONE, TWO, FOUR = (Machines(ranks, "loopback", 1) for ranks in (1, 2, 4))
GBIT, SLOW, PAIRS = Machines(2, "1gbit", 2), Machines(2, "200mbit", 2), Machines(4, "1gbit", 2)
PIPE = {"pp": 2, "micro_batches": 4}
LAYOUTS: list[tuple[str, Machines, dict[str, Any]]] = [
    ("one rank", ONE, {}),
    ("ring", TWO, {}),
    ("ZeRO-1", TWO, {"zero": 1}),
    ("ZeRO-3", TWO, {"zero": 3}),
    ("pipeline", TWO, PIPE),
    ("tensor", TWO, {"tp": 2}),
    ("context", TWO, {"cp": 2}),
    ("ring", FOUR, {}),
    ("ZeRO-2", FOUR, {"zero": 2}),
    ("pipeline of 4", FOUR, {"pp": 4, "micro_batches": 4}),
    ("ring x tensor", FOUR, {"tp": 2}),
    ("ring", GBIT, {}),
    ("ZeRO-3", GBIT, {"zero": 3}),
    ("tensor", GBIT, {"tp": 2}),
    ("ring", SLOW, {}),
    ("ZeRO-1", SLOW, {"zero": 1}),
    ("pipeline", SLOW, PIPE),
    ("ring x tensor", PAIRS, {"tp": 2}),
]


def parallel_of(settings: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig.model_validate({"engine": "torch", **settings})


def workload_of(recipe: Recipe, world: int, settings: dict[str, Any]) -> Workload:
    """The step as `sparkring plan` knows it."""
    config, tokens = parallel_of(settings), torch.zeros(1, recipe.tokens + 1, dtype=torch.int64)
    mesh, task = resolve_mesh(config, world), LanguageModelTask()
    return Workload(
        model=GPT(**recipe.model),
        config=config,
        mesh=mesh,
        engine=choose_engine(config, mesh, "cpu"),
        inputs=task.inputs({"tokens": tokens}),
        global_batch=recipe.rows,
        task=task,
        columns={"tokens": tokens},
    )


# On a rank


@dataclass(frozen=True)
class RankOnly:
    """What measuring needs of a launch (WorkerContext), where there is no driver."""

    rank_info: RankInfo
    payload: dict[str, Any]

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    def heartbeat(self, step: int, phase: str) -> None:
        """There is nobody to tell."""


def train_steps(recipe: Recipe, info: RankInfo, settings: dict[str, Any]) -> list[float]:
    """Seconds of each step after the first ones."""
    torch.manual_seed(0)
    tokens = torch.randint(0, recipe.model["vocab"], (recipe.rows, recipe.tokens + 1))
    whole = Batch({"tokens": tokens}, recipe.rows, recipe.rows, recipe.rows)
    strategy = build_strategy(parallel_of(settings), info, CPU, clip_norm=1.0)
    strategy.prepare(GPT(**recipe.model), LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig()))
    part = slice_batch(whole, *part_bounds(recipe.rows, strategy.data_size)[strategy.data_rank])
    spent: list[float] = []
    wanted = WARM_UP + STEPS
    while len(spent) < wanted:
        began = time.perf_counter()
        strategy.forward_backward(part)
        strategy.step(1e-3)
        spent.append(time.perf_counter() - began)
        if len(spent) == WARM_UP:
            wanted = WARM_UP + int(agreed(max(STEPS, STEPS_S / min(spent))))
    return spent[WARM_UP:]


def agreed(value: float) -> float:
    """Rank 0's."""
    tensor = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)
    return float(tensor)


def as_rank(task: dict[str, Any], out: Path) -> None:
    """Measure, or train; rank 0 writes what all ranks found."""
    torch.set_num_threads(1)
    info = RankInfo.from_json(task["infos"][int(os.environ["RANK"])])
    if info.world_size > 1:
        start_process_group(info, CPU, TIMEOUT)
    if task["cores"]:
        os.sched_setaffinity(0, {task["cores"][info.node_rank]})
    if task["what"] == "measure":
        found = measure(RankOnly(info, {"storage": str(out.parent / "stored"), "reader": None}))  # type: ignore[arg-type]
        (out.parent / f"{info.rank}.json").write_text(json.dumps(found))
    else:
        spent = train_steps(Recipe(**task["recipe"]), info, task["settings"])
        if info.rank == 0:
            (out.parent / "0.json").write_text(json.dumps(spent))
    os._exit(0)


# On the machine


def launch(machines: Machines, task: dict[str, Any]) -> list[Any]:
    """Start the ranks and return what they wrote, by rank."""
    spaces, folder = Namespaces(machines.count, machines.link, BURST), Path(tempfile.mkdtemp())
    infos = [machines.info(rank) for rank in range(machines.ranks)]
    cores = sorted(os.sched_getaffinity(0))[: machines.count] if machines.count > 1 else []
    task = {**task, "infos": [info.to_json() for info in infos], "cores": cores}
    (folder / "task").write_text(json.dumps(task))
    words = [sys.executable, __file__, "--as-rank", str(folder / "task")]
    ranks = [
        subprocess.Popen(spaces.command(info.node_rank, words), env=environment(info, spaces.shared)) for info in infos
    ]
    try:
        for process in ranks:
            assert process.wait(timeout=600) == 0
        found = [folder / f"{rank}.json" for rank in range(machines.ranks)]
        return [json.loads(path.read_text()) for path in found if path.exists()]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        spaces.close()


def environment(info: RankInfo, shared: bool) -> dict[str, str]:
    first, interface = ("127.0.0.1", "lo") if shared else ("10.77.0.1", "eth0")
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "MASTER_ADDR": first,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": interface,
    }


def measured_cluster(machines: Machines) -> Cluster:
    """What `sparkring plan measure` writes of these machines."""
    results = launch(machines, {"what": "measure"})
    return cluster_of(summarize([each["links"] for each in results]), results)


def cluster_for(machines: Machines, keep: Path) -> Cluster:
    """The cluster's file of these machines, measured once; loopback is measured with as many ranks as are used."""
    if machines.count == 1:
        machines = FOUR
    path = keep / f"{file_name(machines.name)}.yaml"
    if not path.exists():
        path.write_text(cluster_text(measured_cluster(machines)))
        print(path.read_text(), flush=True)
    return load_cluster(str(path))


def file_name(words: str) -> str:
    return words.replace(",", "").replace(" ", "_")


@dataclass(frozen=True)
class Compared:
    """A layout's step: as predicted before it ran, and as it was."""

    name: str
    predicted_s: float
    measured_s: float
    quartiles: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def compare(recipe_name: str, keep: Path, only: str) -> list[Compared]:
    recipe = RECIPES[recipe_name]
    chosen = [each for each in LAYOUTS if only in f"{each[0]}, {each[1].name}"]
    for _, machines, _ in chosen:
        cluster_for(machines, keep)
    predicted = [
        step_seconds(workload_of(recipe, machines.ranks, settings), cluster_for(machines, keep))
        for _, machines, settings in chosen
    ]
    found = []
    for (name, machines, settings), seconds in zip(chosen, predicted, strict=True):
        ranks = "" if machines.count > 1 else "1 rank on " if machines.ranks == 1 else f"{machines.ranks} ranks on "
        key = f"{recipe_name}, {name}, {ranks}{machines.name}"
        path = keep / f"{file_name(key)}.json"
        if not path.exists():
            task = {"what": "train", "recipe": vars(recipe), "settings": settings}
            path.write_text(json.dumps(launch(machines, task)[0]))
        steps = json.loads(path.read_text())
        low, middle, high = statistics.quantiles(steps, n=4)
        found.append(Compared(key, seconds, middle, (low, high)))
        print(f"{key}: predicted {seconds:.4f}, measured {middle:.4f} ({found[-1].error:+.0%})", flush=True)
    return found


def wrong_pairs(found: list[Compared]) -> tuple[int, list[str]]:
    """(pairs whose steps differ by more than APART, those of them that are ranked wrong)."""
    pairs = [
        (a, b)
        for a, b in combinations(found, 2)
        if max(a.measured_s, b.measured_s) > (1 + APART) * min(a.measured_s, b.measured_s)
    ]
    wrong = [(a, b) for a, b in pairs if (a.measured_s < b.measured_s) != (a.predicted_s < b.predicted_s)]
    return len(pairs), [f"{a.name} / {b.name}" for a, b in wrong]


def errors_line(found: list[Compared]) -> str:
    errors = sorted(abs(c.error) for c in found)
    pairs, wrong = wrong_pairs(found)
    return (
        f"Median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; of {pairs} pairs whose steps differ by "
        f"more than {APART:.0%}, {len(wrong)} are ranked wrong{': ' if wrong else ''}{'; '.join(wrong)}."
    )


def report(found: dict[str, list[Compared]], clusters: list[Path], note: str) -> str:
    lines = [
        "# The planner's seconds on this machine, predicted before they were measured",
        str(__doc__).partition("\n\n")[2].partition("\n\n")[2].strip(),
        *([note] if note else []),
        *(f"## {name}: {RECIPES[name]}\n\n{table(each)}\n\n{errors_line(each)}" for name, each in found.items()),
        "## Clusters, as `sparkring plan measure` has written them",
        *(f"{path.stem}:\n\n```yaml\n{path.read_text()}```" for path in clusters),
        measured_with("torch", "numpy"),
    ]
    return "\n\n".join(lines) + "\n"


def table(found: list[Compared]) -> str:
    rows = [["layout", "predicted s", "measured s", "middle half", "error"]]
    for c in found:
        middle = f"{c.quartiles[0]:.4f} to {c.quartiles[1]:.4f}"
        rows.append([c.name, f"{c.predicted_s:.4f}", f"{c.measured_s:.4f}", middle, f"{c.error:+.1%}"])
    return as_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder of what was measured; default: a new one")
    parser.add_argument("--only", default="", help="layouts whose name contains this text")
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--note", default="", help="of the circumstances, put into the result")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        task = Path(arguments.as_rank)
        as_rank(json.loads(task.read_text()), task)
    keep = arguments.keep or Path(tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    found = {name: compare(name, keep, arguments.only) for name in arguments.recipes}
    publish(report(found, sorted(keep.glob("*.yaml")), arguments.note), arguments.out)


if __name__ == "__main__":
    main()
