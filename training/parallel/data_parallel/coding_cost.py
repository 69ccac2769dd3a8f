"""Measure what coding a gradient costs on this machine, without any network."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.training.parallel.data_parallel.codecs import QUANTIZERS, sent_bytes
from sparkring.training.parallel.data_parallel.compress import Collectives, compressed
from sparkring.training.parallel.data_parallel.reduce import GradientReducer

CODECS = (*QUANTIZERS, "topk", "powersgd")
SHAPE = (2048, 2048)  # of the gradient: 16 MiB of fp32
REPEATS = 3


class EchoCollectives(Collectives):
    """As if all ranks had sent what this one sends, at once."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        return buffer

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        return rows

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        return flat.repeat(self.ranks)

    def wait(self, handle: Any) -> torch.Tensor:
        result: torch.Tensor = handle
        return result


def coding_cost(compress: CompressConfig, ranks: int, device: torch.device) -> tuple[float, float, float]:
    """Time one codec on a gradient of SHAPE: (seconds, bytes a rank sends, bytes of a dense all-reduce).

    The seconds are the best of REPEATS sums after a first one.
    """
    parameter = nn.Parameter(torch.zeros(SHAPE, device=device))
    transport = compressed(compress, EchoCollectives(ranks))
    reducer = GradientReducer([parameter], transport, bucket_bytes=parameter.nbytes)
    transport.plan(reducer.buckets, {parameter: "gradient"})
    gradient, best = torch.randn(SHAPE, device=device), float("inf")
    for _ in range(1 + REPEATS):
        parameter.grad = gradient.clone()
        _finish(device)
        began = time.perf_counter()
        reducer.finish()
        transport.commit()
        _finish(device)
        best = min(best, time.perf_counter() - began)
    reducer.close()
    element = parameter.element_size()
    dense = sent_bytes(CompressConfig(), [SHAPE], ranks, element)
    return best, sent_bytes(compress, [SHAPE], ranks, element), dense


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
