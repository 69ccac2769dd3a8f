"""Score what `sparkring init table` writes on real tables, beside the baselines of its own report.

    python benchmarks/tables.py [--only adult carriers] [--variants "" "model.args.members=1"]
           [--out benchmarks/results/tables_2core_202611.md]

The recipe is used as `init` writes it; each further variant is the same recipe with other settings, on the same
dataset. The tables are those of tables_data.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import ROOT, measured_with, publish
from tables_data import TABLES, Table

VARIANTS = ("", "model.args.members=1 model.args.cosine_width=0")


def measure(name: str, folder: Path, variants: list[str]) -> list[str]:
    """Lines of the result: a variant or a baseline each."""
    table, data = TABLES[name], folder / f"{name}.csv"
    table.rows().to_csv(data, index=False)
    run(folder, "init", "table", "--data", data.name, "--label", table.label)
    lines = []
    for number, variant in enumerate(variants):
        settings = ["tracking.enabled=false", f"storage.runs=runs-{number}", *variant.split()]
        run(folder / name, "run", "recipe.yaml", *settings)
        (summary,) = (folder / name).glob(f"runs-{number}/*/*/summary.json")
        found = json.loads(summary.read_text())
        scores: dict[str, dict[str, float]] = found["scores"]
        train, train_s, own = found["train"], found["timings"]["train_s"], next(iter(scores))
        trained = f"{train_s:.0f} s; step {train['best_step']:,} of {train['steps']:,} was best"
        what = f"ours with {variant}" if variant else "ours, as init writes it"
        lines.append(line(name, what, table, scores[own], trained))
        if number == 0:
            lines += [line(name, other, table, scores[other], "") for other in scores if other != own]
    return lines


def line(name: str, what: str, table: Table, scores: dict[str, float], trained: str) -> str:
    shown = " / ".join(f"{scores[score]:.5g}" if score in scores else "-" for score in table.scores)
    return f"| {name} | {what} | {' / '.join(table.scores)} | {shown} | {trained} |"


def run(folder: Path, *words: str) -> None:
    command = [sys.executable, "-c", "import sys; from sparkring.pipelines.cli import main; sys.exit(main())", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TABLES, default=["adult", "diamonds", "carriers"])
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS], help="settings of a recipe, in one word each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory(dir=ROOT / "build") as folder:
        lines = [each for name in args.only for each in measure(name, Path(folder), args.variants)]
    head = "| table | model | scores | on test rows | training |\n|---|---|---|---|---|"
    measured = measured_with("torch", "scikit-learn", "pyspark")
    publish("\n".join(["# Tables as a new user trains them", "", measured, "", head, *lines, ""]), args.out)


if __name__ == "__main__":
    main()
