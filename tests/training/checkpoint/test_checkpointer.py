from __future__ import annotations

import json
import math
import pickletools
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.conf.storage import Storage, open_storage
from sparkring.training.checkpoint import checkpointer as checkpointer_module
from sparkring.training.checkpoint import writer as writer_module
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.format import DTYPES, CheckpointError
from sparkring.training.checkpoint.policy import Retention
from tests.waits import wait_for

TRAINER = {"step": 3, "cursor": 96, "lr": 1e-3, "best": math.inf, "order_state": {"seed": 1, "lanes": (4, 8)}}


def trained(width: int = 4, seed: int = 0) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for _ in range(seed + 1):
        model(torch.randn(5, width)).square().sum().backward()
        optimizer.step()
    return model, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{prefix}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{prefix}.{i}").items()}
    return {prefix: value}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    left, right = flat(one), flat(other)
    assert left.keys() == right.keys()
    for name in left:
        if isinstance(left[name], torch.Tensor):
            assert torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype, name
        else:
            assert left[name] == right[name] and type(left[name]) is type(right[name]), name


@pytest.mark.parametrize("stuck", [False, True])
def test_who_waits_for_a_slow_save_tells_how_far_it_is_and_says_nothing_of_a_stuck_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Else the hang watch ends healthy jobs, or never ends a storage that hangs."""
    monkeypatch.setattr(checkpointer_module, "POLL_S", 0.02)
    monkeypatch.setattr("sparkring.conf.storage.CHUNK_BYTES", 1 << 10)
    write = writer_module.write_file

    def slowly(folder: Storage, path: str, parts: Any, on_progress: Callable[[], None]) -> Any:
        def written() -> None:
            before = len(told)

            def is_told() -> bool:
                on_progress()  # again: who begins to wait after a piece hears of the next one only
                return stuck or len(told) > before

            wait_for(is_told)

        entry = write(folder, path, parts, written)
        if stuck and not grew:
            time.sleep(0.4)  # what is written has been told by now
            before = len(told)
            time.sleep(0.2)
            grew.append(len(told) - before)
        return entry

    monkeypatch.setattr(writer_module, "write_file", slowly)
    told: list[str] = []
    grew: list[int] = []  # texts while the first file was stuck
    checkpointer = Checkpointer(open_storage(str(tmp_path)), on_progress=told.append)
    checkpointer.save(1, {"w": torch.arange(2048.0)}, TRAINER)  # 8 pieces
    checkpointer.wait()
    assert len(set(told)) == len(told)
    assert grew == [0] if stuck else len(told) >= 6
    assert all(words.startswith("checkpoint-1: piece ") for words in told)
    told.clear()
    info = checkpointer.latest()
    assert info is not None and len(set(told)) == len(told) > len(info.files)
    checkpointer.load(info, {"w": torch.zeros(2048)})
    assert told[-1] == "load box 1 of step-1"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_everything_comes_back(tmp_path: Path, asynchronous: bool) -> None:
    _, state = trained(seed=1)
    checkpointer = Checkpointer(open_storage(str(tmp_path)), asynchronous=asynchronous)
    checkpointer.save(3, state, TRAINER, metric=0.25, rank_state={"codec": np.arange(3, dtype=np.float32)})
    expected = (torch.rand(2), np.random.rand(), random.random())
    _, other = trained(seed=0)
    info = checkpointer.latest()
    assert info is not None and info.metric == 0.25 and info.world == 1 and info.skipped == ()
    restored = checkpointer.load(info, other)
    assert restored.trainer == TRAINER
    assert restored.rank_state is not None and restored.rank_state["codec"].tolist() == [0, 1, 2]
    assert_same(state, other)
    assert (
        torch.equal(torch.rand(2), expected[0]) and np.random.rand() == expected[1] and random.random() == expected[2]
    )
    checkpointer.close()


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for shape in ((), (0, 3), (5,), (2, 3, 4)):
            raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
            tensors[f"{name}{shape}"] = (
                raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
            )
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, {"t": tensors}, {})
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    info = checkpointer.latest()
    assert info is not None
    checkpointer.load(info, {"t": empty})
    for name, tensor in tensors.items():
        left, right = tensor.contiguous().reshape(-1), empty[name].contiguous().reshape(-1)
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


def test_training_may_change_everything_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, saved = writer_module.write_file, threading.Event()
    written_after_save: list[bool] = []

    def write_after_save(*given: Any) -> Any:
        written_after_save.append(saved.wait(60))
        return write(*given)

    monkeypatch.setattr(writer_module, "write_file", write_after_save)
    model, state = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = {"cursor": 1, "history": [1, 2]}
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, state, trainer)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    trainer["history"].append(3)
    saved.set()
    info = checkpointer.latest()
    assert info is not None and len(written_after_save) > 1 and all(written_after_save)
    target = trained(seed=1)[1]
    restored = checkpointer.load(info, target)
    assert restored.trainer == {"cursor": 1, "history": [1, 2]}
    assert_same(before, target["model"])


def test_tables_are_copied_when_the_save_before_is_written_and_training_waits_for_the_copy(tmp_path: Path) -> None:
    """Before, memory would hold a second copy beside the table."""
    seen: list[str] = []

    def copy(most_bytes: int) -> dict[str, torch.Tensor]:
        seen.append("copied")
        time.sleep(0.05)
        return {"ids": torch.arange(3)}

    def on_commit(info: Any) -> None:
        time.sleep(0.2)
        seen.append(f"step {info.step}")

    checkpointer = Checkpointer(open_storage(str(tmp_path)), on_commit=on_commit)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.ones(1)}, {}, tables={"users": copy})
        assert checkpointer.times.stall_s > checkpointer.times.copy_s > 0
    checkpointer.wait()
    assert seen == ["copied", "step 1", "copied", "step 2"]


def test_a_damaged_checkpoint_is_skipped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)), keep=Retention(last=5))
    for step in (1, 2, 3, 4):
        checkpointer.save(step, trained(seed=step)[1], {"step": step}, metric=1.0 / step)
    checkpointer.wait()
    shard = next((tmp_path / "step-4").rglob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    index = next((tmp_path / "step-3").rglob("index.json"))
    index.write_bytes(index.read_bytes()[:-1])
    info = checkpointer.latest()
    assert info is not None and info.step == 2
    assert "step-4" in info.skipped[0] and "sha256" in info.skipped[0] and "rank-00000.safetensors" in info.skipped[0]
    assert "step-3" in info.skipped[1] and "index.json" in info.skipped[1]
    assert "checkpoint skipped: step-4" in caplog.text
    best = checkpointer.best("min")
    assert best is not None and best.step == 2
    unverified = checkpointer.latest(verify=False)
    assert unverified is not None and unverified.step == 4
    checkpointer.save(3, trained()[1], {})  # the run goes on from 2; what was damaged must not outlive it
    info = checkpointer.latest()
    assert info is not None and info.step == 3 and info.skipped == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "digest": ""}'])
def test_a_broken_marker_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, trained()[1], {})
    checkpointer.wait()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "COMMIT.json").write_text(text)
    info = checkpointer.latest()
    assert info is not None and info.step == 1 and "step-2/COMMIT.json" in info.skipped[0]


def test_a_changed_marker_is_no_checkpoint(tmp_path: Path) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, trained()[1], {}, metric=0.5)
    checkpointer.wait()
    marker = tmp_path / "step-1" / "COMMIT.json"
    marker.write_text(marker.read_text().replace('"metric": 0.5', '"metric": 0.4'))
    assert checkpointer.latest() is None


def test_another_model_is_named_whole(tmp_path: Path) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, {"a": torch.ones(2), "b": torch.ones(3), "old": 1, "kind": 2}, {})
    state = {"a": torch.zeros(2), "b": torch.zeros(4), "new": torch.zeros(1), "kind": torch.zeros(1)}
    info = checkpointer.latest()
    assert info is not None
    with pytest.raises(CheckpointError) as caught:
        checkpointer.load(info, state)
    message = str(caught.value)
    assert "1 missing from the checkpoint: new" in message
    assert "1 unexpected in the checkpoint: old" in message
    assert "2 misshapen: b shape (3,) there, shape (4,) here, kind a value there, shape (1,) here" in message
    assert state["a"].sum() == 0  # nothing was touched


def test_retention_and_replacing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)), keep=Retention(last=2, best=1, every=10))
    for step in (5, 10, 15, 20, 25, 30):
        checkpointer.save(step, {"x": torch.full((2,), float(step))}, {}, metric=abs(step - 14.0))
    checkpointer.save(30, {"x": torch.full((2,), -1.0)}, {})
    checkpointer.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-15", "step-20", "step-25", "step-30"]
    assert len(list((tmp_path / "step-30").iterdir())) == 2  # the marker and one generation: the older one is gone
    info = checkpointer.latest()
    assert info is not None
    state = {"x": torch.zeros(2)}
    checkpointer.load(info, state)
    assert state["x"].tolist() == [-1.0, -1.0]


def test_errors_surface_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, trained()[1], {})
    checkpointer.wait()

    def full(folder: Storage, path: str, *_: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device", folder.path(path))

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_file", full)
        checkpointer.save(2, trained()[1], {})
        with pytest.raises(CheckpointError, match=r"step 2 failed on rank 0 of 1: OSError.*No space.*step-2"):
            checkpointer.save(3, trained()[1], {})
    checkpointer.save(4, trained()[1], {})
    info = checkpointer.latest()
    assert info is not None and info.step == 4
    checkpointer.save(5, trained()[1], {"loader": object()})
    with pytest.raises(CheckpointError, match=r"trainer\.loader: a object cannot be checkpointed"):
        checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"optimizer\.fn: a function"):
        checkpointer.save(6, {"optimizer": {"fn": flat}}, {})
        checkpointer.wait()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"opening .*file/checkpoints failed on rank 0"):
        Checkpointer(open_storage(str(tmp_path / "file" / "checkpoints")))


def test_nothing_is_pickled(tmp_path: Path) -> None:
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(1, trained()[1], TRAINER)
    checkpointer.wait()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".safetensors"} and len(files) == 5
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are not JSON
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))


def test_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(port=0, ip_address="127.0.0.1")
    server.start()
    try:
        host, port = server.get_host_and_port()
        uri = f"s3://bucket/run/checkpoints?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        storage = open_storage(uri)
        import pyarrow.fs as pafs

        pafs.S3FileSystem(
            endpoint_override=f"{host}:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        ).create_dir("bucket")
        checkpointer = Checkpointer(storage, keep=Retention(last=1))
        for step in (1, 2):
            checkpointer.save(step, trained(seed=step)[1], {"step": step})
        info = checkpointer.latest()
        assert info is not None and info.step == 2
        target = trained()[1]
        checkpointer.load(info, target)
        assert_same(target, trained(seed=2)[1])
        assert not [path for path in storage.list_files() if path.startswith("step-1/")]
    finally:
        server.stop()


def test_the_documentation_reads_one_with_plain_torch(tmp_path: Path) -> None:
    """The code block of docs/explanation/checkpoints.md, run as it stands there."""
    text = (Path(__file__).parents[3] / "docs/explanation/checkpoints.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    _, state = trained(seed=2)
    checkpointer = Checkpointer(open_storage(str(tmp_path)))
    checkpointer.save(7, state, {})
    checkpointer.wait()
    scope: dict[str, Any] = {}
    exec(code[1], scope)
    read = scope["read_checkpoint"](str(tmp_path / "step-7"))
    for name, tensor in state["model"].items():
        assert torch.equal(read[f"model.{name}"], tensor)
    assert read["optimizer.param_groups.0.lr"] == 2.1
