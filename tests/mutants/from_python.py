"""Make the YAML files of a list of mutants in Python: for merges; delete it then.

    python -m tests.mutants.from_python FILE

A verdict that the YAML files have stays with its text and tests, also if the source file moved.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace

from tests.mutants.entries import Mutant, load, save


def main(path: str) -> None:
    known = {(each.old, each.new, each.tests.rpartition("/")[2]): each for each in load() if each.verdict}
    mutants = [Mutant(m.file, m.old, m.new, m.tests, m.equivalent) for m in runpy.run_path(path)["MUTANTS"]]
    found = [known.get((each.old, each.new, each.tests.rpartition("/")[2]), each) for each in mutants]
    judged = [replace(new, verdict=old.verdict, by=old.by) for new, old in zip(mutants, found, strict=True)]
    save(judged)
    print(f"{len(judged)} mutants, {sum(bool(each.verdict) for each in judged)} with a verdict")


if __name__ == "__main__":
    main(sys.argv[1])
