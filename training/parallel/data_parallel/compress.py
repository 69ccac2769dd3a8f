"""Sum gradients through a codec with error feedback (https://arxiv.org/abs/1901.09847).

What a step does not send is added to the next gradient of the same rank.

    p = gradient + residual;  residual' = p - sent(p)

so over all ranks, the sum that a step applies plus the residuals after it are the gradients plus those before it. The
sums of fp16 to onebit are made in two exchanges, as in 1-bit Adam (https://arxiv.org/abs/2102.02888, section 5): an
all-to-all takes each rank one chunk of every rank's code; it sums them, with its own values as they are, and an
all-gather takes the sum, encoded again, to all. What the second coding loses is kept by the rank that owns the chunk,
in its residual there, which has nothing of its own to keep: so one residual is enough. Every rank decodes the same
bytes, so all have the same sum bit for bit; PowerSGD's products are the same where hosts have one kind of processor.

Bytes sent: codecs.py. Memory: two more tensors as large as the gradients, the residual before and after a step, since a
step that is skipped must leave it as it was. Residuals are kept without the loss scale of fp16.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.training.parallel.data_parallel.base import CodecState
from sparkring.training.parallel.data_parallel.codecs import (
    INDEX_BYTES,
    QUANTIZERS,
    Quantizer,
    as_bytes,
    chunk_numel,
    flag_bytes,
    is_factored,
    kept_count,
    largest,
    matrix_shape,
    orthonormal,
    pack_bits,
    unpack_bits,
)
from sparkring.training.parallel.data_parallel.reduce import Bucket, Transport


class Collectives(Transport):
    """What codecs and averages are built on: start a collective over `ranks`, then wait for its result."""

    leads = True  # of the processes that are one rank here, True on the process that represents its replica

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    @abstractmethod
    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        """Send row r of (w, n) to rank r; `wait` returns (w, n), row r from rank r."""

    @abstractmethod
    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        """Send (n,) to all ranks; `wait` returns (w x n,)."""

    @abstractmethod
    def wait(self, handle: Any) -> torch.Tensor: ...

    def close(self) -> None:
        """Release resources after the last collective, on every rank."""
        return None


@dataclass
class Feedback:
    """Of one bucket: the residual, and what it becomes if the step is made."""

    bucket: Bucket
    residual: torch.Tensor  # (elements,)
    pending: torch.Tensor  # (elements,)

    @property
    def numel(self) -> int:
        return len(self.residual)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split a flat tensor, laid out as `residual`, into the bucket's parameters."""
        pieces = flat.split([view.numel() for view in self.bucket.views])
        return [piece.view(view.shape) for piece, view in zip(pieces, self.bucket.views, strict=True)]


class CodecTransport(Transport):
    """Error feedback around a codec: one per codec below."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives, self.rank, self.ranks = collectives, collectives.rank, collectives.ranks
        self.feedback: dict[str, Feedback] = {}  # by name of the bucket
        self.names: Mapping[nn.Parameter, str] = {}

    def plan(self, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        self.names = names
        for bucket in buckets:
            like = bucket.buffer[: len(bucket.buffer) - len(bucket.parameters)]
            self.feedback[bucket.name] = Feedback(bucket, torch.zeros_like(like), torch.empty_like(like))

    def take(self, feedback: Feedback) -> torch.Tensor:
        """Add the residual to the gradient, (elements,), in the memory of the bucket."""
        values = feedback.bucket.buffer[: feedback.numel]
        if self.loss_scale != 1.0:
            values.div_(self.loss_scale)
        return values.add_(feedback.residual)

    def give(self, feedback: Feedback, summed: torch.Tensor, reached: torch.Tensor) -> None:
        """Write the sum to the bucket, and how many ranks reached each parameter.

        A parameter that no rank reached is not stepped, so its residuals stay.
        """
        bucket = feedback.bucket
        torch.mul(summed, self.loss_scale, out=bucket.buffer[: feedback.numel])
        bucket.reached.copy_(reached)
        lacking = sorted(bucket.missing)
        if not lacking:
            return
        before, after = feedback.parts(feedback.residual), feedback.parts(feedback.pending)
        for index, count in zip(lacking, bucket.reached[lacking].tolist(), strict=True):
            if not count:
                after[index].copy_(before[index])

    def flags(self, bucket: Bucket) -> torch.Tensor:
        """Pack a bit per parameter, whether this rank has a gradient, as (bytes,) uint8."""
        return pack_bits(nn.functional.pad(bucket.reached, (0, -len(bucket.reached) % 8)))

    def counts(self, flags: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Count from the ranks' flags (w, bytes) how many ranks reached each parameter."""
        return unpack_bits(flags)[:, : len(bucket.parameters)].sum(dim=0)

    def commit(self) -> None:
        for feedback in self.feedback.values():
            feedback.residual, feedback.pending = feedback.pending, feedback.residual

    def state(self) -> CodecState:
        found: dict[str, torch.Tensor] = {}
        for feedback in self.feedback.values():
            parts = feedback.parts(feedback.residual)
            found |= {self.names[p]: part for p, part in zip(feedback.bucket.parameters, parts, strict=True)}
        return CodecState(found)

    def load(self, state: CodecState) -> None:
        for name, residual in self.state().residuals.items():
            given = state.residuals.get(name)
            if given is None:
                residual.zero_()
            else:
                residual.copy_(given)


class QuantizedTransport(CodecTransport):
    """fp16, bf16, int8, int4, onebit: chunks by all-to-all, their sums by all-gather."""

    def __init__(self, collectives: Collectives, quantizer: Quantizer) -> None:
        super().__init__(collectives)
        self.quantizer = quantizer

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        feedback = self.feedback[name]
        chunk = chunk_numel(feedback.numel, self.ranks, self.quantizer.block)
        values = self.take(feedback)
        rows = nn.functional.pad(values, (0, self.ranks * chunk - feedback.numel)).view(self.ranks, chunk)
        codes = self.quantizer.encode(rows, feedback.numel)
        unsent = rows - self.quantizer.decode(codes, rows.dtype)
        feedback.pending.copy_(unsent.view(-1)[: feedback.numel])
        flags = self.flags(feedback.bucket).expand(self.ranks, -1)
        work = self.collectives.start_all_to_all(name, torch.cat([codes, flags], dim=1))
        return feedback, rows[self.rank], work

    def wait(self, handle: Any) -> None:
        feedback, own, work = handle
        bucket, dtype = feedback.bucket, own.dtype
        received = self.collectives.wait(work)  # (w, bytes)
        code_bytes = received.shape[1] - flag_bytes(len(bucket.parameters))
        codes, flags = received.split([code_bytes, received.shape[1] - code_bytes], dim=1)
        values = self.quantizer.decode(codes, dtype)  # (w, chunk)
        values[self.rank] = own
        mine = values.sum(dim=0, keepdim=True)  # (1, chunk)
        begin, end = (min(r * mine.numel(), feedback.numel) for r in (self.rank, self.rank + 1))
        mine[:, end - begin :] = 0  # padding, whatever its codes were
        again = self.quantizer.encode(mine, end - begin)
        unsent = mine - self.quantizer.decode(again, dtype)
        feedback.pending[begin:end] = unsent.view(-1)[: end - begin]
        gathered = self.collectives.wait(self.collectives.start_all_gather(f"{bucket.name}.sums", again.view(-1)))
        summed = self.quantizer.decode(gathered.view(self.ranks, -1), dtype)
        self.give(feedback, summed.view(-1)[: feedback.numel], self.counts(flags, bucket))


class TopKTransport(CodecTransport):
    """topk: the largest elements of every rank, gathered by all and summed in the order of the ranks."""

    def __init__(self, collectives: Collectives, share: float) -> None:
        super().__init__(collectives)
        self.share = share

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        feedback = self.feedback[name]
        values = self.take(feedback)
        places, kept = largest(values, kept_count(feedback.numel, self.share))
        feedback.pending.copy_(values)
        feedback.pending[places.long()] = 0
        payload = [as_bytes(places[None]), as_bytes(kept[None]), self.flags(feedback.bucket)[None]]
        return feedback, self.collectives.start_all_gather(name, torch.cat(payload, dim=1).view(-1))

    def wait(self, handle: Any) -> None:
        feedback, work = handle
        bucket, dtype = feedback.bucket, feedback.residual.dtype
        k = kept_count(feedback.numel, self.share)
        sizes = [k * INDEX_BYTES, k * dtype.itemsize, flag_bytes(len(bucket.parameters))]
        places, kept, flags = self.collectives.wait(work).view(self.ranks, -1).split(sizes, dim=1)
        summed = torch.zeros_like(feedback.residual)
        for rank in range(self.ranks):  # no place twice within a rank: the same sum on every rank
            at = places[rank].clone().view(torch.int32).long()
            summed[at] += kept[rank].clone().view(dtype)
        self.give(feedback, summed, self.counts(flags, bucket))


class PowerTransport(CodecTransport):
    """powersgd: a matrix M, of all ranks' sum, as P Q^T, by one step of power iteration from the Q of the step before.

    P = sum of M_j Q, made orthonormal; Q = sum of M_j^T P. A rank has sent P P^T M_j. Vectors, scalars, and matrices
    that are no larger than their factors are summed as they are.
    """

    def __init__(self, collectives: Collectives, columns: int) -> None:
        super().__init__(collectives)
        self.columns = columns
        self.factors: dict[nn.Parameter, torch.Tensor] = {}  # Q, (b, r)
        self.pending_factors: dict[nn.Parameter, torch.Tensor] = {}

    def plan(self, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        super().plan(buckets, names)
        for bucket in buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if is_factored(view.shape, self.columns):
                    random = torch.Generator().manual_seed(zlib.crc32(names[parameter].encode()))  # equal on all ranks
                    first = torch.randn(matrix_shape(view.shape)[1], self.columns, generator=random)
                    self.factors[parameter] = first.to(view)

    def matrices(self, feedback: Feedback, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views into `flat`, laid out as `residual`: of factored parameters (a, b), and of others."""
        factored, whole = [], []
        for parameter, part in zip(feedback.bucket.parameters, feedback.parts(flat), strict=True):
            if parameter in self.factors:
                factored.append(part.view(matrix_shape(part.shape)))
            else:
                whole.append(part.view(-1))
        return factored, whole

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        feedback = self.feedback[name]
        factored, whole = self.matrices(feedback, self.take(feedback))
        right = [self.factors[p] for p in feedback.bucket.parameters if p in self.factors]
        left = [(m @ q).view(-1) for m, q in zip(factored, right, strict=True)]
        flat = torch.cat([*left, *whole, feedback.bucket.reached])
        return feedback, flat, self.collectives.start(f"{name}.left", flat)

    def wait(self, handle: Any) -> None:
        feedback, flat, work = handle
        bucket = feedback.bucket
        self.collectives.wait(work)
        factored, whole = self.matrices(feedback, bucket.buffer[: feedback.numel])
        sizes = [len(m) * self.columns for m in factored] + [len(v) for v in whole] + [len(bucket.parameters)]
        pieces = flat.split(sizes)
        left = [orthonormal(piece.view(len(m), -1)) for piece, m in zip(pieces, factored, strict=False)]
        right = [m.T @ p for m, p in zip(factored, left, strict=True)]
        unsent, unsent_whole = self.matrices(feedback, feedback.pending)
        for rest, m, p, q in zip(unsent, factored, left, right, strict=True):
            torch.addmm(m, p, q.T, alpha=-1, out=rest)
        for rest in unsent_whole:
            rest.zero_()
        if right:
            sent = torch.cat([q.view(-1) for q in right])
            self.collectives.wait(self.collectives.start(f"{bucket.name}.right", sent))
            right = [
                piece.view(q.shape) for piece, q in zip(sent.split([q.numel() for q in right]), right, strict=True)
            ]
        summed = torch.empty_like(feedback.residual)
        products, sums = self.matrices(feedback, summed)
        for product, p, q in zip(products, left, right, strict=True):
            torch.mm(p, q.T, out=product)
        for total, piece in zip(sums, pieces[len(factored) : -1], strict=True):
            total.copy_(piece)
        self.pending_factors |= zip((p for p in bucket.parameters if p in self.factors), right, strict=True)
        self.give(feedback, summed, pieces[-1])

    def commit(self) -> None:
        super().commit()
        self.factors |= self.pending_factors

    def state(self) -> CodecState:
        factors = {self.names[parameter]: q for parameter, q in self.factors.items()}
        return CodecState(super().state().residuals, factors)

    def load(self, state: CodecState) -> None:
        super().load(state)
        for parameter, q in self.factors.items():
            given = state.factors.get(self.names[parameter])
            if given is not None and given.shape == q.shape:  # else of another rank: the next step finds its own
                self.factors[parameter] = given.to(q, copy=True)


def compressed(config: CompressConfig, collectives: Collectives) -> Transport:
    """Return the transport for parallel.compress; the collectives themselves without a codec."""
    if config.codec in QUANTIZERS:
        return QuantizedTransport(collectives, QUANTIZERS[config.codec])
    if config.codec == "topk":
        return TopKTransport(collectives, config.share)
    return PowerTransport(collectives, config.rank) if config.codec == "powersgd" else collectives
