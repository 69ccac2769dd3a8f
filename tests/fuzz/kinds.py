"""What is read from outside: real examples of each kind, how it is read, and the errors its reader documents."""

from __future__ import annotations

import io
import json
import logging
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from pydantic import TypeAdapter
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.transforms import IdentityTransform
from torch import nn

from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.load import ConfigError, load_config
from sparkring.conf.manifest import ManifestError, read_manifest
from sparkring.conf.recipes import recipe_names
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import interval_of, parse_date
from sparkring.conf.sources import IcebergSource
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError, parse, read
from sparkring.etl.build import numbered_files
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.source import OpenIceberg
from sparkring.etl.sources.predicate import parse as parse_where
from sparkring.etl.text.tokenizer import Codec, train_bpe
from sparkring.etl.windows.parts import PART_NAME, Part, find_part
from sparkring.etl.windows.window import PartFolder
from sparkring.pipelines import serving
from sparkring.pipelines.evaluation.evaluate import read_predictions
from sparkring.pipelines.model.check import data_folder
from sparkring.pipelines.predict.publish import MANIFEST as PREDICTIONS
from sparkring.pipelines.predict.publish import PredictionFile, PublishedPredictions
from sparkring.pipelines.run.runs import RunRecord, Runs
from sparkring.pipelines.schedule.conditional import Found
from sparkring.pipelines.schedule.lease import LeaseState, read_state
from sparkring.pipelines.schedule.ledger import STATE, DateRecord, Ledger
from sparkring.pipelines.tracking.journal import Journal, abandoned_journals
from sparkring.pipelines.tracking.mlmodel import MLMODEL
from sparkring.pipelines.tracking.ops import Artifact, Metrics, StartRun
from sparkring.training.checkpoint.catalog import committed, parse_marker
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.dcp import mismatch, read_index, to_metadata
from sparkring.training.checkpoint.format import CheckpointError
from sparkring.training.checkpoint.layout import RankFile, TrainerFile
from sparkring.training.checkpoint.weights import FILE as WEIGHTS_FILE
from sparkring.training.checkpoint.weights import read_weights, write_weights
from sparkring.training.data.audit.log import read_records
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.launch.channel.frames import ProtocolError, decode, encode
from sparkring.training.loop.fit import LoopRecord, TrainerState
from sparkring.training.model.folder import (
    CONFIG,
    DIGESTS,
    MANIFEST,
    TABLES,
    TREES_FILE,
    attach_tables,
    changed_files,
    model_files,
    read_model_folder,
    write_digests,
    write_tables,
)
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.parallel.state import TensorInfo
from sparkring.training.servers.codec import pack, unpack
from sparkring.training.servers.definition import Definition, decoded
from sparkring.training.servers.partition import cut_parameters
from sparkring.training.tables.exchange import Alone
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import TableSpec
from sparkring.training.tables.update_rules import UpdateRule
from sparkring.training.trees.model import read_trees
from sparkring.training.worker.result import SUMMARY, FailedAttempt, read_result
from tests.etl.sources.iceberg.tables import delete_by_position
from tests.etl.sources.iceberg.tables import paths as table_paths
from tests.fuzz.mutate import mutated, overwritten
from tests.pipelines import served
from tests.pipelines.results import train_result
from tests.training.launch.examples import MESSAGES, example
from tests.training.servers.examples import SERVER_MESSAGES, server_message

CONF = Path(__file__).parents[2] / "conf/recipes"
SHA = "ab" * 32


@dataclass(frozen=True)
class Kind:
    """`read(data)` returns, or raises one of `errors`. share: how many of all inputs are of this kind."""

    examples: list[bytes]
    read: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    share: float = 1.0
    damage: Callable[[random.Random, bytes], bytes] = mutated


def kinds(folder: Path) -> dict[str, Kind]:
    """All kinds; files are read from below `folder`."""
    logging.getLogger().setLevel(logging.CRITICAL)
    made = {
        "manifest": _manifest(folder),
        PART_NAME: _part(folder / "part"),
        "run.json": _run(folder),
        STATE: _date(folder / "ledger"),
        "lease": _lease(),
        "server definition": _definition(),
        SUMMARY: _summary(folder),
        PREDICTIONS: _scored(),
    }
    made |= _iceberg(folder / "lake") | {"where": _where()}
    made |= {TREES_FILE: _trees(folder / "trees"), "model folder": _models(folder / "models")}
    made |= {"sha256.json": _digests(folder / "hashed"), MLMODEL: _mlmodel(folder / "mlmodel"), "date": _dates()}
    made |= _checkpoint(folder / "checkpoints") | _model(folder / "model") | _recipe(folder)
    made |= {"tokenizer": _tokenizer(), "predictions": _predictions(folder), "journal": _journal(folder / "tracking")}
    header = {"format": 3, "attempt": 1, "rank": 0, "size": 2, "dataset": "d", "order_state": {"seed": 1}}
    records = np.array([0, 0, 4, 2, 5, 6, 0, 1, 4, 2, 1, 7], np.int64).tobytes()
    audit = json.dumps(header).encode() + b"\n" + records
    made["audit"] = Kind([audit], lambda data: read_records(data, "a.ids"), (ValueError,), 2.0)
    for message in MESSAGES:
        made[message.__name__] = Kind([encode(example(message))[4:]], decode, (ProtocolError,), 2.0 / len(MESSAGES))
    return made | _server_messages()


def _server_messages() -> dict[str, Kind]:
    """Requests to parameter servers, and their replies."""
    made = {}
    for kind in SERVER_MESSAGES:
        data = pack(server_message(kind))
        made[kind.__name__] = Kind([data], partial(unpack, kind), (ValueError,), 1.0 / len(SERVER_MESSAGES))
    return made


def _manifest(folder: Path) -> Kind:
    file = {"path": "d/a.parquet", "split": "train", "rows": 3, "bytes": 9, "sha256": SHA, "row_groups": [2, 1]}
    numeric = {"name": "x", "kind": "numeric", "column": "x", "transform": "none", "mean": 1.0, "std": 2.0, "fill": 1.0,
               "indicator": False, "train_nulls": 0}  # fmt: skip
    plain = {
        "name": "p",
        "kind": "passthrough",
        "column": "p",
        "dtype": None,
        "shape": None,
        "nulls": "refuse",
        "fill": None,
    }
    states = [numeric, plain, {"name": "c", "kind": "categorical", "column": "c", "values": ["a", "b"]},
              {"name": "day", "kind": "categorical", "column": "d", "values": ["2013-01-31", "-0044-03-15"]},
              {"name": "hour", "kind": "cyclic", "column": "h", "period": 24.0},
              {"name": "who", "kind": "hashed", "column": "c"}]  # fmt: skip
    check = {"name": "r", "kind": "range", "level": "row", "rows": 4, "failing": 1, "share": 0.25, "max_share": 1.0,
             "passed": True, "rule": "0 <= x", "detail": ""}  # fmt: skip
    table = {
        "format_version": 2, "name": "flights", "fingerprint": SHA, "created_at": "2026-11-22T00:00:00+00:00",
        "columns": [{"name": "x", "dtype": "float64", "role": "input"}, {"name": "p", "dtype": "float64"},
                    {"name": "c", "dtype": "string", "role": "input", "nulls": "keep"}, {"name": "h", "dtype": "int8"},
                    {"name": "d", "dtype": "int32", "logical": "date"}, {"name": "v", "dtype": "int8", "shape": [3]}],
        "files": [file, file | {"path": "d/b.parquet", "split": "valid"}],
        "splits": {"train": {"rows": 3, "files": 1}, "valid": {"rows": 3, "files": 1}},
        "accounting": {"rows_in": 7, "rows_out": 6, "quarantined": {"r": 1}},
        "features": {"version": 1, "inputs": dict.fromkeys("xph", "double") | {"c": "string", "d": "date"},
                     "features": states},
        "checks": [check], "lineage": {"sources": {"t": {"path": "x", "files": 1}}},
    }  # fmt: skip
    about = {"tokenizer_json": "", "size": 256, "pad_id": 257, "seq_len": 16}
    text = table | {"features": {}, "text": about | {"splits": {"train": {"unigram_entropy_nats": 3.1}}}}

    def check_manifest(data: bytes) -> None:
        (folder / "_manifest.json").write_bytes(data)
        manifest = read_manifest(open_storage(str(folder)))
        manifest.to_json()
        TensorSource(manifest, None)
        serving.signature_inputs(RunConfig(name="fuzz"), manifest)
        for split in manifest.splits:
            manifest.files_of(split)

    return Kind([json.dumps(table).encode(), json.dumps(text).encode()], check_manifest, (ManifestError,), 2.0)


def _part(folder: Path) -> Kind:
    file = {"path": "d/rows-0.parquet", "split": "rows", "rows": 3, "bytes": 0, "sha256": SHA, "row_groups": [2, 1]}
    part = {
        "interval": "2013-03-28", "fingerprint": SHA, "created_at": "2026-11-22T00:00:00+00:00",
        "columns": [{"name": "x", "dtype": "float64", "role": "input"}], "inputs": {"x": "double"}, "files": [file],
        "splits": {"rows": 3}, "statistics": "d/statistics.arrow", "statistics_sha256": SHA, "failing": {"r": 1},
        "accounting": {"rows_in": 4, "rows_out": 3, "quarantined": {"r": 1}}, "lineage": {"sources": {"t": [None]}},
    }  # fmt: skip
    storage = open_storage(str(folder))

    def check(data: bytes) -> None:
        storage.put_atomic(PART_NAME, data)
        find_part(storage, SHA)
        numbered_files([PartFolder(read(Part, storage, PART_NAME), "p", is_new=False).files(None)], ["rows"])

    return Kind([json.dumps(part).encode()], check, (StoredError,))


def _scored() -> Kind:
    made = PublishedPredictions(
        interval="2013-03-01", scored_at="2013-03-02T00:00:00+00:00", model="models:/a/1", model_name="a",
        model_version="1", model_run_id="r", weights_sha256=SHA, mlflow_run_id=None, config_digest=SHA, commit="",
        rows="made", sources={"a": SHA}, rows_in=3, rows_out=2, refused={"x": 1},
        files=(PredictionFile("part-00000.parquet", 2, 9, SHA),),
    )  # fmt: skip
    return Kind([made.to_json()], lambda data: parse(PublishedPredictions, data, PREDICTIONS), (StoredError,))


def _run(folder: Path) -> Kind:
    runs = Runs(f"{folder}/runs", "r")
    record = RunRecord("20261122-000000-abababab", "failed", SHA, SHA, None, "host boot", 12, 345)
    file = Path(runs.at(record).root) / "run.json"
    file.parent.mkdir(parents=True)

    def check(data: bytes) -> None:
        file.write_bytes(data)
        assert len(runs.records()) <= 1, "reads all it can"
        runs.read(record.folder)

    return Kind([record.to_json()], check, (StoredError,))


def _date(folder: Path) -> Kind:
    ledger = Ledger(str(folder), "r")
    record = DateRecord(ds="2026-11-22", status="built", parts={"2026-11-22": SHA}, scores={"this model": {"auc": 0.5}})
    ledger.write(record)
    file = folder / f"r/dates/{record.ds}/{STATE}"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        assert len(ledger.records()) <= 1, "reads all it can"
        ledger.read(record.ds)

    return Kind([record.to_json()], check, (StoredError,))


def _iceberg(folder: Path) -> dict[str, Kind]:
    """The files of metadata of a table with deletes and two manifests, each in turn damaged below whole others."""
    folder.mkdir()
    examples: dict[str, list[bytes]] = {"metadata.json": [], "manifest list": [], "manifest": []}
    first: dict[str, Path] = {}
    for codec in ("null", "gzip"):  # uncompressed, damage is to values and lengths
        catalog = SqlCatalog("fuzz", uri=f"sqlite:///{folder}/{codec}.db", warehouse=f"file://{folder}/{codec}")
        catalog.create_namespace("db")
        rows = pa.table({"n": [1, 2], "s": ["a", None]})
        table = catalog.create_table("db.t", rows.schema, properties={"write.avro.compression-codec": codec})
        with table.update_spec() as update:
            update.add_field("s", IdentityTransform(), "s")
        table.append(rows)
        table.append(rows)
        delete_by_position(table, table_paths(table)[0], [0])
        catalog.close()
        snapshot = table.current_snapshot()
        assert snapshot is not None
        locations = [
            table.metadata_location,
            snapshot.manifest_list,
            *[m.manifest_path for m in snapshot.manifests(table.io)],
        ]
        files = [Path(location.removeprefix("file://")) for location in locations]
        for name, file in zip([*examples, "manifest"], files, strict=False):
            examples[name].append(file.read_bytes())
            first.setdefault(name, file)

    def check(name: str, data: bytes) -> None:
        for other, file in first.items():
            file.write_bytes(data if other == name else examples[other][0])
        path = str(first["metadata.json"])
        config = IcebergSource(format="iceberg", path=path, allowed_folders=[str(folder)])
        found = OpenIceberg.open("t", config).pin(config)
        json.dumps(found.lineage())
        found.version.schema.highest_field_id  # noqa: B018

    for name, found in examples.items():
        for data in found[:2]:  # the second manifest is not of the first table
            check(name, data)
    return {f"iceberg {name}": Kind(found, partial(check, name), (EtlError,)) for name, found in examples.items()}


def _where() -> Kind:
    types = {"day": "date", "n": "int", "s": "string", "d": "decimal(9,2)", "b": "boolean", "at": "timestamp"}
    texts = [
        "day >= '2024-01-03' AND NOT (n IN (1, 2) OR s IS NULL)",
        "(((d BETWEEN 1.5 AND 2) <=> NULL)) OR b",
        "NOT NOT at < DATE '2024-01-03' AND s <> 'it''s'",
        "n = 1 AND " * 40 + "n <= 3",
    ]

    def check(data: bytes) -> None:
        parse_where("k", data.decode(errors="replace"), types).matches(dict.fromkeys(types))

    return Kind([text.encode() for text in texts], check, (EtlError,))


def _lease() -> Kind:
    state = LeaseState(
        nonce="ab", epoch=2, duration_s=60.0, what="2026-11-22", since="now", host="h", pid=1, start_ticks=2
    )
    return Kind([state.to_json()], lambda data: read_state(Found(data, "v", 0.0), "here"), ())


def _definition() -> Kind:
    """Of parameters and tables on servers, and what a server makes of it."""
    rules = [UpdateRule("adam"), UpdateRule("sgd", (0.8, 0.9), 1e-6)]
    specs = [TableSpec("u", 2, [0.1, 0.2], 3, rules[0], "float32", 4096, 2), TableSpec("i", 3, 0.3, 4, rules[1])]
    shapes = {"w": [4, 3], "b": [3], "s": []}
    given = [
        Definition(2, shapes, "float64", specs, 2.0, 3, 9, True),
        Definition(4, shapes, "bfloat16", backup=2),
        Definition(1, {}, "float32", specs, bound=None),
    ]

    def check(data: bytes) -> None:
        cut_parameters(decoded(data).shapes, 2)

    return Kind([each.encoded() for each in given], check, (StoredError,))


def _summary(folder: Path) -> Kind:
    failed = FailedAttempt(
        attempt=1, world=2, cause="lost", message="", step=3, steps_lost=1, decision="retry", next_world=2
    )
    result = train_result(history={"train/loss": [(1, 0.5), (2, 0.4)]}, failed_attempts=[failed])

    def check(data: bytes) -> None:
        (folder / SUMMARY).write_bytes(data)
        read_result(open_storage(str(folder)))

    return Kind([result.to_json()], check, (StoredError,))


def _checkpoint(folder: Path) -> dict[str, Kind]:
    storage = open_storage(str(folder))
    checkpointer = Checkpointer(storage, asynchronous=False)

    def state(value: float) -> dict[str, Any]:
        return {"w": torch.full((4, 3), value), "b": torch.full((3,), value), "s": {"lr": value, "name": "x"}}

    trainer = {
        "state": TrainerState(step=1, consumed_samples=8).to_json(),
        "dataset": SHA,
        "order": {"seed": 1},
        "config_digest": "",
    }
    checkpointer.save(1, state(1.0), trainer, metric=0.5, rank_state={"codec": np.arange(3)})
    info = checkpointer.latest()
    assert info is not None
    step, generation, record = storage.at("step-1"), info.generation, TypeAdapter(LoopRecord)
    names = [f"{generation}/{name}" for name in ("index.json", "trainer.json", "rank-00000.json")]
    whole = {name: step.read_bytes(name) for name in [*names, "COMMIT.json"]}

    def check_marker(data: bytes) -> None:
        step.put_atomic("COMMIT.json", data)
        committed(storage)
        parse_marker(data, "here")

    def check_index(data: bytes) -> None:
        step.put_atomic(names[0], data)
        index = read_index(step, generation, info.files)
        to_metadata(index)
        mismatch({"w": [4, 3]}, index, {"w"})

    def check_trainer(data: bytes) -> None:
        step.put_atomic(names[1], data)
        record.validate_python(read(TrainerFile, step, names[1]).trainer)

    def check_rank(data: bytes) -> None:
        step.put_atomic(names[2], data)
        read(RankFile, step, names[2])

    def load(data: bytes) -> None:
        """The damaged file is signed, as who writes a checkpoint can; the other files are whole."""
        name = names[data[0] % 3]
        for path, content in (whole | {name: data[1:]}).items():
            step.put_atomic(path, content)
        marker = json.loads(whole["COMMIT.json"])
        marker["files"][name] = {"bytes": len(data) - 1, "sha256": step.sha256(name)}
        marker["digest"] = digest({key: value for key, value in marker.items() if key != "digest"})
        step.put_atomic("COMMIT.json", json.dumps(marker).encode())
        found, target = checkpointer.latest(), state(0.0)
        assert found is not None, "its hashes are right"
        try:
            checkpointer.load(found, target, check=record.validate_python)
        except CheckpointError:
            assert not target["w"].any() and not target["b"].any(), "touched before all was read"
            raise

    signed = [bytes([number]) + whole[name] for number, name in enumerate(names)]
    return {
        "COMMIT.json": Kind([whole["COMMIT.json"]], check_marker, (StoredError,)),
        "index.json": Kind([whole[names[0]]], check_index, (StoredError,), 2.0),
        "trainer.json": Kind([whole[names[1]]], check_trainer, (ValueError,)),
        "rank.json": Kind([whole[names[2]]], check_rank, (StoredError,)),
        "checkpoint": Kind(
            [signed[0], signed[1], signed[2]], lambda data: load(data or b"\0"), (CheckpointError,), 0.2
        ),
    }


def _model(folder: Path) -> dict[str, Kind]:
    exported = open_storage(str(folder))
    tensors = {"w": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    described = [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_weights(exported, described, tensors.values(), {"v": "w"})

    def check_weights(data: bytes) -> None:
        (folder / WEIGHTS_FILE).write_bytes(data)
        read_weights(exported)

    def check_config(data: bytes) -> None:
        serving.check_trusted(parse(RunConfig, data, "config.json"), "config.json")

    write_tables(exported, {"users": ShardedTable(TableSpec("users", 2, 0.5), Alone())}, lambda block: None)
    tables = (folder / TABLES).read_bytes()

    def check_tables(data: bytes) -> None:
        (folder / TABLES).write_bytes(data)
        model_files(exported)
        attach_tables(nn.ModuleDict({"users": SparseEmbedding("user", 2)}), exported)

    configs = [load_config(name).as_dict() for name in ("flights", "text")]
    return {
        "config.json": Kind([json.dumps(config).encode() for config in configs], check_config, (StoredError,)),
        TABLES: Kind([tables], check_tables, (StoredError,)),
        WEIGHTS_FILE: Kind([(folder / WEIGHTS_FILE).read_bytes()], check_weights, (StoredError,)),
    }


def _trees(folder: Path) -> Kind:
    """A forged file of trees: nothing says that it is not what was trained, so it is read and predicts."""
    model = served.trees_folder(folder)
    trained, rows = read_model_folder(model), served.random_rows(50)
    whole = model.read_bytes(TREES_FILE)

    def check(data: bytes) -> None:
        model.put_atomic(TREES_FILE, data)
        found = serving.Predictor(trained.config, trained.manifest, read_trees(model, trained.config, trained.manifest))
        with suppress(ValueError):  # predictions that are not finite
            found.predict(rows)

    return Kind([whole], check, (StoredError,), 4.0, overwritten)


def _models(folder: Path) -> Kind:
    """A file of a finished model, of which it is known what it was: as damage, and never another prediction."""
    given = [(served.model_folder(folder / "net")), (served.trees_folder(folder / "trees"))]
    files, before, rows = list[tuple[Storage, str, bytes]](), dict[str, bytes](), served.random_rows(50)
    for model in given:
        write_digests(model)
        before[model.uri] = serving.load_trusted(model.uri).predict(rows)["prediction"].to_numpy().tobytes()
        files += [(model, name, model.read_bytes(name)) for name in [*model_files(model), DIGESTS]]

    def check(data: bytes) -> None:
        """The first byte says which file is damaged."""
        model, name, whole = files[(data or b"\0")[0] % len(files)]
        model.put_atomic(name, data[1:])
        try:
            found = serving.load_trusted(model.uri).predict(rows)["prediction"].to_numpy().tobytes()
            assert found == before[model.uri], f"{name} is damaged, and predicts"
        finally:
            model.put_atomic(name, whole)

    return Kind([bytes([n]) + whole for n, (_, _, whole) in enumerate(files)], check, (StoredError,), 2.0)


def _digests(folder: Path) -> Kind:
    folder.mkdir()
    for name in (CONFIG, MANIFEST, WEIGHTS_FILE):
        (folder / name).write_bytes(b"x")
    storage = open_storage(str(folder))
    write_digests(storage)

    def check(data: bytes) -> None:
        (folder / DIGESTS).write_bytes(data)
        changed_files(storage)

    return Kind([(folder / DIGESTS).read_bytes()], check, (StoredError,))


def _mlmodel(folder: Path) -> Kind:
    folder.mkdir()
    flavor = {"data": "data/data", "code": "code", "loader_module": "m", "env": {"virtualenv": "python_env.yaml"}}
    model = {
        "flavors": {"python_function": flavor}, "model_size_bytes": 5, "utc_time_created": "2026-11-22 00:00:00.5",
        "signature": {"inputs": '[{"type": "long", "name": "x", "required": true}]', "params": None},
    }  # fmt: skip

    def check(data: bytes) -> None:
        (folder / MLMODEL).write_bytes(data)
        data_folder(folder, "m")

    return Kind([yaml.safe_dump(model).encode()] * 2 + [json.dumps(model).encode()], check, (StoredError,), 2.0)


def _dates() -> Kind:
    """Of a command line, of MLflow's tags and of names of folders."""
    schedules = [ScheduleConfig(begin="2013-01-01"), ScheduleConfig(begin="2013-01-01T00", interval="hour")]

    def check(data: bytes) -> None:
        schedule = schedules[(data or b"\0")[0] % 2]
        interval_of(schedule, parse_date(schedule, data[1:].decode(errors="surrogateescape")))

    examples = [b"\x002013-03-28", b"\x002024-02-29", b"\x012013-03-28T05", b"\x012013-03-28T05:00:00+02:00"]
    return Kind(examples, check, (ConfigError, ValueError), 0.5)


def _recipe(folder: Path) -> dict[str, Kind]:
    file, small = folder / "fuzzed.yaml", folder / "small.yaml"
    small.write_text("name: small\ndataset: here\n")

    def check(data: bytes) -> None:
        file.write_bytes(data)
        load_config(str(file))

    def check_override(data: bytes) -> None:
        load_config(str(small), [data.decode(errors="surrogateescape")])

    block = {
        "name": "x",
        "dataset": "d",
        "train": {"epochs": 2, "global_batch": 64},
        "optim": {"lr": 0.1, "betas": [0.9, 0.99]},
    }
    block |= {
        "model": {"args": {"width": 8}},
        "data": {"filters": [["x", ">", 1]]},
        "parallel": {"tp": 2},
    }  # JSON is YAML
    examples = [(CONF / f"{name}.yaml").read_bytes() for name in recipe_names()]
    overrides = [
        b"optim.lr=1e-3",
        b"train.steps=[1, {a: &x 2, b: *x}]",
        b"data.filters=[[a, '==', 1]]",
        b"name=2026-01-01",
    ]
    return {
        "recipe": Kind([*examples[:2], *[json.dumps(block).encode()] * 4], check, (ConfigError,), 0.5),
        "override": Kind(overrides, check_override, (ConfigError,), 0.5),
    }


def _tokenizer() -> Kind:
    codec = train_bpe(iter(["the cat sat on the mat", "a dog ran"] * 3), 300)

    def check(data: bytes) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return  # it stands in a manifest, which is text
        found = Codec(text, codec.size)
        found.decode(next(found.encode(["the cat ☃"]))[:-1])

    return Kind([codec.json.encode()], check, (StoredError,), 0.5)


def _predictions(folder: Path) -> Kind:
    sink, storage = io.BytesIO(), open_storage(str(folder))
    pq.write_table(pa.table({"id": np.arange(20), "prediction": np.linspace(0, 1, 20), "label": np.ones(20)}), sink)

    tested: Any = SimpleNamespace(row_numbers=lambda: np.arange(20))  # the rows of the test split, of `Chosen`

    def check(data: bytes) -> None:
        (folder / "p.parquet").write_bytes(data)
        read_predictions(storage, ["p.parquet"], tested)

    return Kind([sink.getvalue()], check, (StoredError, RuntimeError), 0.3)


def _journal(folder: Path) -> Kind:
    journal = Journal.create(folder, "j")
    for op in (
        StartRun(key="job", at=1.0, name="n", parent=None, tags={}, resume=False),
        Metrics(key="job", at=2.0, points=[("a", 1.0, 1, 2)]),
        Artifact(key="job", at=3.0, file=journal.add_file(b"text", "a.txt"), folder=""),
    ):
        journal.append(op)
    journal.done(0)
    name = journal.folder.name
    files = {name: (journal.folder / name).read_bytes() for name in ("state.json", "ops.jsonl")}
    journal.close(delete=True)

    def check(data: bytes) -> None:
        """The first byte says which of its files is damaged."""
        here = folder / "buffer" / name
        for old in (folder / "buffer").iterdir():
            for path in old.glob("*"):
                path.unlink() if path.is_file() else os.rmdir(path)
            old.rmdir()
        here.mkdir()
        damaged = sorted(files)[(data or b"\0")[0] % 2]
        for path, content in (files | {damaged: data[1:]}).items():
            (here / path).write_bytes(content)
        for found in abandoned_journals(folder):
            try:
                for op, _ in found.pending():
                    if isinstance(op, Artifact):
                        assert found.file(op.file).resolve().is_relative_to(found.folder.resolve())
            finally:
                found.close(delete=False)

    return Kind([bytes([i]) + files[path] for i, path in enumerate(sorted(files))], check, (ValueError,), 0.5)
