"""Every element is on one server, and all have as many."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.training.servers.partition import cut_parameters

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(max_examples=200)
@given(SHAPES, st.integers(1, 6))
def test_every_element_is_in_one_slice_and_servers_differ_by_one_element(
    shapes: list[tuple[int, ...]], servers: int
) -> None:
    named = {f"p{number}": shape for number, shape in enumerate(shapes)}
    cut = cut_parameters(named, servers)
    for name, shape in named.items():
        covered = [i for own in cut for each in own if each.name == name for i in range(each.start, each.stop)]
        assert covered == list(range(math.prod(shape)))
    sizes = [sum(each.size for each in own) for own in cut]
    assert max(sizes) - min(sizes) <= 1
    for each in (each for own in cut for each in own):
        assert len(each.shape) == len(named[each.name]) and math.prod(each.shape) == each.size


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_a_large_parameter_does_not_make_its_server_the_largest(servers: int) -> None:
    cut = cut_parameters({"embedding": (1000, 64), "bias": (64,), "head": (64, 10)}, servers)
    sizes = [sum(each.size for each in own) for own in cut]
    assert max(sizes) / (sum(sizes) / servers) <= 1.05
