"""The parameters of one pipeline rank, as tensor parallelism and ZeRO cut them."""

from __future__ import annotations

import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.plan import make_plan
from sparkring.training.planner.traffic import batch_axes_bytes
from sparkring.training.planner.workload import RankParameters, Workload


def workload(mesh: Mesh, **settings: object) -> Workload:
    model = GPT(vocab=30, width=8, layers=4, heads=2, hidden=12)
    inputs = (torch.zeros(1, 5, dtype=torch.int64),)
    return Workload(model, ParallelConfig(**settings), mesh, "torch-gloo", inputs, global_batch=16)  # type: ignore[arg-type]


def test_a_tied_weight_counts_on_both_stages_that_have_it() -> None:
    ranks = [RankParameters(workload(Mesh(pp=2), pp=2, micro_batches=4), rank) for rank in range(2)]
    assert "embed.weight" in ranks[0].parameters and "head.weight" in ranks[1].parameters
    assert [name for rank in ranks for name in rank.names] == [
        "embed",
        *(f"blocks.{i}" for i in range(4)),
        "norm",
        "head",
    ]


def test_tensor_ranks_have_their_part_of_matrices_and_whole_norms() -> None:
    local = RankParameters(workload(Mesh(tp=4), tp=4), 0).local
    assert local["embed.weight"] == 8 * 8, "30 rows over 4 ranks: 8 on the fullest"
    assert local["blocks.0.mlp.up.weight"] == 3 * 8 and local["norm.weight"] == 8


def test_zero_needs_several_batch_ranks() -> None:
    assert RankParameters(workload(Mesh(dp=1), zero=3), 0).zero == 0
    sharded = RankParameters(workload(Mesh(dp=4), zero=3), 0)
    assert sharded.zero == 3 and sharded.owned < sharded.whole / 3
    assert sharded.units == [f"blocks.{i}" for i in range(4)], "the tied embedding stays with the rest"


def test_rows_per_pass_are_the_fullest_ranks() -> None:
    assert workload(Mesh(dp=3), accumulate=2).rows_per_pass == 3
    assert workload(Mesh(pp=2), pp=2, micro_batches=4, accumulate=2).config.passes == 8


def test_frozen_weights_are_kept_and_have_neither_gradient_nor_state_and_nothing_is_sent() -> None:
    for config in ({}, {"zero": 3}):
        step = workload(Mesh(dp=4), **config)
        step.model.blocks.requires_grad_(False)  # type: ignore[union-attr]
        rank, stage = RankParameters(step, 0), make_plan(step).stages[0]
        frozen = sum(p.numel() for p in step.model.blocks.parameters())  # type: ignore[union-attr]
        assert rank.whole_trained == rank.whole - frozen
        assert stage.weights == 4 * rank.owned and stage.gradients == 4 * rank.updated
        assert stage.optimizer == 2 * 4 * rank.updated
        assert rank.updated == ((30 * 8 + 8) / 4 if config else rank.whole_trained)
    ring = RankParameters(workload(Mesh(dp=4)), 0)
    ring.workload.model.blocks.requires_grad_(False)  # type: ignore[union-attr]
    assert ring.trained == ["embed.weight", "norm.weight"]
    assert batch_axes_bytes(ring) == 2 * 3 / 4 * 4 * (31 * 8 + 2)
