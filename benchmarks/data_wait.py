"""How long the training step waits for data when it takes as long as the reader's own floor allows.

    python benchmarks/data_wait.py FOLDER [--batch 4096] [--slack 1.0 1.1] --out benchmarks/results/data_wait_2core.md

FOLDER is a dataset written by benchmarks/data_readers.py. An epoch is first read as fast as it goes; that gives the
time per step the reader needs (on this machine, with nothing else to do). Then an epoch is read by a step that sleeps
for that time (times each `slack`), as a step on an accelerator would leave the cores to the reader. Reported: the share
of the epoch spent waiting, with and without the first batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from data_readers import machine

from conf.manifest import DatasetManifest
from conf.storage import open_storage
from training.data.reader import ParquetReader, ReaderSettings


def epoch(reader: ParquetReader, number: int, step_s: float) -> tuple[float, float, float, int]:
    """(seconds in all, seconds waited, seconds to the first batch, steps)."""
    began = time.perf_counter()
    steps = 0
    for _ in reader.batches(number):
        steps += 1
        if step_s:
            time.sleep(step_s)
    total = time.perf_counter() - began
    taken = reader.meter.take()
    return total, taken["data_stall_s"], taken["first_batch_s"], steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--slack", type=float, nargs="+", default=[1.0, 1.1, 1.25, 1.5])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    manifest = DatasetManifest.from_json(Path(args.folder, "_manifest.json").read_text(), args.folder)
    reader = ParquetReader(open_storage(args.folder), manifest, "train", None, args.batch, settings=ReaderSettings())
    reader.verify()
    epoch(reader, 0, 0.0)
    lines = []
    for slack in args.slack:
        runs = [one_run(reader, run, slack) for run in range(args.runs)]
        step, waited, later, first = (statistics.median(column) for column in zip(*runs, strict=True))
        lines.append(f"| {slack} | {step * 1e3:.2f} | {waited:.2%} | {later:.2%} | {first:.2f} |")
    reader.close()
    notes = machine(f"python {' '.join(sys.argv)}", None)
    notes[1] = notes[1].format(load=f"{os.getloadavg()[0]:.1f}")
    head = [
        f"# Waiting for data: {manifest.splits['train'].rows:,} rows, batch {args.batch}, medians of {args.runs} runs",
        "",
        *notes,
        "",
        "| step / floor | step ms | waited, of the epoch | after the first batch | first batch s |",
        "|---|---|---|---|---|",
    ]
    Path(args.out).write_text("\n".join([*head, *lines, ""]))


def one_run(reader: ParquetReader, number: int, slack: float) -> tuple[float, float, float, float]:
    """(seconds of a step, share of the epoch waited, the same after the first batch, seconds to the first batch)."""
    alone, _, first, steps = epoch(reader, number, 0.0)
    step_s = slack * (alone - first) / max(1, steps - 1)
    total, waited, first, _ = epoch(reader, number, step_s)
    return step_s, waited / total, max(0.0, waited - first) / total, first


if __name__ == "__main__":
    main()
