"""A recipe that trains both families of models, and what it says of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.load import load_config
from sparkring.conf.rules.families import of_family
from sparkring.conf.rules.recipe import RECIPE
from sparkring.conf.rules.rule import find_problems
from tests.conf.rules.test_recipe import OF_NETWORKS, SMALL, recipe

ALLOWED = [word for word in OF_NETWORKS if not word.startswith("data.mix")]


@pytest.mark.parametrize("word", [*ALLOWED, "train.device=cuda", "parallel.dp=1"])
def test_keys_of_networks_are_allowed_with_both_and_are_the_networks(tmp_path: Path, word: str) -> None:
    both = load_config(recipe(tmp_path, SMALL), ["model.family=both", word]).config
    net, trees = of_family(both, "net"), of_family(both, "trees")
    assert net == load_config(recipe(tmp_path, SMALL), [word]).config
    assert trees == load_config(recipe(tmp_path, SMALL), ["model.family=trees"]).config
    assert not find_problems(RECIPE, trees)


def test_what_is_of_both_stays(tmp_path: Path) -> None:
    words = ["model.family=both", "trees.rounds=7", "optim.lr=0.5", "train.seed=3", "parallel.zero=1"]
    both = load_config(recipe(tmp_path, SMALL), words).config
    trees = of_family(both, "trees")
    assert (trees.trees.rounds, trees.optim.lr, trees.train.seed) == (7, 0.5, 3)
    assert trees.parallel == ParallelConfig() and both.parallel.zero == 1
    assert of_family(trees, "trees") is trees


@pytest.mark.parametrize("words", [[], ["model.family=trees"], ["trees.refit=true"]])
def test_one_family_may_be_judged_by_its_training_rows(tmp_path: Path, words: list[str]) -> None:
    found = load_config(recipe(tmp_path, SMALL), ["train.valid_split=train", *words]).config
    assert found.train.valid_split == "train" and len(found.model.families) == 1
