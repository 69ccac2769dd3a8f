"""A factorization machine of hashed ids, bags of ids, codes and numbers: for who likes what, of any number of ids.

Rendle 2010: each value of a column has a weight and a vector; a row's output is the sum of the weights, and of the
products of each two columns' vectors. Of user and item that is what the one likes and the other is, as in a matrix
factorization; of a bag of items taken before it is how they go together with this one (FISM, Kabbur et al. 2013).

Shapes: B rows, C columns, F factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from sparkring.conf.manifest import DatasetManifest
from sparkring.training.models.arguments import FromDataset, Positive, Size
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.models.tabular import module_name


class FactorizationMachine(nn.Module):
    """columns, each (B,) or a bag a row -> (B,) logits."""

    def __init__(
        self,
        hashed: Annotated[Sequence[str], FromDataset(())],
        bags: Annotated[Sequence[str], FromDataset(())],
        codes: Annotated[Mapping[str, int], FromDataset({})],
        numbers: Annotated[Sequence[str], FromDataset(("x",))],
        factors: Size = 16,
        scale: Positive = 0.1,
    ) -> None:
        """Build the machine. `model.args` are the last two; the others come from the manifest.

        Args:
            hashed: columns of 64-bit ids, each with a sparse table.
            bags: ragged columns of ids, each with a sparse table; a row's vectors are averaged.
            codes: column -> number of codes.
            numbers: columns whose value is multiplied with their one vector.
            factors: F, numbers of each vector.
            scale: first vectors are uniform in [-scale, scale); first weights are 0.
        """
        super().__init__()
        self.names = [*hashed, *bags, *codes]
        if not self.names and not numbers:
            raise ValueError("a factorization machine needs a feature column; the dataset has none")
        scales, width = [0.0] + [scale] * factors, 1 + factors
        self.tables = nn.ModuleDict()
        for name in (*hashed, *bags):
            self.tables[module_name(name)] = SparseEmbedding(name, width, scales, "mean")
        for name, count in codes.items():
            self.tables[module_name(name)] = nn.Embedding(count, width)
        self.number_names = list(numbers)
        self.of_number = nn.Parameter(torch.empty(len(numbers), width)) if numbers else None
        self.bias = nn.Parameter(torch.zeros(()))
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.uniform_(weight, -scale, scale)
                nn.init.zeros_(weight[:, 0])

    @classmethod
    def from_manifest(cls, manifest: DatasetManifest, **args: Any) -> FactorizationMachine:
        """Sort features by kind. ValueError for a vector, or a ragged column without ids."""
        features = [column for column in manifest.tensors if column.role == "feature"]
        bags = [c.name for c in features if c.layout == "ragged" and not c.shape and c.dtype.startswith("int")]
        if odd := [c.name for c in features if c.layout != "scalar" and c.name not in bags]:
            raise ValueError(
                f"sparkring.training.models.factors takes scalars, and ragged columns of whole numbers; {odd} are "
                "neither: bring your own model.factory"
            )
        scalars = [column for column in features if column.layout == "scalar"]
        numbers = [c.name for c in scalars if c.cardinality is None and c.name not in manifest.hashed]
        return cls(
            hashed=[column.name for column in scalars if column.name in manifest.hashed],
            bags=bags,
            codes={column.name: column.cardinality for column in scalars if column.cardinality is not None},
            numbers=[*numbers, *(column.mask for column in features if column.mask is not None)],
            **args,
        )

    def forward(self, columns: dict[str, Any]) -> torch.Tensor:
        parts = [self.tables[module_name(name)](columns[name]) for name in self.names]
        if self.of_number is not None:
            values_BC = torch.stack([columns[name] for name in self.number_names], dim=1).to(self.bias.dtype)
            parts += (values_BC[:, :, None] * self.of_number).unbind(1)
        found_BCF = torch.stack(parts, dim=1)
        vectors_BCF = found_BCF[:, :, 1:]
        # the sum over pairs of columns, in time linear in columns: half of (sum)^2 minus the sum of squares
        pairs_B = (vectors_BCF.sum(dim=1).square() - vectors_BCF.square().sum(dim=1)).sum(dim=1) / 2
        out: torch.Tensor = self.bias + found_BCF[:, :, 0].sum(dim=1) + pairs_B
        return out
