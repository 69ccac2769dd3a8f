"""An embedding whose table may have any 64-bit ids, and more rows than a rank can hold.

The module has no parameters: its rows are in a table (training/tables/) that all ranks hold together. Before each pass
the training loop pulls the rows of the batch, and after backward it sends their gradients to their owners. A finished
model reads them from files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn import functional

from sparkring.training.data.batch import Ragged
from sparkring.training.models.torch_private import disable_dynamo, has_memory


class RowSource(Protocol):
    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, dim) of ids (n,) int64."""
        ...


class PulledRows:
    """The rows of one batch, on its device: `ids` (u,) sorted, `rows` (u, dim), whose gradient backward fills."""

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.ids, self.rows = ids, rows

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.searchsorted(self.ids, ids).clamp_(max=max(len(self.ids) - 1, 0))
        if has_memory(ids) and len(ids) and (not len(self.ids) or not torch.equal(self.ids[place], ids)):
            raise ValueError(
                "SparseEmbedding: was given ids that are not in its columns of this batch, so their rows were not "
                "pulled; pass the columns it is made with, unchanged"
            )
        return functional.embedding(place, self.rows)


class SparseEmbedding(nn.Module):
    """ids (B, ...) of any integer type -> (B, ..., dim); a ragged column of ids -> (B, dim), one bag a row."""

    def __init__(
        self,
        columns: str | Sequence[str],
        dim: int,
        scale: float | Sequence[float] | None = None,
        bag: Literal["sum", "mean"] = "sum",
    ) -> None:
        """Describe a table; its name is the module's path in the model.

        Args:
            columns: columns of the batch with ids of this table; several share it.
            dim: number of values per row.
            scale: initial values are uniform in [-scale, scale), one for all or one per value; None: dim ** -0.5.
            bag: how the rows of a bag are combined; an empty bag gives zeros.
        """
        super().__init__()
        self.columns = (columns,) if isinstance(columns, str) else tuple(columns)
        self.dim, self.bag = dim, bag
        self.scale = dim**-0.5 if scale is None else scale
        self.source: RowSource | None = None  # set by who runs the model

    def forward(self, ids: torch.Tensor | Ragged, weights: Ragged | None = None) -> torch.Tensor:
        """Look rows up; `weights`: of the ids of bags, for bags that are sums."""
        if isinstance(ids, torch.Tensor):
            return self._rows(ids.reshape(-1)).reshape(*ids.shape, self.dim)
        rows_ND = self._rows(ids.values)
        if len(ids.offsets) != 1 or ids.values.dim() != 1:
            raise ValueError(f"SparseEmbedding {self.columns}: a bag is one list of ids a row, without lists in it")
        sizes_B = ids.offsets[0].diff().to(rows_ND.device)  # offsets stay in the host's memory
        if weights is not None:
            if self.bag != "sum":
                raise ValueError(f"SparseEmbedding {self.columns}: weights are for sums; bag is {self.bag!r}")
            _check_one_each(self.columns, ids, weights)
            rows_ND = rows_ND * weights.values.to(rows_ND.dtype)[:, None]
        of_row = torch.repeat_interleave(
            torch.arange(len(sizes_B), device=rows_ND.device), sizes_B, output_size=len(rows_ND)
        )
        out_BD = rows_ND.new_zeros(len(sizes_B), self.dim).index_add(0, of_row, rows_ND)
        return out_BD if self.bag == "sum" else out_BD / sizes_B.clamp(min=1)[:, None].to(out_BD.dtype)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.is_meta and self.source is None:  # looked at by the planner, never run
            return torch.empty(len(ids), self.dim, device="meta")
        return self._given_rows(ids)

    @disable_dynamo  # the source is another one in every step
    def _given_rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.source is None:
            raise RuntimeError(
                f"SparseEmbedding {self.columns}: has no rows yet: training pulls them, and a finished model reads "
                "them from its folder"
            )
        return self.source.rows_of(ids.long())


def _check_one_each(columns: Sequence[str], ids: Ragged, weights: Ragged) -> None:
    """Raise ValueError that names the first row without one weight for each id."""
    where = f"SparseEmbedding {tuple(columns)}: weights"
    if len(weights.offsets) != 1 or weights.values.dim() != 1 or len(weights.offsets[0]) != len(ids.offsets[0]):
        raise ValueError(f"{where} are a list of numbers for each row of ids")
    if ids.values.is_meta:
        return
    have, wanted = weights.offsets[0].diff(), ids.offsets[0].diff()
    if len(odd := torch.nonzero(have != wanted)):
        row = int(odd[0])
        raise ValueError(f"{where} are one for each id; row {row} of the batch has {have[row]} for {wanted[row]} ids")


def sparse_embeddings(model: nn.Module) -> dict[str, SparseEmbedding]:
    """Map each table's name, its path in the model, to its module."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseEmbedding)}
