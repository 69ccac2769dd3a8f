"""Everything one GPU can show in half an hour, in the order of its worth, without Spark, Horovod or MLflow:

    python benchmarks/gpu_session.py all [--out FILE.md]      every part but `ranks`, which takes an hour, each in a
                                                              process of its own with its limit
    python benchmarks/gpu_session.py PART ...                 some of them

Each line says what was expected beside what came. A part that fails, or takes longer than its limit, is a line too, and
the next one runs. It needs torch 2.11 or newer, Python 3.11 or newer, numpy, pyarrow and pydantic; what a part needs
besides (pytest, Horovod) is skipped by name where it is not there. `--device cpu` is for its own test: no speeds.

MFU: (6 N + 12 layers x width x T) FLOPs per token (PaLM, https://arxiv.org/abs/2204.02311, appendix B) over the
device's dense bf16 peak. N counts every weight that is multiplied, the head once.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.conf.manifest import Accounting, Column, DataFile, DatasetManifest, Lineage, SplitInfo
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.data.batch import Batch, Meter
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.data.transfer import to_device
from sparkring.training.launch.failure import cause_of
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models import loss as loss_module
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.data_parallel.codecs import QUANTIZERS
from sparkring.training.parallel.data_parallel.zero import TorchZero
from sparkring.training.parallel.local import LocalStep
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.placement import make_placement
from sparkring.training.parallel.process_groups import RankContext, make_device_mesh, start_process_group
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.worker.device import pick_device
from sparkring.training.worker.hardware import device_facts, host_copy_rates, host_memory_rate, host_step_rate

ROOT = Path(__file__).resolve().parent.parent
# Dense bf16, by NVIDIA's data sheets; the first key found in the device's name counts. V100 has no bf16.
PEAK_TFLOPS = {
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "4090": 165.0,
}
TOKENS = 1024
# tests/ranks/layouts.py: ranks, and layouts of one launch; as many launches as one that hangs may cost.
LAYOUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (2, ("ddp", "zero1", "zero2", "zero3", "tp", "tp-sequence", "cp")),
    (2, ("1f1b", "gpipe", "interleaved", "zero-bubble")),
    (4, ("pp4",)),
    (4, ("zero3-hybrid", "dp-tp-zero3-sequence", "dp-cp-zero3")),
    (
        2,
        ("1f1b-measured", "1f1b-shared", "1f1b-checkpointing", "zero-bubble-interleaved-untied", "gpipe-breadth-first"),
    ),
    (2, ("ddp-codec", "zero3-offload", "zero2-lamb", "zero3-lars", "tp-lamb", "zero3-shared", "tp-untied-grouped")),
)
BATCH = {"gpt-124m": 64, "gpt-1b": 16}  # rows per step of each recipe
# Steps whose memory and seconds are predicted and then measured: recipe, rows of a step, other keys.
PLANNED: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("gpt-124m", 16, ("train.compile=false",)),
    ("gpt-124m", 16, ("train.compile=false", "parallel.precision=fp32")),
    ("gpt-124m", 64, ("train.compile=false",)),
    ("gpt-124m", 64, ("train.compile=false", "parallel.activation_checkpointing=true")),
    ("gpt-124m", 64, ("train.compile=false", "parallel.accumulate=4")),
    ("gpt-1b", 16, ("train.compile=false", "parallel.activation_checkpointing=false")),
    ("gpt-1b", 16, ("train.compile=false",)),
    ("gpt-124m", 64, ()),
    ("gpt-1b", 16, ("train.compile=true", "parallel.activation_checkpointing=false")),
)


@dataclass(frozen=True)
class Line:
    """One thing that a part looked at. `good` None: a figure without an expectation that decides."""

    what: str
    expected: str
    came: str
    good: bool | None = None


def small_gpt(dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab=128, width=64, layers=3, heads=4, kv_heads=2).to(dtype)


def train_small(strategy: MeshStrategy, model: nn.Module, optimizer: str = "adamw") -> dict[str, torch.Tensor]:
    """Ten steps of a small GPT; the final parameters, on the CPU."""
    strategy.prepare(
        model,
        LanguageModelTask(),
        lambda named: build_optimizer(named, OptimConfig.model_validate({"name": optimizer})),
    )
    for step in range(10):
        strategy.forward_backward(small_batch(step, strategy.local.device))
        strategy.step(1e-3)
    described, values = strategy.stream_model()
    return {each.name: value.cpu().clone() for each, value in zip(described, values, strict=True)}


def small_batch(step: int, device: torch.device) -> Batch:
    tokens = torch.randint(0, 128, (8, 33), generator=torch.Generator().manual_seed(step))
    return Batch({"tokens": tokens.to(device)}, 8, 8, 8)


def plain_run(device: torch.device, dtype: torch.dtype, optimizer: str = "adamw") -> dict[str, torch.Tensor]:
    strategy = build_strategy(ParallelConfig(accumulate=2), RankInfo(), device, clip_norm=0.5)
    return train_small(strategy, small_gpt(dtype), optimizer)


def compared(what: str, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> Line:
    far = max(float((got[name] - value).abs().max()) for name, value in expected.items())
    return Line(what, f"within {tolerance:.0e} of the CPU", f"{far:.2e}", far < tolerance)


def imports(device: torch.device) -> list[Line]:
    """What is here, and that the device is the one `train.device=auto` takes."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    chosen = pick_device("auto", RankInfo(), timedelta(minutes=1)).type
    found = [
        Line("machine", "-", f"{name}, torch {torch.__version__}, Python {platform.python_version()}"),
        Line("train.device=auto", device.type, chosen, chosen == device.type),
    ]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found.append(Line("memory", "-", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"))
        found.append(Line("NCCL", "-", ".".join(map(str, torch.cuda.nccl.version()))))
    return found


def equality(device: torch.device) -> list[Line]:
    """Ten steps with each optimizer on the device and on the CPU."""
    cpu, lines = torch.device("cpu"), []
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        for optimizer in ("adamw", "lamb", "lars", "sgd"):
            got, expected = plain_run(device, dtype, optimizer), plain_run(cpu, dtype, optimizer)
            lines.append(compared(f"{optimizer} in {dtype}", got, expected, tolerance))
    return lines


def tests(device: torch.device) -> list[Line]:
    """`tests/gpu`, where pytest and the checkout's tests are here."""
    return [ran("tests/gpu", device)]


def layouts(device: torch.device) -> list[Line]:
    """Layouts over NCCL against one process on the CPU: five steps in float64. On one GPU its ranks take turns."""
    if device.type == "cpu" or importlib.util.find_spec("pytest") is None:
        return [Line("layouts", "-", "skipped: needs a GPU and pytest")]
    os.environ["SPARKRING_TEST_GPU"] = "1"
    from tests.ranks.conftest import RankForkServer
    from tests.ranks.layouts import FOUR, TWO
    from tests.ranks.problem import EXACT, worst_difference
    from tests.ranks.test_mesh import Results

    server, lines, results = RankForkServer(), [], Results()
    for world, names in LAYOUTS:
        cases = {name: {2: TWO, 4: FOUR}[world][name] for name in names}
        with tempfile.TemporaryDirectory() as folder:
            request = {"world": world, "function": "tests.ranks.cases_mesh:many", "engine": "torch", "out": folder}
            began = time.perf_counter()
            code = server.run({**request, "payload": {"cases": cases, "tmp": folder}}, 150)
            took = f"{time.perf_counter() - began:.0f} s"
            if code != 0:
                errors = sorted(Path(folder).glob("*.error"))
                print(*(path.read_text()[-1500:] for path in errors), file=sys.stderr)
                last = errors[0].read_text().strip().splitlines()[-1][:200] if errors else "no error was written"
                lines.append(Line(f"{world} ranks: {', '.join(names)}", "an end", f"{took}: {last}", False))
                continue
            found = [torch.load(f"{folder}/{r}.pt", map_location="cpu", weights_only=False) for r in range(world)]
        for name, case in cases.items():
            far = worst_difference([rank[name] for rank in found], results.oracle(case))
            engine = found[0][name]["engine"]
            lines.append(Line(f"{world} ranks, {engine}: {name}", f"within {EXACT:.0e}", f"{far:.1e}", far < EXACT))
        lines.append(Line(f"{world} ranks: a launch of {len(names)} layouts", "-", took))
        print(*lines[-len(names) - 1 :], sep="\n", file=sys.stderr, flush=True)  # the rest may not end
    server.close()
    return lines


def ranks(device: torch.device) -> list[Line]:
    """`tests/ranks`, but for what it counts on the CPU's wire and in its memory."""
    return [ran(str(path.relative_to(ROOT)), device) for path in sorted(ROOT.glob("tests/ranks/test_*.py"))]


def ran(path: str, device: torch.device) -> Line:
    """How the tests of a file or folder end on GPUs."""
    if device.type == "cpu":
        return Line(path, "passed", "skipped: needs a GPU")
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("psutil") is None:
        return Line(path, "passed", "skipped: needs pytest and psutil")
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-m", "gpu", path]
    environment = os.environ | {"SPARKRING_TEST_GPU": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-6000:], file=sys.stderr)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    failed = [line.partition("::")[2].partition(" - ")[0] for line in lines if line.startswith("FAILED")]
    return Line(path, "passed", "; ".join([lines[-1].strip("= "), *failed]), done.returncode == 0)


def host(device: torch.device) -> list[Line]:
    """What `plan measure` finds of the host's memory and its link to the device, of one rank alone, and as the keys of
    a cluster's file."""
    memory, step, copies = host_memory_rate(), host_step_rate(), host_copy_rates(device)
    named = {"host memory, read and written": memory, "AdamW's step on the host, 28 bytes a parameter": step}
    named |= {f"pinned copy {direction}": each for direction, each in copies.items()}
    lines = [
        Line(what, "-", f"{each.per_s / 1e9:.3g} GB/s (middle half of the repetitions: {each.spread:.1%})")
        for what, each in named.items()
    ]
    facts = device_facts(device, local_size=1)
    best = max(memory.per_s, step.per_s)
    node = f"memory_gib: {float(facts['host_bytes']) / 2**30:.3g}, memory_gb_per_s: {best / 1e9:.3g}"
    copied = min(each.per_s for each in copies.values())
    threads = f"{torch.get_num_threads()} threads of {facts['cores']} cores"
    lines.append(Line("node", threads, f"{node}, copy_gb_per_s: {copied / 1e9:.3g}"))
    lines.append(Line("reached", "0.43 published", f"host: {step.per_s / best:.3g}"))
    return lines


def transfer(device: torch.device) -> list[Line]:
    """Batches on their way: the same bits, and hidden behind a computation that takes as long."""
    rows = 1 << (16 if device.type == "cuda" else 8)
    batches = [Batch({"x": torch.randn(rows, 256), "id": torch.arange(rows)}, rows, rows, rows) for _ in range(8)]
    equal = True
    for sent, batch in zip(batches, to_device(iter(batches), device, Meter()), strict=True):
        equal &= all(torch.equal(batch.columns[name].cpu(), sent.columns[name]) for name in sent.columns)
    lines = [Line("bits of moved batches", "equal", "equal" if equal else "different", equal)]
    if device.type == "cuda":
        weight = torch.randn(256, 1 << 14, device=device)

        def seconds(source: Callable[[], Iterator[Batch]]) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for batch in source():
                batch.columns["x"] @ weight
            torch.cuda.synchronize()
            return time.perf_counter() - began

        resident = list(to_device(iter(batches), device, Meter()))
        computing = statistics.median(seconds(lambda: iter(resident)) for _ in range(3))
        both = statistics.median(seconds(lambda: to_device(iter(batches), device, Meter())) for _ in range(3))
        lines.append(Line("computing with transfer over computing alone", "near 1", f"{both / computing:.2f}"))
    return lines


def syncs(device: torch.device) -> list[Line]:
    """How often the host waits for the device in a step, per optimizer: once, for the norm."""
    lines = []
    for optimizer in ("adamw", "sgd", "lars", "lamb"):
        strategy = build_strategy(ParallelConfig(), RankInfo(), device, clip_norm=0.5)
        train_small(strategy, small_gpt(torch.float32), optimizer)
        batch = small_batch(11, device)
        if device.type == "cpu":
            lines.append(Line(f"{optimizer}: waits for the device in a step", "1", "skipped: needs a GPU"))
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            strategy.forward_backward(batch)
            strategy.step(1e-3)
            torch.cuda.set_sync_debug_mode("default")
        count = sum("synchronizing CUDA operation" in str(each.message) for each in caught)
        lines.append(Line(f"{optimizer}: waits for the device in a step", "1", str(count), count == 1))
    return lines


def alone(device: torch.device) -> list[Line]:
    """NCCL in a world of one: ZeRO 1 to 3, offload and compile against the plain run; codecs against the CPU's bits."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    start_process_group(RankInfo(), device, timedelta(minutes=2))
    expected, lines = plain_run(torch.device("cpu"), torch.float64), []
    for settings in ({"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 2, "offload": True}):
        config = ParallelConfig(accumulate=2, engine="torch", **settings)  # type: ignore[arg-type]
        context = RankContext(config, Mesh(), RankInfo(), device, make_device_mesh(Mesh(), 0, device))
        strategy = MeshStrategy(LocalStep(context, TorchZero(context), make_placement(context), clip_norm=0.5))
        got = train_small(strategy, small_gpt(torch.float64))
        lines.append(compared(f"{settings} over {dist.get_backend_config()}", got, expected, 1e-9))
    for name, codec in QUANTIZERS.items():
        values = torch.randn(4, 8 * codec.block, generator=torch.Generator().manual_seed(1))
        sent = codec.encode(values.to(device))
        far = float(
            (codec.decode(sent, torch.float32).cpu() - codec.decode(codec.encode(values), torch.float32)).abs().max()
        )
        lines.append(Line(f"codec {name}", "within 1e-6 of the CPU", f"{far:.1e}", far <= 1e-6))
    total = torch.ones(1 << 20, device=device)
    dist.all_reduce(total)
    lines.append(Line("all_reduce", "1", f"{float(total.mean()):g}", bool((total == 1).all())))
    dist.destroy_process_group()
    return lines


def checkpoints(device: torch.device) -> list[Line]:
    """An asynchronous save from the device, loaded on the CPU and on the device, bit for bit."""
    strategy = build_strategy(ParallelConfig(), RankInfo(), device, clip_norm=0.5)
    train_small(strategy, small_gpt(torch.float32))
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(open_storage(folder))
        checkpointer.save(1, strategy.state_dict(), {})
        lines.append(Line("stall of the save", "-", f"{checkpointer.times.stall_s * 1e3:.1f} ms"))
        expected = {name: value.cpu().clone() for name, value in strategy.prepared.module.state_dict().items()}
        checkpointer.wait()
        info = checkpointer.latest()
        assert info is not None
        for where in (torch.device("cpu"), device):
            other = build_strategy(ParallelConfig(), RankInfo(), where, clip_norm=0.5)
            train_small(other, small_gpt(torch.float32), "adamw")
            weights = other.state_dict(checkpointer.shapes(info))
            checkpointer.load(info, weights, random_state=False)
            other.load_state_dict(weights)
            got = other.prepared.module.state_dict()
            equal = all(torch.equal(got[name].cpu(), value) for name, value in expected.items())
            lines.append(Line(f"{device.type} to {where.type}", "equal bits", "equal" if equal else "different", equal))
    return lines


def recipes(device: torch.device) -> list[Line]:
    """The named GPTs in bf16 with torch.compile, fused AdamW and the project's own reader over Parquet."""
    if device.type == "cpu":
        return [Line("recipes", "-", "skipped: needs a GPU")]
    lines = []
    for recipe, batch in BATCH.items():
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            found = train_recipe(recipe, 30, batch, device, Path(folder))
        mfu = "unknown peak" if found["mfu"] is None else f"MFU {found['mfu']:.1%}"
        came = (
            f"{found['step_s'] * 1e3:.1f} ms a step of {batch} x {TOKENS}, {found['tokens_per_s']:,.0f} tokens/s, "
            f"{mfu}, peak {found['peak_memory_bytes'] / 2**30:.1f} GiB, stall {found['stall_share']:.2%}, "
            f"loss {found['first_loss']:.3f} -> {found['last_loss']:.3f}"
        )
        lines.append(Line(recipe, "MFU over 35 %, stall under 1 %", came, found["last_loss"] < found["first_loss"]))
    return lines


def planned(device: torch.device) -> list[Line]:
    """Peak memory and seconds of steps of the named GPTs as the planner predicts them, beside what they take."""
    if device.type == "cpu":
        return [Line("planned", "-", "skipped: needs a GPU")]
    return [line for recipe, rows, keys in PLANNED for line in planned_step(recipe, rows, keys, device)]


def planned_step(recipe: str, rows: int, keys: tuple[str, ...], device: torch.device) -> list[Line]:
    """One layout on one rank."""
    from sparkring.conf.clusters.catalog import load_cluster
    from sparkring.pipelines.model import layouts
    from sparkring.pipelines.model.fits import held_bytes
    from sparkring.pipelines.model.machine import gpu_cluster
    from sparkring.pipelines.model.plan import cost_plan

    alone = ("launch.world=1", "launch.min_world=1", "parallel.zero=0", f"etl.text.seq_len={TOKENS + 1}")
    config = load_config(recipe, (*alone, f"train.global_batch={rows}", *keys)).config
    seen = torch.cuda.get_device_properties(device)
    cluster = gpu_cluster(seen.name, seen.total_memory)
    plan = layouts.planned(config, load_cluster(cluster), None)
    predicted = plan.costs.layout(config.parallel, Mesh())
    torch._dynamo.reset()
    gc.collect()  # models and optimizers have cycles
    torch.cuda.empty_cache()
    step_s, peak = measured_step(config, rows, device)
    name = " ".join((recipe, f"{rows} rows", *keys))
    found = []
    for what, expected, came, tolerance in (
        ("peak", (held_bytes(cost_plan(config, None)) or 0) / 2**30, peak / 2**30, 0.02),
        ("peak, as searches estimate it", predicted.memory / 2**30, peak / 2**30, 0.02),
        ("step", predicted.time.total * 1e3, step_s * 1e3, 0.10),
    ):
        error = expected / came - 1
        unit = "ms" if what == "step" else "GiB"
        text = f"{came:.2f} {unit}; predicted {expected:.2f} ({error:+.1%})"
        found.append(Line(f"{name}: {what} on {cluster}", f"within {tolerance:.0%}", text, abs(error) <= tolerance))
    print(*found, sep="\n", file=sys.stderr, flush=True)
    return found


def measured_step(config: RunConfig, rows: int, device: torch.device) -> tuple[float, int]:
    """Seconds of a step, the median of ten, and the most bytes that torch had allocated in them."""
    torch.manual_seed(0)
    model = GPT(**config.model.args)
    strategy = build_strategy(config.parallel, RankInfo(), device, clip_norm=1.0)
    strategy.prepare(
        model, LanguageModelTask(), lambda named: build_optimizer(named, config.optim), compiled=config.train.compile
    )
    tokens = torch.randint(0, config.model.args["vocab"], (rows, TOKENS + 1), device=device)
    seconds = []
    for step in range(13):
        if step == 3:  # compilation, and what the first step sets up
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        strategy.forward_backward(Batch({"tokens": tokens}, rows, rows, rows))
        strategy.step(3e-4)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:]), torch.cuda.max_memory_allocated()


def loss_chunks(device: torch.device) -> list[Line]:
    """The loss of a batch of gpt-124m by the size of its chunks: the default is within a tenth of the best."""
    rows, vocab = (16384, 50304) if device.type == "cuda" else (64, 50304)
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), device=device)
    kept, lines = dict(loss_module.CHUNK_ELEMENTS), []
    for power in (22, 24, 26):
        loss_module.CHUNK_ELEMENTS[device.type] = 1 << power
        times = []
        for _ in range(3):
            _finish(device)
            began = time.perf_counter()
            loss_module.token_cross_entropy(logits, target, -100).sum().backward()
            _finish(device)
            times.append(time.perf_counter() - began)
        lines.append(Line(f"chunks of 2^{power}", "-", f"{statistics.median(times) * 1e3:.1f} ms"))
    loss_module.CHUNK_ELEMENTS.update(kept)
    return lines


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def out_of_memory(device: torch.device) -> list[Line]:
    """More memory than there is, as the driver names it."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    except Exception as error:
        cause = cause_of(f"{type(error).__module__}.{type(error).__qualname__}", str(error))
        wanted = "gpu memory" if device.type == "cuda" else "memory"
        return [Line("out of memory", wanted, cause, cause == wanted)]
    return [Line("out of memory", "an error", "none", False)]


PAIR = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
kind, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
mine = torch.full((1000,), float(rank + 1), device=kind)
dist.all_reduce(mine)
assert bool((mine == 3).all()), mine[:4]
dist.destroy_process_group()
"""


def two_on_one(device: torch.device) -> list[Line]:
    """Two processes on one device over Gloo."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", PAIR, device.type]
    ranks = [subprocess.Popen([*command, str(rank), port], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate()[1].strip().splitlines()[-1:] for rank in ranks]
    good = all(rank.returncode == 0 for rank in ranks)
    return [Line("all_reduce of two processes", "3", "3" if good else str(errors), good)]


def horovod(device: torch.device) -> list[Line]:
    """Horovod with NCCL, where it was built so."""
    if importlib.util.find_spec("horovod") is None:
        return [Line("Horovod", "-", "skipped: not installed")]
    import horovod.torch as hvd

    if device.type == "cuda" and not hvd.nccl_built():
        return [Line("Horovod", "-", "skipped: built for the CPU (make setup GPU=1)")]
    hvd.init()
    total = hvd.allreduce(torch.ones(1000, device=device), op=hvd.Sum)
    hvd.shutdown()
    return [Line("Horovod's all-reduce in a world of one", "1", f"{float(total.mean()):g}", bool((total == 1).all()))]


def tf32(device: torch.device) -> list[Line]:
    """Errors of a convolution and a product in float32, as training sets it, and with TF32: a thousand times larger."""
    torch.manual_seed(0)
    images, weight = torch.randn(4, 32, 32, 32, device=device), torch.randn(32, 32, 3, 3, device=device)
    left = torch.randn(512, 512, device=device)
    exact_conv = nn.functional.conv2d(images.double(), weight.double())
    exact_product = left.double() @ left.double()
    lines = []
    for allowed in (False, True) if device.type == "cuda" else (False,):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
        conv = float((nn.functional.conv2d(images, weight).double() - exact_conv).abs().max() / exact_conv.abs().max())
        product = float(((left @ left).double() - exact_product).abs().max() / exact_product.abs().max())
        good = None if allowed else max(conv, product) < 1e-5
        expected = "over 1e-5" if allowed else "under 1e-5"
        lines.append(
            Line(f"TF32 {'on' if allowed else 'off'}", expected, f"conv {conv:.1e}, product {product:.1e}", good)
        )
    return lines


# In the order of their worth; seconds that each may take.
PARTS: dict[str, tuple[Callable[[torch.device], list[Line]], float]] = {
    "imports": (imports, 60),
    "equality": (equality, 180),
    "alone": (alone, 240),
    "host": (host, 60),
    "syncs": (syncs, 120),
    "transfer": (transfer, 120),
    "checkpoints": (checkpoints, 120),
    "recipes": (recipes, 600),
    "planned": (planned, 300),
    "loss_chunks": (loss_chunks, 120),
    "out_of_memory": (out_of_memory, 60),
    "two_on_one": (two_on_one, 120),
    "tf32": (tf32, 60),
    "horovod": (horovod, 60),
    "layouts": (layouts, 900),
    "tests": (tests, 300),
    "ranks": (ranks, 3000),
}


def write_tokens(folder: Path, rows: int, vocab: int) -> DatasetManifest:
    """A dataset of random tokens in the project's own format: one Parquet file, row groups of 256."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, TOKENS + 1), dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), TOKENS + 1)
    path = folder / "train-00000.parquet"
    pq.write_table(pa.table({"tokens": column}), path, row_group_size=256, compression="none")
    groups = pq.ParquetFile(path).metadata
    counts = tuple(groups.row_group(i).num_rows for i in range(groups.num_row_groups))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return DatasetManifest(
        name="random-tokens",
        fingerprint=digest,
        created_at="",
        columns=(Column(name="tokens", dtype="int32", layout="vector", shape=(TOKENS + 1,), cardinality=vocab),),
        files=(
            DataFile(
                path=path.name, split="train", rows=rows, bytes=path.stat().st_size, sha256=digest, row_groups=counts
            ),
        ),
        splits={"train": SplitInfo(rows=rows, files=1)},
        accounting=Accounting(rows_in=rows, rows_out=rows),
        lineage=Lineage(sources={"random": "numpy default_rng(0)"}),
    )


def flops_per_token(model: GPT) -> float:
    count = sum(p.numel() for p in model.parameters())
    if model.head.weight is not model.embed.weight:
        count -= model.embed.weight.numel()  # looked up, not multiplied
    return 6.0 * count + 12.0 * model.layers * model.embed.embedding_dim * TOKENS


def train_recipe(recipe: str, steps: int, batch: int, device: torch.device, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = load_config(recipe).config.model.args
    model = GPT(**sizes)
    flops = flops_per_token(model)
    manifest = write_tokens(folder, rows=batch * (steps + 12), vocab=sizes["vocab"])
    request = ReadRequest(open_storage(str(folder)), manifest, "train", None, batch)
    reader = ParquetReader(request, DataRank(device=device), DataConfig(lanes=8, threads=4))
    strategy = build_strategy(ParallelConfig(precision="bf16"), RankInfo(), device, clip_norm=1.0)
    strategy.prepare(
        model, LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig(weight_decay=0.1)), compiled=True
    )
    seconds, stalls, losses = [], [], []
    batches = iter(reader.batches(0))
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps + 10):
        began = time.perf_counter()
        rows = next(batches)
        waited = time.perf_counter() - began
        loss = strategy.forward_backward(rows)
        strategy.step(3e-4)
        torch.cuda.synchronize()
        if step >= 10:  # compilation and warm-up
            seconds.append(time.perf_counter() - began)
            stalls.append(waited)
        losses.append(float(loss) / batch)
    reader.close()
    step_s = statistics.median(seconds)
    name = torch.cuda.get_device_name()
    peak = next((tflops for key, tflops in PEAK_TFLOPS.items() if key in name), None)
    return {
        "recipe": recipe,
        "batch": batch,
        "step_s": step_s,
        "tokens_per_s": batch * TOKENS / step_s,
        "mfu": flops * batch * TOKENS / step_s / (peak * 1e12) if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "stall_share": sum(stalls) / sum(seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def table(part: str, lines: list[Line]) -> str:
    marks = {True: "as expected", False: "**NOT AS EXPECTED**", None: ""}
    rows = [f"| {part} | {line.what} | {line.expected} | {line.came} | {marks[line.good]} |" for line in lines]
    return "\n".join(rows)


def run_parts(parts: list[str], device: str, scale_s: float) -> tuple[str, bool]:
    """Run each part in a process of its own: (the rows of the table, whether nothing failed)."""
    rows, good = [], True
    for part in parts:
        limit_s = PARTS[part][1]
        command = [sys.executable, __file__, part, "--here", "--device", device]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s * scale_s)
            last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
            text = done.stdout.strip() or table(part, [Line("the whole part", "an end", last, False)])
            good &= done.returncode == 0
            print(done.stderr[-8000:], file=sys.stderr, flush=True)
        except subprocess.TimeoutExpired as error:
            print((error.stderr or b"").decode(errors="replace")[-8000:], file=sys.stderr, flush=True)
            text, good = table(part, [Line("the whole part", f"at most {limit_s:g} s", "no end", False)]), False
        print(text, flush=True)
        rows.append(text)
    return "\n".join(rows), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=["all", *PARTS])
    parser.add_argument("--here", action="store_true", help="one part, in this process")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scale", type=float, default=1.0, help="of the limits, for a slow machine")
    parser.add_argument("--out", type=Path, help="file for the table of `all`")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible: this benchmark needs one (it ran nothing)")
    parts = [part for part in PARTS if part != "ranks"] if "all" in arguments.parts else arguments.parts
    if arguments.here:
        lines = PARTS[parts[0]][0](torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu"))
        print(table(parts[0], lines))
        return int(any(line.good is False for line in lines))
    rows, good = run_parts(parts, arguments.device, arguments.scale)
    if arguments.out:
        name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        head = f"# One device: {name}, torch {torch.__version__}, commit {_commit()}"
        head += f"\n\n`python benchmarks/gpu_session.py {' '.join(arguments.parts)}`"
        columns = "| part | what | expected | came | |\n|---|---|---|---|---|"
        arguments.out.write_text(f"{head}\n\n{columns}\n{rows}\n")
    return int(not good)


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
