"""Encode gradients in fewer bytes, and say how many: pure functions of tensors, which know no ranks.

Bytes sent per rank and step, for buckets of n elements and p parameters on w ranks, with S = 2 (w-1)/w and elements of
e bytes (4 in fp32). Chunks are padded to w times whole blocks; a bit per parameter says which ranks have a gradient.

| codec | sent | per fp32 element | source |
|---|---|---|---|
| none | S (n + p) e | 4 S | |
| fp16, bf16 | S 2 n + (w-1) p/8 | 2 S | https://arxiv.org/abs/1710.03740, section 3 |
| int8 | S n (1 + 4/256) + (w-1) p/8 | 1.016 S | https://arxiv.org/abs/1511.04561, blocks of 256 with a scale each |
| int4 | S n (1/2 + 4/256) + (w-1) p/8 | 0.516 S | the same with 15 levels |
| onebit | S n (1/8 + 4/1024) + (w-1) p/8 | 0.129 S | Seide 2014 (Interspeech, 1-bit SGD), scales of blocks |
| topk | (w-1) (k (4 + e) + p/8), k = share n | 8 share (w-1) | https://arxiv.org/abs/1704.05021 |
| powersgd | S e (sum of r (a + b) over matrices a x b, the rest, p) | | https://arxiv.org/abs/1905.13727, algorithm 1 |

Numbers with a scale are rounded to nearest; what rounding leaves is the residual of compress.py. A value that is not
finite stays so: int8, int4 and onebit make its whole block not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparkring.conf.blocks.parallel import CompressConfig

BLOCK, SIGN_BLOCK = 256, 1024  # elements that share a scale
SCALE_BYTES, INDEX_BYTES = 4, 4
BIT_VALUES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Quantizer:
    """A codec of one number of bytes per block, whatever the values.

    `coded`: (rows, elements), and (rows, blocks) how many elements of each block are no padding -> (rows, bytes) uint8.
    `decode`: (rows, bytes), and a dtype -> (rows, elements).
    """

    block: int  # a row is whole blocks
    block_bytes: int
    coded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]

    def encode(self, values: torch.Tensor, numel: int | None = None) -> torch.Tensor:
        """Encode (rows, elements) as (rows, bytes) uint8. Elements after the first `numel` are zero padding."""
        places = torch.arange(0, values.numel(), self.block, device=values.device)
        filled = ((values.numel() if numel is None else numel) - places).clamp(0, self.block)
        return self.coded(values, filled.view(len(values), -1))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View (rows, ...) of any dtype as (rows, bytes) uint8."""
    return tensor.reshape(tensor.shape[0], -1).contiguous().view(torch.uint8)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack (..., 8 k) of 0 and 1 into (..., k) uint8, the first in the lowest bit."""
    values = torch.tensor(BIT_VALUES, dtype=torch.uint8, device=bits.device)
    return (bits.to(torch.uint8).unflatten(-1, (-1, 8)) * values).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """Unpack (..., k) uint8 to (..., 8 k) of bool."""
    values = torch.tensor(BIT_VALUES, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) & values).ne(0).flatten(-2)


def _encode_half(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max  # a finite value beyond it is sent as it, the rest stays in the residual
    return as_bytes(torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(dtype))


def _half(dtype: torch.dtype) -> Quantizer:
    return Quantizer(1, 2, lambda v, _: _encode_half(v, dtype), lambda codes, to: codes.contiguous().view(dtype).to(to))


def _scaled(values: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to (rows, blocks, BLOCK) int8 in -levels .. levels, and (rows, blocks, 1) float32 scales."""
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / levels).float()
    divisors = torch.where(scales > 0, scales, 1.0).to(values.dtype)
    return (blocks / divisors).round().clamp(-levels, levels).to(torch.int8), scales


def _encode_int8(values: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    numbers, scales = _scaled(values, 127)
    return torch.cat([as_bytes(numbers), as_bytes(scales)], dim=1)


def _encode_int4(values: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    numbers, scales = _scaled(values, 7)
    low, high = (numbers.flatten(1) + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([low | high << 4, as_bytes(scales)], dim=1)


def _encode_signs(values: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    # a mean over padding too would be too small, and residuals of a small gradient would grow for ever
    scales = (values.unflatten(-1, (-1, SIGN_BLOCK)).abs().sum(-1) / filled.clamp(min=1)).float()
    return torch.cat([pack_bits(values >= 0), as_bytes(scales)], dim=1)


def _split(codes: torch.Tensor, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split (rows, bytes) into (rows, bytes of numbers) and (rows, blocks, 1) scales."""
    numbers = codes.shape[1] // block_bytes * (block_bytes - SCALE_BYTES)
    return codes[:, :numbers], codes[:, numbers:].contiguous().view(torch.float32).unsqueeze(-1)


def _times(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (numbers.unflatten(-1, (scales.shape[1], -1)).to(dtype) * scales.to(dtype)).flatten(1)


def _decode_int8(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    numbers, scales = _split(codes, BLOCK + SCALE_BYTES)
    return _times(numbers.view(torch.int8), scales, dtype)


def _decode_int4(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    packed, scales = _split(codes, BLOCK // 2 + SCALE_BYTES)
    numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int8) - 8
    return _times(numbers, scales, dtype)


def _decode_signs(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    packed, scales = _split(codes, SIGN_BLOCK // 8 + SCALE_BYTES)
    return _times(unpack_bits(packed).to(dtype) * 2 - 1, scales, dtype)


QUANTIZERS: dict[str, Quantizer] = {
    "fp16": _half(torch.float16),
    "bf16": _half(torch.bfloat16),
    "int8": Quantizer(BLOCK, BLOCK + SCALE_BYTES, _encode_int8, _decode_int8),
    "int4": Quantizer(BLOCK, BLOCK // 2 + SCALE_BYTES, _encode_int4, _decode_int4),
    "onebit": Quantizer(SIGN_BLOCK, SIGN_BLOCK // 8 + SCALE_BYTES, _encode_signs, _decode_signs),
}


def chunk_numel(numel: int, ranks: int, block: int) -> int:
    """Return the elements of a rank's chunk: equal on all ranks, whole blocks, at least one block."""
    return max(1, -(-numel // (ranks * block))) * block


def kept_count(numel: int, share: float) -> int:
    """Return k of top-k, at least 1 where there are elements."""
    return min(numel, max(1, math.ceil(share * numel)))


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k elements of (n,) largest by magnitude: (k,) int32 places and values. ValueError if k > n."""
    if k > values.numel():
        raise ValueError(f"top-k of k = {k}: there are only n = {values.numel()} elements; k must be at most n")
    places = values.abs().topk(k, sorted=False).indices
    return places.to(torch.int32), values[places]


def is_factored(shape: Sequence[int], rank: int) -> bool:
    """Return whether PowerSGD sends a gradient as two factors: they must be smaller than it is."""
    rows, columns = matrix_shape(shape)
    return len(shape) >= 2 and rank * (rows + columns) < rows * columns


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the matrix PowerSGD factors: (first dim, product of the others)."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormalize (a, r) to (a, min(a, r)) with at least the same span; NaN if a value is not finite."""
    finite = columns.isfinite().all()  # a tensor: the host does not wait for it
    basis = torch.linalg.qr(columns.where(finite, 0.0)).Q
    return basis.where(finite, math.nan)


def flag_bytes(parameters: int) -> int:
    return -(-parameters // 8)


def sent_bytes(compress: CompressConfig, shapes: Sequence[Sequence[int]], ranks: int, element_bytes: int) -> float:
    """Compute the bytes one rank sends for one bucket, by the formula above.

    Args:
        compress: block `parallel.compress` of the recipe.
        shapes: shapes of the bucket's parameters.
        ranks: number of ranks that share the gradient.
        element_bytes: bytes of a gradient's element.
    """
    numel, others = sum(math.prod(shape) for shape in shapes), ranks - 1
    if compress.codec in QUANTIZERS:
        quantizer = QUANTIZERS[compress.codec]
        row = chunk_numel(numel, ranks, quantizer.block) // quantizer.block * quantizer.block_bytes
        return others * (2 * row + flag_bytes(len(shapes)))
    if compress.codec == "topk":
        k = kept_count(numel, compress.share)
        return others * (k * (INDEX_BYTES + element_bytes) + flag_bytes(len(shapes)))
    elements = numel
    if compress.codec == "powersgd":
        elements = sum(
            compress.rank * sum(matrix_shape(s)) if is_factored(s, compress.rank) else math.prod(s) for s in shapes
        )
    return 2 * others / ranks * (elements + len(shapes)) * element_bytes
