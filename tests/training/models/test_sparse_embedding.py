import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparkring.training.data.batch import Ragged
from sparkring.training.models.sparse_embedding import PulledRows, SparseEmbedding, sparse_embeddings
from sparkring.training.models.tabular import Tabular

IDS, ROWS = torch.tensor([-5, 2, 9]), torch.tensor([[1.0, 10], [2, 20], [3, 30]])


def embedding(bag: str = "sum") -> SparseEmbedding:
    made = SparseEmbedding("tags", 2, bag=bag)  # type: ignore[arg-type]
    made.source = PulledRows(IDS, ROWS.clone().requires_grad_())
    return made


def test_rows_are_looked_up_by_id_in_any_shape_and_gradients_add_up() -> None:
    made = embedding()
    out = made(torch.tensor([[9, -5], [9, 9]], dtype=torch.int32))
    assert out.tolist() == [[[3, 30], [1, 10]], [[3, 30], [3, 30]]]
    out.sum().backward()
    assert made.source.rows.grad.tolist() == [[1, 1], [0, 0], [3, 3]]  # type: ignore[union-attr]
    assert not list(made.parameters()) and not made.state_dict()


def bags(values: list[float] | None = None) -> Ragged:
    ids = torch.tensor([9, 2, -5]) if values is None else torch.tensor(values)
    return Ragged(ids, (torch.tensor([0, 2, 2, 3]),))


def test_bags_are_sums_means_and_weighted_sums_and_an_empty_one_is_zero() -> None:
    assert embedding()(bags()).tolist() == [[5, 50], [0, 0], [1, 10]]
    assert embedding("mean")(bags()).tolist() == [[2.5, 25], [0, 0], [1, 10]]
    assert embedding()(bags(), bags([1.0, 2.0, -1.0])).tolist() == [[7, 70], [0, 0], [-1, -10]]
    with pytest.raises(ValueError, match="weights are for sums"):
        embedding("mean")(bags(), bags([1.0, 2.0, -1.0]))


def test_weights_of_other_bags_are_refused_where_their_total_is_the_same() -> None:
    others = Ragged(torch.tensor([1.0, 2.0, -1.0]), (torch.tensor([0, 1, 2, 3]),))
    with pytest.raises(ValueError, match=r"\('tags',\): weights are one for each id; row 0 .* has 1 for 2 ids"):
        embedding()(bags(), others)
    fewer_rows = Ragged(torch.tensor([1.0, 2.0, -1.0]), (torch.tensor([0, 2, 3]),))
    with pytest.raises(ValueError, match="weights are a list of numbers for each row"):
        embedding()(bags(), fewer_rows)


class _RowsOnGpu:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows


def test_bags_are_combined_on_the_device_of_their_rows() -> None:
    """Offsets stay on the host. Fake tensors raise where a GPU would, at tensors of two devices."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        ids = Ragged(torch.empty(3, dtype=torch.int64, device="cuda"), (torch.zeros(4, dtype=torch.int64),))
        made = SparseEmbedding("tags", 2)
        made.source = _RowsOnGpu(torch.empty(3, 2, device="cuda"))
        out = made(ids)
    assert out.shape == (3, 2) and out.device.type == "cuda"


def test_ids_that_were_not_pulled_are_refused() -> None:
    for unknown in (3, 10, -6):
        with pytest.raises(ValueError, match="ids that are not in its columns of this batch"):
            embedding()(torch.tensor([2, unknown]))
    with pytest.raises(RuntimeError, match="has no rows yet"):
        SparseEmbedding("tags", 2)(torch.tensor([2]))
    assert embedding()(torch.zeros(0, dtype=torch.int64)).shape == (0, 2)


def test_the_tabular_model_reads_hashed_columns_by_a_deep_and_a_wide_part() -> None:
    model = Tabular({}, ["x"], width=4, blocks=1, outputs=2, hashed=["user.id"], hashed_width=3)
    tables = sparse_embeddings(model)
    (table,) = tables.values()
    assert list(tables) == ["hashed.column_user%2Eid"] and table.columns == ("user.id",)
    assert table.dim == 5 and list(table.scale) == [3**-0.5] * 3 + [0.0] * 2  # type: ignore[arg-type]
    rows = torch.randn(3, 5)
    table.source = PulledRows(IDS, rows)
    columns = {"x": torch.zeros(3), "user.id": IDS}
    at_first = model(columns)
    assert at_first.shape == (3, 2) and model.input.weight.shape == (4, 4)
    rows[:, 3:] += torch.tensor([1.0, -1])  # the wide part is added to the outputs
    assert torch.allclose(model(columns), at_first + torch.tensor([1.0, -1]))
    assert model.input_columns() == {"user.id": slice(0, 3), "x": slice(3, 4)}


def test_rows_are_looked_up_outside_of_compiled_code() -> None:
    seen = []

    class Source:
        def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return ROWS[: len(ids)] * 2

    made = embedding()
    made.source = Source()
    ids = torch.tensor([9, 2])
    try:
        assert torch.compile(made, backend="eager")(ids).tolist() == made(ids).tolist() == [[2, 20], [4, 40]]
    finally:
        torch._dynamo.reset()
    assert seen == [False, False]
