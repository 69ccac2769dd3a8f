"""Place ranks on the mesh: world = pp x dp x cp x tp, tp runs fastest.

Neighboring ranks share a host, so the axis that sends most (tp) gets them, and the one that sends least (pp) gets ranks
far apart. The data shard of a rank comes from its dp coordinate, never from its global rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rules.strategies import Layout

AXES = ("pp", "dp", "cp", "tp")  # slowest to fastest running
REST = -1  # "all remaining ranks", allowed for one axis


@dataclass(frozen=True)
class Coordinates:
    """One rank's position on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes, and the rank arithmetic on them."""

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of AXES."""
        return (self.pp, self.dp, self.cp, self.tp)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world} ({describe(self)})")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """List the ranks that differ from `rank` on one axis only, including itself, ascending."""
        stride = 1
        for name, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            if name == axis:
                first = rank - getattr(self.coordinates(rank), axis) * stride
                return list(range(first, first + size * stride, stride))
            stride *= size
        raise ValueError(f"{axis!r} is not an axis of the mesh: {', '.join(AXES)}")


def describe(mesh: Mesh) -> str:
    """Describe the mesh as `dp(2) * pp(2) * tp(1)`; cp only where it is used."""
    sizes = [("dp", mesh.dp), ("cp", mesh.cp), ("pp", mesh.pp), ("tp", mesh.tp)]
    return " * ".join(f"{name}({size})" for name, size in sizes if name != "cp" or size > 1)


def used_axes(mesh: Mesh) -> str:
    """List the axes of more than one rank as `dp(2) * pp(2)`; `dp(1)` for a single rank."""
    sizes = [("dp", mesh.dp), ("pp", mesh.pp), ("tp", mesh.tp), ("cp", mesh.cp)]
    return " * ".join(f"{name}({size})" for name, size in sizes if size > 1) or "dp(1)"


def resolve_mesh(config: ParallelConfig, world: int) -> Mesh:
    """Return the mesh of `world` ranks; an axis of -1 takes the rest. ValueError prints every factor."""
    sizes = {"dp": config.dp, "cp": config.cp, "pp": config.pp, "tp": config.tp}
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
    """Return (replicas, shard size) of the batch axes dp x cp for hybrid sharding.

    Args:
        mesh: sizes of the axes.
        shard: ranks per shard group; 0 makes one group of all batch ranks.
    """
    batch = mesh.dp * mesh.cp
    if shard in (0, batch):
        return 1, batch
    if shard < 0 or mesh.cp > 1 or mesh.dp % shard:
        raise ValueError(
            f"parallel.shard is {shard}: it must divide dp({mesh.dp}) and needs cp(1), here cp({mesh.cp}); "
            f"0 shards over all data ranks"
        )
    return mesh.dp // shard, shard


def layout_of(config: ParallelConfig, mesh: Mesh, device_type: str, global_batch: int | None = None) -> Layout:
    """Return what the rules of layouts look at. `global_batch`: rows per step; None: not looked at."""
    return Layout(config, **asdict(mesh), device=device_type, global_batch=global_batch)
