"""Which columns a recipe's model is fed and predicts, and how many outputs the built-in one has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.features.transform import TagFlags
from sparkring.training.model.recipe_model import build_model, pick_columns
from sparkring.training.models.warm_start import WarmStartError, compare_features
from tests.helpers.datasets import manifest_of

X = Column(name="x", dtype="float32")
FLAGS = [Column(name=name, dtype="int64", role="label") for name in ("a", "b")]
TAGS = Column(name="tags", dtype="string", layout="ragged", role="label", logical="array<string>")


def dataset(columns: list[Column], **features: Any) -> DatasetManifest:
    return manifest_of(
        columns=(X, *columns), name="several", features={"version": 1, "inputs": {}, "features": []} | features
    )


def of_columns(*names: str, **odd: int) -> DatasetManifest:
    return dataset(FLAGS, flags={"values": [*names], "counts": {}, "odd": odd})


def of_tags(*tags: str) -> DatasetManifest:
    return dataset([TAGS], labels=[{"name": "tags", "kind": "tags", "column": "tags", "values": [*tags], "counts": {}}])


def outputs(manifest: DatasetManifest, task: str, label: str | None = None) -> int:
    model = {"task": task, "label": label, "args": {"width": 4, "blocks": 1}}
    built: Any = build_model(RunConfig.model_validate({"name": "m", "dataset": "d", "model": model}), manifest)
    return int(built.outputs)


def test_several_labels_are_a_list_of_which_a_recipe_may_name_one() -> None:
    columns = pick_columns(of_columns("a", "b"), ModelConfig())
    assert (columns.label, columns.labels, columns.features) == (["a", "b"], ["a", "b"], ["x"])
    assert columns.read == ["x", "a", "b"]
    columns = pick_columns(of_columns("a", "b"), ModelConfig(label="b"))
    assert (columns.label, columns.labels, columns.read) == ("b", ["b"], ["x", "b"]), "no model is shown `a`"
    assert pick_columns(of_tags("k", "l"), ModelConfig()).label == "tags"


def test_the_built_in_model_has_an_output_for_each_label_it_predicts() -> None:
    assert outputs(of_columns("a", "b"), "multilabel") == 2
    assert outputs(of_columns("a", "b"), "binary", "b") == 1
    assert outputs(of_tags("k", "l", "m"), "multilabel") == 3


def test_columns_of_other_values_have_no_names_of_labels() -> None:
    assert of_columns("a", "b", a=0, b=2).label_names == []
    with pytest.raises(ValueError, match="the label 'c' is no stored column with role label"):
        of_columns("a", "c")


def test_a_model_of_other_labels_is_no_start() -> None:
    for old, new, key in (
        (of_tags("k", "l"), of_tags("k", "m"), "etl.classes"),
        (of_columns("a", "b"), of_columns("b", "a"), "etl.label"),
    ):
        with pytest.raises(WarmStartError, match=rf"trained on the labels .* has \[.* fix their list by {key}"):
            compare_features(old, new)


def test_tags_become_0_and_1_in_the_order_of_their_names() -> None:
    tags = TagFlags({"name": "tags", "column": "tags", "values": ["k", "l", "m"]}, "string")
    rows = pa.array([["odd"], ["l", "k", "l"], [], ["m"]], pa.list_(pa.string()))
    made = tags.of_stored(pa.chunked_array([rows.slice(1, 2), rows.slice(3)]))["tags"]
    assert made.dtype == np.float32 and made.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    with pytest.raises(DataError, match="label 'tags': 1 tag is none that a model knows"):
        tags.of_stored(pa.chunked_array([rows]))
    assert tags.of_stored(pa.chunked_array([rows.slice(0, 0)]))["tags"].shape == (0, 3)
