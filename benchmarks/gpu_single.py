"""Everything one GPU can prove, in one call, without Spark:

    python benchmarks/gpu_single.py [--recipes gpt-124m gpt-1b] [--steps 40] [--out FILE.md]

1. ten AdamW steps of a small GPT on the GPU in float64 equal the CPU's; float32 within 2e-5;
2. the named GPTs in bf16 with torch.compile, fused AdamW and the project's own reader over Parquet: tokens/s, model
   FLOPs utilisation, peak memory, share of time waiting for data.

MFU: (6 N + 12 layers x width x T) FLOPs per token (PaLM, https://arxiv.org/abs/2204.02311, appendix B) over the
device's dense bf16 peak. N counts every weight that is multiplied, the head once.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.launch import ParallelConfig
from sparkring.conf.blocks.train import OptimConfig
from sparkring.conf.load import load_config
from sparkring.conf.manifest import Accounting, Column, DataFile, DatasetManifest, Lineage, SplitInfo
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.optim import build_optimizer
from sparkring.training.parallel import build_strategy

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
BATCH = {"gpt-124m": 64, "gpt-1b": 16}  # rows per step of each recipe


def ten_steps(device: torch.device, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters of a small GPT."""
    torch.manual_seed(0)
    model = GPT(vocab=128, width=64, layers=3, heads=4, kv_heads=2).to(dtype)
    strategy = build_strategy(ParallelConfig(accumulate=2), RankInfo(), device, clip_norm=0.5)
    strategy.prepare(model, LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig()))
    losses = []
    for step in range(10):
        tokens = torch.randint(0, 128, (8, 33), generator=torch.Generator().manual_seed(step))
        losses.append(float(strategy.forward_backward(Batch({"tokens": tokens.to(device)}, 8, 8, 8))) / 8)
        strategy.step(1e-3)
    described, values = strategy.stream_model()
    return losses, {each.name: value.clone() for each, value in zip(described, values, strict=True)}


def equality(device: torch.device) -> list[str]:
    """One line per dtype; AssertionError beyond the tolerance."""
    lines = []
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        _, expected = ten_steps(torch.device("cpu"), dtype)
        _, got = ten_steps(device, dtype)
        far = max(float((got[name] - value).abs().max()) for name, value in expected.items())
        assert far < tolerance, f"{dtype} on {device} is {far} from the CPU, beyond {tolerance}"
        lines.append(
            f"- {dtype}: largest parameter difference after 10 AdamW steps {far:.2e} (tolerance {tolerance:.0e})"
        )
    return lines


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


def report(lines: list[str], found: list[dict[str, Any]]) -> str:
    rows = [
        f"| {r['recipe']} | {r['batch']} x {TOKENS} | {r['step_s'] * 1e3:.1f} | {r['tokens_per_s']:,.0f} | "
        f"{'unknown peak' if r['mfu'] is None else format(r['mfu'], '.1%')} | {r['peak_memory_bytes'] / 2**30:.1f} | "
        f"{r['stall_share']:.2%} | {r['first_loss']:.3f} -> {r['last_loss']:.3f} |"
        for r in found
    ]
    head = f"# One GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}\n\n`python benchmarks/gpu_single.py`"
    table = "| recipe | batch | step ms | tokens/s | MFU | peak GiB | stall | loss |\n|---|---|---|---|---|---|---|---|"
    return "\n".join(
        [head, "", "## Equal to the CPU", "", *lines, "", "## bf16, torch.compile, own reader", "", table, *rows, ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, help="rows per step; default by size")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible: this benchmark needs one (it ran nothing)")
    device = torch.device("cuda")
    lines, found = equality(device), []
    for recipe in arguments.recipes:
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            batch = arguments.batch or BATCH[recipe]
            found.append(train_recipe(recipe, arguments.steps, batch, device, Path(folder)))
    text = report(lines, found)
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
