"""Process groups for tests in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A real Gloo group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """make(ranks, name): rank 0's mesh of a group that answers at once and moves nothing."""

    def make(ranks: int, name: str) -> DeviceMesh:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))

    yield make
    dist.destroy_process_group()
