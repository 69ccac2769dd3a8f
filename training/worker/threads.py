"""Choose torch's threads of a rank by what its network computes: a small one gains nothing by more than one.

Measured (benchmarks/results/threads_2core_202611.md): with 25 million multiply-adds in a forward pass and fewer, two
threads make 0.8 to 1.1 times the steps of one, with 50 million 1.5 times, with 400 million 1.8 times. With other work
those of a small net make half of one's or less, since they wait for each other at every operation
(benchmarks/results/busy_machine_2core_202611.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.batch import SAMPLE
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.models.initial import InitialModel, Unrecordable

SMALL_WORK = 40e6  # multiply-adds of a rank's forward pass, below which one thread is as fast as several


def useful_threads(offer: int, work: float | None) -> int:
    """Return the threads of a rank that is offered `offer` cores. `work`: multiply-adds of its pass, or None."""
    return 1 if work is not None and work < SMALL_WORK else offer


def pass_work(model: nn.Module, rows: int, positions: int | None) -> float | None:
    """Return the most multiply-adds of a forward pass: each weight once per position of a row.

    Embeddings are looked up. `positions`: positions per row, such as tokens; None if unknown.
    """
    dense = (module for module in model.modules() if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    weights = sum(p.numel() for module in dense for p in module.parameters(recurse=False) if p.ndim > 1)
    return None if positions is None else float(rows * positions * weights)


def row_positions(columns: Iterable[Column]) -> int | None:
    """Return the most positions per row: tokens, pixels, members of a list; None if only values tell.

    A vector of numbers is one: it is a layer's input.
    """
    most = 1
    for column in columns:
        if column.layout not in ("scalar", "vector"):
            return None
        is_input = len(column.shape) == 1 and column.dtype.startswith("float")
        most = max(most, 1 if is_input else math.prod(column.shape))
    return most


def recipe_work(
    made: InitialModel | Unrecordable, config: RunConfig, manifest: DatasetManifest, world: int
) -> float | None:
    """Return the multiply-adds of a rank's forward pass in a recipe; None if unknown."""
    if isinstance(made, Unrecordable):
        return None
    rows = math.ceil(config.train.global_batch / (world * config.parallel.passes))
    read = [manifest.tensor(name) for name in pick_columns(manifest, config.model).read if name != SAMPLE]
    return pass_work(made.module, rows, row_positions(read))
