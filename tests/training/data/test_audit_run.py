"""`sparkring audit` on a run's folder: records, checkpoint and dataset must agree, whichever of them was changed."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.cli.audit import audit_run
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.peers import solo
from sparkring.training.data.audit.log import FORMAT, AuditHeader, AuditLog
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.loop.fit import TrainerState


@pytest.fixture
def dataset(make_dataset: Callable[..., DatasetManifest], tmp_path: Path) -> tuple[Path, DatasetManifest]:
    return tmp_path / "dataset", make_dataset(tmp_path / "dataset", [[25, 25], [50]])


def trained(dataset: tuple[Path, DatasetManifest], run: Path, steps: int, **data: Any) -> Path:
    """A run without a model that has made `steps` steps and committed a checkpoint of them; of two ranks, but where
    they would have to ask each other."""
    commit(run, steps, dataset[1], recorded(dataset, run, steps, **data))
    return run


def recorded(dataset: tuple[Path, DatasetManifest], run: Path, steps: int, **data: Any) -> dict[str, Any]:
    """The audit's records of a run of `steps` steps; the reader's order_state."""
    folder, manifest = dataset
    size = 1 if data.keys() & {"filters", "on_corrupt"} else 2
    config = DataConfig.model_validate({"lanes": 4, "tail": "pad", "audit": True} | data)
    for rank in range(size):
        reader = make_reader(
            config, ReadRequest(open_storage(str(folder)), manifest, "train", ["x"], 8), DataRank(rank, size)
        )
        order = reader.order_state()
        header = AuditHeader(format=FORMAT, attempt=1, rank=rank, size=size, dataset=str(folder), order_state=order)
        log = AuditLog(open_storage(str(run)).at("audit"), header)
        for step, batch in enumerate(reader.batches(0, steps)):
            log.record(*divmod(step, reader.steps_per_epoch), batch)
        log.flush()
        reader.close()
    return dict(order)


def commit(run: Path, steps: int, manifest: DatasetManifest, order: dict[str, Any]) -> None:
    state = {"state": TrainerState(step=steps).to_json(), "dataset": manifest.fingerprint, "order": order}
    checkpoints = Checkpointer(open_storage(str(run)).at("checkpoints"), solo())
    checkpoints.save(steps, {"w": torch.zeros(1)}, state | {"config_digest": ""})
    checkpoints.close()


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ({}, 100),
        ({"tail": "drop"}, 96),
        ({"shuffle": False}, 100),
        ({"filters": [["id", ">=", 30], ["id", "<", 75]]}, 45),
        ({"filters": [["id", "in", [3, 50, 51, 52, 53, 54, 55, 56, 99]]]}, 9),
        ({"cache": "files"}, 100),
    ],
)
def test_a_run_is_proven_row_by_row(
    dataset: tuple[Path, DatasetManifest], tmp_path: Path, data: dict[str, Any], rows: int
) -> None:
    if data.get("cache"):
        data = {"cache": {"files": str(tmp_path / "files")}}
    report = audit_run(str(trained(dataset, tmp_path / "run", 30, **data)))
    assert report.ok and report.epochs[0].rows == report.expected_rows == rows, report.lines()
    dropped = "96 of 100 rows, attempts [1], ranks [2]: each exactly once, 4 left out by data.tail"
    assert (dropped if "tail" in data else "every row exactly once") in report.lines()[0]


def test_a_quarantined_file_is_no_missing_row(dataset: tuple[Path, DatasetManifest], tmp_path: Path) -> None:
    folder, manifest = dataset
    path = folder / manifest.files[0].path
    path.write_bytes(path.read_bytes()[:-9] + b"spoilt" + path.read_bytes()[-3:])
    report = audit_run(str(trained(dataset, tmp_path / "run", 7, on_corrupt="quarantine")))
    assert report.ok and report.epochs[0].rows == 50, report.lines()


def test_records_that_are_gone_or_cut_are_found(
    dataset: tuple[Path, DatasetManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(dataset, tmp_path / "run", 39)  # three epochs
    assert main(["audit", str(run)]) == Exit.OK and "every row exactly once" in capsys.readouterr().out
    one, other = sorted((run / "audit").rglob("*.ids"))
    data = one.read_bytes()
    one.unlink()
    assert main(["audit", str(run)]) == Exit.DATA and "steps missing: 13 of 13" in capsys.readouterr().out
    one.write_bytes(data[:-11])
    assert main(["audit", str(run)]) == Exit.DATA
    told = capsys.readouterr().err
    assert one.name in told and "cut or changed" in told and "Traceback" not in told and len(told.splitlines()) == 1
    one.write_bytes(data)
    other.unlink()
    one.unlink()
    assert main(["audit", str(run)]) == Exit.DATA and "no audit records" in capsys.readouterr().err


def test_what_says_how_far_the_run_came_must_be_there_and_agree(
    dataset: tuple[Path, DatasetManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, manifest = dataset
    run = trained(dataset, tmp_path / "run", 13)
    (folder / "_manifest.json").write_text(manifest.model_copy(update={"fingerprint": "b" * 64}).to_json())
    assert main(["audit", str(run)]) == Exit.DATA and "not the dataset of" in capsys.readouterr().err
    fewer = manifest.model_copy(
        update={
            "files": manifest.files[:1],
            "splits": {"train": manifest.splits["train"].model_copy(update={"rows": 50, "files": 1})},
            "accounting": manifest.accounting.model_copy(update={"rows_in": 50, "rows_out": 50}),
        }
    )
    (folder / "_manifest.json").write_text(fewer.to_json())
    assert main(["audit", str(run)]) == Exit.DATA and "the run read 100 rows" in capsys.readouterr().err
    (folder / "_manifest.json").unlink()
    assert main(["audit", str(run)]) == Exit.DATA and "not a dataset" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["audit", str(run)]) == Exit.DATA and "no committed checkpoint" in capsys.readouterr().err


def test_the_checkpoint_that_says_how_far_the_run_came_must_be_whole(
    dataset: tuple[Path, DatasetManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a run whose last epoch has no records would be called every row exactly once."""
    run = trained(dataset, tmp_path / "run", 26)
    (trainer,) = run.rglob("trainer.json")
    good = trainer.read_text()
    for spoiled in (good.replace('"step": 26', '"step": 13'), good[:-9]):
        trainer.write_text(spoiled)
        assert spoiled != good and main(["audit", str(run)]) == Exit.DATA
        said = capsys.readouterr().err
        assert "step-26" in said and "/trainer.json has " in said and len(said.splitlines()) == 1, said
    trainer.write_text(good)
    commit(run, 13, dataset[1], json.loads(good)["trainer"]["order"])
    for step, ok in ((13, True), (26, False)):
        marker = run / f"checkpoints/step-{step}/COMMIT.json"
        whole = marker.read_text()
        marker.write_text("{")
        report = audit_run(str(run))
        assert report.ok == ok and (f"step-{step}/COMMIT.json" in str(report.problems)) == (not ok), report.problems
        marker.write_text(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": 0}, "global_batch is 0; it must be at least 1"),
        ({"filters": [{}]}, "filters.0 = {}: input should be a valid tuple"),
        ({"filters": [["nothing", "==", 3]]}, "data.filters: "),
        ({"seed": -1}, "seed = -1: "),
        ({"tail": "x"}, "tail = 'x': "),
    ],
)
def test_an_order_that_is_none_is_refused_by_file_in_one_line(
    dataset: tuple[Path, DatasetManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: dict[str, Any], words: str,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    commit(run, 13, dataset[1], recorded(dataset, run, 13) | change)
    assert main(["audit", str(run)]) == Exit.DATA
    said = capsys.readouterr().err
    assert "trainer.json: " in said and words in said and "pydantic" not in said and len(said.splitlines()) == 1, said


def test_records_choose_no_host_to_ask(
    dataset: tuple[Path, DatasetManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(dataset, tmp_path / "run", 13)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for uri in (f"http://{address}/x", f"s3://b/x?endpoint_override={address}&scheme=http", "memory://x"):
            for path in run.rglob("*.ids"):
                line, _, body = path.read_bytes().partition(b"\n")
                path.write_bytes(json.dumps(json.loads(line) | {"dataset": uri}).encode() + b"\n" + body)
            assert main(["audit", str(run)]) == Exit.DATA
            said = capsys.readouterr().err
            assert uri in said and "give it as --dataset" in said and len(said.splitlines()) == 1, said
        with pytest.raises(TimeoutError):
            server.accept()
    assert main(["audit", str(run), "--dataset", str(dataset[0])]) == Exit.OK
