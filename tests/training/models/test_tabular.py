"""The tabular model: shapes, where it starts, and which columns its parts may combine."""

from __future__ import annotations

import pytest
import torch

from sparkring.training.models.tabular import Tabular

CODED, NUMERIC = {"carrier": 5, "origin": 4}, ["temp", "wind", "distance"]


def rows(count: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.randint(0, n, (count,), generator=generator) for name, n in CODED.items()}
    return columns | {name: torch.randn(count, generator=generator) for name in NUMERIC}


@pytest.mark.parametrize(("outputs", "shape"), [(1, (6,)), (3, (6, 3))])
def test_shapes_and_gradients(outputs: int, shape: tuple[int, ...]) -> None:
    model = Tabular(CODED, NUMERIC, width=8, outputs=outputs)
    out = model(rows())
    assert out.shape == shape
    out.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_column_may_have_any_name() -> None:
    """`type`, `keys` and `values` are attributes of torch's own containers, which refuse them, and dots, as keys."""
    names = ["type", "keys", "values", "forward", "a.b", "a%2Eb"]
    model = Tabular(dict.fromkeys(names, 3), [], width=8)
    assert model({name: torch.tensor([0, 2]) for name in names}).shape == (2,)
    assert len(model.embeddings) == len(names)


def test_it_starts_as_a_linear_model() -> None:
    model = Tabular(CODED, NUMERIC, width=8)
    columns = rows()
    assert model.wide_numeric is not None
    numbers = torch.stack([columns[name] for name in NUMERIC], dim=1)
    torch.testing.assert_close(model(columns), model.wide_numeric.line(numbers).squeeze(1))


@pytest.mark.parametrize(("numbers", "outputs"), [(1, 1), (3, 1), (16, 1), (30, 1), (5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_the_same_bits_without_gradients(numbers: int, outputs: int, dtype: torch.dtype) -> None:
    """Serving and evaluation sum the bumps by another way than training does."""
    torch.manual_seed(numbers)
    names = [f"n{i}" for i in range(numbers)]
    model = Tabular({}, names, width=8, outputs=outputs).to(dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    for count in (1, 7, 256, 1000):
        columns = {name: torch.randn(count) for name in names}
        with torch.inference_mode():
            served = model(columns)
        assert torch.equal(served, model(columns).detach()) and served.abs().sum() > 0


def test_outputs_are_in_the_unit_of_the_label() -> None:
    plain, scaled = Tabular(CODED, NUMERIC), Tabular(CODED, NUMERIC, output_center=500.0, output_scale=20.0)
    for weight in plain.parameters():
        torch.nn.init.normal_(weight)
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(scaled(rows()), 500 + 20 * plain(rows()))


def test_additive_only_columns_are_never_combined_with_others() -> None:
    """d2 out / (d temp d wind) is zero for such columns, and is not for the others."""
    model = Tabular(CODED, NUMERIC, width=8, additive_only=["temp"])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    columns = rows(1)
    temp, wind, distance = (columns[n].clone().requires_grad_() for n in NUMERIC)
    out = model(columns | {"temp": temp, "wind": wind, "distance": distance})
    (by_temp,) = torch.autograd.grad(out.sum(), temp, create_graph=True)
    (mixed,) = torch.autograd.grad(by_temp.sum(), wind, create_graph=True, allow_unused=True)
    assert mixed is None or not mixed.any()
    (by_wind,) = torch.autograd.grad(out.sum(), wind, create_graph=True)
    (mixed,) = torch.autograd.grad(by_wind.sum(), distance)
    assert mixed.any()


@pytest.mark.parametrize(
    ("coded", "numeric", "args", "expected"),
    [
        ({}, [], {}, "at least one feature column"),
        (CODED, NUMERIC, {"additive_only": ["tmp"]}, r"additive_only names \['tmp'\]"),
        ({}, ["temp"], {"additive_only": ["temp"]}, "leaves the MLP no column"),
    ],
)
def test_impossible_models_are_refused(coded: dict, numeric: list, args: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Tabular(coded, numeric, **args)
