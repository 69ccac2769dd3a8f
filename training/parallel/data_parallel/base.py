"""One way of combining gradients over the batch axes (dp x cp): what the strategies of this folder differ in."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from training.parallel.measure import storage_bytes

MOMENTS = 128  # at which what is held whole is counted, at most, in the one step that is measured


class DataAxis(ABC):
    """Life: shard -> wrap -> (scope around each part's forward and backward, finish)* -> close."""

    engine: str
    size: int  # ranks the gradient is combined over
    step_bytes: float = 0.0  # sent per step by calls torch does not see
    whole_bytes: int = 0  # of `whole_tensors`, at most, as far as they were watched
    watched = False
    waited_s: float = 0.0  # blocked on the other ranks, so far; on GPUs only what blocks the host
    averages: bool = False  # the reduction divides by `size`: losses are multiplied by it first
    forward_is_collective: bool = False  # every rank must run every pass, even on 0 rows
    counts: bool = True  # what backward reaches now is reached: not in passes over 0 rows

    def shard(self, model: nn.Module, stages: list[nn.Module] | None) -> None:
        """Cut the parameters of a model on the meta device, where this rank is to hold a part of them only.

        `stages`: the modules a pipeline calls instead of `model`, which holds them all.
        """
        return None

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Make the gradients of a model that has its values be combined; returns what forward is called on."""

    def parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        """What the optimizer is given: the model's trainable parameters, or the shards this rank owns."""
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what blocks until the other ranks have come as far."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def whole_tensors(self) -> Iterable[torch.Tensor]:
        """Weights and gradients this rank holds now and would not hold if everything were sharded all the time."""
        return ()

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        """Those backward gives gradients to, where they are not sharded."""
        return ()

    @contextmanager
    def watching_whole(self) -> Iterator[None]:
        """Within, every new gradient is a moment at which to count: each moment that holds most has just got one. A
        moment looks at every parameter, so of more than MOMENTS gradients evenly chosen ones count."""
        parameters = list(self.whole_parameters())
        counted = parameters[:: max(1, -(-len(parameters) // MOMENTS))]
        hooks = [p.register_post_accumulate_grad_hook(lambda _: self.count_whole()) for p in counted]
        self.watched = True
        try:
            yield
        finally:
            self.watched = False
            for hook in hooks:
                hook.remove()

    def count_whole(self) -> None:
        if self.watched:
            self.whole_bytes = max(self.whole_bytes, storage_bytes(self.whole_tensors()))

    def scope(self, last: bool) -> AbstractContextManager[object]:
        """Around one part's forward and backward; `last` parts start the reduction."""
        return nullcontext()

    def before_stage_backward(self, module: nn.Module, last: bool) -> None:
        """Before a pipeline stage's backward; `last`: its last in this step."""
        return None

    def after_pipeline(self) -> None:
        """After the last action of a pipeline's schedule."""
        return None

    def finish(self) -> None:
        """Afterwards every gradient is the sum (or mean, see `averages`) over the axis; None where no rank had one."""
        return None

    def share_buffers(self, buffers: list[torch.Tensor]) -> None:
        """`buffers` become those of the axis' first rank."""
        return None

    def after_step(self) -> None:
        """After the optimizer: gather parameters where the optimizer held only shards of them."""
        return None

    def after_evaluate(self) -> None:
        return None

    def close(self, failed: bool) -> None:
        return None


class NoAxis(DataAxis):
    """One data rank: the oracle. 0 bytes; 16 bytes per parameter in fp32 with AdamW."""

    size = 1

    def __init__(self, engine: str = "none") -> None:
        self.engine = engine

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
