"""`sparkring.data`: the order is that of trainings, and a state goes on in another world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import sparkring.data
from sparkring.conf.manifest import DatasetManifest, ManifestError
from tests.training.data.test_reader import epoch_of, read, real_ids

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, Any] = {"lanes": 12, "tail": "pad", "audit": True}


@pytest.fixture
def dataset(make_dataset: Callable[..., DatasetManifest], tmp_path: Path) -> tuple[str, DatasetManifest]:
    return str(tmp_path), make_dataset(tmp_path, [[25, 25, 40], [50, 10]])


def opened(uri: str, world: int, **settings: Any) -> list[sparkring.data.DataReader]:
    return [
        sparkring.data.open(uri, rank=rank, world=world, global_batch=24, **(SETTINGS | settings))
        for rank in range(world)
    ]


def test_each_rank_is_given_the_rows_that_a_rank_of_a_training_is_given(dataset: tuple[str, DatasetManifest]) -> None:
    uri, manifest = dataset
    for rank in range(3):
        theirs = [real_ids(batch) for batch in epoch_of(read(Path(uri), manifest, 24, rank, 3, lanes=12, tail="pad"))]
        with opened(uri, 3)[rank] as ours:
            assert len(ours) == 7
            assert [real_ids(batch) for batch in ours] == theirs


def test_a_state_of_two_ranks_goes_on_on_three_with_the_rows_that_are_left(
    dataset: tuple[str, DatasetManifest],
) -> None:
    uri, _ = dataset
    with ExitStack() as stack:
        two = [stack.enter_context(one) for one in opened(uri, 2)]
        before = [[real_ids(batch) for batch in one.batches(steps=3)] for one in two]
        states = [json.loads(json.dumps(one.state_dict())) for one in two]
        assert states[0] == states[1] and states[0]["consumed_samples"] == 72
        three = [stack.enter_context(one) for one in opened(uri, 3)]
        after = []
        for one in three:
            one.load_state_dict(states[0])
            assert (one.consumed_samples, one.epoch) == (72, 0)
            after.append([real_ids(batch) for batch in one])
        assert all(one.epoch == 1 for one in three)
    rows = [row for rank in (*before, *after) for batch in rank for row in batch]
    assert sorted(rows) == [*range(150)]
    with opened(uri, 1)[0] as reader:
        whole = [sorted(real_ids(batch)) for batch in reader]
    parts = [*zip(*before, strict=True), *zip(*after, strict=True)]
    assert [sorted(row for rank in step for row in rank) for step in parts] == whole


UNCLOSED = """
import atexit, sys, threading
atexit.register(lambda: print("AT EXIT", [thread.name for thread in threading.enumerate()]))  # the last to be called
import sparkring.data
reader = sparkring.data.open(sys.argv[1], global_batch=24, lanes=12)
batches = iter(reader)
next(batches)
print("READING", any(thread.name == "sparkring-reader" for thread in threading.enumerate()))
"""


def test_a_script_that_closes_no_reader_ends_without_its_threads(dataset: tuple[str, DatasetManifest]) -> None:
    """Python ended them inside of C++, which aborted the process now and then: exit code 134."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", UNCLOSED, dataset[0]], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "READING True\nAT EXIT ['MainThread']\n"), done.stderr


def test_a_path_is_as_good_as_its_text(dataset: tuple[str, DatasetManifest]) -> None:
    uri, _ = dataset
    with sparkring.data.open(Path(uri), global_batch=24, **SETTINGS) as reader, opened(uri, 1)[0] as other:
        assert reader.state_dict() == other.state_dict()


def test_a_second_pass_is_the_next_epoch(dataset: tuple[str, DatasetManifest]) -> None:
    with opened(dataset[0], 1)[0] as reader:
        first, second = ([row for batch in reader for row in real_ids(batch)] for _ in range(2))
        again = [row for batch in reader.batches(from_sample=0) for row in real_ids(batch)]
    assert sorted(first) == sorted(second) == [*range(150)] and first != second and again == first


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"seed": 7}, "seed"), ({"lanes": 6}, "lanes"), ({"shuffle": False}, "shuffle")],
)
def test_a_state_of_another_order_is_refused_by_the_setting(
    changes: dict[str, Any], said: str, dataset: tuple[str, DatasetManifest]
) -> None:
    with opened(dataset[0], 1)[0] as one:
        state = one.state_dict()
    with (
        opened(dataset[0], 1, **changes)[0] as other,
        pytest.raises(ValueError, match=f"other order of rows: .*{said}"),
    ):
        other.load_state_dict(state)


def test_what_cannot_be_opened_is_named(dataset: tuple[str, DatasetManifest], tmp_path: Path) -> None:
    uri, _ = dataset
    with pytest.raises(ManifestError):
        sparkring.data.open(str(tmp_path / "nothing"), global_batch=4)
    with pytest.raises(ValueError, match=r"split = 'test': .* has the splits \['train'\]"):
        sparkring.data.open(uri, "test", global_batch=4)
    with pytest.raises(ValueError, match="rank = 2: world = 2 processes"):
        sparkring.data.open(uri, rank=2, world=2, global_batch=4)
    with pytest.raises(
        ValueError, match="global_batch = 1: world = 2 processes share its rows, and some would have none"
    ):
        sparkring.data.open(uri, world=2, global_batch=1)
    with pytest.raises(ValueError, match="world = 2: filters and on_corrupt=quarantine ask the other ranks"):
        sparkring.data.open(uri, world=2, global_batch=4, filters=[["id", ">", 3]])


def test_what_a_reader_cannot_do_is_said(dataset: tuple[str, DatasetManifest]) -> None:
    uri, _ = dataset
    with pytest.raises(ValueError, match=r"^shufle: unknown key; did you mean 'shuffle'\?$"):
        sparkring.data.open(uri, global_batch=4, shufle=False)
    one = opened(uri, 1)[0]
    with pytest.raises(ValueError, match=r"state: has no consumed_samples and no order; give what state_dict\(\)"):
        one.load_state_dict({"x": 1})
    with pytest.raises(ValueError, match="state: has no consumed_samples and no order"):
        one.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iterate over it, without a DataLoader"):
        next(iter(torch.utils.data.DataLoader(one)))
    one.close()
    with pytest.raises(ValueError, match="the reader is closed"):
        next(one.batches())


def test_a_device_may_be_named_as_torch_names_it(dataset: tuple[str, DatasetManifest]) -> None:
    """It was `'str' object has no attribute 'type'`."""
    with sparkring.data.open(dataset[0], global_batch=24, device="cpu", **SETTINGS) as reader:
        assert next(iter(reader)).columns["x"].device == torch.device("cpu")


def test_nothing_of_spark_and_mlflow_is_imported() -> None:
    program = "import sys, sparkring.data; print({'pyspark', 'mlflow', 'sparkring.pipelines'} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
