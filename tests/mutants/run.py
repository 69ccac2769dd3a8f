"""Try every mutant on a copy of the tree, one after another: `python -m tests.mutants.run [--only order]`.

With `--write` the verdicts go into the YAML files. Exit code 1 if a mutant survives that is not said to be equivalent,
or no longer stands in its file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.mutants.entries import Mutant, load, save

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
    noticed = ("FAILED ", "ERROR tests")  # a line of a log begins with ERROR too
    lines = [line for line in done.stdout.splitlines() if line.startswith(noticed)]
    return done.returncode, (lines or done.stdout.strip().splitlines() or [done.stderr.strip()])[0][:200]


def try_mutant(tree: Path, mutant: Mutant) -> Mutant:
    """The mutant with its verdict."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    try:
        code, line = pytest(tree, mutant.tests)
    finally:
        path.write_text(text)
    if code in (None, 1, 2):  # 2: it cannot even be imported
        return replace(mutant, verdict="caught", by=line)
    return replace(mutant, verdict="survived", by="")


def judged(mutants: list[Mutant], tried: list[Mutant]) -> list[Mutant]:
    """The mutants, with the verdicts of those that were tried."""
    found = {key(each): each for each in tried}
    return [found.get(key(each), each) for each in mutants]


def key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.old, mutant.new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose file or tests contain this")
    parser.add_argument("--write", action="store_true", help="keep each verdict in the YAML files, as it is found")
    parser.add_argument("--missing", action="store_true", help="only mutants without a verdict")
    arguments = parser.parse_args()
    mutants, tried = load(), list[Mutant]()
    chosen = [
        m
        for m in mutants
        if (arguments.only in m.file or arguments.only in m.tests) and not (arguments.missing and m.verdict)
    ]
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
            began = time.monotonic()
            tried.append(try_mutant(tree, mutant))
            verdict = "equivalent" if is_excused(tried[-1]) else tried[-1].verdict
            spent_s = time.monotonic() - began
            print(f"{number}/{len(chosen)} {verdict:10} {mutant.file}: {mutant.old!r} ({spent_s:.1f} s)", flush=True)
            if arguments.write:
                save(judged(mutants, tried))
    survivors = [each for each in tried if each.verdict == "survived" and not is_excused(each)]
    print(f"{len(tried) - len(survivors)} of {len(tried)} mutants are caught or equivalent")
    sys.exit(1 if survivors else 0)


def is_excused(mutant: Mutant) -> bool:
    """Whether the mutant survived, as its `equivalent` says it must."""
    return mutant.verdict == "survived" and bool(mutant.equivalent)


if __name__ == "__main__":
    main()
