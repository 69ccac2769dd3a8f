"""Mesh arithmetic: every rank has one position, axes partition the world, errors print every factor."""

from __future__ import annotations

import itertools

import pytest

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.training.parallel.mesh import AXES, Mesh, resolve_mesh, shard_groups

SIZES = [Mesh(*sizes) for sizes in itertools.product((1, 2, 3), repeat=4)]


@pytest.mark.parametrize("mesh", SIZES, ids=str)
def test_ranks_and_coordinates_are_one_to_one(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]
    assert [((at.pp * mesh.dp + at.dp) * mesh.cp + at.cp) * mesh.tp + at.tp for at in places] == list(range(mesh.world))
    for axis in AXES:
        groups = {tuple(mesh.ranks_along(axis, rank)) for rank in range(mesh.world)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
        assert {len(group) for group in groups} == {getattr(mesh, axis)}


def test_tensor_ranks_are_neighbors() -> None:
    assert Mesh(dp=2, pp=2, tp=2).ranks_along("tp", 5) == [4, 5]
    assert Mesh(dp=2, pp=2, tp=2).ranks_along("pp", 1) == [1, 5]


def test_an_axis_of_minus_one_takes_the_remaining_ranks() -> None:
    assert resolve_mesh(ParallelConfig(pp=2, tp=2), 8) == Mesh(dp=2, pp=2, tp=2)
    assert resolve_mesh(ParallelConfig(dp=3, tp=-1), 6) == Mesh(dp=3, tp=2)


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (8, {"dp": 2, "pp": 2, "tp": 1}, r"dp\(2\) \* pp\(2\) \* tp\(1\) != world\(8\)"),
        (8, {"pp": 3}, r"pp\(3\).*does not divide world\(8\)"),
        (2, {"dp": -1, "tp": 4}, r"does not divide world\(2\)"),
        (4, {"dp": -1, "pp": -1}, "only one axis can be the rest"),
        (4, {"tp": 0}, "parallel.tp is 0"),
    ],
)
def test_an_impossible_product_prints_every_factor(world: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_mesh(ParallelConfig(**sizes), world)


def test_hybrid_sharding_makes_replicas_of_shard_groups() -> None:
    assert shard_groups(Mesh(dp=8), 2) == (4, 2)
    assert shard_groups(Mesh(dp=8), 0) == (1, 8)
    with pytest.raises(ValueError, match=r"divide dp\(8\)"):
        shard_groups(Mesh(dp=8), 3)
