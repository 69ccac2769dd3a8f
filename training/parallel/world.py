"""Ranks on the mesh, in pure ints: world = pp x dp x cp x tp, with tp the fastest-running axis.

Neighbouring ranks share a host, so the axis that talks most (tp) gets them, and the one that talks least (pp) gets
the far ones. The data shard of a rank comes from its dp coordinate, never from its global rank.
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")  # slowest to fastest running
REST = -1  # "whatever is left", allowed for one axis


@dataclass(frozen=True)
class Coordinates:
    """One rank's place on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes; `ranks_along` and `coordinates` are the only rank arithmetic of the project."""

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.pp, self.dp, self.cp, self.tp)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world} ({describe(self)})")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def rank_of(self, at: Coordinates) -> int:
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def ranks_along(self, axes: tuple[str, ...], rank: int) -> list[int]:
        """Ranks that differ from `rank` in `axes` only, itself among them, ascending."""
        mine = self.coordinates(rank)
        fixed = [axis for axis in AXES if axis not in axes]

        def same(other: int) -> bool:
            at = self.coordinates(other)
            return all(getattr(at, axis) == getattr(mine, axis) for axis in fixed)

        return [other for other in range(self.world) if same(other)]


def describe(mesh: Mesh) -> str:
    """`dp(2) * pp(2) * tp(1)`; cp only where it is used."""
    sizes = [("dp", mesh.dp), ("cp", mesh.cp), ("pp", mesh.pp), ("tp", mesh.tp)]
    return " * ".join(f"{name}({size})" for name, size in sizes if name != "cp" or size > 1)


def resolve_mesh(world: int, *, dp: int = REST, cp: int = 1, pp: int = 1, tp: int = 1) -> Mesh:
    """The mesh for `world` ranks; -1 stands once for the rest. ValueError prints every factor."""
    sizes = {"dp": dp, "cp": cp, "pp": pp, "tp": tp}
    for name, size in sizes.items():
        if size != REST and size < 1:
            raise ValueError(f"parallel.{name} is {size}: an axis has at least 1 rank, or {REST} for the rest")
    open_axes = [name for name, size in sizes.items() if size == REST]
    if len(open_axes) > 1:
        raise ValueError(f"parallel.{' and parallel.'.join(open_axes)} are both {REST}: only one axis can be the rest")
    known = 1
    for size in sizes.values():
        known *= size if size != REST else 1
    if open_axes and world % known == 0 and world >= known:
        sizes[open_axes[0]] = world // known
    mesh = Mesh(**sizes)
    if open_axes and sizes[open_axes[0]] == REST:
        raise ValueError(
            f"{describe(mesh)}: the fixed axes multiply to {known}, which does not divide world({world}); "
            f"change parallel.dp, pp, tp or cp, or the number of ranks"
        )
    if mesh.world != world:
        raise ValueError(
            f"{describe(mesh)} != world({world}): change parallel.dp, pp, tp or cp, or the number of ranks"
        )
    return mesh


def shard_groups(mesh: Mesh, shard: int) -> tuple[int, int]:
    """(replicas, shard size) of the batch axes dp x cp for hybrid sharding; `shard` 0 = one group of all of them."""
    batch = mesh.dp * mesh.cp
    if shard in (0, batch):
        return 1, batch
    if shard < 0 or mesh.cp > 1 or mesh.dp % shard:
        raise ValueError(
            f"parallel.shard is {shard}: it must divide dp({mesh.dp}) and needs cp(1), here cp({mesh.cp}); "
            f"0 shards over all data ranks"
        )
    return mesh.dp // shard, shard
