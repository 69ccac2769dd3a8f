"""What a model's forward is recorded to do, and how much of it grows with the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.training.data.batch import SAMPLE, Ragged
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.models.tabular import Tabular
from sparkring.training.planner.timing.operations import Operation, trace_operations
from sparkring.training.planner.timing.roofline import OperationTable, RankShare, Roofline


class Batched(nn.Module):
    """A weight per group, on either side of the product."""

    def __init__(self, weight_first: bool) -> None:
        super().__init__()
        self.weight, self.weight_first = nn.Parameter(torch.zeros(3, 5, 7)), weight_first

    def forward(self, x_BGK: torch.Tensor) -> torch.Tensor:
        x_GBK = x_BGK.transpose(0, 1)
        if self.weight_first:
            return torch.bmm(self.weight.transpose(1, 2), x_GBK.transpose(1, 2))
        return torch.bmm(x_GBK, self.weight)


class Masked(nn.Module):
    """Numbers of the rows, times a mask of positions, plus a function of the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(8, device=x.device) % 3
        y = x * self.weight.exp()
        bits = (y > 0) & (y < 2)
        return y * mask.float() * bits


def operations_of(model: nn.Module, *row: Any) -> list[Operation]:
    return [each for of in trace_operations(model, row, (), {}).layers.values() for each in of]


@pytest.mark.parametrize("weight_first", [False, True])
def test_products_by_a_weight_of_several_groups_grow_with_the_rows_in_one_product_each(weight_first: bool) -> None:
    [product] = [each for each in operations_of(Batched(weight_first), torch.zeros(1, 3, 5)) if each.k]
    assert product == Operation("matmul", "between", 3, 1, 5, 7, elements=3 * 5 + 3 * 7)
    batch, m, k, n, elements = (float(each[0]) for each in OperationTable([product]).shapes(RankShare(rows=64)))
    assert (batch, m, k, n, elements) == (3, 64, 5, 7, 64 * 36)


def test_products_of_two_activations_grow_in_number() -> None:
    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.transpose(1, 2)

    [product] = operations_of(Scores(), torch.zeros(1, 4, 6))
    assert (product.kind, product.batch, product.m, product.k, product.n) == ("product", 1, 4, 6, 4)
    assert [float(each[0]) for each in OperationTable([product]).shapes(RankShare(rows=64))][:4] == [64, 4, 6, 4]


def test_what_reads_no_rows_is_done_once_and_what_has_no_gradient_has_no_backward() -> None:
    found = operations_of(Masked(), torch.zeros(1, 8))
    of_positions = [each for each in found if not each.per_row and not each.has_backward]
    of_weights = [each for each in found if not each.per_row and each.has_backward]
    bits = [each for each in found if each.per_row and not each.has_backward]
    both = [each for each in found if each.per_row and each.has_backward]
    assert [len(each) for each in (of_positions, of_weights, bits, both)] == [2, 1, 3, 3]
    table = OperationTable(of_positions)
    assert set(table.shapes(RankShare(rows=64))[-1]) == {16.0} and table.starts == 2
    work = Roofline(load_cluster("cpu"), "fp32").pass_work(OperationTable(bits), RankShare(rows=64))
    assert work.forward > 0 and work.backward == 0 and work.backward_starts == 0


def test_a_table_net_is_recorded_as_it_trains() -> None:
    net = Tabular(coded={"a": 10}, numeric=["x", "y"], width=8, blocks=1, bumps=16, dropout=0.1)
    ids = torch.zeros(1, dtype=torch.int64)
    row = {"a": ids, "x": torch.zeros(1), "y": torch.zeros(1), SAMPLE: ids}
    found = operations_of(net, row)
    curves = [each for each in found if each.kind == "matmul" and each.k == 2 * 16]
    assert [(each.batch, each.m, each.n) for each in curves] == [(1, 1, 1)], "not a product per row"
    assert not [each for each in found if each.kind == "product"]


def test_lists_of_numbers_are_rows_too() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Ragged) -> torch.Tensor:
            return x.values.exp()

    [exp] = operations_of(Pooled(), Ragged(torch.zeros(6), (torch.tensor([0, 6]),)))
    assert exp.per_row and exp.elements == 12


def test_rows_of_a_sparse_table_are_of_the_batch_and_have_a_gradient() -> None:
    model = nn.Sequential(SparseEmbedding("user", 16), nn.Linear(16, 8, bias=False))
    assert operations_of(model, torch.zeros(1, dtype=torch.int64)) == [
        Operation("matmul", "between", 1, 1, 16, 8, elements=16 + 8)  # not the look-up
    ]
    [bag] = {
        (each.per_row, each.has_backward)
        for each in operations_of(SparseEmbedding("user", 16), Ragged(torch.zeros(3), (torch.tensor([0, 3]),)))
        if each.elements >= 3 * 16
    }
    assert bag == (True, True)


def test_frozen_layers_have_a_backward_only_behind_one_that_is_trained() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    for frozen in (layers[0], layers[2]):
        frozen.requires_grad_(False)
    work = trace_operations(nn.Sequential(*layers), (torch.zeros(1, 4),), (), {})
    assert [each.has_backward for each in work.layers[""]] == [False, True, True]
    assert work.flops() == 2 * 4 * 4 * (1 + 3 + 3)


def test_batch_normalization_is_recorded_of_one_row() -> None:
    found = operations_of(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.zeros(1, 4))
    [normalized] = [each for each in found if each.kind == "memory" and each.elements == 2 * 8]
    assert normalized.per_row and normalized.has_backward
