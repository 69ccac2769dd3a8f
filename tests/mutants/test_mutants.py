"""The list of mutants is kept true while the code changes; `make mutants` tries them."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.run import ROOT, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {m.old[:40]}")
def test_a_mutant_stands_in_its_file_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutated((ROOT / mutant.file).read_text(), mutant) != (ROOT / mutant.file).read_text()
    files, _, _ = mutant.tests.partition(" -k ")
    assert all((ROOT / name.partition("::")[0]).is_file() for name in files.split())


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 60
