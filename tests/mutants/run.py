"""Try every mutant on a copy of the tree, one after another: `python -m tests.mutants.run [--only order]`.

Exit code 1 where a mutant survives that is not said to be equivalent, or no longer stands in its file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_S = 600.0


def copy_tree(target: Path) -> None:
    """Every file that git tracks, as it stands here."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name, follow_symlinks=False)


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it. ValueError where its text does not stand there exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}: {mutant.old!r} stands there {text.count(mutant.old)} times, not once")
    return text.replace(mutant.old, mutant.new)


def pytest(tree: Path, tests: str) -> tuple[int | None, str]:
    """(exit code, the line that says most); None where the tests hang, which notices too."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests.split(),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return None, f"no end within {MOST_S:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (lines or done.stdout.strip().splitlines() or [done.stderr.strip()])[0][:200]


def try_mutant(tree: Path, mutant: Mutant) -> dict[str, Any]:
    path, began = tree / mutant.file, time.monotonic()
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    try:
        code, line = pytest(tree, mutant.tests)
    finally:
        path.write_text(text)
    caught = code in (None, 1, 2)  # 2: it cannot even be imported
    verdict = "caught" if caught else "equivalent" if mutant.equivalent else "SURVIVED"
    return {
        "file": mutant.file,
        "old": mutant.old,
        "new": mutant.new,
        "verdict": verdict,
        "by": line if caught else mutant.equivalent or mutant.tests,
        "seconds": round(time.monotonic() - began, 1),
    }


def merged(out: Path, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results and those of an earlier run, in the list's order, without mutants that are no longer in it."""
    known = {key(r): r for r in [*(json.loads(out.read_text()) if out.exists() else []), *results]}
    return [known[key(asdict(m))] for m in MUTANTS if key(asdict(m)) in known]


def key(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["file"], entry["old"], entry["new"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose file or tests contain this")
    parser.add_argument("--out", type=Path, help="a JSON file for the results; those of mutants not chosen stay in it")
    parser.add_argument("--missing", action="store_true", help="only mutants that --out has no result of")
    arguments = parser.parse_args()
    known = {key(r) for r in json.loads(arguments.out.read_text())} if arguments.missing else set()
    chosen = [
        m for m in MUTANTS if (arguments.only in m.file or arguments.only in m.tests) and key(asdict(m)) not in known
    ]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        sound: set[str] = set()
        for number, mutant in enumerate(chosen, 1):
            if mutant.tests not in sound:  # a test that fails without a mutant notices none
                code, line = pytest(tree, mutant.tests)
                if code != 0:
                    sys.exit(f"pytest {mutant.tests} fails on the code as it is: {line}")
                sound.add(mutant.tests)
            found = try_mutant(tree, mutant)
            results.append(found)
            print(
                f"{number}/{len(chosen)} {found['verdict']:10} {found['file']}: {mutant.old!r} ({found['seconds']} s)",
                flush=True,
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(merged(arguments.out, results), indent=1) + "\n")
    survivors = [r for r in results if r["verdict"] == "SURVIVED"]
    print(f"{len(results) - len(survivors)} of {len(results)} mutants are caught or equivalent")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
