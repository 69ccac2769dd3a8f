"""torch.compile by blocks: what is compiled, how often, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch import nn

from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.model_parallel.blocks import checkpoint_blocks, compile_blocks


def compiled(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_are_compiled_and_nothing_around_them(checkpointed: bool) -> None:
    model = GPT(vocab=16, width=16, layers=2, heads=2)
    blocks = list(model.blocks)
    if checkpointed:
        checkpoint_blocks(model)
    compile_blocks(model)
    assert all(compiled(block) for block in blocks)
    assert not any(compiled(module) for module in (model, model.embed, model.head, blocks[0].attn))


def test_a_model_without_blocks_is_compiled_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compile_blocks(model)
    assert compiled(model)


@pytest.mark.slow
def test_equal_blocks_are_compiled_once_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # else its workers outlive the test
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    plain, model = (GPT(vocab=16, width=16, layers=3, heads=2) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    compile_blocks(model)
    tokens = torch.randint(0, 16, (2, 8))
    for each in (plain, model):
        each(tokens).square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=name)
