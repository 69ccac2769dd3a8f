"""Which elements of which parameters each server holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of a parameter, row by row. `shape`: of the slice, with as many dims as the parameter."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut_parameters(shapes: Mapping[str, Sequence[int]], servers: int) -> list[list[Slice]]:
    """Cut the parameters, one after the other in their order, into equal stretches of elements, one per server.

    Servers differ by at most one element. A slice keeps its parameter's number of dims, by which optimizers choose
    what decays.
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    edges = [total * server // servers for server in range(servers + 1)]
    found: list[list[Slice]] = [[] for _ in range(servers)]
    first = 0  # element of all parameters at which this one begins
    for name, shape in shapes.items():
        size = math.prod(shape)
        for server, slices in enumerate(found):
            start, stop = max(edges[server] - first, 0), min(edges[server + 1] - first, size)
            if start < stop:
                dims = (1,) * (len(shape) - 1) + (stop - start,) if shape else ()
                slices.append(Slice(name, start, stop, dims))
        first += size
    return found
