"""Stages of a model, and a schedule run over them on one rank. Several ranks are in tests/ranks/test_mesh.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.model_parallel.pipeline import (
    PassFunctions,
    Pipeline,
    PipelineStage,
    add_submodule,
    estimated_costs,
    layer_names,
    measured_costs,
    partition,
)
from sparkring.training.parallel.model_parallel.schedules import schedule_table


class Loopback:
    """A channel from a rank to itself."""

    device, waited_s = torch.device("cpu"), 0.0

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}

    def send(self, x: torch.Tensor, message: Any) -> None:
        self.sent[message.number] = x.detach()

    def receive(self, message: Any) -> torch.Tensor:
        return self.sent.pop(message.number)

    def begin(self, incoming: Any) -> None: ...

    def peer(self, message: Any) -> int:
        return 0

    def expect(self, message: Any) -> None: ...

    def drain(self) -> None:
        assert not self.sent, "every message is received"


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab=16, width=16, layers=4, heads=2, tied=False).double()


def row_losses(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean(dim=(1, 2))


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 3), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)])
def test_a_pipeline_gives_the_gradients_of_the_whole_model(schedule: str, stages: int) -> None:
    model, whole, tokens = gpt(), gpt(), torch.randint(0, 16, (5, 6))
    (row_losses(whole(tokens)) * torch.tensor([1.0, 2, 3, 4, 5])).sum().backward()
    names = layer_names(model)
    cut = partition(names, estimated_costs(model, names), stages)
    parts: dict[int, nn.Module] = {number: PipelineStage(model, part) for number, part in enumerate(cut)}
    pipeline = Pipeline(schedule_table(schedule, 1, 4, stages), 0, parts, stages, Loopback())  # type: ignore[arg-type]
    last: list[bool] = []

    def loss(outputs: torch.Tensor, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        value = (row_losses(outputs) * part.row_weights()).sum()
        return value, value.detach()

    functions = PassFunctions(
        inputs=lambda part: part.columns["tokens"],
        loss=loss,
        before_backward=lambda stage, is_last: last.append(is_last),
        measuring=lambda stage, inputs: nullcontext(),
    )
    batch = Batch({"tokens": tokens}, 5, 5, 5, weight=torch.tensor([1.0, 2, 3, 4, 5]))
    total = pipeline.train(batch, functions)
    assert float(total) == pytest.approx(float((row_losses(whole(tokens)) * batch.weight).sum()))
    assert last.count(True) == stages
    for (name, expected), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, msg=name)
    torch.testing.assert_close(pipeline.evaluate(tokens), whole(tokens))


def test_a_stage_keeps_the_plain_parameter_names() -> None:
    model = gpt()
    stage = PipelineStage(model, ["blocks.2", "blocks.3", "norm"])
    assert set(dict(stage.named_parameters())) == {
        name for name, _ in model.named_parameters() if name.startswith(("blocks.2.", "blocks.3.", "norm."))
    }
    root = nn.Module()
    add_submodule(root, "a.b", nn.Linear(1, 1))
    add_submodule(root, "a.c", nn.Linear(1, 1))
    assert [name for name, _ in root.named_children()] == ["a"]


def test_a_parameter_outside_of_the_layers_is_refused() -> None:
    model = gpt()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"layers leave out \['extra.weight', 'extra.bias'\]: a pipeline would never"):
        layer_names(model)


def test_measured_costs_are_one_per_layer_and_leave_no_weights() -> None:
    model = gpt().float()
    costs = measured_costs(model, layer_names(model), torch.zeros(2, 4, dtype=torch.int64), repeats=1)
    assert len(costs) == 7 and all(cost > 0 for cost in costs)
    assert all(p.is_meta for p in model.parameters())


def test_measured_costs_cut_where_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ten times as slow as the others is left alone in its stage."""
    clock = [0.0]
    monkeypatch.setattr("sparkring.training.parallel.model_parallel.pipeline.time.perf_counter", lambda: clock[0])

    def takes(seconds: float) -> Any:
        def hook(*_: Any) -> None:
            clock[0] += seconds

        return hook

    model = GPT(vocab=32, width=32, layers=4, heads=4)
    names = layer_names(model)
    for name in names:
        model.get_submodule(name).register_forward_hook(takes(10.0 if name == "blocks.1" else 1.0))
    before = torch.random.get_rng_state()
    costs = measured_costs(model, names, torch.zeros(2, 16, dtype=torch.int64))
    assert costs == [10.0 if name == "blocks.1" else 1.0 for name in names]
    assert partition(names, costs, 3)[1] == ["blocks.1"]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)
