"""Start a model from one that was trained on another dataset of the same features, by value.

A feature's state changes from one dataset to the next: a category gets another code, a number another mean. Copied as
they are, the old weights would belong to other values. `FeatureChange` says how the old tensors follow from the new
ones; a model class with a method

    def warm_started(self, fresh, old, weights, change, new_values) -> dict[str, torch.Tensor]

makes weights of it that give the old outputs for the old values (`Tabular.warm_started` says what the arguments are).
Without the method a model can start from another only where the features have not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparkring.conf.features import FIRST_CODE, State
from sparkring.conf.manifest import DatasetManifest
from sparkring.training.models.initial import EagerValue, InitialModel, InitialValue
from sparkring.training.models.torch_private import meta_device

NewValues = Literal["mean", "initial"]
METHOD = "warm_started"


class WarmStartError(ValueError):
    """The weights cannot start this model: says what differs and what to do."""


@dataclass(frozen=True)
class Rescaling:
    """old tensor = scale * new tensor + shift, of the same stored number."""

    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class FeatureChange:
    """How the old dataset's tensors follow from the new one's.

    codes: categorical tensor -> (n,) the old code of each new code, -1 where the value is new.
    numbers: tensor of a numeric feature -> its rescaling.
    """

    codes: Mapping[str, NDArray[np.int64]]
    numbers: Mapping[str, Rescaling]
    old_sizes: Mapping[str, int]  # categorical tensor -> number of old codes

    @property
    def changed(self) -> list[str]:
        """A line for each tensor that is another one now."""
        lines = []
        for name, old in self.codes.items():
            if not np.array_equal(old, np.arange(self.old_sizes[name])):
                new, gone = int((old < 0).sum()), self.old_sizes[name] - int((old >= 0).sum())
                lines.append(
                    f"{name}: {new} new values, {gone} gone, others under other codes"
                    if new or gone
                    else f"{name}: other codes"
                )
        return lines + [f"{name}: another scale" for name, how in self.numbers.items() if how != Rescaling()]


def compare_features(old: DatasetManifest, new: DatasetManifest) -> FeatureChange:
    """Compare the feature states of two datasets.

    WarmStartError where their tensors are not of the same kinds, or their texts of another tokenizer.
    """
    before, now = ({state["name"]: state for state in m.features.get("features", [])} for m in (old, new))
    tensors = [{(t.name, t.layout, t.dtype, t.mask) for t in m.tensors if t.role != "weight"} for m in (old, new)]
    if differing := sorted({name for name, *_ in tensors[0] ^ tensors[1]}):
        raise WarmStartError(
            f"the model was trained on other tensors than dataset {new.name!r} has: {differing} differ; "
            "train from scratch"
        )
    if before.keys() != now.keys():
        raise WarmStartError(
            f"the model was trained on the features {sorted(before)}, dataset {new.name!r} has {sorted(now)}; "
            "train from scratch"
        )
    for what, theirs, ours in (
        ("classes", old.classes, new.classes),
        ("labels", old.label_names, new.label_names),
    ):
        if theirs != ours:
            key = "etl.label" if "flags" in new.features else "etl.classes"
            raise WarmStartError(
                f"the model was trained on the {what} {theirs}, dataset {new.name!r} has {ours}; train from "
                f"scratch, or fix their list by {key}"
            )
    if old.text.get("tokenizer_json") != new.text.get("tokenizer_json"):
        raise WarmStartError(
            f"dataset {new.name!r} has another tokenizer than the model was trained with, so its ids stand for other "
            "text; train from scratch"
        )
    codes, numbers = dict[str, NDArray[np.int64]](), dict[str, Rescaling]()
    for name, state in now.items():
        _check_same_kind(before[name], state)
        if state["kind"] == "categorical":
            codes[name] = _old_codes(before[name]["values"], state["values"])
        elif state["kind"] == "numeric":
            numbers[name] = _rescaling(before[name], state)
    return FeatureChange(codes, numbers, {name: FIRST_CODE + len(before[name]["values"]) for name in codes})


def _check_same_kind(old: State, new: State) -> None:
    for key in ("kind", "column", "transform", "period"):
        if old.get(key) != new.get(key):
            raise WarmStartError(
                f"feature {new['name']!r}: {key} is {new.get(key)!r}, the model was trained with {old.get(key)!r}; "
                "train from scratch"
            )


def _old_codes(old: list[str], new: list[str]) -> NDArray[np.int64]:
    """Map new codes to old ones (-1: new value); the codes of null and unseen stay."""
    place = {value: FIRST_CODE + i for i, value in enumerate(old)}
    return np.array([*range(FIRST_CODE), *(place.get(value, -1) for value in new)], np.int64)


def _rescaling(old: State, new: State) -> Rescaling:
    """Compute (x - m0) / s0 from (x - m1) / s1."""
    return Rescaling(new["std"] / old["std"], (new["mean"] - old["mean"]) / old["std"])


def warm_start(
    initial: InitialModel,
    old: Callable[[], nn.Module],
    weights: Mapping[str, torch.Tensor] | None,
    change: FeatureChange,
    new_values: NewValues,
) -> InitialModel:
    """Replace the initial model's values by those of `weights`, which rank 0 has.

    Raises WarmStartError if the model cannot take the weights.

    Args:
        initial: the model as its constructor made it.
        old: builds the module that `weights` belong to; called on the meta device.
        weights: name -> trained tensor; None on the ranks that receive their values from rank 0.
        change: change of the features since then.
        new_values: rows of values that were not there: the mean of the old values' rows, or as initialized.

    Raises WarmStartError where the model cannot take the weights over.
    """
    values = {name: EagerValue(None, value.size, value.dtype, "") for name, value in initial.values.items()}
    if weights is not None:
        module: Any = initial.module
        if hasattr(module, METHOD):
            with meta_device():
                before = old()
            fresh = {name: whole(value) for name, value in initial.values.items()}
            weights = module.warm_started(fresh, before, weights, change, new_values)
        else:
            refuse_changes(type(module).__name__, change)
        values = {name: _value(name, weights, initial.values[name]) for name in initial.values}
    return InitialModel(initial.module, values, initial.aliases, "it starts from trained weights")


def refuse_changes(model: str, change: FeatureChange) -> None:
    """Raise WarmStartError unless the features are the same: the model has no method for others."""
    if changed := change.changed:
        raise WarmStartError(
            f"{model} has no method {METHOD}(), and its features have changed ({'; '.join(changed)}); "
            "write one (training/models/warm_start.py says how), or train from scratch"
        )


def _value(name: str, made: Mapping[str, torch.Tensor], value: InitialValue) -> EagerValue:
    if name not in made:
        raise WarmStartError(f"the trained model has no {name!r}; train from scratch")
    tensor = made[name]
    if tuple(tensor.shape) != value.size:
        raise WarmStartError(f"{name!r} is {tuple(tensor.shape)}, this model's is {value.size}; train from scratch")
    return EagerValue(tensor.to(value.dtype), value.size, value.dtype, "")


def whole(value: InitialValue) -> torch.Tensor:
    """Return the initial value as one tensor on the CPU."""
    pieces = [piece for _, piece in value.pieces(0, value.size[0] if value.size else 1)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def table_by_value(
    table: torch.Tensor, fresh: torch.Tensor, codes: NDArray[np.int64] | None, new_values: NewValues
) -> torch.Tensor:
    """Make a table (n, ...) of new codes from one of old codes: for models that write their own `warm_started`.

    Args:
        table: (m, ...) trained rows, by old code.
        fresh: (n, ...) initial rows, by new code.
        codes: (n,) as in FeatureChange; None where codes have not changed.
        new_values: what the row of a value that was not there becomes.
    """
    if codes is None:
        return table
    rows = torch.from_numpy(codes)
    out = table[rows.clamp(min=0)]
    known = out[FIRST_CODE:][rows[FIRST_CODE:] >= 0]
    out[rows < 0] = known.mean(dim=0) if new_values == "mean" and len(known) else fresh[rows < 0]
    return out


def fit_width(table: torch.Tensor, reads: torch.Tensor, fresh_reads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit an embedding (m, d) and the weights (H, d) that read it to the width of `fresh_reads` (H, e).

    Wider: columns of zeros, read by initial weights, so that the product is the same and they learn. Narrower: the best
    product of that width (Eckart and Young 1936).
    """
    old, new = table.shape[1], fresh_reads.shape[1]
    if new > old:
        zeros = torch.zeros(len(table), new - old, dtype=table.dtype)
        return torch.cat([table, zeros], dim=1), torch.cat([reads, fresh_reads[:, old:]], dim=1)
    if new < old:
        u, s, vh = torch.linalg.svd(table.double() @ reads.double().T, full_matrices=False)
        root = s[:new].sqrt()
        return (u[:, :new] * root).to(table.dtype), (vh[:new].T * root).to(reads.dtype)
    return table, reads
