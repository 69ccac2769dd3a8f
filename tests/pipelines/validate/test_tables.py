"""Storage that cannot be written, and tables of which some files are looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.config import RunConfig
from sparkring.etl.examine import examine_sources
from sparkring.etl.sources.files.listing import LOOKED_AT, spread
from sparkring.pipelines.validate.folders import JOB_FOLDERS, storage_problems
from sparkring.pipelines.validate.recipe import device_problems
from sparkring.training.worker.device import NO_GPU

ETL = {"sources": {"t": {"path": "t", "format": "text"}}, "rows": "t", "features": {"path": {"kind": "categorical"}}}


def storage(**uris: str) -> RunConfig:
    return RunConfig.model_validate({"name": "a", "storage": uris, "tracking": {"enabled": False}, "etl": ETL})


def test_a_gpu_is_missed_only_where_the_ranks_run_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(gpus: int, master: str | None, device: str = "cuda", **parallel: Any) -> list[str]:
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("sparkring.pipelines.run.spark_settings.submitted", lambda: False)
        blocks = {"spark": {"master": master}, "train": {"device": device}, "launch": {"world": 2}}
        config = {"name": "a", "etl": ETL, "parallel": parallel} | blocks
        return [*device_problems(RunConfig.model_validate(config))]

    session = SimpleNamespace(master="local[2]")  # which the job would run in
    monkeypatch.setattr("sparkring.pipelines.run.spark_settings.active_context", lambda: session)
    assert found(0, "local[4]") == found(0, "spark://a:7077") == [NO_GPU]
    monkeypatch.setattr("sparkring.pipelines.run.spark_settings.active_context", lambda: None)
    assert found(0, None) == found(0, "local[4]") == [NO_GPU]
    (line,) = found(1, None)
    assert "launch.world = 2: each rank needs a GPU, and torch sees 1 on this host; set launch.world=1" in line
    assert not found(2, None) and not found(0, "spark://a:7077") and not found(1, None, servers={"per_host": 1})
    assert not found(0, None, device="auto") and not found(1, None, device="auto")


def test_a_bucket_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(port=0, ip_address="127.0.0.1")
    server.start()
    try:
        host, port = server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="there")
        options = f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        found = storage_problems(storage(runs=f"s3://there/runs{options}", datasets=f"s3://gone/datasets{options}"))
    finally:
        server.stop()
    (said,) = found.resources
    assert said.startswith("storage.datasets = 's3://gone/datasets") and "there is no bucket 'gone'" in said


def test_a_folder_is_made_by_a_job_only(tmp_path: Path) -> None:
    config = storage(runs=str(tmp_path / "a/runs"), datasets=str(tmp_path / "b"))
    assert not storage_problems(config).resources and not list(tmp_path.iterdir())
    assert not storage_problems(config, make=True).resources and (tmp_path / "a/runs").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    config = storage(runs=str(tmp_path / "link"), datasets="/dev/null/x")
    assert len(storage_problems(config).resources) == 2
    (said,) = storage_problems(config, JOB_FOLDERS).resources
    assert "link is a link to nothing" in said


def test_files_are_looked_at_from_the_first_to_the_last() -> None:
    assert spread(range(5), 16) == (0, 1, 2, 3, 4)
    chosen = spread(range(1000), LOOKED_AT)
    assert len(set(chosen)) == LOOKED_AT and (chosen[0], chosen[-1]) == (0, 999)


def test_of_a_table_read_by_intervals_the_last_is_looked_at(tmp_path: Path) -> None:
    for day, kind in (("2026-11-20", pa.string()), ("2026-11-21", pa.int32())):
        folder = tmp_path / f"sales/day={day}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"amount": pa.array([None], kind)}), folder / "a.parquet")
    block = {
        "sources": {"sales": {"path": str(tmp_path / "sales"), "format": "parquet", "columns": {"amount": "int"},
                              "partitions": {"day": "date"}}},
        "rows": "sales", "features": {"amount": {"kind": "numeric"}},
        "interval": {"column": "day", "sources": {"sales": "day"}, "last": "2026-11-21", "window": 2},
    }  # fmt: skip

    def found(last: str) -> list[str]:
        interval = dict(block["interval"], last=last)  # type: ignore[arg-type]
        return examine_sources(EtlConfig.model_validate(block | {"interval": interval})).problems

    assert found("2026-11-21") == [] == found("2026-11-22"), (
        "a missing interval is what `etl.interval.missing` is about"
    )
    (said,) = found("2026-11-20")
    assert "column 'amount' is string, declared int" in said


def test_what_a_job_pins_without_reading_it_is_left_to_the_pin(tmp_path: Path) -> None:
    """The tables of a lake are listed once: a listing is what a job on a known dataset spends its time on."""
    columns = {"path": str(tmp_path / "gone"), "format": "parquet", "columns": {"x": "int"}}
    sources = {"read": columns, "listed": columns | {"fingerprint": "stat"}}
    etl = EtlConfig.model_validate({"sources": sources, "rows": "read", "features": {"x": {"kind": "numeric"}}})
    assert [line.split(".")[2] for line in examine_sources(etl).problems] == ["read", "listed"]
    assert [line.split(".")[2] for line in examine_sources(etl, pinned_soon=True).problems] == ["read"]
