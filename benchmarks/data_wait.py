"""How long the training step waits for data when it takes as long as the reader's own floor allows.

    python benchmarks/data_wait.py FOLDER [--batch 4096] [--slack 1.0 1.25] --out benchmarks/results/data_wait_2core.md

FOLDER is a dataset written by benchmarks/data_readers.py. A few epochs are first read as fast as it goes, which gives
the time per step the reader needs (on this machine, with nothing else to do). Then they are read by a step that sleeps
for that time (times each `slack`), as a step on an accelerator would leave the cores to the reader. Reported is the
share of all time spent waiting for a batch: as training reads, on from epoch to epoch, and with each epoch begun anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from data_readers import notes_on

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import ReadRequest


def on(reader: ParquetReader, epochs: int) -> Iterator[Batch]:
    return reader.batches(0, epochs * reader.steps_per_epoch)


def anew(reader: ParquetReader, epochs: int) -> Iterator[Batch]:
    return chain.from_iterable(reader.batches(epoch * reader.epochs.samples) for epoch in range(epochs))


def waits(batches: Iterator[Batch], step_s: float) -> list[float]:
    """Seconds waited for each batch by a step of step_s seconds; the last: seconds of everything."""
    found = []
    began = waiting = time.perf_counter()
    for _ in batches:
        found.append(time.perf_counter() - waiting)
        if step_s:
            time.sleep(step_s)
        waiting = time.perf_counter()
    return [*found, time.perf_counter() - began]


def one_run(reader: ParquetReader, epochs: int, slacks: list[float]) -> list[list[float]]:
    """Per slack: seconds of a step, shares of the time waited (anew, on, on after the first batch, of that for a
    chunk), milliseconds waited for the first batch of the second epoch (anew, on), seconds for the very first."""
    second = reader.steps_per_epoch
    fast = waits(on(reader, epochs), 0.0)
    floor_s = (fast[-1] - fast[0]) / (len(fast) - 2)
    rows = []
    for slack in slacks:
        *begun, begun_s = waits(anew(reader, epochs), slack * floor_s)
        reader.meter.take()
        *read, read_s = waits(on(reader, epochs), slack * floor_s)
        for_chunks_s = reader.meter.take()["data_stall_s"] - read[0]
        shares = [sum(begun) / begun_s, sum(read) / read_s, sum(read[1:]) / read_s, max(0.0, for_chunks_s) / read_s]
        rows.append([slack * floor_s, *shares, 1e3 * begun[second], 1e3 * read[second], read[0]])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--slack", type=float, nargs="+", default=[1.0, 1.25, 2.0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    manifest = DatasetManifest.from_json(Path(args.folder, "_manifest.json").read_text(), args.folder)
    reader = ParquetReader(ReadRequest(open_storage(args.folder), manifest, "train", None, args.batch))
    reader.verify()
    waits(on(reader, 1), 0.0)
    runs = [one_run(reader, args.epochs, args.slack) for _ in range(args.runs)]
    reader.close()
    lines = []
    for slack, found in zip(args.slack, zip(*runs, strict=True), strict=True):
        step, begun, read, later, chunks, before, after, first = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        lines.append(
            f"| {slack} | {step * 1e3:.2f} | {begun:.2%} | {read:.2%} | {later:.2%} | {chunks:.2%} | "
            f"{before:.0f} | {after:.0f} | {first:.2f} |"
        )
    head = [
        f"# Waiting for data: {args.epochs} epochs of {manifest.splits['train'].rows:,} rows, batch {args.batch}, "
        f"medians of {args.runs} runs",
        "",
        *notes_on(None),
        "",
        "| step / floor | step ms | waited, of all time, each epoch begun anew | as training reads | the same after "
        "its first batch | of that, for a chunk to be ready | second epoch's first batch ms, begun anew | as training "
        "reads | very first batch s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    Path(args.out).write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
