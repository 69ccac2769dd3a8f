"""The model alone: what it is made of, that it looks at no later token, that positions matter, its task and samples."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkring.conf.load import load_config
from sparkring.training.data.batch import Batch
from sparkring.training.loop.evaluation import evaluate_split
from sparkring.training.metrics import perplexity
from sparkring.training.models.gpt import GPT, LanguageModelTask, Sampling, generate, rotate


def tiny(**args: object) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab": 30, "width": 16, "layers": 2, "heads": 4, **args}).double()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_no_token_sees_a_later_one(kv_heads: int) -> None:
    model, tokens = tiny(kv_heads=kv_heads), torch.randint(0, 30, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 30
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotary_products_depend_on_distance_only() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q, turned_k = (rotate(x.expand(1, 10, 1, 8), 100.0)[0, :, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    assert torch.allclose(products.diagonal(2), products[0, 2].expand(8))
    assert not torch.allclose(products[0], products[0, 0].expand(10))


def test_parameter_counts_are_the_published_sizes() -> None:
    published = {"gpt-124m": 124e6, "gpt-1b": 1.3e9, "gpt-7b": 6.74e9, "gpt-70b": 68.98e9}
    for recipe, parameters in published.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in GPT(**load_config(recipe).config.model.args).parameters())
        assert count == pytest.approx(parameters, rel=0.02), recipe


def test_a_tied_head_is_one_weight() -> None:
    model = tiny(tied=True)
    assert model.head.weight is model.embed.weight
    assert tiny(tied=False).head.weight is not tiny(tied=False).embed.weight


def test_the_task_is_cross_entropy_per_row() -> None:
    task, model = LanguageModelTask(), tiny()
    columns = {"tokens": torch.randint(0, 30, (3, 9))}
    outputs = model(*task.inputs(columns))
    by_hand = -torch.log_softmax(outputs, -1).gather(-1, columns["tokens"][:, 1:, None]).squeeze(-1).mean(1)
    assert torch.allclose(task.loss(outputs, columns), by_hand)
    sums = task.metric_sums(outputs, columns)
    assert set(sums) == set(task.metric_names())
    assert torch.allclose(sums["bits_per_token"], by_hand / math.log(2))
    assert perplexity(math.log(7)) == pytest.approx(7)


class Uniform:
    """A strategy whose model gives every one of 6 tokens the same chance, and prefers token 1."""

    def measuring_evaluation(self, batch: Batch) -> AbstractContextManager[object]:
        return nullcontext()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        logits = torch.zeros(*batch.columns["tokens"][:, 1:].shape, 6, dtype=torch.float64)
        logits[..., 1] = 1e-9
        return logits

    @property
    def meeting(self) -> Any:
        return self

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_padding_is_not_counted_as_predicted_tokens() -> None:
    """10 of 100 targets are real: the loss is of those ten, and a padding row of the batch is no row at all."""
    tokens = torch.full((3, 101), 5)
    tokens[0, :11] = 1
    batch = Batch({"tokens": tokens}, 3, 2, 2, weight=torch.tensor([1.0, 1.0, 0.0]))
    reader = SimpleNamespace(batches=lambda: iter([batch]))
    found = evaluate_split(Uniform(), reader.batches(), LanguageModelTask(pad_id=5))  # type: ignore[arg-type]
    assert found["loss"] == pytest.approx(math.log(6)) and found["bits_per_token"] == pytest.approx(math.log2(6))
    assert found["token_accuracy"] == 1.0


def test_slices_of_a_sequence_cover_every_target_once() -> None:
    task, tokens = LanguageModelTask(), torch.arange(18).reshape(2, 9)
    parts = [task.slice_sequence({"tokens": tokens}, part, 4)["tokens"] for part in range(4)]
    assert torch.equal(torch.cat([part[:, 1:] for part in parts], 1), tokens[:, 1:])
    with pytest.raises(ValueError, match=r"parallel\.cp=3"):
        task.slice_sequence({"tokens": tokens}, 0, 3)


def test_it_learns_and_generates_what_it_learned() -> None:
    torch.manual_seed(0)
    model, task = tiny().float(), LanguageModelTask()
    tokens = (torch.arange(17) % 5).repeat(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = task.loss(model(*task.inputs({"tokens": tokens})), {"tokens": tokens}).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    assert generate(model, [0, 1, 2], 6, context=16, sampling=Sampling(temperature=0)) == [3, 4, 0, 1, 2, 3]
    sample = generate(model, [0], 8, context=16, sampling=Sampling(seed=5))
    assert sample == generate(model, [0], 8, context=16, sampling=Sampling(seed=5)) and len(sample) == 8


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width\(10\).*heads\(4\)"):
        tiny(width=10)
    with pytest.raises(ValueError, match=r"kv_heads\(3\)"):
        tiny(kv_heads=3)
