"""Gradient codecs as functions: what is sent and what stays are the value, bytes are the formula's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.training.parallel.data_parallel.codecs import (
    QUANTIZERS,
    chunk_numel,
    is_factored,
    kept_count,
    largest,
    orthonormal,
    pack_bits,
    sent_bytes,
    unpack_bits,
)


def gradients(dtype: torch.dtype, numel: int = 4096) -> torch.Tensor:
    """(2, numel) over eight decades, with zeros and one block of zeros."""
    make = torch.Generator().manual_seed(3)
    values = torch.randn(2, numel, generator=make, dtype=torch.float64)
    values *= 10 ** (4 * torch.rand(2, numel, generator=make, dtype=torch.float64) - 6)
    values[:, ::7] = 0
    values[0, :1024] = 0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", QUANTIZERS)
def test_what_is_sent_and_what_stays_are_the_value(codec: str, dtype: torch.dtype) -> None:
    quantizer, values = QUANTIZERS[codec], gradients(dtype)
    sent = quantizer.decode(quantizer.encode(values), dtype)
    residual = values - sent
    off = (sent + residual - values).abs().max()
    assert off == 0 if codec != "onebit" else off < (1e-12 if dtype == torch.float64 else 1e-6)
    assert (sent[0, :1024] == 0).all() and not torch.equal(sent, values)


@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
def test_a_scaled_number_is_off_by_half_a_level_of_its_block(codec: str, levels: int) -> None:
    quantizer, values = QUANTIZERS[codec], gradients(torch.float64)
    sent = quantizer.decode(quantizer.encode(values), torch.float64)
    level = values.unflatten(-1, (-1, 256)).abs().amax(-1, keepdim=True) / levels
    assert ((values - sent).unflatten(-1, (-1, 256)).abs() <= 0.5001 * level).all()


def test_a_sign_is_sent_as_the_mean_magnitude_of_its_block() -> None:
    values = torch.tensor([[1.0, -3.0] * 512])
    sent = QUANTIZERS["onebit"].decode(QUANTIZERS["onebit"].encode(values), torch.float32)
    assert sent.tolist() == [[2.0, -2.0] * 512]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("codec", QUANTIZERS)
def test_a_value_that_is_not_finite_stays_so(codec: str, value: float) -> None:
    quantizer, values = QUANTIZERS[codec], gradients(torch.float32)
    values[1, 2000] = value
    assert not quantizer.decode(quantizer.encode(values), torch.float32)[1, 2000].isfinite()


def test_a_finite_value_beyond_fp16_is_sent_as_its_largest() -> None:
    values = torch.tensor([[1e6, -1e6, 1.0]])
    sent = QUANTIZERS["fp16"].decode(QUANTIZERS["fp16"].encode(values), torch.float32)
    assert sent.tolist() == [[65504.0, -65504.0, 1.0]]


def test_bits_are_packed_and_unpacked() -> None:
    bits = torch.rand(3, 16) > 0.5
    assert torch.equal(unpack_bits(pack_bits(bits)), bits)
    assert pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1])).tolist() == [129]


def test_top_k_of_all_elements_is_all_of_them_and_of_more_is_refused() -> None:
    values = torch.randn(10)
    places, kept = largest(values, 10)
    assert torch.equal(torch.zeros(10).index_put((places.long(),), kept), values)
    assert set(largest(torch.tensor([1.0, -5.0, 3.0]), 2)[0].tolist()) == {1, 2}
    with pytest.raises(ValueError, match="k = 11: there are only n = 10 elements"):
        largest(values, 11)


def test_power_iteration_at_full_rank_is_the_matrix() -> None:
    matrix, start = torch.randn(12, 7, dtype=torch.float64), torch.randn(7, 7, dtype=torch.float64)
    left = orthonormal(matrix @ start)
    assert (left @ (matrix.T @ left).T - matrix).abs().max() < 1e-13
    low = torch.randn(12, 2, dtype=torch.float64) @ torch.randn(2, 7, dtype=torch.float64)
    left = orthonormal(low @ start[:, :3])
    assert (left @ (low.T @ left).T - low).abs().max() < 1e-13, "columns enough for its rank"
    assert orthonormal(torch.full((4, 2), math.nan)).isnan().all()


def test_a_matrix_is_factored_only_where_its_factors_are_smaller() -> None:
    assert is_factored((64, 3, 3, 3), 4) and is_factored((10, 10), 4) and not is_factored((10, 10), 5)
    assert not is_factored((1000,), 1) and not is_factored((), 1)


@pytest.mark.parametrize("codec", QUANTIZERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_of_the_code(codec: str, ranks: int) -> None:
    quantizer, shapes = QUANTIZERS[codec], [(7, 100), (1,), (33,)]
    chunk = chunk_numel(734, ranks, quantizer.block)
    assert chunk * ranks >= 734 and chunk % quantizer.block == 0
    row = quantizer.encode(torch.zeros(1, chunk)).numel()
    assert sent_bytes(CompressConfig(codec=codec), shapes, ranks, 4) == (ranks - 1) * (2 * row + 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"codec": "none"}, 2 * 2 / 3 * 4 * (3000 + 2)),
        ({"codec": "topk", "share": 0.01}, 2 * (30 * 8 + 1)),
        ({"codec": "powersgd", "rank": 2}, 2 * 2 / 3 * 4 * (2 * (100 + 20) + 1000 + 2)),
    ],
)
def test_bytes_of_the_other_exchanges(settings: dict[str, Any], sent: float) -> None:
    assert sent_bytes(CompressConfig(**settings), [(100, 20), (1000,)], 3, 4) == pytest.approx(sent)


def test_top_k_sends_one_element_at_least() -> None:
    assert [kept_count(n, 0.01) for n in (0, 1, 100, 101)] == [0, 1, 1, 2]
