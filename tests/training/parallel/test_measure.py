"""What the ranks measured, as one table."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial

import pytest
import torch
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.models.torch_private import fake_tensors
from sparkring.training.parallel.measure import combined
from sparkring.training.parallel.memory.meters import ActivationMeter, RankMemoryMeter, held_tensors, memory_bytes


def test_memory_is_the_fullest_ranks_bytes_the_mean_and_the_bubble_the_slowest_pass_over_the_most_work() -> None:
    first = {"weights_bytes": 10.0, "sent_bytes pp": 6.0, "pass_s": 4.0, "work_s": 3.0}
    last = {
        "weights_bytes": 14.0,
        "sent_bytes pp": 2.0,
        "sent_bytes pp tied weights": 8.0,
        "pass_s": 5.0,
        "work_s": 4.0,
    }
    assert combined([first, last]) == {
        "weights_bytes": 14.0,
        "sent_bytes pp": 4.0,
        "sent_bytes pp tied weights": 4.0,
        "bubble_share": pytest.approx(0.25),
    }


def test_a_pipeline_that_made_one_pass_has_no_bubble_yet() -> None:
    assert combined([{"pass_s": 0.0, "work_s": 0.0}] * 2) == {}


def test_storages_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    averages = [torch.zeros(4, 4)]
    assert memory_bytes(model, list(model.parameters()), optimizer, averages) == {
        "weights_bytes": 64,
        "gradients_bytes": 64,
        "optimizer_bytes": 128,
    }


def test_what_forward_keeps_counts_once_until_backward_frees_it() -> None:
    meter, x = ActivationMeter(), torch.ones(8, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    with meter.measuring(model, (x,)):
        first = model(x)
    kept = (
        4 * 8 * (16 + 16)
    )  # tanh's output, for itself and the layer after; the next layer's; no weights, not the batch
    assert (meter.alive, meter.peak) == (kept, kept)
    with meter.measuring(model, (x,)):
        second = model(x)
    assert meter.alive == 2 * kept
    first.sum().backward()
    assert meter.alive == kept
    second.sum().backward()
    assert (meter.alive, meter.peak) == (0, 2 * kept)


def test_what_half_a_backward_has_not_freed_goes_with_the_graph() -> None:
    meter, x = ActivationMeter(), torch.ones(8, 4, requires_grad=True)
    with meter.measuring(nn.Identity(), ()):
        y = (x.exp() * 2).exp()  # each keeps what it makes
    torch.autograd.grad(y.sum(), x, retain_graph=True)  # as the first half of a zero-bubble backward
    assert meter.alive == 2 * 8 * 4 * 4
    del y
    assert meter.alive == 0


class Holder:
    """Holds tensors in the ways that models, optimizers and strategies do."""

    def __init__(self) -> None:
        self.expected = list(torch.ones(12).split(1))
        of = iter(self.expected)
        self.model = nn.Linear(1, 1, bias=False)
        self.model.weight = nn.Parameter(next(of))
        self.model.weight.grad = next(of)
        self.model.register_buffer("mean", next(of))
        self.model.note = {"a": [(next(of),)]}  # type: ignore[assignment]
        self.state = defaultdict(dict, {self.model.weight: {"exp_avg": next(of)}})
        self.call = partial(print, next(of))
        captured, default, own = next(of), next(of), next(of)

        def hook(given: torch.Tensor = default) -> torch.Tensor:
            return captured

        self.model.register_forward_hook(lambda *_: hook())
        self.method = Slots(own).method
        self.tagged = next(of)
        self.tagged.tag = next(of)  # type: ignore[attr-defined]
        self.queue = deque([next(of)])
        self.me = self


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def method(self) -> None: ...


ELSEWHERE = torch.zeros(1)  # a global of this module, which its functions refer to


def test_tensors_are_found_wherever_an_object_holds_them_and_nowhere_else() -> None:
    """Those of a trace have no memory: of an earlier compilation they have sizes that are symbols."""
    holder = Holder()
    with fake_tensors():
        holder.model.fake = torch.zeros(1000)  # type: ignore[assignment]
    holder.model.sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,))  # type: ignore[assignment]
    holder.elsewhere = lambda: ELSEWHERE  # type: ignore[attr-defined]
    found = {tensor.data_ptr() for tensor in held_tensors(holder)}
    assert found == {tensor.data_ptr() for tensor in holder.expected}


def test_a_ranks_meter_counts_what_is_made_and_freed_but_for_traces_and_sparse_tensors() -> None:
    meter = RankMemoryMeter(torch.device("cpu"))
    with meter:
        kept = torch.zeros(1000)
        freed = torch.zeros(500)
        del freed
        with fake_tensors():
            torch.zeros(10**9)
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (4,)).coalesce()
    assert meter.live == kept.nbytes and 6000 <= meter.peak < 7000


def test_of_a_gpus_rank_nothing_on_the_host_is_counted() -> None:
    """As offloaded shards, their optimizer's state, and the columns that readers keep there."""
    meter = RankMemoryMeter(torch.device("cuda"))
    kept = torch.zeros(1000)
    meter.count_rows([kept])
    meter.count_existing([kept])
    with meter:
        shard = kept + 1.0
    assert (meter.live, meter.peak) == (0, 0) and len(shard) == 1000


def test_of_batches_a_peak_has_the_rows_of_its_step_and_not_the_chunks_that_a_reader_cut_them_from() -> None:
    chunk = torch.zeros(8, 100)
    ahead = [Batch({"x": rows}, 2, 2, 2) for rows in chunk.split(2)]
    meter = RankMemoryMeter(torch.device("cpu"))
    meter.count_rows(held_tensors(ahead[0].columns))
    meter.count_existing(held_tensors(ahead[0].columns))
    with meter:
        seen = ahead[0].columns["x"][:, 1:]
    assert meter.peak == 2 * 100 * 4 and len(seen) == 2
    del chunk, ahead, seen
    assert meter.live == 0
