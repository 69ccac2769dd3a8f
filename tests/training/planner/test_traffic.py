"""Bytes sent by axis, by the formulas at the heads of the strategies. Measured ones are in tests/ranks/test_cost.py."""

from __future__ import annotations

import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.plan import make_plan
from sparkring.training.planner.table import table_rows
from sparkring.training.planner.trace import trace_model
from sparkring.training.planner.traffic import activation_bytes, batch_axes_bytes, schedule_cost, tied_weight_bytes
from sparkring.training.planner.workload import RankParameters, Workload

ROWS, TOKENS, WIDTH, VOCAB = 8, 6, 8, 30


def workload(mesh: Mesh, engine: str = "torch-gloo", tied: bool = True, **settings: object) -> Workload:
    model = GPT(vocab=VOCAB, width=WIDTH, layers=2, heads=2, hidden=12, tied=tied)
    inputs = (torch.zeros(1, TOKENS, dtype=torch.int64),)
    return Workload(model, ParallelConfig(**settings), mesh, engine, inputs, global_batch=ROWS)  # type: ignore[arg-type]


def traced_bytes(work: Workload) -> dict[str, int]:
    names = {*work.kinds, *work.attention_cores, *work.block_names, *(n for stage in work.stages for n in stage)}
    return activation_bytes(work, trace_model(work.model, work.inputs, names, work.kinds))  # type: ignore[arg-type]


def test_the_ring_sends_twice_w_minus_one_over_w_of_gradients_and_flags() -> None:
    rank = RankParameters(workload(Mesh(dp=4)), 0)
    assert batch_axes_bytes(rank) == 2 * 3 / 4 * 4 * (rank.whole + len(rank.local))


def test_gradients_through_a_codec_are_its_formula_bucket_by_bucket() -> None:
    compress = {"codec": "int8"}
    rank = RankParameters(workload(Mesh(dp=4), compress=compress, bucket_bytes=2**30), 0)
    chunk = -(-rank.whole // (4 * 256)) * 260
    assert batch_axes_bytes(rank) == 3 * (2 * chunk + -(-len(rank.local) // 8))
    assert batch_axes_bytes(rank, dense=True) == batch_axes_bytes(RankParameters(workload(Mesh(dp=4)), 0))
    alone = RankParameters(workload(Mesh(), compress=compress), 0)
    assert batch_axes_bytes(alone) == 0


def test_averages_send_the_weights_once_in_a_window() -> None:
    averaging = {"kind": "local_sgd", "every": 10}
    ring = RankParameters(workload(Mesh(dp=4)), 0)
    rank = RankParameters(workload(Mesh(dp=4), averaging=averaging), 0)
    assert batch_axes_bytes(rank) == int(2 * 3 / 4 * 4 * rank.whole / 10)
    assert batch_axes_bytes(rank, dense=True) == batch_axes_bytes(ring)
    with_moments = RankParameters(workload(Mesh(dp=4), averaging={**averaging, "inner_state": "averaged"}), 0)
    assert batch_axes_bytes(with_moments) == int(3 * 2 * 3 / 4 * 4 * rank.whole / 10)
    assert batch_axes_bytes(RankParameters(workload(Mesh(), averaging=averaging), 0)) == 0


def test_a_rank_sends_servers_its_gradient_and_keeps_no_optimizer_state() -> None:
    plan = make_plan(workload(Mesh(dp=4), servers={"per_host": 1}))
    rank = RankParameters(workload(Mesh(dp=4), servers={"per_host": 1}), 0)
    assert batch_axes_bytes(rank) == 4 * rank.whole and plan.stages[0].optimizer == 0
    alone = RankParameters(workload(Mesh(), servers={"per_host": 1}), 0)
    assert batch_axes_bytes(alone) == 4 * rank.whole


def test_hosts_that_train_apart_ring_within_and_average_between() -> None:
    averaging = {"kind": "diloco", "every": 10, "groups": "host"}
    plan = make_plan(workload(Mesh(dp=4), averaging=averaging))
    ring = make_plan(workload(Mesh(dp=4)))
    weights = RankParameters(workload(Mesh(dp=4)), 0).whole * 4
    assert plan.sent_bytes == ring.sent_bytes | {"between hosts": int(2 * weights * (1 - 1e-6) / 10)}
    units = {row["quantity"]: row["unit"] for row in table_rows(plan)}
    assert units["sent_bytes between hosts"] == "per host and step, at most, diloco, mean of 10 steps"
    assert units["sent_bytes dp x cp"] == "per rank and step"
    assert plan.stages[0].optimizer == 2 * ring.stages[0].optimizer, "the anchor and its momentum"


def test_horovods_zero_sends_flags_in_full() -> None:
    ours, horovod = (RankParameters(workload(Mesh(dp=2), engine, zero=1), 0) for engine in ("torch-gloo", "horovod"))
    assert batch_axes_bytes(horovod) - batch_axes_bytes(ours) == len(ours.local) * (4 - 1)


def test_a_pipeline_sends_one_activation_forward_and_one_gradient_back() -> None:
    sent = traced_bytes(workload(Mesh(pp=2), pp=2, micro_batches=4))
    assert sent["pp"] == 2 * ROWS * TOKENS * WIDTH * 4 / 2 and sent["tp"] == sent["cp"] == 0


def test_context_parallelism_sends_half_of_q_k_v_and_output_four_times() -> None:
    per_pass = 4 * ROWS * TOKENS * WIDTH * 4  # q, k, v and the output of a block
    assert traced_bytes(workload(Mesh(cp=2), cp=2))["cp"] == 2 * 2 * per_pass / 2 / 2


def test_a_tied_weight_is_summed_over_two_stages_and_an_untied_one_is_not() -> None:
    assert tied_weight_bytes(workload(Mesh(pp=2), pp=2, micro_batches=2)) == 2 * VOCAB * WIDTH * 4 / 2
    assert tied_weight_bytes(workload(Mesh(pp=2), tied=False, pp=2, micro_batches=2)) == 0


def test_the_bubble_is_the_schedules() -> None:
    assert schedule_cost(workload(Mesh())) == (0.0, [1])
    assert schedule_cost(workload(Mesh(pp=2), pp=2, micro_batches=4)) == (0.25, [2, 1])
