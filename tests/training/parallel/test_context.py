"""The exchange of tokens for heads: shapes for two ranks, values for one. Equality is in tests/ranks/test_mesh.py."""

from __future__ import annotations

import torch

from sparkring.training.models.gpt import GPT, PLAN
from sparkring.training.parallel.model_parallel.context import (
    AllToAllCore,
    apply_context,
    gather_sequence,
    heads_for_tokens,
    tokens_for_heads,
)


def test_tokens_are_exchanged_for_heads_and_back(fake_mesh) -> None:
    group = fake_mesh(2, "cp").get_group()
    x_BtHD = torch.zeros(3, 5, 4, 8, requires_grad=True)
    x_BThD = heads_for_tokens(x_BtHD, group)
    assert x_BThD.shape == (3, 10, 2, 8)
    back = tokens_for_heads(x_BThD, group)
    assert back.shape == x_BtHD.shape
    back.sum().backward()
    assert x_BtHD.grad.shape == x_BtHD.shape
    assert gather_sequence(torch.zeros(3, 5, 7), group).shape == (3, 10, 7)


def test_one_rank_computes_what_the_core_alone_does(alone) -> None:
    torch.manual_seed(0)
    model, tokens = GPT(vocab=16, width=16, layers=2, heads=4), torch.randint(0, 16, (2, 6))
    expected = model(tokens)
    apply_context(model, PLAN, alone)
    cores = [module for module in model.modules() if isinstance(module, AllToAllCore)]
    assert len(cores) == 2
    torch.testing.assert_close(model(tokens), expected)
    for core in cores:
        core.whole_sequences = True
    torch.testing.assert_close(model(tokens), expected)
