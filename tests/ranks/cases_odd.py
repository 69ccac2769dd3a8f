"""Models that are legal and unusual, with tables beside them: under every layout what one process computes, or refused
before anything is trained."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.gpt import PLAN as GPT_PLAN
from sparkring.training.models.sharding_plan import ShardingPlan
from sparkring.training.parallel.batching import slice_batch
from tests.ranks.cases_mesh import small_gpt, token_batch
from tests.ranks.problem import SquaredError, make_strategy, on_device, rank_part, table_batch, train


def planned(model: nn.Module, plan: ShardingPlan) -> nn.Module:
    """As if the plan stood beside the model's class."""
    name = f"planned_{type(model).__name__}"
    beside = sys.modules.setdefault(name, ModuleType(name))
    beside.PLAN = plan  # type: ignore[attr-defined]
    type(model).__module__ = name
    return model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Expert(nn.Module):
    """For few rows: in some steps for none, in others on some ranks for none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 0.45
        return x.index_put((chosen,), torch.tanh(self.inner(x[chosen]))) if chosen.any() else x


class Heads(nn.Module):
    """Attention of a row's two halves to each other, whose views DTensor cannot make of 0 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.view(-1, 2, 8)).view(-1, 2, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return x + ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(len(x), 16)


class Odd(nn.Module):
    """Its first module is frozen as a whole, one block stands in two places, one trains on few rows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width).requires_grad_(False)
        twice = Block(width)
        self.blocks = nn.ModuleList([twice, Expert(width), Heads(), twice])
        self.head = nn.Sequential(nn.Linear(width, 1), nn.Flatten(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def odd(beside: bool = False) -> nn.Module:
    """`beside`: the plan of its file is of another class."""
    torch.manual_seed(7)
    kinds = {"inner": "replicate", "blocks.0.up": "column", "blocks.0.down": "row", "blocks.1.inner": "replicate"}
    plan = ShardingPlan(("inner", "blocks.*", "head"), kinds | {"blocks.2": "replicate", "head": "replicate"})
    return planned(Odd(), GPT_PLAN if beside else plan).double()


def one_process() -> dict[str, Any]:
    return run_odd(0, 1, {})


def run_odd(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """`uneven` leaves the last data rank no rows; `beside`: as of `odd`."""
    case = {"accumulate": 2, "bucket_bytes": 3000, **case}
    uneven, beside = case.pop("uneven", False), case.pop("beside", False)
    strategy = make_strategy(rank, world, case)
    batches = [table_batch(step, (24, 7)[step % 2]) for step in range(10)]
    result = train(strategy, odd(beside), SquaredError(), batches, uneven=uneven, lr=1e-2)
    none = strategy.evaluate(on_device(slice_batch(batches[0], 0, 0), strategy))
    result["no_rows"] = None if none is None else tuple(none.shape)
    strategy.local.data_parallel.close(failed=True)
    return result


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {name: run_odd(rank, world, case) for name, case in payload["cases"].items()}
    dist.destroy_process_group()
    return results


class Scaled(GPT):
    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTM = self.embed(tokens_BT) * 4.0
        for block in self.blocks:
            x_BTM = block(x_BTM)
        logits: torch.Tensor = self.head(self.norm(x_BTM))
        return logits


class Positions(nn.Module):
    """Learned, of tokens counted from 0."""

    def __init__(self, tokens: int, vocab: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(tokens, width)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.token(tokens_BT) + self.place(torch.arange(tokens_BT.shape[1]))


def placed(**changes: Any) -> nn.Module:
    torch.manual_seed(3)
    gpt = changes.pop("cls", GPT)(40, width=32, layers=2, heads=8, hidden=48, tied=False)
    for name, module in changes.items():
        gpt.set_submodule(name, module)
    return gpt


def compared(rank: int, world: int, payload: dict[str, Any]) -> dict[str, str]:
    """What `prepare` says to each model and layout."""
    models = {
        "scaled": lambda: planned(placed(cls=Scaled), GPT_PLAN),
        "positions": lambda: placed(embed=Positions(16, 40, 32)),
        "plain": small_gpt,
    }
    said = {}
    for name, (model, settings) in payload["cases"].items():
        strategy = make_strategy(rank, world, {"engine": "torch", **settings})
        sample = rank_part(token_batch(0), strategy)
        try:
            strategy.prepare(
                models[model](), LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig()), sample
            )
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)
    dist.destroy_process_group()
    return said
