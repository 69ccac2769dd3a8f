"""`sparkring gc` on real datasets, runs, checkpoints and an MLflow store: what is needed stays, the rest goes whole."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from sparkring.conf.blocks.retention import RetentionConfig
from sparkring.conf.load import load_config
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.build import find_dataset
from sparkring.pipelines.cli import main
from sparkring.pipelines.housekeeping import gc
from sparkring.pipelines.housekeeping.retention import Deletion, Leftover, TrackedState, decide, protect
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.store.cleanup import Cleanup
from tests.pipelines.housekeeping import house as house_module
from tests.pipelines.housekeeping.house import House

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def built(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> House:
    house = house_module.build(spark, tmp_path_factory.mktemp("house"))
    shutil.copytree(house.home, house.home.with_name("as_built"))
    return house


@pytest.fixture
def house(built: House) -> Iterator[House]:
    """Everything as it was built, at its own place: MLflow has whole paths."""
    restore(built)
    yield built


def restore(house: House, kept: str = "as_built") -> None:
    """Put everything back from the folder `kept`; the database in place, since MLflow keeps it open."""
    for folder in ("datasets", "runs"):
        shutil.rmtree(house.home / folder, ignore_errors=True)
    shutil.copytree(house.home.with_name(kept), house.home, dirs_exist_ok=True)


def client_of(house: House) -> MlflowClient:
    uri = load_config(str(house.recipe)).config.tracking.store_uri
    return MlflowClient(uri, registry_uri=uri)


def files(house: House) -> dict[str, bytes]:
    """All files but MLflow's database, whose pages move when it is read."""
    found = [path for path in house.home.rglob("*") if path.is_file() and "mlflow.db" not in path.name]
    return {str(path.relative_to(house.home)): path.read_bytes() for path in found}


def pointers(house: House) -> list[str]:
    """URIs of the checkpoints that MLflow points at."""
    settings = load_config(str(house.recipe)).config.tracking.named("sales")
    return sorted(pointer.uri for pointer in Cleanup(settings, knows_runs=True).pointers())


def collect(house: House, *, dry_run: bool = False, words: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """The exit code, and the printed lines."""
    lines: list[str] = []
    return gc.collect_garbage(load_config(str(house.recipe), words).config, dry_run, lines.append), lines


def named(lines: list[str]) -> list[str]:
    """What the lines name as deleted, or as to be deleted, with kind, bytes and reason."""
    verbs = ("deleted ", "would go")
    found = [line for line in lines if line.startswith(verbs) and not line.startswith("deleted:")]
    return [line[len(verbs[0]) :].strip() for line in found]


def dangling(house: House) -> set[str]:
    """URIs that MLflow points at where no checkpoint is."""
    return {uri for uri in pointers(house) if not Path(uri, "COMMIT.json").exists()}


def check_nothing_dangles(house: House, but: frozenset[str] = frozenset()) -> None:
    """A pointer has its checkpoint, a manifest its parts and files, a run.json its run."""
    assert dangling(house) <= but
    for manifest in house.home.glob("datasets/sales-*/_manifest.json"):
        folder = open_storage(str(manifest.parent))
        assert find_dataset(folder, json.loads(manifest.read_text())["fingerprint"]) is not None, manifest
    for run in house.home.glob("runs/sales/*/run.json"):
        finished = json.loads(run.read_text())["status"] == "finished"
        assert (run.parent / "model/model.safetensors").exists() or not finished, run


def check_champion(house: House) -> None:
    """The first night's model and its data load."""
    version = client_of(house).get_model_version_by_alias("sales", "champion")
    config = json.loads(Path(version.source.removeprefix("file://"), "data/data/model.json").read_text())
    assert config == {"factor": 3}
    assert find_dataset(open_storage(str(house.datasets[0])), house.fingerprints[0]) is not None
    assert Runs(str(house.home / "runs"), "sales").read(house.runs[0].name).status == "finished"


def test_a_dry_run_changes_nothing_and_names_what_the_real_one_deletes(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    before, pointed = files(house), pointers(house)
    assert main(["gc", str(house.recipe), "--dry-run"]) == Exit.OK
    planned = capsys.readouterr().out.splitlines()
    assert files(house) == before and pointers(house) == pointed
    assert main(["gc", str(house.recipe)]) == Exit.OK
    done = capsys.readouterr().out.splitlines()
    assert named(planned) == named(done) != []
    after = files(house)
    gone_folders = [line.split()[1] for line in named(done) if not line.startswith("pointer")]
    under = [f for f in before if any(str(house.home / f).startswith(f"{folder}/") for folder in gone_folders)]
    assert sorted(before.keys() - after.keys()) == sorted(under) and after.keys() <= before.keys()
    bytes_named = sum(int(line.split()[2].replace(",", "")) for line in named(done) if not line.startswith("pointer"))
    assert bytes_named == sum(len(before[file]) for file in under)
    assert f" {bytes_named:,} bytes; " in done[-1]


def test_what_is_needed_stays_and_the_rest_goes(house: House) -> None:
    assert len(pointers(house)) == 9  # of 6 checkpoints that are there
    assert collect(house)[0] == Exit.OK
    check_champion(house)
    check_nothing_dangles(house)
    first, _, third = house.runs
    assert [path.exists() for path in house.datasets] == [True, False, True]  # champion's, old, newest
    assert [run.exists() for run in house.runs] == [True, True, True]
    assert [(run / "checkpoints").exists() for run in house.runs] == [True, False, True]
    assert [(run / "predictions").exists() for run in house.runs] == [True, False, True]
    steps = [f"{run}/checkpoints/step-{step}" for run in (first, third) for step in (2, 3)]
    assert pointers(house) == steps
    parts = sorted(path.name for path in house.home.glob("datasets/parts/sales/*"))
    assert parts == ["2024-03-01", "2024-03-02", "2024-03-03", "2024-03-04"]  # each of one of the two windows
    assert collect(house) == (Exit.OK, ["deleted: 0 folders, 0 bytes; 0 pointers to checkpoints"])


def test_without_an_alias_everything_old_goes(house: House) -> None:
    client_of(house).delete_registered_model_alias("sales", "champion")
    assert collect(house, words=("retention.runs.keep=1",))[0] == Exit.OK
    check_nothing_dangles(house)
    assert [path.exists() for path in house.datasets] == [False, False, True]
    assert [run.exists() for run in house.runs] == [False, False, True]
    assert sorted(path.name for path in house.home.glob("datasets/parts/sales/*")) == ["2024-03-03", "2024-03-04"]
    assert len(pointers(house)) == 2


def test_a_tagged_run_stays(house: House) -> None:
    client = client_of(house)
    record = Runs(str(house.home / "runs"), "sales").read(house.runs[1].name)
    client.set_tag(str(record.mlflow_run_id), "sparkring.keep", "shown to the board")
    collect(house, words=("retention.runs.keep=1",))
    assert (house.runs[1] / "checkpoints").exists() and house.datasets[1].exists()
    client.set_tag(str(record.mlflow_run_id), "sparkring.keep", "false")
    collect(house, words=("retention.runs.keep=1",))
    assert not house.runs[1].exists() and not house.datasets[1].exists()


@pytest.mark.parametrize("words", [("tracking.uri=http://127.0.0.1:9",), ("tracking.root={home}/moved",)])
def test_without_mlflow_nothing_is_deleted(house: House, words: tuple[str, ...]) -> None:
    """Neither with a server that does not answer, nor with a store that does not know the recipe's runs."""
    before = files(house)
    code, lines = collect(house, words=tuple(word.format(home=house.home) for word in words))
    assert code == Exit.RESOURCES and "nothing is deleted" in lines[0] and files(house) == before
    assert not (house.home / "moved").exists()


class Stopped(BaseException):
    """The process is killed."""


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Stop right before the n-th change of disk or store; gives how many changes there were."""
    changes = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == number:
                raise Stopped
            return act(*arguments)

        return wrapped

    monkeypatch.setattr(Storage, "delete", counted(Storage.delete))
    monkeypatch.setattr(Storage, "rename_file", counted(Storage.rename_file))
    monkeypatch.setattr(Cleanup, "delete_pointer", counted(Cleanup.delete_pointer))
    return lambda: changes


def test_a_gc_that_is_stopped_anywhere_leaves_nothing_dangling_and_the_next_one_finishes(house: House) -> None:
    words, before = ("retention.runs.keep=1",), frozenset(dangling(house))
    assert len(before) == 3  # that the house was built with
    client_of(house).delete_registered_model_alias("sales", "champion")
    shutil.copy(house.home / "mlflow/mlflow.db", house.home.with_name("without_alias.db"))
    with pytest.MonkeyPatch.context() as patch:
        changes = stop_at(patch, 0)
        collect(house, words=words)
        total, wanted = changes(), (files(house).keys(), pointers(house))
    assert total > 20
    for number in range(1, total + 1, 4):
        restore(house)
        shutil.copy(house.home.with_name("without_alias.db"), house.home / "mlflow/mlflow.db")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            stop_at(patch, number)
            collect(house, words=words)
        check_nothing_dangles(house, but=before)
        assert collect(house, words=words)[0] == Exit.OK
        assert (files(house).keys(), pointers(house)) == wanted, number


def test_what_cannot_be_deleted_is_named_and_the_rest_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is injected: root, who runs tests in containers, may delete everything."""
    delete = Storage.delete

    def refuse(storage: Storage, relative: str) -> None:
        if str(house.datasets[1]) in storage.path(relative):
            raise PermissionError(13, "Permission denied", storage.path(relative))
        delete(storage, relative)

    monkeypatch.setattr(Storage, "delete", refuse)
    code, lines = collect(house)
    assert code == Exit.RESOURCES and any("Permission denied" in line for line in lines if line.startswith("failed"))
    assert not (house.runs[1] / "checkpoints").exists()
    check_nothing_dangles(house)


def test_a_dataset_that_cannot_be_taken_out_of_use_keeps_its_parts(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Storage.rename_file

    def refuse(storage: Storage, relative: str, new: str) -> None:
        if relative.endswith("_manifest.json"):
            raise OSError(errno.EROFS, "Read-only file system", storage.path(relative))
        rename(storage, relative, new)

    client_of(house).delete_registered_model_alias("sales", "champion")
    monkeypatch.setattr(Storage, "rename_file", refuse)
    code, lines = collect(house)
    assert code == Exit.RESOURCES and sum("a dataset that is still there needs it" in line for line in lines) == 2
    check_nothing_dangles(house)
    assert all(dataset.exists() for dataset in house.datasets)


@pytest.mark.parametrize("number", [0, 1])
def test_a_dataset_that_a_run_takes_meanwhile_stays_with_all_parts(
    house: House, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config, decide = load_config(str(house.recipe)).config, gc.decide
    client_of(house).delete_registered_model_alias("sales", "champion")
    with ExitStack() as running:

        def decide_and_begin(*arguments: Any) -> Any:
            found = decide(*arguments)
            running.enter_context(Runs(config.storage.runs, "sales").begin(config, house.fingerprints[number]))
            return found

        monkeypatch.setattr(gc, "decide", decide_and_begin)
        code, lines = collect(house)
    kept = [line for line in lines if line.startswith("kept ")]
    assert code == Exit.OK and len(kept) == 3 and "has started meanwhile" in kept[0]
    assert [dataset.exists() for dataset in house.datasets] == [number == 0, number == 1, True]
    assert len(list(house.home.glob("datasets/parts/sales/*"))) == 4
    check_nothing_dangles(house)


def test_on_an_object_store_a_folder_goes_and_a_half_deleted_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(port=0, ip_address="127.0.0.1", verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        place = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1"}
        pafs.S3FileSystem(**place, allow_bucket_creation=True).create_dir("bucket")
        query = "&".join(f"{key}={value}" for key, value in place.items())
        storage = open_storage(f"s3://bucket/runs?{query}")
        runs = storage.at("sales")
        for file in ("a/run.json", "a/model/weights", "b/run.json", "b/model/weights"):
            runs.put_atomic(file, b"x" * 10)
        delete = Storage.delete

        def stop(folder: Storage, relative: str) -> None:
            if relative.endswith("/model"):
                raise Stopped
            delete(folder, relative)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(Storage, "delete", stop)
            gc.delete_folder(runs, Deletion("run", "runs", "a", 20, ""))
        assert runs.list_files("a") == ["a/model/weights", "a/run.json.deleted"]
        found = gc.take_inventory(gc.Roots("sales", open_storage(f"s3://bucket/datasets?{query}"), storage), {})
        assert found.leftovers == [Leftover("runs", "a", 20)]
        gc.delete_folder(runs, Deletion("leftover", "runs", "a", 20, ""))
        assert runs.list_files() == ["b/model/weights", "b/run.json"] and gc.tree_bytes(runs, "b")[""] == 20
    finally:
        server.stop()


@pytest.mark.parametrize(
    "link",
    [
        "datasets/sales-{0}", "datasets/parts", "datasets/parts/sales", "datasets/parts/sales/2024-03-01",
        "datasets/parts/sales/2024-03-01/{1}", "runs/sales", "runs/sales/{2}", "runs/sales/{2}/checkpoints",
        "runs/sales/{2}/checkpoints/step-1", "runs/sales/{2}/predictions",
    ],
)  # fmt: skip
def test_what_a_symbolic_link_leads_to_is_not_deleted(link: str, tmp_path: Path) -> None:
    """With files that an earlier gc would have left, so that no rule is needed."""
    dataset, part, run = "d" * 12, "e" * 64, "20240301-020000-0a"
    folders = {
        f"datasets/sales-{dataset}": "_manifest.json", f"datasets/parts/sales/2024-03-01/{part}": "_part.json",
        f"runs/sales/{run}": "run.json",
    }  # fmt: skip
    for folder, name in folders.items():
        place = tmp_path / "home" / folder
        for file in ("mine", "checkpoints/step-1/COMMIT.json", "predictions/rows.parquet"):
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text("{}")
        (place / f"{name}.deleted").write_text("{}")
    at = tmp_path / "home" / link.format(dataset, part, run)
    at.rename(tmp_path / "elsewhere")
    at.symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    roots = gc.Roots("sales", *(open_storage(str(tmp_path / "home" / name)) for name in ("datasets", "runs")))
    inventory = gc.take_inventory(roots, {})
    deletions = decide(inventory, protect("sales", inventory, TrackedState()), RetentionConfig(), datetime.now(UTC))
    for deletion in deletions:
        gc.delete_folder(roots.at(deletion.root), deletion)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def test_a_link_among_runs_is_named_and_the_rest_goes(house: House) -> None:
    aside = house.home.with_name("aside")
    shutil.rmtree(aside, ignore_errors=True)
    (house.runs[1] / "checkpoints").rename(aside)
    (house.runs[1] / "checkpoints").symlink_to(aside)
    before = sorted(aside.rglob("*"))
    assert before
    for words in ((), ("retention.runs.keep=1",)):
        code, lines = collect(house, words=words)
        assert code == Exit.OK and sorted(aside.rglob("*")) == before
        named_link = f"passed over: {house.runs[1]}/checkpoints is a symbolic link; what it leads to is not deleted"
        assert named_link in lines
    assert not house.runs[1].exists() and not house.datasets[1].exists()


def test_a_mount_point_among_runs_is_named_and_stays(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is one is made up; tests/conf/test_storage.py has real ones."""
    mounted = house.runs[1] / "checkpoints"
    before = sorted(mounted.rglob("*"))
    monkeypatch.setattr("sparkring.conf.storage.mount_points", lambda: ["/", str(mounted)])
    code, lines = collect(house, words=("retention.runs.keep=1",))
    assert code == Exit.OK and f"passed over: {mounted} is a mount point; what it leads to is not deleted" in lines
    assert before and sorted(mounted.rglob("*")) == before and [*house.runs[1].iterdir()] == [mounted]


def test_a_checkpoint_stays_while_mlflow_still_points_at_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: Cleanup, model_id: str) -> None:
        raise StoreUnreachable("database or disk is full")

    monkeypatch.setattr(Cleanup, "delete_pointer", refuse)
    before = pointers(house)
    code, lines = collect(house, words=("retention.runs.keep=1",))
    assert code == Exit.RESOURCES and "database or disk is full" in "".join(lines)
    assert all((run / "checkpoints").exists() for run in house.runs) and pointers(house) == before
    assert not house.datasets[1].exists()


FULL = """
import errno, os, shutil, subprocess, sys
home, built, left, recipe, old = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", home], check=True)
shutil.copytree(built, home, dirs_exist_ok=True)
open(f"{old}/shard", "wb").write(b"x" * 200_000)  # what a dataset has that is worth deleting
with open(f"{home}/full", "wb", buffering=0) as file:
    try:
        while True:
            file.write(b"x" * 4096)
    except OSError as error:
        assert error.errno == errno.ENOSPC
try:
    open(f"{home}/more", "wb").write(b"x" * 8192)
except OSError as error:
    print("FULL", error.errno == errno.ENOSPC)
from sparkring.pipelines.cli import main
codes = [main(["gc", recipe]), main(["gc", recipe])]
shutil.copytree(home, left, ignore=shutil.ignore_patterns("full"))
print("CODES", codes)
"""


def test_on_a_full_disk_gc_makes_room_and_leaves_nothing_dangling(house: House, private_mounts: list[str]) -> None:
    """A tmpfs of 16 MB with everything on it, MLflow's store too."""
    built, left = (str(house.home.with_name(name)) for name in ("as_built", "left"))
    command = [*private_mounts, sys.executable, "-c", FULL, str(house.home), built, left, str(house.recipe)]
    command.append(str(house.datasets[1]))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert "FULL True" in done.stdout, done.stderr
    assert "CODES [0, 0]" in done.stdout, done.stdout + done.stderr
    restore(house, "left")
    check_nothing_dangles(house)
    assert len([*house.home.glob("datasets/sales-*")]) == 2 and len(pointers(house)) == 4
