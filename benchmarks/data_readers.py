"""How fast rows become tensors: this project's reader beside the decoder's limit and its peers.

    python benchmarks/data_readers.py --theme table --rows 4000000 --out benchmarks/results/data_table_2core_202611.md

The peers live in an environment of their own, made by `make peers`; without it they are left out.

Each measurement is a fresh process (benchmarks/data_cases.py), in the order A B C ... C B A, repeated; the page cache
is warm (every file is read before) or, with --cold, emptied of the files in every run before its clocks start. Memory
is the peak of the proportional set size of the process and its children, sampled every 20 ms. Reported are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from machine import measured_with  # noqa: E402

from benchmarks.peak_memory import peak_pss  # noqa: E402
from sparkring.conf.blocks.data import DataConfig  # noqa: E402
from sparkring.conf.manifest import Accounting, Column, DataFile, DatasetManifest, Lineage, SplitInfo  # noqa: E402
from sparkring.etl.shards.write import SHARD, WriteTask, write_shard  # noqa: E402

PEERS_PYTHON = str(HERE.parent / "build/peers/bin/python")
PEERS = ("HF datasets", "HF datasets unshuffled", "LitData", "MosaicML streaming")
GATHERS = ("decode + torch gather", "decode + numpy gather")
VALUE_GATHERS = ("decode + transforms + torch gather", "decode + transforms + numpy gather")
CASES = {
    "table": [
        "decode alone", *GATHERS, "sparkring", "sparkring 8 lanes", "sparkring 2 threads",
        "petastorm BatchedDataLoader", "petastorm DataLoader", "HF datasets", "LitData", "MosaicML streaming",
    ],
    "values": [
        "decode alone", *VALUE_GATHERS, "sparkring", "sparkring 8 lanes", "sparkring 2 threads",
        "petastorm with transforms",
    ],
    "images": ["decode alone", "sparkring", "HF datasets", "LitData", "MosaicML streaming"],
    "tokens": ["decode alone", "sparkring", "HF datasets", "LitData", "MosaicML streaming"],
}  # fmt: skip
# (case, beside the fastest of which, how many times its rows per CPU-second are aimed at)
AIMS = {
    "table": [("sparkring", GATHERS, 0.8), ("sparkring", ("petastorm BatchedDataLoader",), 11.0)],
    "values": [("sparkring", VALUE_GATHERS, 0.8), ("sparkring", ("petastorm with transforms",), 11.0)],
    "images": [("sparkring", (peer,), 1.0) for peer in ("HF datasets", "LitData", "MosaicML streaming")],
    "tokens": [("sparkring", (peer,), 1.0) for peer in ("HF datasets", "LitData", "MosaicML streaming")],
}
WHY = {
    "table": """What differs: `sparkring` moves rows twice, in the cache inside their row group and then in blocks to a
batch (`shuffle` below), `gather` once, at random over 8 row groups. The second move reads from as many row groups as
there are lanes, more than a processor's cache holds; and `sparkring` resumes at any batch and gives any number of
ranks the same batches.""",
}
BATCH = {"values": 4096, "table": 4096, "images": 256, "tokens": 1024}
GROUP = {"values": 16_384, "table": 16_384, "images": 512, "tokens": 2048}


def make_table(theme: str, first: int, count: int, random: np.random.Generator) -> pa.Table:
    """`count` rows: 41 columns of float32, int32 and int64; JPEG images; or ragged int32 tokens (mean 512).

    `values`: the 41 columns before their features: doubles, some null, 9 texts of 16 to 4,096 values, 10 whole numbers.
    """
    ids = np.arange(first, first + count)
    if theme == "values":
        raw: dict[str, Any] = {"id": ids}
        raw |= {f"f{k}": pa.array(random.normal(50, 9, count), mask=random.random(count) < 0.02) for k in range(20)}
        for k in range(9):
            texts = pa.array([f"value {i}" for i in range(16 << k)])
            codes = pa.array(random.integers(0, 16 << k, count).astype(np.int32), mask=random.random(count) < 0.02)
            raw[f"t{k}"] = pa.DictionaryArray.from_arrays(codes, texts).cast(pa.string())
        raw |= {f"c{k}": random.integers(0, 1000 * (k + 1), count).astype(np.int32) for k in range(10)}
        return pa.table(raw | {"label": random.random(count).astype(np.float32)})
    if theme == "images":
        smooth = random.integers(0, 255, (count, 8, 8, 3), dtype=np.uint8)
        return pa.table({"id": ids, "image": pa.array([_jpeg(s) for s in smooth], pa.binary())})
    if theme == "tokens":
        lengths = random.integers(1, 1024, count)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        values = random.integers(0, 32_000, offsets[-1], dtype=np.int32)
        return pa.table({"id": ids, "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})
    columns: dict[str, Any] = {"id": ids}
    columns |= {f"f{k}": random.normal(size=count).astype(np.float32) for k in range(20)}
    columns |= {f"c{k}": random.integers(0, 1000 * (k + 1), count).astype(np.int32) for k in range(19)}
    return pa.table(columns | {"label": random.random(count).astype(np.float32)})


def _jpeg(small: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(small).resize((224, 224), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()


def manifest_columns(theme: str) -> tuple[Column, ...]:
    if theme == "images":
        image = Column(name="image", dtype="binary", layout="binary", shape=(224, 224, 3))
        return Column(name="id", dtype="int64"), image
    if theme == "tokens":
        return Column(name="id", dtype="int64"), Column(
            name="tokens", dtype="int32", layout="ragged", logical="array<int>"
        )
    names = make_table(theme, 0, 1, np.random.default_rng(0)).column_names
    if theme == "values":
        stored = {"f": "float64", "t": "string", "c": "int32"}
        inputs = [Column(name=n, dtype=stored[n[0]], role="input", nulls="keep") for n in names if n[0] in stored]
        return Column(name="id", dtype="int64"), *inputs, Column(name="label", dtype="float32", role="label")
    kinds = {"f": "float32", "c": "int32", "l": "float32", "i": "int64"}
    return tuple(Column(name=n, dtype=kinds[n[0]]) for n in names)


def features(theme: str) -> dict[str, Any]:
    """The feature state: every number scaled, every text and whole number a code; a tenth was not seen in training."""
    if theme != "values":
        return {}
    about: dict[str, Any] = {"version": 1, "inputs": {}, "features": []}
    for column in manifest_columns(theme):
        if column.role != "input":
            continue
        state: dict[str, Any] = {"name": column.name, "column": column.name}
        if column.name[0] == "f":
            state |= {
                "kind": "numeric",
                "transform": "none",
                "mean": 50.0,
                "std": 9.0,
                "fill": 50.0,
                "indicator": False,
            }
        else:
            number = int(column.name[1:])
            size, prefix = (16 << number, "value ") if column.name[0] == "t" else (1000 * (number + 1), "")
            state |= {"kind": "categorical", "values": [f"{prefix}{i}" for i in range(size - size // 10)]}
        about["inputs"][column.name] = {"f": "double", "t": "string", "c": "int"}[column.name[0]]
        about["features"].append(state)
    return about


def write(folder: Path, theme: str, rows: int, files: int = 4) -> None:
    """The dataset as `etl` leaves it: equal files written by its own write task, exact row groups, a manifest."""
    if (folder / "_manifest.json").exists():
        return
    columns, random = manifest_columns(theme), np.random.default_rng(7)
    bounds = np.linspace(0, rows, files + 1).astype(int).tolist()
    paths = tuple(f"data-bench/train-{number:05d}.parquet" for number in range(files))
    task = WriteTask(str(folder), paths, tuple(bounds[:-1]), columns, (GROUP[theme],) * files, "snappy")
    listed = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        starts = range(begin, end, GROUP[theme])
        tables = (make_table(theme, at, min(GROUP[theme], end - at), random) for at in starts)
        batches = (
            batch.append_column(SHARD, pa.array([number] * batch.num_rows, pa.int32()))
            for table in tables
            for batch in table.to_batches()
        )
        record = next(write_shard(task, batches)).to_pylist()[0]
        listed.append(
            DataFile(
                path=paths[number], split="train", rows=record["rows"], bytes=record["bytes"],
                sha256=record["sha256"], row_groups=tuple(record["row_groups"]),
            )
        )  # fmt: skip
    manifest = DatasetManifest(
        name=theme, fingerprint=hashlib.sha256(theme.encode()).hexdigest(), created_at="",
        columns=columns, files=tuple(listed), splits={"train": SplitInfo(rows=rows, files=files)},
        accounting=Accounting(rows_in=rows, rows_out=rows), lineage=Lineage(sources={}), features=features(theme),
    )  # fmt: skip
    (folder / "_manifest.json").write_text(manifest.to_json())


def run(case: str, folder: Path, batch: int, limit_s: float, python: str, cold: bool) -> dict[str, Any]:
    """One measurement in a fresh process; its peak PSS is watched from here."""
    command = [python, str(HERE / "data_cases.py"), case, str(folder), str(batch), str(limit_s)]
    command += ["cold"] if cold else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    with peak_pss(process.pid, 0.02) as peak:
        out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{case}: exit {process.returncode}\n{errors[-2000:]}")
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result | {"peak_pss_mib": peak[0] / 2**20}


def warm(folder: Path) -> None:
    """Bring every file into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def groups_per_batch(theme: str, folder: Path, lanes: int) -> float:
    """Distinct row groups in a global batch of ours, from the order itself (epoch 0)."""
    from sparkring.training.data.order import epoch_ids, make_plan

    manifest = DatasetManifest.from_json((folder / "_manifest.json").read_text(), str(folder))
    sizes = [rows for file in manifest.files for rows in file.row_groups]
    plan = make_plan(sizes, BATCH[theme], DataConfig(lanes=lanes, window_row_groups=1))
    group_of = np.repeat(np.arange(len(sizes)), sizes)[epoch_ids(plan, 0)]
    whole = len(group_of) // BATCH[theme] * BATCH[theme]
    return float(np.mean([len(np.unique(b)) for b in group_of[:whole].reshape(-1, BATCH[theme])]))


def report(
    title: str, theme: str, rows: int, results: dict[str, list[dict[str, Any]]], notes: list[str], folder: Path
) -> str:
    lines = [
        f"{title}: {rows:,} rows, batch {BATCH[theme]}, row groups of {GROUP[theme]:,}, "
        f"{len(results['decode alone'])} runs each",
        "",
        *notes,
        "",
        "| | rows per CPU-s | of decode alone | wall rows/s | first batch s | peak PSS MiB | rows read |",
        "|---|---|---|---|---|---|---|",
    ]
    floor = _median(results["decode alone"], lambda r: r["rows"] / r["cpu_s"])
    for case, runs in results.items():
        rate = _median(runs, lambda r: r["rows"] / r["cpu_s"])
        spread = [r["rows"] / r["cpu_s"] for r in runs]
        lines.append(
            f"| {case} | {rate:,.0f} ({min(spread):,.0f}-{max(spread):,.0f}) | {rate / floor:.3f} | "
            f"{_median(runs, lambda r: r['rows'] / r['wall_s']):,.0f} | "
            f"{_median(runs, lambda r: r['first_batch_s']):.2f} | "
            f"{_median(runs, lambda r: r['peak_pss_mib']):.0f} | {int(_median(runs, lambda r: r['rows'])):,} |"
        )
    lines += [*aims(theme, results), *accounts(results)]
    for lanes in (DataConfig().lanes, 8):
        lines.append("")
        lines.append(
            f"Distinct row groups in a global batch, {lanes} lanes: {groups_per_batch(theme, folder, lanes):.1f}."
        )
    return "\n".join(lines) + "\n"


def aims(theme: str, results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What was aimed at, and whether it was reached; if not, why."""
    lines = [""]

    def rate(case: str) -> float:
        return _median(results[case], lambda r: r["rows"] / r["cpu_s"])

    for case, others, aim in AIMS[theme]:
        if measured := [other for other in others if results.get(other)] if results.get(case) else []:
            other = max(measured, key=rate)
            held, beside = (_median(results[c], lambda r: r["peak_pss_mib"]) for c in (case, other))
            sooner, later = (_median(results[c], lambda r: r["first_batch_s"]) for c in (case, other))
            times = rate(case) / rate(other)
            verdict = "reached" if times >= aim else "missed"
            lines.append(
                f"- {case} beside {other}: {times:.2f} times its rows per CPU-second, {aim:g} aimed at: {verdict}; "
                f"{held / beside:.2f} times its memory; first batch after {sooner:.2f} s, {later:.2f} s"
            )
    if any("missed" in line for line in lines) and theme in WHY:
        lines += ["", WHY[theme]]
    return lines


def accounts(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Where the reader's seconds went, by its own meter: of its threads, so they may exceed the wall's."""
    causes = ("read_s", "decode_s", "shuffle_s", "collate_s", "data_stall_s")
    lines = ["", "Its own meter, seconds per million rows:", "", f"| | {' | '.join(c[:-2] for c in causes)} |"]
    lines.append("|---|" + "---|" * len(causes))
    for case, runs in results.items():
        if runs and runs[0]["account"]:
            spent = [_median(runs, lambda r, c=c: r["account"].get(c, 0.0) / r["rows"] * 1e6) for c in causes]
            lines.append(f"| {case} | {' | '.join(f'{s:.3f}' for s in spent)} |")
    return lines


def _median(runs: list[dict[str, Any]], of: Any) -> float:
    return statistics.median(of(r) for r in runs)


def notes_on(peers_python: str | None) -> list[str]:
    """What the numbers were measured on and with, so that they can be measured again."""
    lines = [
        f"- {measured_with('pyarrow', 'torch', 'numpy', 'petastorm', 'pillow')}",
        "- where the load average is above 2, other work shared the machine: trust ratios of CPU time, which were "
        "taken in interleaved order, not wall times",
    ]
    if len(os.sched_getaffinity(0)) == 1:
        lines.append(
            "- on one core: here, work in two threads at once costs more CPU time than one after the other "
            "(1.6-2 times for a loop of numpy.take), which a limit in one thread does not pay"
        )
    if peers_python:
        ask = (
            "import importlib.metadata as m; "
            "names = ('datasets', 'litdata', 'mosaicml-streaming', 'torch', 'pyarrow'); "
            "print(', '.join(f'{n} {m.version(n)}' for n in names))"
        )
        found = subprocess.run([peers_python, "-c", ask], capture_output=True, text=True).stdout.strip()
        lines.append(f"- peers, in their own environment: {found}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theme", choices=sorted(CASES), required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--peer-rows", type=int, default=50_000, help="rows written in the peers' own formats")
    parser.add_argument("--rounds", type=int, default=3, help="each is A B ... B A: two measurements per case")
    parser.add_argument("--limit-s", type=float, default=15.0, help="CPU seconds after which a case is stopped")
    parser.add_argument("--one-core", action="store_true", help="run everything on one core: see the result's remark")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before every run")
    parser.add_argument("--cases", help="comma-separated; default: all of the theme")
    parser.add_argument("--folder", default="/tmp/sparkring-bench")
    parser.add_argument("--peers-python", default=PEERS_PYTHON if Path(PEERS_PYTHON).exists() else None)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    theme = args.theme
    if args.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    title = f"# Reading {theme}, {'cold' if args.cold else 'warm'} page cache"
    folder = Path(args.folder) / f"{theme}-{args.rows}"
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, theme, args.rows)
    wanted = args.cases.split(",") if args.cases else CASES[theme]
    cases = [c for c in wanted if args.peers_python or c not in PEERS]
    if args.peers_python and not (folder / "mds").exists():
        prepare = [args.peers_python, str(HERE / "data_cases.py"), "prepare", str(folder), str(args.peer_rows)]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    warm(folder)
    for turn in range(2 * args.rounds):
        for case in cases if turn % 2 == 0 else cases[::-1]:
            python = args.peers_python if case in PEERS else sys.executable
            results[case].append(run(case, folder, BATCH[theme], args.limit_s, python, args.cold))
        now = notes_on(args.peers_python)
        Path(args.out).write_text(
            report(title, theme, args.rows, results, now, folder)
        )  # after every pass: it may be long


if __name__ == "__main__":
    main()
