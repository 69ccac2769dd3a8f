"""The copy of a state in host memory: its own bits, in buffers that are used again."""

from __future__ import annotations

import torch

from sparkring.training.checkpoint.dcp import JsonSavePlanner
from sparkring.training.checkpoint.snapshot import HostBuffers


def copied(buffers: HostBuffers, state: dict[str, object]) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    planner = JsonSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    chunks, values = buffers.copy(planner, planner.finish_plan(plans[0]).items)
    return {chunk.fqn: tensor for chunk, tensor in chunks}, values


def test_a_copy_does_not_change_with_the_state_and_its_buffer_is_used_again() -> None:
    weights = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    buffers = HostBuffers()
    first, values = copied(buffers, {"w": weights, "lr": 0.5, "names": ["a"]})
    assert torch.equal(first["w"], weights) and values == {"lr": 0.5, "names": ["a"]}
    weights += 1
    assert not torch.equal(first["w"], weights)
    second, _ = copied(buffers, {"w": weights})
    assert second["w"] is first["w"] and torch.equal(second["w"], weights)
    third, _ = copied(buffers, {"w": weights.double()})
    assert third["w"].dtype == torch.float64
