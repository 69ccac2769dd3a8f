"""The tabular model: shapes, where it starts, and which columns its parts may combine."""

from __future__ import annotations

import pytest
import torch

from sparkring.training.models.tabular import Cosines, Tabular
from sparkring.training.tasks import TASK_CLASSES, _TableTask

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


def several(task: str) -> tuple[Tabular, dict[str, torch.Tensor], _TableTask]:
    """A trained-like model of three members, a batch of 6 rows, and its task."""
    outputs = {"multiclass": 4, "multilabel": 2}.get(task, 1)
    torch.manual_seed(3)
    model = Tabular({"c": 5}, ["x", "z"], width=8, outputs=outputs, members=3, cosine_width=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    columns = {"c": torch.tensor([0, 1, 2, 3, 4, 1]), "x": torch.randn(6), "z": torch.randn(6)}
    labels = {
        "multiclass": torch.tensor([0, 1, 2, 3, 0, 1]),
        "multilabel": torch.tensor([[0.0, 1], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1]]),
    }
    columns["y"] = labels.get(task, torch.tensor([0.0, 1, 1, 0, 1, 0]))
    return model, columns, TASK_CLASSES[task](["c", "x", "z"], "y")


@pytest.mark.parametrize("task", sorted(TASK_CLASSES))
def test_each_member_has_a_loss_of_its_own_and_their_mean_is_the_prediction(task: str) -> None:
    model, columns, described = several(task)
    together = model.train()(columns)
    members = [together[:, number] for number in range(3)]
    assert not torch.equal(members[0], members[1])
    expected = torch.stack([described.loss(one, columns) for one in members]).mean(dim=0)
    torch.testing.assert_close(described.loss(together, columns), expected)
    torch.testing.assert_close(model.eval()(columns), torch.stack(members).mean(dim=0))
    none = {name: values[:0] for name, values in columns.items()}
    assert described.loss(model.train()(none), none).shape == (0,), "a rank may have no row of a step"


def test_a_model_of_one_member_is_what_it_was() -> None:
    torch.manual_seed(0)
    plain = Tabular({"c": 5}, ["x"], width=8)
    torch.manual_seed(0)
    one = Tabular({"c": 5}, ["x"], width=8, members=1, cosine_width=0)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in one.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), one.parameters(), strict=True))


def test_members_differ_from_the_first_step_on() -> None:
    model, columns, described = several("binary")
    model = Tabular({"c": 5}, ["x", "z"], width=8, members=3, cosine_width=4).train()
    for _ in range(3):
        described.loss(model(columns), columns).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    out = model(columns)
    assert float(out.detach().std(dim=1).min()) > 0


def test_cosines_give_a_number_more_than_a_line() -> None:
    torch.manual_seed(0)
    cosines = Cosines(2, 3)
    x = torch.linspace(-2, 2, 5)
    columns = torch.stack([x, torch.zeros(5)], dim=1)
    out = cosines(columns)
    assert out.shape == (5, 6)
    waves = torch.cos(2 * torch.pi * cosines.frequency[0] * x[:, None] + cosines.phase[0])
    torch.testing.assert_close(out[:, :3], waves @ cosines.weight[0])
    assert torch.equal(out[:, 3:], out[:1, 3:].expand(5, 3)), "each column has outputs of its own"
