"""All lists of rules together."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.conf.config import RunConfig
from sparkring.conf.load import _nodes_below, json_schema
from sparkring.conf.rules.dataset import DATASET
from sparkring.conf.rules.foreseen import FORESEEN
from sparkring.conf.rules.recipe import RECIPE
from sparkring.conf.rules.strategies import LAYOUT, SPARSE_TABLES
from sparkring.pipelines.run.trial import TRIAL
from sparkring.pipelines.sweep.job import SWEEP
from sparkring.pipelines.validate import recipe as recipe_module
from sparkring.pipelines.validate.recipe import CLUSTER, CODE
from sparkring.pipelines.validate.tables import TABLES


def is_known(schema: dict[str, Any], key: str) -> bool:
    nodes = [schema]
    for part in key.split("."):
        nodes = _nodes_below(schema, nodes, part)
    return bool(nodes)


def test_a_rule_names_keys_of_the_recipe() -> None:
    stages = (RECIPE, FORESEEN, TABLES, CODE, DATASET, LAYOUT, SPARSE_TABLES, CLUSTER, TRIAL, SWEEP)
    named = {key for rules in stages for rule in rules for key in rule.keys}
    assert len(named) > 100
    schema = json_schema()
    assert [key for key in sorted(named) if not is_known(schema, key)] == []


def test_petastorm_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "is_installed", lambda name: False)
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "data": {"reader": "petastorm"}})
    assert recipe_module.recipe_problems(config).recipe[0] == (
        "data.reader = 'petastorm': needs petastorm, which is not installed: pip install 'sparkring[petastorm]'"
    )
