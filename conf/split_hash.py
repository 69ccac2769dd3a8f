"""What a split by hash is made of: how many buckets there are, and which split each is of."""

from __future__ import annotations

BUCKETS = 1_000_000
# Keeps the hash of the split apart from the hash of the stored order, else a split's rows would be one range of it.
SALT = "sparkring.split"


def share_edges(shares: list[float]) -> list[int]:
    """Upper bucket of every share: [0.8, 0.1, 0.1] -> [800000, 900000, 1000000]."""
    total, edges = 0.0, []
    for share in shares:
        total += share
        edges.append(round(total * BUCKETS))
    return edges
