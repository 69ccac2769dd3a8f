"""Wide and deep for tables: one-column functions, plus embeddings and an MLP.

Shapes: B rows, N numeric columns, D of them also seen by the MLP, K bumps of a column's function, H hidden width,
M members.
The sum of the two outputs follows Cheng et al. 2016 (arXiv:1606.07792); differs in that both parts share one optimizer
and the MLP's last layer starts at zero. The wide part is additive rather than linear, after Agarwal et al. 2020
(arXiv:2004.13912): each number has a learned curve of its own, here one line and K tanh steps.
Follows Guo & Berkhahn 2016 (arXiv:1604.06737) for the embeddings and Gorishniy et al. 2021 (arXiv:2106.11959, "ResNet")
for the pre-norm residual blocks; differs in that widths follow the vocabularies and there is no batch norm, whose
statistics would depend on how a global batch is cut into ranks.
Members are TabM's (Gorishniy et al. 2025, arXiv:2410.24210, "TabM-mini"): one MLP whose weights all members share, a
scale of its inputs and a last layer per member; each member has a loss of its own, and a prediction is their mean.
Differs in that the scale is of the first layer's outputs, which are computed once for all members, and in that means
are of outputs, not of probabilities. Cosines of numbers are those of Gorishniy et al. 2022 (arXiv:2203.05556) with a
phase, as in Holzmueller et al. 2024 (arXiv:2407.04491), each next to the number itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from sparkring.conf.manifest import DatasetManifest
from sparkring.training.data.batch import SAMPLE
from sparkring.training.models.arguments import Blocks, Count, Finite, FromDataset, Positive, Share, Size
from sparkring.training.models.dropout import Dropout
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.models.warm_start import (
    FeatureChange,
    NewValues,
    Rescaling,
    WarmStartError,
    fit_width,
    table_by_value,
)

FREQUENCIES, FREQUENCY_SCALE = 16, 0.1  # per number; their deviation at first


def embedding_width(cardinality: int, most: int = 32) -> int:
    """Return the width by fast.ai's rule of thumb, 1.6 * n^0.56, capped."""
    return max(1, min(most, round(1.6 * cardinality**0.56)))


def module_name(column: str) -> str:
    """Return the key of a column's table: torch refuses dots and ModuleDict's own names."""
    return "column_" + column.replace("%", "%25").replace(".", "%2E")


def check_columns(
    coded: Collection[str], numeric: Collection[str], hashed: Collection[str], additive_only: Collection[str]
) -> None:
    """Raise ValueError where a model would have no column, or none for its MLP. The arguments are Tabular's."""
    if not coded and not numeric and not hashed:
        raise ValueError("a tabular model needs at least one feature column; the dataset has none with role feature")
    if unknown := sorted(set(additive_only) - set(numeric)):
        raise ValueError(
            f"model.args.additive_only names {unknown}, which are no numeric feature columns of the dataset; "
            f"it may name {sorted(numeric)}"
        )
    if not coded and not hashed and set(numeric) <= set(additive_only):
        raise ValueError(f"model.args.additive_only leaves the MLP no column: {list(additive_only)} are all there are")


class ResidualBlock(nn.Module):
    """x + down(dropout(relu(up(norm(x))))): (B, H) -> (B, H). `sample_B`: the rows' numbers, which seed dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = Dropout(dropout)

    def forward(self, x_BH: torch.Tensor, sample_B: torch.Tensor | None) -> torch.Tensor:
        y_BH: torch.Tensor = self.down(self.dropout(torch.relu(self.up(self.norm(x_BH))), sample_B))
        return x_BH + y_BH


class ColumnCurves(nn.Module):
    """Sum over columns of w x + sum_k v_k tanh(a_k x + b_k), (B, N) -> (B, outputs)."""

    def __init__(self, columns: int, bumps: int, outputs: int) -> None:
        super().__init__()
        self.line = nn.Linear(columns, outputs)
        self.slope = nn.Parameter(torch.randn(columns, bumps))
        self.shift = nn.Parameter(torch.randn(columns, bumps))
        self.height = nn.Parameter(torch.zeros(columns, bumps, outputs))

    def forward(self, x_BN: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            out: torch.Tensor = self.line(x_BN) + self._bumps_without_grad(x_BN)
            return out
        bumps_BNK = torch.tanh(x_BN[:, :, None] * self.slope + self.shift)
        out = self.line(x_BN) + torch.einsum("bnk,nko->bo", bumps_BNK, self.height)
        return out

    def _bumps_without_grad(self, x_BN: torch.Tensor) -> torch.Tensor:
        """Sum the bumps, (B, outputs), with the bits of `forward`'s einsum in a third of its time."""
        # TRICK: einsum sums over k before n, so it copies its operands to that order; here they are made in it. Not for
        # training: the gradients' sums over rows would be taken in another order, and round differently.
        bumps_BKN = (x_BN[:, None, :] * self.slope.t().contiguous()).add_(self.shift.t().contiguous()).tanh_()
        height_KNO = self.height.transpose(0, 1)
        return torch.bmm(bumps_BKN.flatten(1)[None], height_KNO.flatten(0, 1)[None])[0]


class Cosines(nn.Module):
    """Per column a linear map of cosines of its number, (B, D) -> (B, D * width)."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(FREQUENCY_SCALE * torch.randn(columns, FREQUENCIES))
        self.phase = nn.Parameter(math.pi * torch.randn(columns, FREQUENCIES))
        self.weight = nn.Parameter(FREQUENCIES**-0.5 * torch.randn(columns, FREQUENCIES, width))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        waves_BDF = torch.cos(2 * math.pi * self.frequency * x_BD[:, :, None] + self.phase)
        return torch.einsum("bdf,dfw->bdw", waves_BDF, self.weight).flatten(1)


class MemberHeads(nn.Module):
    """A last layer per member, (B, M, H) -> (B, M, outputs); zero at first."""

    def __init__(self, members: int, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(members, width, outputs))
        self.bias = nn.Parameter(torch.zeros(members, outputs))

    def forward(self, x_BMH: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bmh,mho->bmo", x_BMH, self.weight) + self.bias


class Tabular(nn.Module):
    """columns, each (B,) -> (B,) for one output, else (B, outputs).

    With several members, while it trains: (B, M), or (B, M, outputs).
    """

    def __init__(
        self,
        coded: Annotated[dict[str, int], FromDataset({})],
        numeric: Annotated[list[str], FromDataset(["x"])],
        width: Size = 128,
        blocks: Blocks = 2,
        dropout: Share = 0.0,
        outputs: Size = 1,
        bumps: Size = 16,
        additive_only: Annotated[Sequence[str], FromDataset((), may_be_set=True, names_columns=True)] = (),
        output_center: Finite = 0.0,
        output_scale: Positive = 1.0,
        hashed: Annotated[Sequence[str], FromDataset(())] = (),
        hashed_width: Size = 16,
        members: Size = 1,
        cosine_width: Count = 0,
    ) -> None:
        """Build the network from `model.args`; `coded`, `numeric` and `hashed` come from the manifest.

        Args:
            coded: column -> number of codes, from the manifest.
            numeric: columns that are numbers, from the manifest.
            width: H, width of the MLP.
            blocks: number of residual blocks in the MLP.
            dropout: probability in the MLP's blocks.
            outputs: number of outputs per row.
            bumps: K, tanh steps per numeric column.
            additive_only: numeric columns that the MLP does not see; by readings that identify an hour, for example, it
                could memorize rows.
            output_center: added to every output; for a regression, about the label's mean.
            output_scale: factor of the sum of both parts; for a regression, about the label's standard deviation.
            hashed: columns of 64-bit ids, from the manifest.
            hashed_width: width of a hashed column's embedding.
            members: M, networks that share the MLP; their mean is the prediction.
            cosine_width: width of the cosine features of each number, next to the number itself; 0 for none.
        """
        super().__init__()
        check_columns(coded, numeric, hashed, additive_only)
        self.coded_names, self.numeric_names, self.outputs = list(coded), list(numeric), outputs
        self.output_center, self.output_scale = output_center, output_scale
        self.deep_positions = [i for i, name in enumerate(numeric) if name not in set(additive_only)]
        tables = {module_name(name): n for name, n in coded.items()}
        self.wide_coded = nn.ModuleDict({name: nn.Embedding(n, outputs) for name, n in tables.items()})
        self.wide_numeric = ColumnCurves(len(numeric), bumps, outputs) if numeric else None
        self.embeddings = nn.ModuleDict({name: nn.Embedding(n, embedding_width(n)) for name, n in tables.items()})
        # a row of a hashed column: what the MLP reads, uniform at first, then the wide part, zero as `wide_coded` is
        scale = [hashed_width**-0.5] * hashed_width + [0.0] * outputs
        self.hashed_names, self.hashed_width = list(hashed), hashed_width
        self.hashed = nn.ModuleDict(
            {module_name(name): SparseEmbedding(name, hashed_width + outputs, scale) for name in hashed}
        )
        embedded = sum(embedding_width(n) for n in coded.values()) + hashed_width * len(hashed)
        deep, self.cosine_width = len(self.deep_positions), cosine_width
        self.cosines = Cosines(deep, cosine_width) if deep and cosine_width else None
        self.input = nn.Linear(embedded + deep * (1 + cosine_width), width)
        self.member_scale = nn.Parameter(torch.randn(members, width).sign()) if members > 1 else None
        self.blocks = nn.ModuleList([ResidualBlock(width, dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        for table in self.wide_coded.values():
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]
        if members > 1:
            self.head: nn.Module = MemberHeads(members, width, outputs)
        else:
            self.head = head = nn.Linear(width, outputs)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    @classmethod
    def from_manifest(cls, manifest: DatasetManifest, **args: Any) -> Tabular:
        """Code columns with a cardinality, give hashed ones sparse tables, take other scalars as numbers.

        The mask of a nullable column is a number too: without it, nulls would look like zeros.
        """
        features = [c for c in manifest.tensors if c.role == "feature"]
        if odd := [c.name for c in features if c.layout != "scalar"]:
            raise ValueError(
                f"sparkring.training.models.tabular takes scalar features; {odd} are not: bring your own model.factory"
            )
        classes, labels = len(manifest.classes), len(manifest.label_names)
        return cls(
            **({"outputs": labels or classes} if labels or classes > 2 else {}) | args,
            coded={c.name: c.cardinality for c in features if c.cardinality is not None},
            numeric=[
                *(c.name for c in features if c.cardinality is None and c.name not in manifest.hashed),
                *(c.mask for c in features if c.mask is not None),
            ],
            hashed=[c.name for c in features if c.name in manifest.hashed],
        )

    def warm_started(
        self,
        fresh: Mapping[str, torch.Tensor],
        old: Tabular,
        weights: Mapping[str, torch.Tensor],
        change: FeatureChange,
        new_values: NewValues,
    ) -> dict[str, torch.Tensor]:
        """Make weights of this model that give for a row what `weights` gave for it under the old codes and scales.

        Exact but for rounding, except that an embedding which has become narrower is replaced by the best one of its
        width (Eckart and Young 1936, of the table's product with the layer that reads it).

        Args:
            fresh: name -> initial value: rows and columns that the old model lacks are taken from here.
            old: the module of `weights`, on the meta device.
            weights: name -> trained tensor.
            change: change of the features since then.
            new_values: initial row of a new value.
        """
        if (old.output_center, old.output_scale) != (self.output_center, self.output_scale):
            raise WarmStartError(
                f"model.args: output_center and output_scale are {self.output_center:g} and {self.output_scale:g}; the "
                f"model to start from has {old.output_center:g} and {old.output_scale:g}: take its values"
            )
        made = {name: value.clone() for name, value in {**fresh, **weights}.items() if name in fresh}
        before, after = old.input_columns(), self.input_columns()
        made["input.weight"] = torch.empty_like(fresh["input.weight"])
        for column in self.coded_names:
            wide, deep = (f"{part}.{module_name(column)}.weight" for part in ("wide_coded", "embeddings"))
            codes = change.codes.get(column)
            made[wide] = table_by_value(weights[wide], fresh[wide], codes, new_values)
            table, reads = fit_width(
                weights[deep], weights["input.weight"][:, before[column]], fresh["input.weight"][:, after[column]]
            )
            made[deep] = table_by_value(table, fresh[deep], codes, new_values)
            made["input.weight"][:, after[column]] = reads
        for column in self.hashed_names:  # whose rows stay as they are, by id
            made["input.weight"][:, after[column]] = weights["input.weight"][:, before[column]]
        how = [change.numbers.get(column, Rescaling()) for column in self.numeric_names]
        scale_N = torch.tensor([each.scale for each in how], dtype=torch.float64)
        shift_N = torch.tensor([each.shift for each in how], dtype=torch.float64)
        place = {column: i for i, column in enumerate(old.numeric_names)}
        order = [place[column] for column in self.numeric_names]
        for i in self.deep_positions:
            column = self.numeric_names[i]
            w_H = weights["input.weight"][:, before[column]].double()
            made["input.weight"][:, after[column]] = (w_H * scale_N[i]).to(w_H.dtype)
            made["input.bias"] += (w_H * shift_N[i]).sum(dim=1).to(made["input.bias"].dtype)
        if self.cosines is not None:
            self._rescale_cosines(made, weights, old, scale_N, shift_N)
        if self.wide_numeric is not None:
            _rescale_curves(made, weights, order, scale_N, shift_N)
        return made

    def _rescale_cosines(
        self,
        made: dict[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        old: Tabular,
        scale_N: torch.Tensor,
        shift_N: torch.Tensor,
    ) -> None:
        """Write to `made` the cosines of the old numbers as cosines of the new ones.

        Args:
            made: name -> weight of the new model.
            weights: name -> trained weight.
            old: module that `weights` belong to.
            scale_N: old number = scale * new number + shift.
            shift_N: offset (N,) of the equation at scale_N.
        """
        place = {old.numeric_names[position]: i for i, position in enumerate(old.deep_positions)}
        order = [place[self.numeric_names[position]] for position in self.deep_positions]
        frequency_DF = weights["cosines.frequency"].double()[order]
        scale_D, shift_D = scale_N[self.deep_positions], shift_N[self.deep_positions]
        dtype = made["cosines.frequency"].dtype
        made["cosines.frequency"] = (frequency_DF * scale_D[:, None]).to(dtype)
        phase_DF = weights["cosines.phase"].double()[order] + 2 * math.pi * frequency_DF * shift_D[:, None]
        made["cosines.phase"] = phase_DF.to(dtype)
        made["cosines.weight"] = weights["cosines.weight"][order]
        read = weights["input.weight"][:, -len(order) * self.cosine_width :].unflatten(1, (len(order), -1))
        made["input.weight"][:, -len(order) * self.cosine_width :] = read[:, order].flatten(1)

    def input_columns(self) -> dict[str, slice]:
        """Return which columns of `input.weight` read a dataset column; those of cosines follow."""
        widths = {name: embedding_width(table.num_embeddings) for name, table in self._tables()}
        widths |= dict.fromkeys(self.hashed_names, self.hashed_width)
        widths |= {self.numeric_names[i]: 1 for i in self.deep_positions}
        edges = list(itertools.accumulate(widths.values(), initial=0))
        return {name: slice(a, b) for name, a, b in zip(widths, edges, edges[1:], strict=False)}

    def _tables(self) -> list[tuple[str, Any]]:
        return [(name, self.embeddings[module_name(name)]) for name in self.coded_names]

    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        codes = {module_name(name): columns[name].long() for name in self.coded_names}
        parts = [self.embeddings[name](code_B) for name, code_B in codes.items()]
        wide = [self.wide_coded[name](code_B) for name, code_B in codes.items()]
        for name in self.hashed_names:
            row_BD = self.hashed[module_name(name)](columns[name])
            parts.append(row_BD[:, : self.hashed_width])
            wide.append(row_BD[:, self.hashed_width :])
        if self.wide_numeric is not None:
            numbers_BN = torch.stack([columns[name] for name in self.numeric_names], dim=1)
            numbers_BN = numbers_BN.to(self.wide_numeric.slope.dtype)
            wide.append(self.wide_numeric(numbers_BN))
            deep_BD = numbers_BN[:, self.deep_positions]
            parts.append(deep_BD)
            if self.cosines is not None:
                parts.append(self.cosines(deep_BD))
        x = self.input(torch.cat(parts, dim=1))  # (B, H), or (B, M, H)
        wide_sum = torch.stack(wide).sum(dim=0)
        if self.member_scale is not None:
            x, wide_sum = x[:, None] * self.member_scale, wide_sum[:, None]
        for block in self.blocks:
            x = block(x, columns.get(SAMPLE))
        out: torch.Tensor = self.head(self.norm(x)) + wide_sum
        if (self.output_center, self.output_scale) != (0.0, 1.0):
            out = self.output_center + self.output_scale * out
        if self.member_scale is not None and not self.training:
            out = out.mean(dim=1)
        return out.squeeze(-1) if self.outputs == 1 else out


def _rescale_curves(
    made: dict[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    order: list[int],
    scale_N: torch.Tensor,
    shift_N: torch.Tensor,
) -> None:
    """Write to `made` the ColumnCurves of the old numbers as curves of the new ones.

    Args:
        made: name -> weight of the new model.
        weights: name -> trained weight.
        order: (N,) position of each number among the old model's.
        scale_N: old number = scale * new number + shift.
        shift_N: offset (N,) of the equation at scale_N.
    """
    line, slope = weights["wide_numeric.line.weight"].double()[:, order], weights["wide_numeric.slope"].double()[order]
    shift = weights["wide_numeric.shift"].double()[order]
    curves = {
        "line.weight": line * scale_N,
        "line.bias": weights["wide_numeric.line.bias"].double() + line @ shift_N,
        "slope": slope * scale_N[:, None],
        "shift": shift + slope * shift_N[:, None],
        "height": weights["wide_numeric.height"][order],
    }
    made |= {f"wide_numeric.{name}": value.to(made["wide_numeric.slope"].dtype) for name, value in curves.items()}
