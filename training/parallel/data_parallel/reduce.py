"""Sum gradients over ranks in buckets while backward still computes.

The idea is that of Horovod's tensor fusion (https://arxiv.org/abs/1802.05799, section 4) and of DDP's reducer
(https://arxiv.org/abs/2006.15704, section 3.2). It differs from DDP in that it *sums* (the loss is already divided by
the rows of the global batch), takes parameters sharded over other axes, and carries over any transport.

Bytes sent per rank and step: 2 (w-1)/w x bytes of the gradients, and one element per parameter that counts the ranks
which have a gradient for it. Memory: one gradient-sized set of buckets, which the gradients then live in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparkring.training.models.torch_private import is_dtensor
from sparkring.training.parallel.data_parallel.base import CodecState, DataParallel
from sparkring.training.parallel.dtensor import finalize_partial_grad, local_tensor
from sparkring.training.parallel.state import plain_name


class Transport(ABC):
    """Sums a buffer over the ranks, in place; the order of calls is the same on every rank."""

    loss_scale: float = 1.0  # what the gradients of this step are multiplied by

    @abstractmethod
    def start(self, name: str, buffer: torch.Tensor) -> Any:
        """Start the sum of the flat `buffer`; returns a handle."""

    @abstractmethod
    def wait(self, handle: Any) -> object: ...

    def plan(self, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        """Prepare for all buckets and the names of their parameters, before the first sum."""
        return None

    def commit(self) -> None:
        """Accept the sums after a step was made; a skipped step leaves no trace."""
        return None

    def state(self) -> CodecState:
        """Return the tensors carried from step to step, for checkpoints (not copies)."""
        return CodecState()

    def load(self, state: CodecState) -> None:
        return None


@dataclass
class Bucket:
    """Parameters of one dtype, and the flat buffer their gradients are reduced in."""

    name: str
    parameters: list[nn.Parameter]
    buffer: torch.Tensor  # (elements + parameters,): the gradients, then `reached`
    views: list[torch.Tensor]  # into the buffer, one per parameter, shaped as its gradient
    reached: torch.Tensor  # view (..., parameters): 1 where this rank has a gradient, then summed over ranks
    filled: set[int] = field(default_factory=set)  # indices of parameters
    missing: set[int] = field(default_factory=set)  # of the filled ones: no gradient on this rank
    handle: Any = None
    result: Any = None  # of the transport's wait
    unreached: list[nn.Parameter] = field(default_factory=list)  # no gradient on any rank


def plan_buckets(sizes_bytes: Sequence[int], dtypes: Sequence[Any], limit_bytes: int) -> list[list[int]]:
    """Group indices into buckets as gradients become ready (last parameter first); one dtype per bucket."""
    buckets: list[list[int]] = []
    used, dtype = 0, None
    for index in reversed(range(len(sizes_bytes))):
        if not buckets or dtype != dtypes[index] or used + sizes_bytes[index] > limit_bytes:
            buckets.append([])
            used, dtype = 0, dtypes[index]
        buckets[-1].append(index)
        used += sizes_bytes[index]
    return buckets


def bucket_limit(total_bytes: int, limit_bytes: int) -> int:
    """Return the bucket size: at most `limit_bytes`, and a quarter of the gradients if at least 1 MB.

    So a small model has several buckets too, the first of which are sent behind backward.
    """
    return min(limit_bytes, max(-(-total_bytes // 4), 2**20))


class GradientReducer:
    """Sum the gradients of `parameters` over the ranks of a transport."""

    def __init__(self, parameters: Sequence[nn.Parameter], transport: Transport, bucket_bytes: int) -> None:
        self.transport = transport
        self.armed = False
        sizes = [local_tensor(p).numel() * p.element_size() for p in parameters]
        plans = plan_buckets(sizes, [p.dtype for p in parameters], bucket_limit(sum(sizes), bucket_bytes))
        self.buckets = [self._bucket(f"gradients.{n}", [parameters[i] for i in plan]) for n, plan in enumerate(plans)]
        self.next_start = 0
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def _bucket(self, name: str, parameters: list[nn.Parameter]) -> Bucket:
        locals_ = [local_tensor(p.detach()) for p in parameters]
        sizes = [t.numel() for t in locals_]
        buffer = torch.empty(sum(sizes) + len(sizes), dtype=locals_[0].dtype, device=locals_[0].device)
        *pieces, reached = buffer.split([*sizes, len(sizes)])
        views = [piece.view(t.shape) for piece, t in zip(pieces, locals_, strict=True)]
        return Bucket(name, parameters, buffer, views, reached)

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            if self.armed:
                self._fill(bucket, index)
                self._start_ready()

        return ready

    def arm(self) -> None:
        """Allow sending before the last backward of a step: its gradients are final."""
        self.armed = True

    def _fill(self, bucket: Bucket, index: int) -> None:
        parameter, view = bucket.parameters[index], bucket.views[index]
        finalize_partial_grad(parameter)
        grad = parameter.grad
        if grad is None:
            view.zero_()
            bucket.missing.add(index)
        elif index not in bucket.filled:
            view.copy_(local_tensor(grad))
        if is_dtensor(parameter):
            from torch.distributed.tensor import DTensor  # with sympy: a second

            shape, stride = parameter.shape, parameter.stride()
            parameter.grad = DTensor.from_local(
                view, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
            )
        else:
            parameter.grad = view
        bucket.filled.add(index)

    def _start_ready(self) -> None:
        """Start ready buckets in fixed order, so that every rank issues the same collectives in one order."""
        while self.next_start < len(self.buckets):
            bucket = self.buckets[self.next_start]
            if len(bucket.filled) < len(bucket.parameters):
                return
            bucket.reached.fill_(1)
            for index in bucket.missing:
                bucket.reached[..., index] = 0
            bucket.handle = self.transport.start(bucket.name, bucket.buffer)
            self.next_start += 1

    def _reached_by(self, bucket: Bucket) -> torch.Tensor:
        """Count by how many ranks each parameter was reached."""
        return bucket.reached

    def finish(self) -> None:
        """Send what backward did not reach (as zeros), wait, and reset for the next step.

        A parameter that no rank reached has no gradient afterwards, as in one process: an optimizer would move and
        decay one with a gradient of zeros.
        """
        self.armed = False
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                if index not in bucket.filled:
                    self._fill(bucket, index)
        self._start_ready()
        for bucket in self.buckets:
            bucket.result = self.transport.wait(bucket.handle)
            # a parameter with a gradient here was reached; only for the others must the host wait for a GPU's values
            lacking = sorted(bucket.missing)
            counts = self._reached_by(bucket)[lacking].tolist() if lacking else []
            bucket.unreached = [bucket.parameters[i] for i, count in zip(lacking, counts, strict=True) if not count]
            for parameter in bucket.unreached:
                parameter.grad = None
            bucket.filled, bucket.missing, bucket.handle = set(), set(), None
        self.next_start = 0

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


class BucketedDataParallel(DataParallel):
    """Whole gradients on every rank, summed by a GradientReducer."""

    def __init__(self, size: int, engine: str, transport: Transport, bucket_bytes: int, overlap: bool = True) -> None:
        """Create the engine.

        Args:
            size: number of ranks.
            engine: engine that carries the collectives.
            transport: sums one buffer over the ranks.
            bucket_bytes: bytes of the largest bucket.
            overlap: send buckets while backward runs; not under a pipeline, where no hook knows the last backward.
        """
        super().__init__(size, engine)
        self.transport, self.bucket_bytes, self.overlap = transport, bucket_bytes, overlap
        self.reducers: list[GradientReducer] = []  # the last one is sent while backward runs

    def make_reducers(self, trainable: list[nn.Parameter]) -> list[GradientReducer]:
        return [GradientReducer(trainable, self.transport, self.bucket_bytes)]

    def wrap(self, model: nn.Module) -> nn.Module:
        self.reducers = self.make_reducers([p for p in model.parameters() if p.requires_grad])
        buckets = [bucket for reducer in self.reducers for bucket in reducer.buckets]
        self.transport.plan(buckets, {p: plain_name(name) for name, p in model.named_parameters()})
        return model

    @contextmanager
    def pass_scope(self, last: bool) -> Iterator[None]:
        if last and self.overlap:
            self.reducers[-1].arm()
        yield

    def finish_reduction(self) -> None:
        for reducer in self.reducers:
            reducer.finish()

    def set_loss_scale(self, scale: float) -> None:
        self.transport.loss_scale = scale

    def after_step(self) -> None:
        self.transport.commit()

    def codec_state(self) -> CodecState:
        return self.transport.state()

    def load_codec_state(self, state: CodecState) -> None:
        self.transport.load(state)

    def close(self, failed: bool) -> None:
        for reducer in self.reducers:
            reducer.close()
