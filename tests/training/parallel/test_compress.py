"""Error feedback around every codec, on ranks that are threads; on real ones in tests/ranks/test_compress.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.training.parallel.data_parallel.base import CodecState
from sparkring.training.parallel.data_parallel.compress import Collectives, compressed
from sparkring.training.parallel.data_parallel.reduce import BucketedDataParallel

CODECS: dict[str, dict[str, Any]] = {
    **{name: {"codec": name} for name in ("fp16", "bf16", "int8", "int4", "onebit")},
    "topk": {"codec": "topk", "share": 0.1},
    "powersgd": {"codec": "powersgd", "rank": 2},
}


class Board:
    """Where the ranks of `ThreadCollectives` put what they send."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, dict[str, dict[int, torch.Tensor]]()
        self.lock, self.arrived = threading.Lock(), threading.Condition()

    def put(self, name: str, rank: int, tensor: torch.Tensor) -> None:
        with self.arrived:
            self.sent.setdefault(name, {})[rank] = tensor.clone()
            self.arrived.notify_all()

    def all_of(self, name: str) -> list[torch.Tensor]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.sent[name]) == self.ranks, timeout=60)
            return [self.sent[name][rank] for rank in range(self.ranks)]


class ThreadCollectives(Collectives):
    """Collectives between threads; a call's number and name pair it with the others'."""

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board.ranks)
        self.board, self.calls = board, 0

    def _put(self, name: str, tensor: torch.Tensor) -> str:
        self.calls += 1
        self.board.put(f"{name} {self.calls}", self.rank, tensor)
        return f"{name} {self.calls}"

    def start(self, name: str, buffer: torch.Tensor) -> Any:
        call = self._put(name, buffer)
        return lambda: buffer.copy_(torch.stack(self.board.all_of(call)).sum(0))

    def start_all_to_all(self, name: str, rows: torch.Tensor) -> Any:
        call = self._put(name, rows)
        return lambda: torch.stack([sent[self.rank] for sent in self.board.all_of(call)])

    def start_all_gather(self, name: str, flat: torch.Tensor) -> Any:
        call = self._put(name, flat)
        return lambda: torch.cat(self.board.all_of(call))

    def wait(self, handle: Any) -> torch.Tensor:
        result: torch.Tensor = handle()
        return result


class Model(nn.Module):
    """Matrices, vectors, one element alone in its bucket, a frozen parameter, one without a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide, self.deep = (nn.Parameter(torch.zeros(*s, dtype=dtype)) for s in ((40, 30), (16, 3, 3, 3)))
        self.bias, self.gain = nn.Parameter(torch.zeros(301, dtype=dtype)), nn.Parameter(torch.zeros((), dtype=dtype))
        self.frozen = nn.Parameter(torch.zeros(5, dtype=dtype), requires_grad=False)
        self.idle = nn.Parameter(torch.zeros(9, dtype=dtype))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))


class Rank:
    def __init__(self, rank: int, board: Board, settings: dict[str, Any], dtype: torch.dtype) -> None:
        self.rank, self.model = rank, Model(dtype)
        transport = compressed(CompressConfig(**settings), ThreadCollectives(rank, board))
        self.ring = BucketedDataParallel(board.ranks, "threads", transport, bucket_bytes=700)
        self.ring.wrap(self.model)

    def gradient(self, step: int, alike: bool = False) -> dict[str, torch.Tensor]:
        """Another one on every rank, or the same on all."""
        make = torch.Generator().manual_seed(100 * step + (0 if alike else self.rank))
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad and name != "idle"]
        return {name: torch.randn(p.shape, generator=make, dtype=torch.float64).to(p) for name, p in named}

    def reduce(self, gradients: dict[str, torch.Tensor], scale: float = 1.0) -> dict[str, torch.Tensor]:
        """The summed gradients, still times `scale`; the step is not made yet."""
        self.ring.set_loss_scale(scale)
        for name, p in self.model.named_parameters():
            p.grad = gradients[name] * scale if name in gradients else None
        self.ring.finish_reduction()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def residuals(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.ring.codec_state().residuals.items()}


def on_ranks(
    ranks: int, settings: dict[str, Any], work: Callable[[Rank], Any], dtype: torch.dtype = torch.float64
) -> list[Any]:
    board = Board(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: work(Rank(rank, board, settings, dtype)), range(ranks)))


def total(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def lost(
    found: list[tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]],
) -> float:
    """The largest part of the gradients that is in no step and no residual, over all ranks and parameters."""
    sent, residuals = total(found[0][0]), total([left for _, _, left in found])
    gradients = total([gradient for _, made, _ in found for gradient in made])
    return max(float((sent[name] + residuals[name] - gradients[name]).abs().max()) for name in gradients)


def steps(rank: Rank, count: int = 5, drop: bool = False) -> Any:
    """Sums and gradients of each step, and the residuals after the last; `drop` loses those of rank 1 on the way."""
    sums, made = [], []
    for step in range(count):
        made.append(rank.gradient(step))
        sums.append(rank.reduce(made[-1]))
        rank.ring.after_step()
        if drop and step == 2 and rank.rank == 1:
            for residual in rank.ring.codec_state().residuals.values():
                residual.zero_()
    return sums, made, rank.residuals()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("codec", CODECS)
def test_steps_and_residuals_are_the_gradients_and_all_ranks_agree(codec: str, ranks: int) -> None:
    found = on_ranks(ranks, CODECS[codec], steps)
    assert lost(found) < 1e-12
    for sums, _, left in found:
        assert set(left) == {"wide", "deep", "bias", "gain", "idle"} and "idle" not in sums[0]
        for mine, first in zip(sums, found[0][0], strict=True):
            assert all(torch.equal(mine[name], first[name]) for name in first)
    exact = total([made[0] for _, made, _ in found])
    off = max(float((found[0][0][0][name] - exact[name]).abs().max()) for name in exact)
    assert off > 1e-6, "nothing was compressed"


@pytest.mark.parametrize("codec", CODECS)
def test_a_residual_that_is_dropped_is_noticed(codec: str) -> None:
    least = {"bf16": 1e-4, "fp16": 1e-5}.get(codec, 1e-3)
    assert lost(on_ranks(2, CODECS[codec], lambda rank: steps(rank, drop=True))) > least


@pytest.mark.parametrize("codec", CODECS)
def test_a_skipped_step_and_a_loss_scale_leave_the_same_bits(codec: str) -> None:
    def skipping(rank: Rank) -> Any:
        for step in range(4):
            rank.reduce(rank.gradient(step), scale=2.0**step)
            rank.ring.after_step()
            before = rank.residuals()
            spoiled = rank.gradient(50)
            if rank.rank == 1:
                spoiled["wide"][3, 3] = math.nan
            summed = rank.reduce(spoiled)
            assert not summed["wide"].isfinite().all() and summed["bias"].isfinite().all()
            rank.model.zero_grad(set_to_none=True)
            assert all(torch.equal(before[name], after) for name, after in rank.residuals().items())
        return rank.reduce(rank.gradient(9)), rank.residuals()

    def plain(rank: Rank) -> Any:
        steps(rank, 4)
        return rank.reduce(rank.gradient(9)), rank.residuals()

    for (sums, left), (plain_sums, plain_left) in zip(
        on_ranks(2, CODECS[codec], skipping), on_ranks(2, CODECS[codec], plain), strict=True
    ):
        assert all(torch.equal(left[name], plain_left[name]) for name in plain_left)
        assert all(torch.equal(sums[name], plain_sums[name]) for name in plain_sums)


@pytest.mark.parametrize("codec", CODECS)
def test_the_residual_of_a_parameter_that_no_rank_reached_waits(codec: str) -> None:
    def work(rank: Rank) -> Any:
        steps(rank, 2)
        before = rank.residuals()
        made = rank.gradient(7)
        del made["bias"]
        if rank.rank == 0:
            del made["wide"]
        summed = rank.reduce(made)
        rank.ring.after_step()
        return before, summed, rank.residuals(), made

    found = on_ranks(2, CODECS[codec], work)
    for before, summed, after, _ in found:
        assert "bias" not in summed and torch.equal(before["bias"], after["bias"])
    wide = found[0][1]["wide"] + sum(after["wide"] for _, _, after, _ in found)
    assert (wide - sum(before["wide"] for before, *_ in found) - found[1][3]["wide"]).abs().max() < 1e-12


STEPS = 50
SIZES = sorted({blocks * 1024 + rest for blocks in range(4) for rest in (0, 1, 10, 300)} - {0})


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("codec", CODECS)
def test_a_constant_gradient_is_applied_in_full_whatever_the_size_of_its_bucket(codec: str, ranks: int) -> None:
    """Buckets of up to three blocks and a rest: what is not sent is bounded, so its share goes to zero with the steps.

    By the ratio to the gradient itself, since a scale that is too small loses a share of every step.
    """

    def work(rank: Rank) -> dict[int, float]:
        named = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in SIZES]
        rank.ring = BucketedDataParallel(ranks, "threads", rank.ring.transport, bucket_bytes=1)
        rank.ring.wrap(nn.ParameterList(named))
        values = [1.0 + 0.5 * torch.sin(torch.arange(size, dtype=torch.float64)) for size in SIZES]
        values = [value * (-1) ** torch.arange(len(value)) for value in values]
        applied = [torch.zeros_like(p) for p in named]
        for _ in range(STEPS):
            for p, value in zip(named, values, strict=True):
                p.grad = value * (1 + rank.rank)
            rank.ring.finish_reduction()
            for p, total in zip(named, applied, strict=True):
                total += p.grad
            rank.ring.after_step()
        due = [STEPS * value * sum(range(1, ranks + 1)) for value in values]
        return {len(d): float((a - d).norm() / d.norm()) for a, d in zip(applied, due, strict=True)}

    worst = max((off, size) for size, off in on_ranks(ranks, CODECS[codec], work)[0].items())
    assert worst[0] < 0.2, worst  # topk sends each tenth element in turn


def test_top_k_of_all_and_factors_of_all_columns_are_the_sum() -> None:
    for sums, *_ in on_ranks(3, {"codec": "topk", "share": 1.0}, lambda rank: (rank.reduce(rank.gradient(0)),)):
        expected = total(on_ranks(3, {"codec": "none"}, lambda rank: rank.gradient(0)))
        assert all((sums[name] - expected[name]).abs().max() < 1e-13 for name in expected)

    def low_rank(rank: Rank) -> Any:
        made = rank.gradient(0)
        made["wide"] = made["wide"][:, :1] * made["wide"][:1]
        return rank.reduce(made), made

    found = on_ranks(3, {"codec": "powersgd", "rank": 3}, low_rank)
    expected = total([made for _, made in found])
    assert all((found[0][0][name] - expected[name]).abs().max() < 1e-12 for name in ("wide", "bias", "gain"))
    assert (found[0][0]["deep"] - expected["deep"]).abs().max() > 1e-3, "of more columns than the factors have"


def test_power_iteration_goes_on_from_its_factors() -> None:
    def error(rank: Rank) -> list[float]:
        matrix, off = rank.gradient(0, alike=True), []
        for _ in range(4):  # the same matrix again, without what the step before left
            summed = rank.reduce(matrix)
            rank.ring.after_step()
            for residual in rank.ring.codec_state().residuals.values():
                residual.zero_()
            off.append(float((summed["wide"] - 2 * matrix["wide"]).norm()))
        return off

    errors = on_ranks(2, CODECS["powersgd"], error)
    assert errors[0][3] < errors[0][1] < errors[0][0]


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_what_a_codec_carries_is_loaded_bit_for_bit(codec: str) -> None:
    def work(rank: Rank) -> Any:
        steps(rank, 3)
        kept = rank.ring.codec_state()
        kept = type(kept)(*({name: t.clone() for name, t in part.items()} for part in (kept.residuals, kept.factors)))
        on = rank.reduce(rank.gradient(3))
        rank.ring.after_step()
        rank.ring.load_codec_state(kept)
        return on, rank.reduce(rank.gradient(3))

    for on, again in on_ranks(2, CODECS[codec], work):
        assert all(torch.equal(on[name], again[name]) for name in on)


@pytest.mark.parametrize("codec", CODECS)
def test_a_bucket_without_elements_is_summed_like_any_other(codec: str) -> None:
    board = Board(2)

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        transport = compressed(CompressConfig(**CODECS[codec]), ThreadCollectives(rank, board))
        ring = BucketedDataParallel(2, "threads", transport, bucket_bytes=700)
        full, empty = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(0))
        ring.wrap(nn.ParameterList([full, empty]))  # buckets begin with the last
        full.grad, empty.grad = torch.ones(300), torch.ones(0)
        ring.finish_reduction()
        ring.after_step()
        assert len(ring.reducers[0].buckets[0].buffer) == 1, "how many ranks have a gradient"
        assert empty.grad is not None and empty.grad.shape == (0,)
        return full.grad, ring.codec_state().residuals["0"]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    off = found[0][0] + sum(residual for _, residual in found) - 2
    assert off.abs().max() < 1e-6


def test_what_a_checkpoint_lacks_or_has_of_another_rank_begins_anew() -> None:
    def work(rank: Rank) -> Any:
        first = {name: factor.shape for name, factor in rank.ring.codec_state().factors.items()}
        steps(rank, 2)
        wider = {name: torch.ones(shape[0], shape[1] + 1) for name, shape in first.items()}
        rank.ring.load_codec_state(CodecState(factors=wider))
        left = rank.residuals()
        rank.reduce(rank.gradient(3))
        return left, first, {name: factor.shape for name, factor in rank.ring.codec_state().factors.items()}

    for left, first, shapes in on_ranks(2, CODECS["powersgd"], work):
        assert not any(residual.any() for residual in left.values()) and shapes == first
