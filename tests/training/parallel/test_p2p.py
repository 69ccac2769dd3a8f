"""Messages between stages, over a mailbox in place of a process group."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from sparkring.training.parallel.model_parallel import p2p
from sparkring.training.parallel.model_parallel.p2p import StageChannel, StageMessage

CPU = torch.device("cpu")


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[torch.Tensor]]:
    """tag -> tensors on their way. Sending and receiving work as torch.distributed's do."""
    boxes: dict[int, list[torch.Tensor]] = defaultdict(list)

    def isend(x, peer, group, tag):
        boxes[tag].append(x.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(x, peer, group, tag):
        x.copy_(boxes[tag].pop(0))

    def irecv(x, peer, group, tag):
        return SimpleNamespace(wait=lambda: recv(x, peer, group, tag))

    monkeypatch.setattr(p2p.dist, "isend", isend)
    monkeypatch.setattr(p2p.dist, "irecv", irecv)
    monkeypatch.setattr(p2p.dist, "recv", recv)
    monkeypatch.setattr(p2p.dist, "get_global_rank", lambda group, rank: rank)
    return boxes


def channel() -> StageChannel:
    return StageChannel(None, 2, CPU)  # type: ignore[arg-type]


def test_a_shape_is_announced_by_the_first_message_of_its_key(mail) -> None:
    first, second = channel(), channel()
    for tag in (0, 2):
        x = torch.full((2, 3), float(tag), dtype=torch.bfloat16)
        first.send(x, StageMessage(1, ("boundary", 2), tag))
        assert len(mail[tag]) == (2 if tag == 0 else 1), "a header before the first one"
        received = second.receive(StageMessage(0, ("boundary", 2), tag))
        assert received.dtype == torch.bfloat16 and torch.equal(received, x)
    first.drain()
    assert first.sending == []


def test_messages_without_a_key_all_carry_their_shape(mail) -> None:
    first, second = channel(), channel()
    for rows in (2, 5):
        first.send(torch.zeros(rows, 1), StageMessage(1, None, 0))
        assert second.receive(StageMessage(0, None, 0)).shape == (rows, 1)


def test_a_message_of_a_known_shape_is_received_ahead(mail) -> None:
    first, second = channel(), channel()
    message = StageMessage(0, "key", 4)
    second.expect(message)
    assert second.expected == {}, "the shape is not known yet"
    first.send(torch.ones(3), message)
    second.receive(message)
    first.send(torch.full((3,), 7.0), message)
    second.expect(message)
    assert list(second.expected) == [4]
    assert second.receive(message).tolist() == [7, 7, 7] and second.expected == {}
