"""Old weights under new codes and scales: the outputs for a row stay, whatever its codes have become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.features.transform import apply_numpy
from sparkring.training.models.initial import record_model
from sparkring.training.models.tabular import Tabular, embedding_width
from sparkring.training.models.warm_start import (
    Rescaling,
    WarmStartError,
    compare_features,
    fit_width,
    table_by_value,
    warm_start,
    whole,
)
from tests.helpers.datasets import manifest_of

STATE = {"transform": "none", "fill": 1.0, "indicator": True}
INPUTS = {"carrier": "string", "month": "int", "wind": "double", "hour": "int", "rain": "double"}


def manifest(
    carriers: list[str], wind: tuple[float, float], order: tuple[int, ...] = (0, 1, 2, 3, 4), **changed: Any
) -> DatasetManifest:
    """A dataset whose fit found these carriers, and this mean and deviation of wind; features in `order`."""
    features: list[dict[str, Any]] = [
        {"name": "carrier", "kind": "categorical", "column": "carrier", "values": carriers},
        {"name": "month", "kind": "categorical", "column": "month", "values": ["1", "2", "7"]},
        {"name": "wind", "kind": "numeric", "column": "wind", "mean": wind[0], "std": wind[1], **STATE},
        {"name": "hour", "kind": "cyclic", "column": "hour", "period": 24.0},
        {"name": "rain", "kind": "numeric", "column": "rain", "mean": -wind[0], "std": 2 * wind[1], **STATE},
    ]
    features[2] |= changed
    dtypes = {"carrier": "string", "month": "int32", "wind": "float64", "hour": "int32", "rain": "float64"}
    columns = [Column(name=n, dtype=t, role="input", nulls="keep") for n, t in dtypes.items()]
    return manifest_of(
        columns=(*columns, Column(name="late", dtype="int8", role="label")),
        name="flights",
        features={"version": 1, "inputs": INPUTS, "features": [features[i] for i in order]},
    )


def trained(described: DatasetManifest, seed: int, **args: Any) -> Tabular:
    """A model whose every weight is random, as after training: initially, some are zero."""
    torch.manual_seed(seed)
    model = Tabular.from_manifest(described, width=12, blocks=1, bumps=3, **args).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model.eval()


def started(old: DatasetManifest, model: Tabular, new: DatasetManifest, how: str = "mean", **args: Any) -> Tabular:
    def build(described: DatasetManifest) -> Tabular:
        return Tabular.from_manifest(described, width=12, blocks=1, bumps=3, **args).double()

    initial = record_model(lambda: build(new), seed=5)
    change = compare_features(old, new)
    warm = warm_start(initial, lambda: build(old), model.state_dict(), change, how)  # type: ignore[arg-type]
    made = build(new)
    made.load_state_dict({name: whole(value) for name, value in warm.values.items()})
    return made.eval()


def outputs(model: Tabular, described: DatasetManifest, rows: dict[str, list[Any]]) -> np.ndarray:
    columns = {name: torch.from_numpy(v) for name, v in apply_numpy(described.features, rows).items()}
    columns = {name: v.double() if v.is_floating_point() else v for name, v in columns.items()}
    with torch.no_grad():
        out: np.ndarray = model(columns).numpy()
    return out


def raw(carriers: list[str | None], count: int = 40) -> dict[str, list[Any]]:
    random = np.random.default_rng(len(carriers))
    return {
        "carrier": [carriers[i] for i in random.integers(0, len(carriers), count)],
        "month": random.choice([1, 2, 7, 9], count).tolist(),
        "wind": random.normal(10, 5, count).tolist(),
        "hour": random.integers(0, 24, count).tolist(),
        "rain": random.normal(0, 1, count).tolist(),
    }


names = st.lists(st.sampled_from([f"c{i}" for i in range(12)]), min_size=1, max_size=12, unique=True)


@pytest.mark.parametrize("parts", [{}, {"members": 3, "cosine_width": 4}], ids=["one", "members"])
@settings(max_examples=25)
@given(names, names, st.permutations(range(5)), st.floats(-50, 50), st.floats(0.1, 9), st.integers(1, 3))
def test_a_row_of_known_values_keeps_its_output(
    parts: dict[str, int],
    old_values: list[str],
    new_values: list[str],
    order: list[int],
    mean: float,
    std: float,
    outs: int,
) -> None:
    """Codes, scales and the order of features change; embeddings get wider and narrower with the vocabulary."""
    old, new = manifest(old_values, (3.0, 2.0)), manifest(new_values, (mean, std), tuple(order))
    args = {"outputs": outs, "additive_only": ["rain"], **parts}
    before = trained(old, 1, **args)
    narrow = embedding_width(len(new_values) + 2) < embedding_width(len(old_values) + 2)
    if narrow:  # then the table's product must fit the new width to be kept
        with torch.no_grad():
            table = before.embeddings["column_carrier"].weight
            table[:, embedding_width(len(new_values) + 2) :] = 0
    after = started(old, before, new, **args)
    both: list[str | None] = [None, "never seen", *(set(old_values) & set(new_values))]
    rows = raw(both)
    expected = outputs(before, old, rows)
    assert np.abs(outputs(after, new, rows) - expected).max() < 2e-4 * max(1.0, np.abs(expected).max())


def test_a_model_in_another_unit_is_no_start() -> None:
    old = manifest(["UA", "B6"], (3.0, 2.0))
    other, change = Tabular.from_manifest(old, output_center=5.0), compare_features(old, old)
    with pytest.raises(WarmStartError, match="output_scale are 5 and 1; the model to start from has 0 and 1"):
        other.warm_started({}, Tabular.from_manifest(old), {}, change, "mean")


def test_without_a_change_every_weight_is_the_same_to_the_bit() -> None:
    old = manifest(["UA", "B6"], (3.0, 2.0))
    before = trained(old, 2)
    after = started(old, before, old)
    assert all(torch.equal(after.state_dict()[name], value) for name, value in before.state_dict().items())
    assert compare_features(old, old).changed == []


def test_the_row_of_a_new_value_is_the_mean_of_the_others_or_initial() -> None:
    old, new = manifest(["UA", "B6"], (3.0, 2.0)), manifest(["B6", "AA", "UA"], (3.0, 2.0))
    before = trained(old, 3)
    assert compare_features(old, new).changed == ["carrier: 1 new values, 0 gone, others under other codes"]
    for table in ("wide_coded", "embeddings"):
        name = f"{table}.column_carrier.weight"
        was, now = before.state_dict()[name], started(old, before, new).state_dict()[name]
        width = was.shape[1]
        assert torch.equal(now[:, :width], was[[0, 1, 3, 3, 2]].index_copy(0, torch.tensor([3]), was[2:].mean(0)[None]))
        initial = started(old, before, new, "initial").state_dict()[name]
        assert torch.equal(initial[[0, 1, 2, 4]], now[[0, 1, 2, 4]]) and not torch.equal(initial[3], now[3])
    fresh = record_model(lambda: Tabular.from_manifest(new, width=12, blocks=1, bumps=3).double(), seed=5)
    assert torch.equal(initial[3], whole(fresh.values["embeddings.column_carrier.weight"])[3])


def test_a_narrower_embedding_is_the_best_of_its_width() -> None:
    random = torch.Generator().manual_seed(0)
    table, reads = (torch.randn(9, 6, generator=random, dtype=torch.float64) for _ in range(2))
    small, small_reads = fit_width(table, reads, torch.zeros(9, 4))
    lost = torch.linalg.svdvals(table @ reads.T)[4:].square().sum().sqrt()
    assert small.shape == (9, 4) and small_reads.shape == (9, 4)
    assert torch.allclose((table @ reads.T - small @ small_reads.T).norm(), lost)


def test_a_table_by_value_for_a_model_of_ones_own() -> None:
    table, fresh = torch.arange(8.0).reshape(4, 2), torch.full((5, 2), -1.0)
    codes = np.array([0, 1, 3, -1, 2])
    assert table_by_value(table, fresh, codes, "initial").tolist() == [[0, 1], [2, 3], [6, 7], [-1, -1], [4, 5]]
    assert table_by_value(table, fresh, codes, "mean")[3].tolist() == [5, 6]
    assert table_by_value(table, fresh, None, "mean") is table
    none_known = np.array([0, 1, -1])
    assert table_by_value(table, fresh[:3], none_known, "mean")[2].tolist() == [-1, -1]


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


def test_a_model_without_the_method_starts_only_from_the_same_features() -> None:
    old, new = manifest(["UA", "B6"], (3.0, 2.0)), manifest(["B6", "UA"], (3.5, 2.0))
    weights = OwnModel().state_dict()
    initial = record_model(OwnModel, seed=1)
    same = warm_start(initial, OwnModel, weights, compare_features(old, old), "mean")
    assert all(torch.equal(whole(same.values[name]), value) for name, value in weights.items()) and same.not_recorded
    with pytest.raises(WarmStartError, match=r"OwnModel has no method warm_started.*other codes; wind: another"):
        warm_start(initial, OwnModel, weights, compare_features(old, new), "mean")
    others = warm_start(initial, OwnModel, None, compare_features(old, new), "mean")
    assert [value.tensor for value in others.values.values()] == [None, None]  # rank 0 has them, and reports errors
    with pytest.raises(WarmStartError, match=r"'layer\.bias'"):
        warm_start(initial, OwnModel, {"layer.weight": weights["layer.weight"]}, compare_features(old, old), "mean")
    other = {"layer.weight": torch.zeros(3, 2), "layer.bias": torch.zeros(1)}
    with pytest.raises(WarmStartError, match=r"\(3, 2\), this model's is \(1, 2\)"):
        warm_start(initial, OwnModel, other, compare_features(old, old), "mean")


def test_ids_of_another_tokenizer_are_not_taken_for_the_same_text() -> None:
    tokens = [Column(name="tokens", dtype="int32", layout="vector", shape=(16,), cardinality=258)]
    text = {"size": 256, "pad_id": 257, "seq_len": 16, "splits": {}}
    old, new = (
        DatasetManifest.model_validate(
            dict(manifest(["UA"], (0.0, 1.0)))
            | {"columns": tokens, "features": {}, "text": text | {"tokenizer_json": merges}}
        )
        for merges in ("{}", "{1}")
    )
    assert compare_features(old, old).changed == []
    with pytest.raises(WarmStartError, match="another tokenizer"):
        compare_features(old, new)


def test_features_that_make_the_same_tensors_under_other_names_are_refused() -> None:
    old = manifest(["UA"], (3.0, 2.0))
    features = [dict(state) for state in old.features["features"]]
    (hour,) = (state for state in features if state["kind"] == "cyclic")
    passed = [
        {
            "name": name,
            "kind": "passthrough",
            "column": name,
            "dtype": None,
            "shape": None,
            "nulls": "refuse",
            "fill": None,
        }
        for name in ("hour_sin", "hour_cos")
    ]
    stored = [Column(name=name, dtype="float32") for name in ("hour_sin", "hour_cos")]
    inputs = INPUTS | {"hour_sin": "float", "hour_cos": "float"}
    new = DatasetManifest.model_validate(
        dict(old)
        | {
            "columns": [*old.columns, *stored],
            "features": old.features | {"inputs": inputs, "features": [f for f in features if f != hour] + passed},
        }
    )
    with pytest.raises(WarmStartError, match=r"the features \['carrier', 'hour'"):
        compare_features(old, new)


def test_numbers_are_rescaled_and_other_kinds_refused() -> None:
    old = manifest(["UA"], (3.0, 2.0))
    how = compare_features(old, manifest(["UA"], (5.0, 4.0))).numbers["wind"]
    assert how == Rescaling(2.0, 1.0) and how.scale * (7.0 - 5.0) / 4.0 + how.shift == (7.0 - 3.0) / 2.0
    with pytest.raises(WarmStartError, match="'wind': transform is 'log1p', the model was trained with 'none'"):
        compare_features(old, manifest(["UA"], (3.0, 2.0), transform="log1p"))
    with pytest.raises(WarmStartError, match=r"\['wind__null'\] differ; train from scratch"):
        compare_features(old, manifest(["UA"], (3.0, 2.0), indicator=False))


def test_rows_that_have_weights_now_are_no_other_tensors() -> None:
    old = manifest(["UA"], (3.0, 2.0))
    weight = Column(name="trust", dtype="float64", role="weight")
    features = old.features | {"weight": {"column": "trust", "mean": 2.0}}
    new = DatasetManifest.model_validate(dict(old) | {"columns": (*old.columns, weight), "features": features})
    assert compare_features(old, new).changed == [] == compare_features(new, old).changed
