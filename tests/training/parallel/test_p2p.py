"""Messages between stages, over a mailbox in place of a process group: in order, as NCCL has them."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

from sparkring.training.parallel.model_parallel import p2p
from sparkring.training.parallel.model_parallel.p2p import StageChannel, StageMessage
from sparkring.training.parallel.model_parallel.pipeline import sent_to
from sparkring.training.parallel.model_parallel.schedules import schedule_table

CPU = torch.device("cpu")
LINKS = {(0, 1): "up", (1, 0): "down"}


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> dict[str, deque[torch.Tensor]]:
    """Group -> tensors on their way. A receive takes what is first when it is posted, whatever it is waited for."""
    boxes: dict[str, deque[torch.Tensor]] = defaultdict(deque)

    def isend(x, peer, group):
        boxes[group].append(x.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(x, peer, group):
        x.copy_(boxes[group].popleft())

    def irecv(x, peer, group):
        recv(x, peer, group)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(p2p.dist, "isend", isend)
    monkeypatch.setattr(p2p.dist, "irecv", irecv)
    monkeypatch.setattr(p2p.dist, "recv", recv)
    return boxes


def channels() -> tuple[StageChannel, StageChannel]:
    return StageChannel(LINKS, 0, [0, 1], CPU), StageChannel(LINKS, 1, [0, 1], CPU)  # type: ignore[arg-type]


def test_a_shape_is_announced_by_the_first_message_of_its_key(mail) -> None:
    first, second = channels()
    second.begin({0: [StageMessage(0, ("boundary", 2), number) for number in (0, 2)]})
    for number in (0, 2):
        x = torch.full((2, 3), float(number), dtype=torch.bfloat16)
        first.send(x, StageMessage(1, ("boundary", 2), number))
        assert len(mail["up"]) == (2 if number == 0 else 1), "a header before the first one"
        received = second.receive(StageMessage(0, ("boundary", 2), number))
        assert received.dtype == torch.bfloat16 and torch.equal(received, x)
    first.drain()
    assert first.sending == []


def test_messages_without_a_key_all_carry_their_shape(mail) -> None:
    first, second = channels()
    for rows in (2, 5):
        message = StageMessage(0, None, 0)
        second.begin({0: [message]})
        first.send(torch.zeros(rows, 1), StageMessage(1, None, 0))
        assert second.receive(message).shape == (rows, 1)


def test_a_message_of_a_known_shape_is_received_ahead(mail) -> None:
    first, second = channels()
    message = StageMessage(0, "key", 4)
    for value, ahead in ((1.0, []), (7.0, [4])):
        second.begin({0: [message]})
        if not ahead:
            second.expect(message)
            assert second.posted == {}, "the shape is not known yet"
        first.send(torch.full((3,), value), StageMessage(1, "key", 4))
        second.expect(message) if ahead else None
        assert list(second.posted) == ahead
        assert second.receive(message).tolist() == [value] * 3 and second.posted == {}


def test_what_is_sent_before_a_message_is_received_before_it(mail) -> None:
    """Of two boundaries, of which the second is asked for first: its own values arrive, and the first's wait."""
    first, second = channels()
    early, late = StageMessage(0, "a", 0), StageMessage(2, "b", 1)
    second.begin({0: [early, late]})
    first.send(torch.ones(3), StageMessage(1, "a", 0))
    first.send(torch.full((2, 2), 5.0), StageMessage(3, "b", 1))
    assert second.receive(late).tolist() == [[5, 5], [5, 5]]
    assert list(second.posted) == [0]
    assert second.receive(early).tolist() == [1, 1, 1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_message_has_one_receiver_and_one_place_in_an_order(schedule: str, ranks: int) -> None:
    per_rank = 1 if schedule == "1f1b" else 2
    stages, micro = per_rank * ranks, ranks * 2
    table = schedule_table(schedule, ranks, micro, per_rank)
    every = [(peer, rank, sent) for rank in range(ranks) for peer in range(ranks)
             for sent in sent_to(rank, table, peer, stages)]  # fmt: skip
    expected = {(is_gradient, b, m) for is_gradient in (False, True) for b in range(stages - 1) for m in range(micro)}
    assert len(every) == len(expected) and {sent for _, _, sent in every} == expected
    for peer, rank, (is_gradient, boundary, _) in every:
        ends = boundary % ranks, (boundary + 1) % ranks
        assert (peer, rank) == (ends[::-1] if is_gradient else ends)
