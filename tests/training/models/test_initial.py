"""Initial values without the model: what a constructor does, made again piece by piece."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkring.training.models import initial
from sparkring.training.models.gpt import GPT
from sparkring.training.models.initial import (
    InitialModel,
    InitialValue,
    Unrecordable,
    eager_model,
    preserved_random_state,
    record_model,
)
from sparkring.training.models.tabular import Tabular
from sparkring.training.parallel.initialize import initialize_parameters

CPU = torch.device("cpu")


def whole(value: InitialValue) -> torch.Tensor:
    with preserved_random_state():
        pieces = [piece for _, piece in value.pieces(0, value.size[0] if value.size else 1)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with its values, as one process makes it."""
    model = record_model(build, seed)
    initialize_parameters(model.module, model, CPU, False, world=1)
    return model.module


class Odd(nn.Module):
    """Ways of making parameters and buffers that are met in the wild."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(500, 16, padding_idx=2)
        self.norm = nn.BatchNorm1d(16)
        self.token = nn.Parameter(torch.zeros(400, 16))
        nn.init.trunc_normal_(self.token, std=0.02)
        self.square = nn.Linear(24, 24)
        nn.init.orthogonal_(self.square.weight)
        self.scaled = nn.Parameter(torch.randn(300, 16) * 0.5 + 3)
        self.twin = nn.Parameter(self.scaled.detach().clone())
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.frozen.no_decay = True  # type: ignore[attr-defined]
        self.recurrent = nn.LSTM(16, 16)
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)
        self.conv = nn.Conv2d(3, 4, 3)
        self.after_conv = nn.Linear(self.conv(torch.zeros(1, 3, 8, 8)).numel(), 50)
        self.after_conv.weight.data.normal_(0, 3)
        self.after_conv.bias.data = torch.full((50,), 7.0)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 400))
        self.doubled, self.halved = nn.Linear(16, 300).double(), nn.Linear(16, 300).bfloat16()
        self.tied = nn.Linear(16, 500, bias=False)
        self.tied.weight = self.padded.weight
        self.register_buffer("positions", torch.arange(7.0)[:, None] * torch.tensor([1.0, 2.0]), persistent=False)
        self.register_buffer("same_positions", self.positions)
        self.register_buffer("mask", torch.ones(5, 5).tril())
        self.register_buffer("table", torch.from_numpy(np.arange(5.0)))
        self.depths = torch.linspace(0, 0.1, 4).tolist()
        self.plain = torch.arange(5)
        self.listed = [self.frozen, self.token]


def test_a_recorded_model_is_the_one_its_constructor_makes() -> None:
    """What is not random is equal; what is has the same mean and spread; what holds them together holds."""
    torch.manual_seed(0)
    model, plain = made(Odd), Odd()
    got, expected = dict(model.state_dict()), dict(plain.state_dict())
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert (got[name].dtype, got[name].shape, got[name].device) == (value.dtype, value.shape, CPU), name
        spread = float(value.double().std()) if value.numel() > 1 else 0.0
        if spread == 0 or name in ("positions", "same_positions", "mask", "table"):
            assert torch.equal(got[name], value), name
        elif value.numel() > 4000:
            assert float(got[name].double().std()) == pytest.approx(spread, rel=0.1), name
            assert float(got[name].double().mean()) == pytest.approx(float(value.double().mean()), abs=0.1), name
    assert not got["padded.weight"][2].any() and model.tied.weight is model.padded.weight
    assert torch.allclose(got["square.weight"] @ got["square.weight"].T, torch.eye(24), atol=1e-5)
    assert got["token"].abs().max() <= 2 and 0.018 < got["token"].std() < 0.022
    assert torch.equal(model.twin, model.scaled) and model.listed[0] is model.frozen and model.listed[1] is model.token
    assert not model.frozen.requires_grad and model.frozen.no_decay
    assert model.positions is model.same_positions and model.plain.tolist() == [0, 1, 2, 3, 4]
    assert model.depths == plain.depths
    assert all(a is b for a, b in zip(model.recurrent._flat_weights, model.recurrent.parameters(), strict=True))
    first, second = model.stack.layers
    assert torch.equal(first.linear1.weight, second.linear1.weight), "torch copies the first layer"
    assert not model.normed.weight.isnan().any()


@pytest.mark.parametrize("block", [16, 100, 2**20])
def test_any_rows_of_a_value_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(initial, "BLOCK", block)
    for build in (Odd, lambda: GPT(50, width=16, layers=2, heads=2), lambda: Tabular({"a": 9}, ["x", "y"], width=16)):
        for name, value in record_model(build, 3).values.items():
            expected = whole(value)
            for start in range(0, value.size[0] if value.size else 0, 7):
                with preserved_random_state():
                    for first, piece in value.pieces(start, start + 1):
                        assert torch.equal(piece[start - first], expected[start]), name


def test_a_value_depends_on_seed_and_name_alone() -> None:
    class Two(nn.Module):
        def __init__(self, more: bool) -> None:
            super().__init__()
            torch.randn(3 if more else 5)
            self.before = nn.Linear(8, 8) if more else None
            self.layer = nn.Linear(8, 8)

    few, more = record_model(lambda: Two(False), 0), record_model(lambda: Two(True), 0)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(whole(few.values["layer.weight"]), whole(more.values["layer.weight"]))
    assert not torch.equal(whole(more.values["before.weight"]), whole(more.values["layer.weight"]))
    other = record_model(lambda: Two(False), 1)
    assert not torch.equal(whole(few.values["layer.weight"]), whole(other.values["layer.weight"]))
    assert few.values["layer.weight"].digest == more.values["layer.weight"].digest
    assert torch.equal(torch.get_rng_state(), state), "training's own random state is left alone"


def test_a_large_matrix_is_made_by_rows_and_of_its_last_writes_only() -> None:
    value = record_model(lambda: GPT(50_000, width=64, layers=1, heads=2), 0).values["embed.weight"]
    with preserved_random_state():
        ((first, piece),) = value.pieces(20_000, 20_001)
        (_, before), (_, after) = value.pieces(0, 2 * len(piece))
    assert first <= 20_000 < first + len(piece) and piece.numel() <= initial.BLOCK
    assert not torch.equal(before, after), "blocks are drawn apart"
    assert [call.name for call in value.program] == ["empty", "detach", "normal_"]  # type: ignore[attr-defined]


def keeps_a_tensor(model: Any) -> None:
    model.kept = torch.zeros(5) + 1


def reads_a_value(model: Any) -> None:
    model.scale = float(model.layer.weight.norm())


def lists_values(model: Any) -> None:
    model.scale = model.layer.weight.tolist()


def as_numpy(model: Any) -> None:
    model.scale = model.layer.weight.detach().numpy()


def draws_of_its_own(model: Any) -> None:
    model.layer.weight.normal_(generator=torch.Generator().manual_seed(3))


def draws_truncated_of_its_own(model: Any) -> None:
    nn.init.trunc_normal_(model.layer.weight, generator=torch.Generator().manual_seed(3))


def changes_what_was_used(model: Any) -> None:
    table = torch.arange(9.0).reshape(3, 3)
    model.layer.weight.copy_(table)
    table.zero_()


def takes_data_from_elsewhere(model: Any) -> None:
    model.layer.weight.data = torch.arange(9.0).reshape(3, 3)


def changes_a_shape(model: Any) -> None:
    model.layer.bias.data.resize_(2)


ODD_CONSTRUCTORS = [keeps_a_tensor, reads_a_value, lists_values, as_numpy, draws_of_its_own, draws_truncated_of_its_own]
ODD_CONSTRUCTORS += [changes_what_was_used, takes_data_from_elsewhere, changes_a_shape]


@pytest.mark.parametrize("act", ODD_CONSTRUCTORS)
def test_what_cannot_be_made_again_is_refused_and_never_wrong(act: Callable[[Any], None]) -> None:
    class Constructed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            with torch.no_grad():
                act(self)

    with pytest.raises(Unrecordable):
        record_model(Constructed, 0)
    plain = Constructed()
    expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = eager_model(plain, "refused")
    initialize_parameters(plain, model, CPU, False, world=1)
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in expected.items())


def test_weights_from_a_file_are_kept(tmp_path: Any) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")

    def pretrained() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return layer

    expected = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made(pretrained).state_dict().items())


def test_a_wrong_argument_is_the_models_own_error() -> None:
    with pytest.raises(ValueError, match=r"model.args: width\(10\)"):
        record_model(lambda: GPT(50, width=10, heads=3), 0)


def test_recording_leaves_no_memory_behind() -> None:
    model: InitialModel = record_model(lambda: GPT(128_256, width=8192, layers=4, heads=64), 0)
    assert all(tensor.is_meta for tensor in model.module.parameters())
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is initial.DeferredTensor]


def test_a_constructor_may_leave_its_work_in_a_reference_cycle() -> None:
    """Only the collector frees that: such a tensor is not one that the model keeps."""

    def build() -> nn.Module:
        cycle = [torch.zeros(3)]
        cycle.append(cycle)  # type: ignore[arg-type]
        return nn.Linear(2, 2)

    assert all(tensor.is_meta for tensor in record_model(build, 0).module.parameters())


OLDER_GARBAGE = """
import gc, weakref
from torch import nn
from sparkring.training.models.initial import record_model

class Ring: pass

gc.collect()
gc.disable()
{kept}
ring = Ring()
ring.itself, seen = ring, weakref.ref(ring)
del ring
record_model(lambda: nn.Linear(2, 2), seed=0)
print(seen() is not None)
"""


@pytest.mark.parametrize("kept", ["", "gc.freeze()"], ids=["all", "frozen"])
def test_recording_leaves_the_programs_other_objects_to_the_collector(kept: str) -> None:
    """A driver has a million of them, whether or not some are kept from the collector as in ranks; in a process of
    its own, since the tests' are."""
    program = OLDER_GARBAGE.format(kept=kept)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", (done.stdout, done.stderr[-2000:])
