"""The private parts of torch are where they were, and behave as they did, in the version they were checked against."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import _backward
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparkring.training.models import torch_private as private

ROOT = Path(__file__).parents[3]


@pytest.fixture
def two_ranks():
    """A process group of two ranks that answers at once and moves nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_this_is_the_version_the_private_parts_were_checked_against() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    assert minor in private.CHECKED_TORCH, "check torch_private.py against the new version"


def test_storages_of_meta_tensors_have_different_keys() -> None:
    one, other = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert private.storage_key(one) == private.storage_key(one.view(3, 1)) != private.storage_key(other)


def test_foreach_functions_equal_their_loops() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    assert [float(norm) for norm in private.foreach_norm(tensors, torch.float64)] == [5.0, 12.0]
    private.foreach_multiply_(tensors, 0.5)
    copies = [torch.zeros(2), torch.zeros(1)]
    private.foreach_copy_(copies, tensors)
    assert [copy.tolist() for copy in copies] == [[1.5, 2.0], [6.0]]


def test_a_swapped_tensor_stays_the_same_object() -> None:
    lstm = nn.LSTM(2, 3)  # holds weak references to its weights
    weight = lstm.weight_ih_l0
    private.swap_tensor(weight, nn.Parameter(torch.zeros(12, 2, dtype=torch.float64)))
    assert lstm.weight_ih_l0 is weight and lstm._flat_weights[0] is weight
    assert weight.dtype == torch.float64 and not weight.any()


WITHOUT_MEMORY = """
import sys
import torch
from torch import nn
from sparkring.training.models.initial import record_model
from sparkring.training.models.torch_private import meta_device

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(3, 2))
        self.inner = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2))
        nn.init.normal_(self.drawn, std=0.02)
        nn.init.trunc_normal_(self.inner[1].weight)

with meta_device():
    model = Own()
values = record_model(Own, seed=0).values
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
usual = Own()
print({tensor.device.type for tensor in model.state_dict().values()})
shapes = [{name: (t.shape, t.dtype) for name, t in of.state_dict().items()} for of in (model, usual)]
print(shapes[0] == shapes[1] == {name: (torch.Size(value.size), value.dtype) for name, value in values.items()})
try:
    with meta_device():
        nn.init.normal_(model.drawn, std=-1.0)
except RuntimeError as error:
    print("std" in str(error))
"""


def test_a_module_without_memory_is_made_without_importing_dynamo() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "{'meta'}", "True", "True"], (done.stdout, done.stderr[-2000:])


def test_trunc_normal_is_replaced_within_the_context_only() -> None:
    with private.replaced_trunc_normal(lambda original: lambda tensor, *args, **kwargs: tensor.fill_(7)):
        assert nn.init.trunc_normal_(torch.zeros(2)).tolist() == [7, 7]
    assert nn.init.trunc_normal_(torch.zeros(2)).abs().max() <= 2


def test_wrapped_modules_have_the_prefixes_that_names_are_cleaned_of() -> None:
    layer = nn.Linear(1, 1)
    wrapped = private.checkpoint_wrapper(layer)
    assert private.unwrapped(wrapped) is layer and private.unwrapped(layer) is layer
    holder = nn.ModuleDict({"a": layer})
    private.replace_child(holder, "a", wrapped)
    assert holder["a"] is wrapped
    assert [f"{name}." for name, _ in wrapped.named_children()] == [private.CHECKPOINT_PREFIX]
    assert [f"{name}." for name, _ in torch.compile(layer).named_children()] == [private.COMPILE_PREFIX]


def test_a_module_at_two_keys_is_two_children() -> None:
    layer = nn.Linear(1, 1)
    assert list(private.direct_children(nn.ModuleDict({"a": layer, "b": layer}))) == ["a", "b"]


def test_calls_show_their_name_and_what_they_write() -> None:
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((private.call_name(func), private.written_arguments(func, args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with Mode():
        x.add_(1)
    ((name, written),) = seen
    assert name == "add_" and written[0] is x


def test_the_group_of_a_collective_is_found_in_its_call(two_ranks) -> None:
    found = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                found.append(private.process_group_of([*args, *(kwargs or {}).values()]))
            return func(*args, **(kwargs or {}))

    with Mode():
        dist.all_reduce(torch.zeros(2), group=two_ranks.get_group())
    assert [group.group_name for group in found] == [two_ranks.get_group().group_name]
    assert private.nccl_backends() == []


def test_fully_shard_keeps_its_records_where_they_are_read(two_ranks) -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=two_ranks), nn.Linear(4, 2)), mesh=two_ranks)
    assert isinstance(model, FSDPModule)
    model(torch.ones(1, 4)).sum().backward()
    records = list(private.fsdp_parameters(model))
    assert len(records) == 4 and len(private.fsdp_groups(model)) == 1
    assert all(private.was_gathered(record) for record in records)
    assert {tuple(private.gathered_parameter(record).shape) for record in records} == {(4, 4), (4,), (2, 4), (2,)}
    assert not any(private.has_gradient(record) for record in records), "reduced by now"
    assert all(record.sharded_param.grad is not None for record in records)
    private.run_backward_hooks(model)  # as for a root that no backward came to
    state = fully_shard.state(model)
    assert callable(state._root_post_backward_final_callback) and len(state._state_ctx.all_states) == 2


def test_private_functions_take_the_arguments_they_are_called_with() -> None:
    parameters = inspect.signature(_backward.stage_backward_input).parameters
    assert list(parameters)[:4] == ["stage_outputs_or_loss", "output_grads", "input_values", "weights"]
    assert "weights" in inspect.signature(_backward.stage_backward_weight).parameters
    assert hasattr(torch.optim.AdamW, "_init_group"), "training/loop/optim/build.py overrides it"
    q = torch.zeros(1, 2, 4, 8, device="meta")
    assert private.flash_attention_on_meta(q, q, q, None, 0.0).shape == q.shape


def test_an_unfinished_collective_is_seen_through(two_ranks) -> None:
    import torch.distributed._functional_collectives as functional

    result = functional.all_reduce(torch.ones(2), "sum", two_ranks.get_group())
    assert type(private.waited_tensor(result)) is torch.Tensor
    assert functional.wait_tensor(result).shape == (2,)
