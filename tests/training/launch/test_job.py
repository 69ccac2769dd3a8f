"""What travels to the ranks and back: arguments, results, and what is refused before a process is started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.launch.host.rank import load_call
from sparkring.training.launch.job import JobSpec


@dataclass
class Point:
    x: int
    near: list[Point] = field(default_factory=list)
    at: torch.Tensor | None = None


def scaled(ctx: Any, factor: float, *, offset: float = 0.0) -> float:
    return factor + offset


@pytest.mark.parametrize(
    ("entry", "args", "kwargs"),
    [
        (scaled, (2.0,), {"offset": torch.ones(3)}),
        (scaled, (), {"factor": Point(1)}),
        (lambda ctx, *words, **named: None, (1, {2}, b"3"), {"a": np.arange(2)}),
        ("module:function", ("x", Point(2)), {"y": None}),
    ],
)
def test_arguments_reach_a_function_as_they_were(
    entry: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    described = JobSpec(entry, args=args, kwargs=kwargs).describe_entry()
    if described.form == "name":
        described = replace(described, name="sparkring.training.launch.job:name_of")  # one that can be imported here
    function, given, named = load_call(described)
    assert callable(function)
    assert repr((given, named)) == repr((tuple(args), kwargs))


@pytest.mark.parametrize(
    ("entry", "args", "kwargs", "words"),
    [
        (scaled, (), {}, "missing a required argument: 'factor'"),
        (scaled, (1, 2), {}, "too many positional arguments"),
        (scaled, (1,), {"of": 1}, "got an unexpected keyword argument 'of'"),
        (lambda: None, (), {}, "is called with a WorkerContext"),
        (scaled, (threading.Lock(),), {}, r"args\[0\] \(_thread.lock\) cannot be pickled"),
        ("module:function", (), {"a": threading.Lock()}, r"kwargs\['a'\] \(_thread.lock\) cannot be pickled"),
        (__file__, (1,), {}, "takes words"),
        (__file__, (), {"a": "b"}, "takes words"),
    ],
)
def test_arguments_that_cannot_arrive_are_refused_before_anything_starts(
    entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        JobSpec(entry, args=args, kwargs=kwargs).check()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"entry": None}, "entry = None: neither"),
        ({"entry": 3}, "entry = 3: neither"),
        ({"args": "abc"}, "args = 'abc': must be a tuple or a list"),
        ({"args": b"abc"}, "args = b'abc': must be a tuple or a list"),
        ({"args": None}, "args = None: must be a tuple or a list"),
        ({"args": {"a": 1}}, "must be a tuple or a list"),
        ({"kwargs": None}, "kwargs = None: must be a dict"),
        ({"kwargs": [("a", 1)]}, "must be a dict"),
    ],
)
def test_a_job_whose_parts_are_of_another_type_is_refused_when_it_is_made(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        JobSpec(**{"entry": "module:function"} | parts)
