"""A model that begins with the weights of a file, cut in every way."""

from __future__ import annotations

from typing import Any

import torch

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.weights import open_weights, write_weights
from sparkring.training.model.start import match_tensors, start_model_with
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.initial import record_model
from sparkring.training.models.warm_start import whole
from sparkring.training.parallel.state import TensorInfo
from tests.ranks.cases_mesh import token_batch
from tests.ranks.problem import full_state, make_strategy, rank_part

OTHER = "head.weight"  # of another shape in the file


def gpt() -> GPT:
    return GPT(40, width=32, layers=2, heads=8, kv_heads=8, hidden=48, tied=False).double()


def write_file(folder: str) -> None:
    """Weights of float32 drawn anew, under other names; one of another shape, and one that the model has not."""
    torch.manual_seed(11)
    tensors = {f"body.{name}": torch.randn_like(tensor).float() for name, tensor in gpt().state_dict().items()}
    tensors |= {f"body.{OTHER}": torch.zeros(7, 32), "pooler": torch.zeros(3)}
    infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_weights(open_storage(folder), infos, tensors.values(), {})


def expected(folder: str) -> dict[str, torch.Tensor]:
    """What every layout must begin with, of one plain look at the file."""
    given = open_weights(open_storage(folder))
    own = {name: whole(value) for name, value in record_model(gpt, 5).values.items()}
    file = {name: given[f"body.{name}"].read().double() for name in own if name != OTHER}
    return own | file


def begun(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole model on rank 0 before the first step, by layout."""
    results = {}
    for name, settings in payload["cases"].items():
        initial = record_model(gpt, 5)
        given = open_weights(open_storage(payload["file"])) if rank == 0 else None
        shapes = {key: each.shape for key, each in open_weights(open_storage(payload["file"])).items()}
        model = start_model_with(initial, match_tensors(initial.module, shapes, {"body.": ""}), given)
        strategy = make_strategy(rank, world, settings)
        sample = rank_part(token_batch(0), strategy)
        strategy.prepare(model, LanguageModelTask(), lambda named: torch.optim.SGD([p for _, p in named]), sample)
        results[name] = full_state(strategy)
        strategy.local.data_parallel.close(failed=True)
    strategy.close()
    return results
