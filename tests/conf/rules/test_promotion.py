"""What `promote`, `drift` and `warm_start.from` refuse, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.manifest import Column, DatasetManifest, WindowPart
from sparkring.conf.rules.dataset import DATASET, OnDataset
from sparkring.conf.rules.rule import find_problems
from tests.helpers.datasets import manifest_of

NOT_WORSE = {"metric": "loss", "min_relative_change": 0.0}
PSI = {"columns": ["x"], "measure": "psi", "max": 0.2}
ETL = {
    "sources": {"s": {"path": "s", "format": "parquet", "columns": {"x": "double", "y": "float"}}},
    "rows": "s",
    "features": {"x": {"kind": "numeric"}},
    "label": "y",
}
BY_DAY = {"column": "x", "last": "2024-03-03", "window": 3}


def problems(folder: Path, **blocks: Any) -> str:
    (folder / "r.yaml").write_text(yaml.safe_dump({"name": "r", "dataset": "somewhere"} | blocks))
    try:
        load_config(str(folder / "r.yaml"))
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"promote": {"rules": [{"metric": "aux", "threshold": 0.5}]}},
         "promote.rules.0: metric = 'aux': no held-out metric of model.task = 'binary'; did you mean 'auc'?"),
        ({"promote": {"rules": [{"metric": "auc"}]}},
         "needs threshold, min_absolute_change or min_relative_change"),
        ({"promote": {"rules": [{"metric": "auc", "threshold": 0.5, "confidence": 0.9}]}},
         "confidence is of a change: give min_relative_change"),
        ({"promote": {"rules": [{"metric": "auc", "min_relative_change": 1.5}]}}, "min_relative_change"),
        ({"promote": {"rules": [{"metric": "auc", "min_absolute_change": 0}]}}, "min_absolute_change"),
        ({"promote": {"rules": [{"metric": "auc", "min_relative_change": 0.0, "confidence": 95}]}}, "confidence"),
        ({"promote": {"rules": [{"metric": "calibration_error", "min_relative_change": 0.0, "confidence": 0.9}]}},
         "calibration_error cannot be resampled"),
        ({"promote": {"slices": ["x"]}}, "slices are compared by the rules with min_absolute_change"),
        ({"promote": {"mode": "dryrun"}}, "promote.mode"),
        ({"promote": {"rules": [NOT_WORSE]}, "train": {"test_split": None}},
         "promote.rules: train.test_split is null, so there are no held-out rows to judge the model on"),
        ({"promote": {"rules": [NOT_WORSE]}, "model": {"task": "language_model"}},
         "with model.task = 'language_model' a rule can have a threshold, no change"),
        ({"promote": {"rules": [{"metric": "gini", "threshold": 0.5}]}, "model": {"task": "my.tasks:Own"}},
         "greater_is_better: say whether more is better of 'gini', a metric of your own task 'my.tasks:Own'"),
        ({"promote": {}, "tracking": {"enabled": False}}, "promote: tracking.enabled is false"),
        ({"drift": {"rules": [PSI]}, "tracking": {"enabled": False}}, "drift: tracking.enabled is false"),
        ({"warm_start": {"from": "champion"}, "tracking": {"enabled": False}},
         "warm_start.from: tracking.enabled is false"),
        ({"warm_start": {}}, "give either `model`, the URI of a model folder, or `from: champion`"),
        ({"warm_start": {"from": "champion", "model": "/x"}}, "give either `model`"),
        ({"warm_start": {"model": "/x", "retrain_every": 7}},
         "warm_start.retrain_every = 7: has no effect with warm_start.model"),
        ({"warm_start": {"model": "/x", "after_correction": "warm"}}, "warm_start.after_correction = 'warm': has no"),
        ({"drift": {"rules": []}}, "drift.rules"),
        ({"drift": {"rules": [PSI | {"measure": "kl"}]}}, "drift.rules.0.measure"),
        ({"drift": {"rules": [PSI | {"columns": ["prediction"], "action": "stop"}]}},
         "predictions are known after training, which `stop` would prevent"),
        ({"drift": {"rules": [PSI | {"columns": ["prediction"]}], "against": {"dataset": "/d"}}},
         "drift.rules.0: a dataset has no predictions"),
        ({"drift": {"rules": [PSI], "against": {"dataset": "nope://x"}}}, "drift.against.dataset: "),
        ({"drift": {"rules": [PSI | {"columns": ["prediction"]}]}, "model": {"task": "language_model"}},
         "drift.rules.0: predictions are compared over train.test_split, for the tasks"),
        ({"drift": {"rules": [PSI]}, "dataset": None, "etl": ETL}, "drift.rules.0: columns are compared by what the"),
        ({"drift": {"rules": [PSI | {"columns": ["y"]}]}, "dataset": None, "etl": ETL | {"interval": BY_DAY}},
         "drift.rules.0: columns = 'y': no numeric or categorical feature is made of such a column"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(blocks: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in problems(tmp_path, **blocks)


def test_what_can_be_is_taken(tmp_path: Path) -> None:
    sure = NOT_WORSE | {"confidence": 0.95}
    block = {"rules": [{"metric": "auc", "threshold": 0.6}, sure], "slices": ["x"]}
    prediction = PSI | {"columns": ["prediction"], "action": "hold"}
    warm = {"from": "champion", "retrain_every": 7, "after_correction": "warm"}
    assert problems(tmp_path, promote=block, drift={"rules": [PSI, prediction]}, warm_start=warm) == ""
    own = {"metric": "gini", "threshold": 0.5, "greater_is_better": True}
    assert problems(tmp_path, promote={"rules": [own]}, model={"task": "my.tasks:Own"}) == ""
    only = {"rules": [prediction]}
    assert problems(tmp_path, drift=only, dataset=None, etl=ETL) == ""


COLUMNS = [rule for rule in DATASET if {"promote.slices", "drift.rules"} & {*rule.keys}]


def manifest(parts: bool) -> DatasetManifest:
    state = {"name": "x", "kind": "numeric", "column": "x", "transform": "none", "mean": 0.0, "std": 1.0, "fill": 0.0,
             "indicator": False}  # fmt: skip
    part = WindowPart(interval="2024-03-01", fingerprint="a" * 64, folder="p", rows=1)
    return manifest_of(
        columns=(
            Column(name="x", dtype="float64", role="input"),
            Column(name="shop", dtype="string", role="meta"),
            Column(name="v", dtype="float32", layout="vector", shape=(3,)),
        ),
        name="r",
        parts=(part,) if parts else (),
        features={"version": 1, "inputs": {"x": "double"}, "features": [state]},
    )


def test_columns_that_the_dataset_does_not_have(tmp_path: Path) -> None:
    def found(parts: bool = True, **blocks: Any) -> list[str]:
        config = RunConfig.model_validate({"name": "r", "dataset": "d"} | blocks)
        return find_problems(
            [rule for rule in DATASET if set(rule.keys) & {"promote.slices", "drift.rules"}],
            OnDataset(config, manifest(parts)),
        )

    def sliced(name: str) -> dict[str, Any]:
        return {"promote": {"rules": [NOT_WORSE], "slices": [name]}}

    assert found(**sliced("shop")) == [] and found(**sliced("x")) == []
    assert found(**sliced("shopp")) == [
        "promote.slices = 'shopp': the dataset has no such column, slices are of scalar ones; did you mean 'shop'?"
    ]
    assert "has it as a vector column" in found(**sliced("v"))[0]
    for columns in ("all", ["x", "prediction"], ["prediction"]):
        assert found(drift={"rules": [PSI | {"columns": columns}]}) == []
    assert found(drift={"rules": [PSI | {"columns": ["xx"]}]}) == [
        "drift.rules.0: columns = 'xx': no numeric or categorical feature is made of such a column, so nothing has "
        "counted its values; did you mean 'x'?"
    ]
    assert "has no day partitions" in found(parts=False, drift={"rules": [PSI]})[0]
    assert found(parts=False, drift={"rules": [PSI | {"columns": ["prediction"]}]}) == []
