"""Which engine and which strategy a configuration gives."""

from __future__ import annotations

import pytest
import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.data_parallel.base import SingleProcess
from sparkring.training.parallel.data_parallel.horovod_ring import available
from sparkring.training.parallel.engine import choose_engine
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.placement import ModelPlacement


def test_one_process_is_the_same_strategy_with_nothing_around_it() -> None:
    strategy = build_strategy(ParallelConfig(), RankInfo(), torch.device("cpu"))
    assert type(strategy.local.data_parallel) is SingleProcess and type(strategy.local.placement) is ModelPlacement
    assert (strategy.engine, strategy.data_size, strategy.is_data_leader) == ("none", 1, True)


@pytest.mark.parametrize(
    ("settings", "mesh", "reason"),
    [
        ({"pp": 2}, Mesh(pp=2), "Horovod has no send and receive between ranks"),
        ({"zero": 2}, Mesh(dp=2), "Horovod's collectives carry zero 0 and 1 here"),
        ({"zero": 1}, Mesh(dp=2), "parallel.zero=1 runs on fully_shard unless parallel.engine=horovod is set"),
    ],
)
def test_auto_leaves_to_torch_what_horovod_cannot_carry(
    settings: dict, mesh: Mesh, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkring.training.parallel.engine.available", lambda device_type: None)
    with caplog.at_level("INFO"):
        assert choose_engine(ParallelConfig(**settings), mesh, "cpu") == "torch"
    assert reason in caplog.text


def test_settings_without_effect_are_logged_when_the_strategy_is_built(caplog: pytest.LogCaptureFixture) -> None:
    build_strategy(ParallelConfig(zero=1, engine="torch"), RankInfo(), torch.device("cpu"))
    assert "parallel.zero=1" in caplog.text and "have no effect" in caplog.text


def test_building_refuses_it_too() -> None:
    settings = ParallelConfig(dp=1, micro_batches=2, engine="torch")
    with pytest.raises(ValueError, match="micro_batches=2 with pp"):
        build_strategy(settings, RankInfo(), torch.device("cpu"))


def test_auto_logs_why_it_chose_torch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level("INFO"):
        assert choose_engine(ParallelConfig(tp=2), Mesh(tp=2), "cpu") == "torch"
    assert "since tp(2) * cp(1): tensor and context parallelism run on torch's process groups" in caplog.text
    monkeypatch.setattr(
        "sparkring.training.parallel.engine.available", lambda device_type: "horovod cannot be imported (test)"
    )
    with caplog.at_level("INFO"):
        assert choose_engine(ParallelConfig(), Mesh(dp=2), "cpu") == "torch"
    assert "cannot be imported (test)" in caplog.text
    with pytest.raises(ValueError, match="engine=horovod: horovod cannot be imported"):
        choose_engine(ParallelConfig(engine="horovod"), Mesh(dp=2), "cpu")


@pytest.mark.skipif(available("cpu") is not None, reason="Horovod is not installed")
@pytest.mark.horovod
def test_auto_takes_horovod_where_it_can() -> None:
    assert choose_engine(ParallelConfig(), Mesh(dp=2), "cpu") == "horovod"
    assert choose_engine(ParallelConfig(), Mesh(), "cpu") == "none"


@pytest.mark.skipif(available("cuda") == available("cpu"), reason="Horovod is missing, or was built with NCCL")
@pytest.mark.horovod
def test_a_horovod_built_for_the_cpu_is_not_used_on_gpu_tensors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert choose_engine(ParallelConfig(), Mesh(dp=2), "cuda") == "torch"
    assert "since this Horovod was built for the CPU" in caplog.text
    with pytest.raises(ValueError, match=r"parallel\.engine=horovod: this Horovod was built for the CPU"):
        choose_engine(ParallelConfig(engine="horovod"), Mesh(dp=2), "cuda")
