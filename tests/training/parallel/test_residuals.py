"""Which residuals of a checkpoint a rank takes over, and what becomes of those that no codec carries on."""

from __future__ import annotations

import torch
from torch import nn

from sparkring.training.parallel.data_parallel.base import CodecState, SingleProcess
from sparkring.training.parallel.residuals import Residuals, rank_of


class Coded(SingleProcess):
    """As if a codec carried one residual."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CodecState({"w": torch.zeros(2)}, {"w": torch.zeros(3, 1)})

    def codec_state(self) -> CodecState:
        return self.state

    def load_codec_state(self, state: CodecState) -> None:
        self.state = state


STORED = {f"residuals.rank-{rank:05d}/w": [2] for rank in range(5)} | {"factors.w": [3, 1], "model.w": [2], "x": None}


def test_the_ranks_of_another_world_share_all_residuals_and_each_has_the_factors() -> None:
    taken = []
    for rank in range(2):
        room = Residuals(Coded(), rank, 2).room_for(STORED, torch.zeros((), dtype=torch.float64))
        assert {tuple(t.shape) for t in room["factors"].values()} == {(3, 1)}
        assert all(t.dtype == torch.float64 for part in room.values() for t in part.values())
        taken.append([rank_of(key) for key in room["residuals"]])
    assert taken == [[0, 2, 4], [1, 3]]


def test_residuals_that_a_rank_takes_over_are_summed() -> None:
    residuals = Residuals(Coded(), 0, 2)
    room = residuals.room_for(STORED, torch.zeros(()))
    for number, tensor in enumerate(room["residuals"].values()):
        tensor.fill_(10.0**number)
    residuals.load(room, {"w"})
    assert residuals.data_parallel.codec_state().residuals["w"].tolist() == [111.0, 111.0]
    assert set(residuals.tensors()["residuals"]) == {"rank-00000/w"} and not residuals.late


def test_a_rank_without_a_codec_adds_them_to_one_gradient_once() -> None:
    residuals = Residuals(SingleProcess(), 0, 1)
    stored = {f"rank-0000{rank}/{name}": torch.ones(2) for rank in range(3) for name in "wvx"}
    residuals.load({"residuals": stored}, {"w", "v"})
    assert residuals.late.keys() == {"w", "v"}, "x is another rank's"
    w, v = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for _ in range(2):  # the first step is skipped
        w.grad = torch.ones(2)
        residuals.add_late([("module.alias", w), ("v", v)], {"alias": "w"}, scale=4.0)
        assert w.grad.tolist() == [13.0, 13.0] and v.grad is None
        assert set(residuals.tensors()["residuals"]) == {"rank-00000/w", "rank-00000/v"}
    residuals.commit()
    assert set(residuals.late) == {"v"}, "it had no gradient yet"
    residuals.commit()
    assert residuals.tensors().keys() == {"residuals"}
    assert Residuals(SingleProcess(), 0, 1).tensors() == {}
