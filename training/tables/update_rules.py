"""How a row changes by its gradient: pure functions of rows, gradients and the rate.

A stored row is its weights, then its state: (n, dim + state). A row that no batch touches does not change, so there is
no weight decay, and Adam's averages and step count are the row's own (SparseAdam of torch counts steps for all rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Kind = Literal["sgd", "rowwise_adagrad", "adam"]


@dataclass(frozen=True)
class UpdateRule:
    """sgd; rowwise_adagrad, one sum of squares a row (FBGEMM's); adam (Kingma 2015, arXiv:1412.6980)."""

    kind: Kind = "rowwise_adagrad"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def state_width(self, dim: int) -> int:
        """Return the number of state values per row, next to its `dim` weights; zero in a new row."""
        return {"sgd": 0, "rowwise_adagrad": 1, "adam": 2 * dim + 1}[self.kind]

    def updated(self, rows: Array, grads: Array, lr: float) -> Array:
        """Update stored rows (n, dim + state) by gradients (n, dim); may change `rows` in place."""
        dim = grads.shape[1]
        weights = rows[:, :dim]
        if self.kind == "sgd":
            weights -= lr * grads
        elif self.kind == "rowwise_adagrad":
            rows[:, dim] += np.einsum("nd,nd->n", grads, grads) / dim
            weights -= grads * (lr / (np.sqrt(rows[:, dim]) + self.eps))[:, None]
        else:
            self._adam(rows, grads, lr)
        return rows

    def _adam(self, rows: Array, grads: Array, lr: float) -> None:
        dim, (beta1, beta2) = grads.shape[1], self.betas
        mean, square, step = rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim], rows[:, 3 * dim :]
        step += 1
        mean += (1 - beta1) * (grads - mean)
        square += (1 - beta2) * (grads * grads - square)
        # in float32 1 - beta2 has lost four of its seven digits
        debias1, debias2 = ((1 - beta ** step.astype(np.float64)).astype(rows.dtype) for beta in (beta1, beta2))
        rate = lr / debias1
        rows[:, :dim] -= rate * mean / (np.sqrt(square / debias2) + self.eps)
