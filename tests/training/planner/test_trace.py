"""What a model takes, returns and keeps, from one forward on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.training.data.batch import Ragged
from sparkring.training.models.gpt import GPT, PLAN
from sparkring.training.models.sparse_embedding import PulledRows, SparseEmbedding, sparse_embeddings
from sparkring.training.models.torch_private import storage_key
from sparkring.training.planner.trace import MeanRow, Untraceable, repeated, tensors_in, trace_model


def test_kept_storages_count_once_and_weights_and_batch_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    trace = trace_model(model, (torch.zeros(1, 4),), ["", "0", "1"], {})
    assert trace.kept[""] == {"between": 16 + 16} and trace.kept["1"] == {"between": 16}
    assert (trace.taken["0"], trace.returned["0"]) == (4, 16)


def test_kept_integers_and_masks_count_by_their_bytes() -> None:
    pooled = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2))
    trace = trace_model(pooled, (torch.zeros(1, 1, 4, 4),), [""], {})
    assert trace.kept[""] == {"between": 2 * 16 + 2 * 2 * 4}, "an index of 8 bytes counts as two floats of 4"


def test_what_is_made_of_weights_alone_is_kept_once_for_all_rows() -> None:
    class Curves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.height = nn.Parameter(torch.zeros(500, 3))

        def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
            return columns["x"].exp() @ torch.tanh(self.height).T

    given = ({"x": torch.zeros(1, 3, device="meta")},)
    trace = trace_model(Curves(), given, [""], {}, rows=10)
    assert trace.kept[""] == {"between": 3 + 500 * 3 / 10} and trace.returned[""] == 500


class Bags(nn.Module):
    """The rows of two lists of ids, averaged, times a number of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.tags = SparseEmbedding("seen", 8, bag="mean"), SparseEmbedding("tags", 8)

    def forward(self, columns: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = self.seen(columns["seen"]) + self.tags(columns["tags"]).tanh()
        return out * columns["x"][:, None]


def kept_by(model: nn.Module, columns: dict[str, Any]) -> int:
    """Bytes of the storages that a real pass keeps beside the batch and the rows of sparse tables."""
    rows, kept = [], {}

    class Source:
        def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
            distinct = ids.unique()
            rows.append(torch.zeros(len(distinct), 8, requires_grad=True))
            return PulledRows(distinct, rows[-1]).rows_of(ids)

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[storage_key(saved)] = saved.untyped_storage().nbytes()
        return saved

    for embedding in sparse_embeddings(model).values():
        embedding.source = Source()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        out = model(columns)
    given = {storage_key(t) for t in tensors_in([columns, rows])}
    assert out.requires_grad
    return sum(size for key, size in kept.items() if key not in given)


def test_what_bags_of_ids_keep_is_what_a_pass_keeps_and_grows_with_their_mean_length() -> None:
    rows, lengths = 20, {"seen": 2.4, "tags": 1.25}
    one = {name: MeanRow.of(length, torch.int64) for name, length in lengths.items()} | {"x": torch.zeros(1)}
    trace = trace_model(Bags(), (one,), [""], {}, rows=rows)
    real: dict[str, Any] = {"x": torch.ones(rows)}
    for name, length in lengths.items():
        offsets = torch.linspace(0, rows * length, rows + 1).round().long()
        real[name] = Ragged(torch.arange(int(offsets[-1])) % 7, (offsets,))
    assert rows * 4 * sum(trace.kept[""].values()) == kept_by(Bags(), real)


def test_a_mean_row_repeated_has_the_values_of_so_many_rows() -> None:
    found = repeated(MeanRow.of(1.7, torch.int32), 10)
    assert found.values.shape == (17,) and found.values.is_meta and found.values.dtype == torch.int32
    assert len(found.offsets[0]) == 11 and int(found.offsets[0][-1]) == 17


def test_tensors_between_cut_layers_are_counted_separately() -> None:
    model = GPT(vocab=16, width=8, layers=1, heads=2, hidden=12)
    kinds = PLAN.kinds(model)
    kept = trace_model(model, (torch.zeros(1, 5, dtype=torch.int64),), ["", *kinds], kinds).kept[""]
    assert set(kept) == {"inner", "entered", "between"} and kept["inner"] > 5 * 3 * 12
    assert not next(model.parameters()).is_meta, "a copy was traced"


def test_a_forward_that_needs_values_is_untraceable() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if (x > 0).any() else -x

    with pytest.raises(Untraceable, match="Reads's forward cannot be run on the meta device"):
        trace_model(Reads(), (torch.zeros(1),), [""], {})
