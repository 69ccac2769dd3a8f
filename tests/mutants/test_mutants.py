"""The list of mutants is kept true while the code changes; `make mutants` tries them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.entries import Mutant, load, save
from tests.mutants.run import ROOT, copy_tree, judged, mutated

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {m.old[:40]}")
def test_a_mutant_stands_in_its_file_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutated((ROOT / mutant.file).read_text(), mutant) != (ROOT / mutant.file).read_text()
    files, _, _ = mutant.tests.partition(" -k ")
    assert all((ROOT / name.partition("::")[0]).is_file() for name in files.split())


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 900


def test_no_mutant_is_listed_twice() -> None:
    assert len({(each.file, each.old, each.new) for each in MUTANTS}) == len(MUTANTS)


def test_no_mutant_survived_its_last_trial() -> None:
    assert [each for each in MUTANTS if each.verdict == "survived" and not each.equivalent] == []
    assert [each for each in MUTANTS if bool(each.by) != (each.verdict == "caught")] == []


def test_verdicts_are_kept_by_the_files(tmp_path: Path) -> None:
    mutants = [
        Mutant("etl/b.py", "x = 1\n\n", "", "tests/b.py -k 'one'"),
        Mutant("conf/a.py", "'a': #", "\tb", "tests/a.py", equivalent="ü"),
    ]
    save(judged(mutants, [Mutant("etl/b.py", "x = 1\n\n", "", "tests/b.py", verdict="caught", by="FAILED")]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf.yaml", "etl.yaml"]
    second, first = load(tmp_path)
    assert second == mutants[1] and (first.old, first.verdict, first.by) == ("x = 1\n\n", "caught", "FAILED")


def test_a_source_file_that_a_merge_has_listed_twice_keeps_all_its_mutants(tmp_path: Path) -> None:
    twice = "".join(f"etl/b.py:\n- old: {old}\n  new: x\n  tests: tests/b.py\n" for old in "ab")
    (tmp_path / "etl.yaml").write_text(twice)
    save(load(tmp_path), tmp_path)
    assert [each.old for each in load(tmp_path)] == ["a", "b"]


def test_tests_in_a_copy_of_the_tree_import_the_copy(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    asked = "import sparkring.conf.load, tests.mutants.run as r; print(sparkring.conf.load.__file__, r.ROOT)"
    names = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", asked], cwd=tmp_path, env=names, capture_output=True, text=True)
    module, root = done.stdout.split()
    assert Path(module).resolve() == tmp_path / "conf/load.py" and root == str(tmp_path), done.stderr
