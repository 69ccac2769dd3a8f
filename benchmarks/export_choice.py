"""Which step should the flights recipe export, decided on months before its validation and test months?

For each month of `--months`: the flights before it, the month before as the validation split, the month itself as the
test split. `best` exports the step with the lowest validation loss, `last` the end of the schedule. No flight from the
recipe's own validation split on is read, so the choice is made without them.

    python benchmarks/export_choice.py --months 8 9 10 --out benchmarks/results/export_choice_2core_202611.md
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from machine import measured_with
from whole_line import run

from etl.raw import unpack_flights
from pipelines.baseline import LOGISTIC

LAST_MONTH = 10  # the recipe's validation split begins on 2013-11-04


def before(raw: Path, target: Path, month: int) -> None:
    """The raw tables with the flights up to and with `month` only."""
    (target / "flights").mkdir(parents=True)
    for item in raw.iterdir():
        if item.name != "flights":
            (target / item.name).symlink_to(item.resolve())
    for text in sorted((raw / "flights").glob("*.csv"))[:month]:
        (target / "flights" / text.name).symlink_to(text.resolve())


def scores(raw: Path, folder: Path, month: int, export: str) -> tuple[float, float, float]:
    """Held-out log loss and AUC of `month`, and the log loss of logistic regression there."""
    before(raw, folder / "data/raw/flights", month)
    boundaries = f'{{valid: "2013-{month - 1:02d}-01", test: "2013-{month:02d}-01"}}'
    words = [f"etl.split.boundaries={boundaries}", f"train.export={export}", "report.must_beat=[]"]
    found = run(folder, words)["scores"]
    return found["this model"]["loss"], found["this model"]["auc"], found[LOGISTIC]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--months", type=int, nargs="+", default=[8, 9, 10])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not all(3 <= month <= LAST_MONTH for month in arguments.months):
        parser.error(f"--months are from 3 to {LAST_MONTH}: later ones are the recipe's validation and test")
    lines = [
        "# Flights: which step to export, on months before the recipe's validation month\n",
        f"{measured_with('pyspark', 'torch')}.\n",
        "| held-out month | log loss, best | log loss, last | AUC, best | AUC, last | log loss, logistic regression |",
        "|---|---|---|---|---|---|",
    ]
    losses: dict[str, list[float]] = {"best": [], "last": []}
    with tempfile.TemporaryDirectory() as scratch:
        raw = unpack_flights(Path(scratch) / "raw")
        for month in arguments.months:
            (best, best_auc, logistic), (last, last_auc, _) = (
                scores(raw, Path(scratch) / f"{month}-{export}", month, export) for export in losses
            )
            losses["best"].append(best)
            losses["last"].append(last)
            lines.append(
                f"| 2013-{month:02d} | {best:.4f} | {last:.4f} | {best_auc:.4f} | {last_auc:.4f} | {logistic:.4f} |"
            )
            print(lines[-1], flush=True)
    means = {export: statistics.mean(values) for export, values in losses.items()}
    chosen = min(means, key=lambda export: means[export])
    lines.append(f"\nMean log loss: best {means['best']:.4f}, last {means['last']:.4f}. Chosen: `{chosen}`.")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
