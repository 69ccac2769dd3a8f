"""Combine gradients over the batch axes (dp x cp): the interface."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from sparkring.training.parallel.memory.meters import storage_bytes

MOMENTS = 128  # most moments at which gathered tensors are counted, in the one step that is measured


@dataclass(frozen=True)
class CodecState:
    """What a gradient codec carries from step to step, by name of the parameter."""

    residuals: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's, shaped as the gradient
    factors: dict[str, torch.Tensor] = field(default_factory=dict)  # PowerSGD's (columns, r), equal on all ranks


class DataParallel(ABC):
    """Life: shard -> wrap -> (pass_scope per part, finish_reduction)* -> close."""

    averages: bool = False  # the reduction divides by `size`: losses are multiplied by it first
    forward_is_collective: bool = False  # every rank must run every pass, even on 0 rows

    def __init__(self, size: int, engine: str) -> None:
        """Keep `size`, the ranks that combine gradients, and `engine`, which carries the collectives."""
        self.size, self.engine = size, engine
        self.has_rows = True  # else a pass is over 0 rows, and its backward reaches no parameter
        self.waited_s = 0.0  # blocked on the other ranks, so far; on GPUs only what blocks the host
        self.step_bytes = 0.0  # sent per step by calls torch does not see
        self.gathered_bytes = 0  # peak of `gathered_tensors`, as far as they were measured
        self.is_measuring = False

    def shard(self, model: nn.Module, stages: list[nn.Module] | None) -> None:
        """Cut the parameters of a model on the meta device if this rank is to hold a shard only.

        `stages`: the modules a pipeline calls instead of `model`, which holds them all.
        """
        return None

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Register hooks on the gradients of a model with values; return the module to call forward on."""

    def owned_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        """Return parameters for the optimizer: the trainable ones, or the shards this rank owns."""
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a call that blocks until the other ranks reach it; add the seconds to `waited_s`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def gathered_tensors(self) -> Iterable[torch.Tensor]:
        """Return the weights and gradients this rank holds now and would not if always fully sharded."""
        return ()

    def gathered_parameters(self) -> Iterable[nn.Parameter]:
        """Return the unsharded parameters that backward gives gradients to."""
        return ()

    @contextmanager
    def measuring_gathered(self) -> Iterator[None]:
        """Count gathered bytes at every new gradient within the block, when most are held.

        A count looks at every parameter, so of more than MOMENTS gradients evenly chosen ones count.
        """
        parameters = list(self.gathered_parameters())
        counted = parameters[:: max(1, -(-len(parameters) // MOMENTS))]
        hooks = [p.register_post_accumulate_grad_hook(lambda _: self.count_gathered()) for p in counted]
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False
            for hook in hooks:
                hook.remove()

    def count_gathered(self) -> None:
        if self.is_measuring:
            self.gathered_bytes = max(self.gathered_bytes, storage_bytes(self.gathered_tensors()))

    def pass_scope(self, last: bool) -> AbstractContextManager[object]:
        """Enclose the forward and backward of one pass; the `last` pass starts the reduction."""
        return nullcontext()

    def before_stage_backward(self, stage: nn.Module, last: bool) -> None:
        """Prepare a pipeline stage's backward; `last`: its last in this step."""
        return None

    def after_pipeline(self) -> None:
        """Finish gradients after the last action of a pipeline's schedule."""
        return None

    def finish_reduction(self) -> None:
        """Make every gradient the sum (or mean, see `averages`) over the ranks; None if no rank has one."""
        return None

    def set_loss_scale(self, scale: float) -> None:
        """Set the factor on the gradients of the next backward."""
        return None

    def codec_state(self) -> CodecState:
        """Return the codec's tensors that persist between steps (not copies); empty without a codec."""
        return CodecState()

    def load_codec_state(self, state: CodecState) -> None:
        """Take what `codec_state` of this or another rank gave; without a codec there is nothing to take."""
        return None

    def broadcast_buffers(self, buffers: list[torch.Tensor]) -> None:
        """Overwrite `buffers` with those of the first rank."""
        return None

    def after_step(self) -> None:
        """Gather parameters after the optimizer's step if it held only shards of them."""
        return None

    def share_weights(self) -> None:
        """Gather parameters as by after_step, after a load or an averaging wrote the weights."""
        return None

    def after_evaluate(self) -> None:
        return None

    def close(self, failed: bool) -> None:
        return None


class SingleProcess(DataParallel):
    """One data rank, the oracle. Sends 0 bytes; 16 bytes per fp32 parameter, AdamW."""

    def __init__(self, engine: str = "none") -> None:
        super().__init__(1, engine)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model
