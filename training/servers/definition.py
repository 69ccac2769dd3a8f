"""What the servers of one attempt hold, and how they apply pushes. Every worker sends the same definition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from sparkring.conf.plain_text import count_of
from sparkring.conf.stored import parse
from sparkring.training.servers.event_log import MAX_WORKERS
from sparkring.training.tables.table import TableSpec

DTYPES = ("bfloat16", "float16", "float32", "float64")
MAX_ELEMENTS = 1 << 40
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LR_SCALE = "lr_scale"  # key of an optimizer's parameter group: times the learning rate of the step; absent: 1


@dataclass(frozen=True)
class Definition:
    """Of all servers together.

    shapes: of the trained parameters, in order, all of one dtype. lr_share: of the tables' rate in the step's.
    bound: steps that a worker may be ahead of the slowest; None: any number. max_lag: version lag above which a push
    is computed again; None: there is no limit. damp: stale pushes have a smaller rate. backup: workers whose gradients
    a step does not wait for (backup.py).
    """

    workers: int
    shapes: Mapping[str, Sequence[int]]
    dtype: str
    tables: Sequence[TableSpec] = ()
    lr_share: float = 1.0
    bound: int | None = 0
    max_lag: int | None = None
    damp: bool = False
    backup: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"parallel.servers with {count_of(self.workers, 'rank')}: there can be 1 to {MAX_WORKERS}")
        sizes = [size for shape in self.shapes.values() for size in shape]
        if min(sizes, default=0) < 0 or sum(map(math.prod, self.shapes.values())) > MAX_ELEMENTS:
            raise ValueError(f"parameters of the shapes {dict(self.shapes)}: negative, or too many elements")
        if self.dtype not in DTYPES:
            raise ValueError(f"trained parameters of dtype {self.dtype!r}: servers hold {', '.join(DTYPES)}")
        if not 0 < self.lr_share < math.inf:
            raise ValueError(f"lr_share = {self.lr_share}: the tables' rate must be a positive share of the step's")
        if self.bound is not None and self.bound < 0:
            raise ValueError(f"parallel.servers.bound = {self.bound}: must not be negative; null is no bound")
        if self.max_lag is not None and self.max_lag < self.workers - 1:
            raise ValueError(
                f"parallel.servers.max_lag = {self.max_lag}: below {self.workers - 1}, one push of each other rank, "
                "which a gradient that is computed again may meet as well; set it higher, or null"
            )
        if self.backup and not (self.synchronous and 0 < 2 * self.backup <= self.workers):
            raise ValueError(
                f"parallel.servers.backup = {self.backup} with {count_of(self.workers, 'rank')} and bound = "
                f"{self.bound}: backups can be half of the ranks at most, and take bound = 0"
            )

    @property
    def synchronous(self) -> bool:
        """The pushes of a step are summed, and applied as one step."""
        return self.bound == 0

    @property
    def parts(self) -> int:
        """Parts that a global batch is cut into, whose gradients make a step where the bound is 0."""
        return self.workers - self.backup

    @property
    def lag_limit(self) -> int | None:
        """The largest version lag that the bound leaves possible: (2 bound + 1) (workers - 1)."""
        return None if self.bound is None else (2 * self.bound + 1) * (self.workers - 1)

    def rate_share(self, lag: int) -> float:
        """Return the share of a step's learning rate that one push gets.

        It is 1 / workers, so that one push of each worker is one step. With `damp` it is divided by the staleness in
        rounds of pushes, lag / (workers - 1), if that is above 1: https://arxiv.org/abs/1511.05950, equation 6.
        """
        staleness = lag / max(self.workers - 1, 1)
        return 1 / (self.workers * (max(1.0, staleness) if self.damp else 1.0))

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decoded(data: bytes) -> Definition:
    """Read what `encoded` gives. StoredError (a ValueError) names a value that breaks a rule."""
    return parse(Definition, data, "the definition of the servers")
