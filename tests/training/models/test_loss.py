"""The chunked cross entropy: torch's values and gradients, with less held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sparkring.training.models import loss as module
from sparkring.training.models.loss import token_cross_entropy


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 3 * 11)


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (2, 5, 11), targets with ignored ones, and a gradient that differs per target."""
    source = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(2, 5, 11, generator=source, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, 11, (2, 5), generator=source)
    target[0, 1] = target[1, 4] = -100
    return logits, target, torch.randn(2, 5, generator=source)


TOLERANCES = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize("chunk", [3 * 11, 110])  # 110: all of the logits, for which torch's own is taken
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_loss_and_gradient_are_those_of_torch(
    dtype: torch.dtype, tolerance: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
    logits, target, weight = case(dtype)
    mine = logits.clone().requires_grad_()
    loss = token_cross_entropy(mine, target, -100)
    (loss * weight).sum().backward()
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact.transpose(1, 2), target, reduction="none", ignore_index=-100)
    (expected * weight).sum().backward()
    assert exact.grad is not None and mine.grad is not None and mine.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance * 10)
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_pad_id_inside_the_vocabulary_is_ignored_too() -> None:
    logits, target, _ = case(torch.float64)
    target = torch.where(target < 0, 3, target)
    logits.requires_grad_()
    loss = token_cross_entropy(logits, target, 3)
    loss.sum().backward()
    assert logits.grad is not None
    assert (loss[target == 3] == 0).all() and (logits.grad[target == 3] == 0).all() and (loss[target != 3] > 0).all()


def test_gradients_pass_torchs_numeric_check(small_chunks: None) -> None:
    logits, target, _ = case(torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_cross_entropy(x, target, -100), logits.requires_grad_())


class LargestFloat32(TorchDispatchMode):
    """Bytes of the largest float32 tensor any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                self.bytes = max(self.bytes, each.numel() * 4)
        return out


def test_no_whole_float32_copy_of_the_logits_is_made() -> None:
    logits = torch.randn(4, 512, 4096).bfloat16().requires_grad_()  # 32 MiB in float32, chunks of 16
    target = torch.randint(0, 4096, (4, 512))
    with LargestFloat32() as mine:
        token_cross_entropy(logits, target, -100).sum().backward()
    with LargestFloat32() as torchs, torch.autocast("cpu", torch.bfloat16):
        functional.cross_entropy(logits.transpose(1, 2), target).backward()
    assert mine.bytes <= 4 * module.CHUNK_ELEMENTS["cpu"] < 4 * logits.numel() <= torchs.bytes
