"""The recipe `text`, made small, through the worker: every strategy is one override, and the curve stays the same."""

from __future__ import annotations

import json.decoder
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkring.conf.load import load_config
from sparkring.conf.manifest import MANIFEST_NAME, Column
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import Event, RankMetrics

from .conftest import write_dataset

pytestmark = pytest.mark.ranks
LENGTH, ROWS = 33, 128
SMALL = [
    *("model.args.width=32", "model.args.layers=2", "train.dtype=float64", "train.threads_per_rank=1"),
    *("train.steps=6", "train.log_every_steps=1", "train.eval_every_steps=6", "train.global_batch=16"),
    *("train.test_split=null", "report.must_beat=[]", "optim.warmup_steps=2", "data.lanes=8"),
]
STRATEGIES = {  # the one override -> the axis its bytes are sent over
    "ddp": (["parallel.engine=torch"], "dp x cp"),
    "zero1": (["parallel.engine=torch", "parallel.zero=1"], "dp x cp"),
    "zero2": (["parallel.zero=2"], "dp x cp"),
    "zero3": (["parallel.zero=3"], "dp x cp"),
    "pipeline": (["parallel.pp=2"], "pp"),
    "tensor": (["parallel.tp=2"], "tp"),
    "context": (["parallel.cp=2"], "cp"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of the standard library's sources as tokens; the validation split has the training split's rows."""
    folder = tmp_path_factory.mktemp("text")
    source = "".join(Path(module.__file__).read_text() for module in (textwrap, json.decoder))
    tokens = np.frombuffer(source.encode(), np.uint8)[: LENGTH * ROWS].reshape(ROWS, LENGTH).astype(np.int32)
    column = Column(name="tokens", dtype="int32", layout="vector", shape=(LENGTH,), cardinality=256)
    train, valid = (
        write_dataset(folder, [[32] * (ROWS // 32)], [column], lambda ids: {"tokens": list(tokens[ids])}, split)
        for split in ("train", "valid")
    )
    both = {"files": train.files + valid.files, "splits": train.splits | valid.splits}
    (folder / MANIFEST_NAME).write_text(train.model_copy(update=both).to_json())
    return folder


def train(
    group: WorkerGroup, text: Path, run: Path, world: int, words: list[str]
) -> tuple[list[float], dict[str, Any]]:
    """Loss of every step, and rank 0's summary."""
    losses = []

    def on_event(event: Event) -> None:
        if isinstance(event, RankMetrics) and event.rank == 0 and "train/loss" in event.values:
            losses.append(event.values["train/loss"])

    config = load_config("text", [*SMALL, f"launch.world={world}", *words]).as_dict()
    payload = {"config": config, "dataset": str(text), "run": str(run)}
    result = group.run(JobSpec("sparkring.training.worker.train:train", payload), world, on_event)
    return losses, result.result


@pytest.fixture(scope="module")
def expected(group: WorkerGroup, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses, _ = train(group, text, tmp_path_factory.mktemp("one"), 1, [])
    assert losses[-1] < losses[0] and len(losses) == 6
    return losses


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_one_override_gives_the_same_curve(
    group: WorkerGroup, text: Path, expected: list[float], tmp_path: Path, name: str
) -> None:
    words, axis = STRATEGIES[name]
    losses, summary = train(group, text, tmp_path, 2, words)
    assert losses == pytest.approx(expected, abs=1e-12)
    assert summary["measured"][f"sent_bytes {axis}"] > 0


@pytest.mark.horovod
@pytest.mark.parametrize("zero", [0, 1])
def test_so_does_horovod(group: WorkerGroup, text: Path, expected: list[float], tmp_path: Path, zero: int) -> None:
    losses, summary = train(group, text, tmp_path, 2, ["parallel.engine=horovod", f"parallel.zero={zero}"])
    assert losses == pytest.approx(expected, abs=1e-12)
    assert summary["measured"]["sent_bytes dp x cp"] > 0
