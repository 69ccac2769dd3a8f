"""Which tensors of a file a model begins with, and that what does not fit is named."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from sparkring.training.model.start import match_tensors, start_model_with
from sparkring.training.model.start_match import StartMatch
from sparkring.training.models.initial import record_model
from sparkring.training.models.warm_start import whole

Shapes = dict[str, tuple[int, ...]]


class Encoder(nn.Module):
    """A table that the output shares, a norm with running means, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


WHOLE = {name: tuple(tensor.shape) for name, tensor in Encoder().state_dict().items()}


def test_every_tensor_of_the_own_model_matches_and_a_shared_one_once() -> None:
    match = match_tensors(Encoder(), WHOLE, {})
    assert set(match.matched) == set(WHOLE) - {"out.weight"}, "a shared tensor has its first name"
    assert (match.missing, match.unexpected, match.other_shape) == ([], [], {})
    only_second = {name: shape for name, shape in WHOLE.items() if name != "table.weight"}
    assert match_tensors(Encoder(), only_second, {}).matched["table.weight"] == "out.weight"


def test_what_does_not_fit_is_named_by_its_kind() -> None:
    given = WHOLE | {"head.weight": (7, 4), "pooler.weight": (4, 4)}
    del given["norm.bias"]
    match = match_tensors(Encoder(), given, {})
    assert match.missing == ["norm.bias"] and match.unexpected == ["pooler.weight"]
    assert match.other_shape == {"head.weight": "(7, 4), in the model (3, 4)"}
    assert match.text == (
        "6 of 8 tensors begin with its values; 1 of another shape (head.weight (7, 4), in the model (3, 4)); "
        "1 not in the file (norm.bias); 1 not of the model (pooler.weight)"
    )


def test_names_are_changed_by_the_longest_beginning_that_fits() -> None:
    given: Shapes = {"bert.table.weight": (5, 4), "bert.old.head.bias": (3,), "head.weight": (3, 4)}
    match = match_tensors(Encoder(), given, {"bert.": "", "bert.old.": "", "": "unused."})
    assert match.matched == {"table.weight": "bert.table.weight", "head.bias": "bert.old.head.bias"}
    assert match.unexpected == ["head.weight"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a\.bias' and 'head\.bias' of the file both become 'head\.bias'"):
        match_tensors(Encoder(), {"a.bias": (3,), "head.bias": (3,)}, {"a.": "head."})


@pytest.mark.parametrize("given", [{}, {"x": (1,)}, {"head.weight": (9, 9)}], ids=["empty", "other names", "shapes"])
def test_a_file_of_which_nothing_matches_is_refused(given: Shapes) -> None:
    with pytest.raises(ValueError, match=r"no tensor of the file has the name and shape .* table\.weight"):
        match_tensors(Encoder(), given, {})


class InFile:
    """A tensor of a file in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def read(self) -> torch.Tensor:
        return self.tensor


def test_matched_tensors_have_the_files_values_in_the_models_dtype_and_the_others_their_initial_ones() -> None:
    initial = record_model(Encoder, 3)
    given = {"head.weight": InFile(torch.full((3, 4), 2.5, dtype=torch.float16))}
    match = match_tensors(initial.module, {"head.weight": (3, 4)}, {})
    begun = start_model_with(initial, match, given)
    values = {name: whole(value) for name, value in begun.values.items()}
    assert torch.equal(values["head.weight"], torch.full((3, 4), 2.5)) and values["head.weight"].dtype == torch.float32
    for name in set(initial.values) - {"head.weight"}:
        assert torch.equal(values[name], whole(initial.values[name])), name
    assert begun.not_recorded, "rank 0's values must be sent"
    received = start_model_with(initial, match, None).values["head.weight"]
    assert (received.size, received.dtype) == ((3, 4), torch.float32)


def test_a_match_is_the_same_after_it_was_stored() -> None:
    adapter, match = TypeAdapter(StartMatch), match_tensors(Encoder(), WHOLE | {"more": (1,)}, {})
    assert adapter.validate_json(adapter.dump_json(match)) == match
