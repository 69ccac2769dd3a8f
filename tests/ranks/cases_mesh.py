"""A small GPT in float64 under many layouts, all in one launch."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from sparkring.training.data.batch import Batch
from sparkring.training.models.gpt import GPT, Block, LanguageModelTask
from sparkring.training.models.initial import record_model
from sparkring.training.parallel.initialize import initialize_parameters
from tests.ranks.problem import make_strategy, train

VOCAB, ROWS, TOKENS = 40, 16, 16


class Sometimes(Block):
    """Leaves its mlp out when told to."""

    whole = True

    def forward(self, x_BTM: torch.Tensor) -> torch.Tensor:
        x_BTM = x_BTM + self.attn(self.norm1(x_BTM))
        return x_BTM + self.mlp(self.norm2(x_BTM)) if self.whole else x_BTM


def small_gpt(tied: bool = True, kv_heads: int = 8, shared: bool = False) -> GPT:
    """Weights larger than usual, so that clipping acts and every path matters; a norm and a matrix are frozen.
    `shared`: a weight stands in both blocks."""
    torch.manual_seed(3)
    gpt = GPT(VOCAB, width=32, layers=2, heads=8, kv_heads=kv_heads, hidden=48, tied=tied)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    for name in ("blocks.0.norm1.weight", "blocks.1.attn.v.weight"):
        gpt.get_parameter(name).requires_grad_(False)
    if shared:
        gpt.blocks[1].mlp.up.weight = gpt.blocks[0].mlp.up.weight
    gpt.blocks[1].__class__ = Sometimes
    return gpt


def token_batch(step: int, rows: int = ROWS) -> Batch:
    """Rows weigh differently; row 3 is padding."""
    make = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (rows, TOKENS + 1), generator=make)
    weight = 0.25 + 1.5 * torch.rand(rows, generator=make)
    weight[3] = 0
    return Batch({"tokens": tokens}, rows, rows - 1, (step + 1) * rows, weight)


PROBLEM = {
    "tied": True,
    "kv_heads": 8,
    "shared": False,
    "steps": 5,  # both batch sizes with the layer and without
    "spoil": 0.0,
    "dtype": "float64",
    "optimizer": "adamw",
    "lr": 1e-3,
}


def run_case(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """`case`: parallel settings, and keys of PROBLEM. Two batch sizes, of which the second leaves ranks and
    micro-batches with fewer rows or none; every third step leaves a layer out."""
    problem = {**PROBLEM, **{key: value for key, value in case.items() if key in PROBLEM}}
    options = {key: value for key, value in case.items() if key not in PROBLEM}
    strategy = make_strategy(rank, world, {"engine": "torch", "accumulate": 2, **options}, clip=0.5)
    dtype, form = getattr(torch, problem["dtype"]), (problem["tied"], problem["kv_heads"], problem["shared"])
    model = record_model(lambda: small_gpt(*form).to(dtype), seed=3)
    block = model.module.blocks[1]

    def before_step(step: int) -> None:
        block.whole = step % 3 != 1

    batches = [token_batch(step, (ROWS, 13)[step % 2]) for step in range(problem["steps"])]
    asked = {key: problem[key] for key in ("optimizer", "spoil", "lr")}
    result = train(strategy, model, LanguageModelTask(), batches, before_step=before_step, **asked)
    strategy.local.data_parallel.close(failed=True)  # keeps the process groups for the next case
    return result


@cache
def bare(optimizer_name: str, lr: float, skipped: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The same in float64 by plain torch, with none of our code but the model and its initial weights: norms, and start
    and end of every trained parameter. `skipped`: steps that do not move it."""
    initial = record_model(lambda: small_gpt().double(), seed=3)
    model = initial.module
    initialize_parameters(model, initial, torch.device("cpu"), offload=False, world=1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if (p.ndim >= 2) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=lr, momentum=0.9) if optimizer_name == "sgd" else torch.optim.AdamW(groups, lr=lr)
    )
    start = {name: p.detach().clone() for name, p in trained.items()}
    norms = []
    for step in range(PROBLEM["steps"]):
        batch = token_batch(step, (ROWS, 13)[step % 2])
        model.blocks[1].whole = step % 3 != 1
        tokens = batch.columns["tokens"]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        losses = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
        ((losses.mean(dim=1) * batch.weight).sum() / batch.global_rows).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)))
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"norms": norms, "start": start, "end": {name: p.detach() for name, p in trained.items()}}


ORACLE = (set(PROBLEM) | {"precision"}) - {"spoil"}  # what one process takes of a case


def one_process(case: dict[str, Any]) -> dict[str, Any]:
    """The same problem without any parallelism."""
    return run_case(0, 1, {key: value for key, value in case.items() if key in ORACLE})


def group_timeouts() -> list[timedelta]:
    """The timeout of each process group that this rank has formed."""
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {name: run_case(rank, world, case) for name, case in payload["cases"].items()}
    results["timeouts"] = group_timeouts()
    torch.distributed.destroy_process_group()
    return results
