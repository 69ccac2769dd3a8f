"""What a parallel block means for a model, before anything starts: refusals, and the table of `sparkring plan show`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conf.manifest import DatasetManifest, ManifestError, read_manifest
from conf.schema import RunConfig
from conf.storage import open_storage
from pipelines import etl_job
from training.parallel.check import layout_problems
from training.parallel.compose import choose_engine
from training.parallel.settings import ParallelSettings
from training.planner import Plan, format_rows, make_plan, rows_of
from training.tasks import build_task, load_reference
from training.worker import build_model, pick_columns
from training.world import resolve_mesh


def layout_problems_of(config: RunConfig, manifest: DatasetManifest | None = None) -> list[str]:
    """Why the parallel block cannot run, one line each, key first. `manifest` adds what depends on the model."""
    try:
        model = meta_model(config, manifest) if manifest is not None or knows_its_size(config) else None
    except ValueError as error:  # names model.factory or model.args, and what is wrong with them
        return [str(error)]
    settings = ParallelSettings(**config.parallel.model_dump())
    device = "cuda" if config.train.device == "cuda" else "cpu"
    return layout_problems(settings, config.launch.world, config.train.global_batch, device, model)


def knows_its_size(config: RunConfig) -> bool:
    """Whether the model can be built without a dataset: a language model whose vocabulary the recipe gives."""
    return "vocab" in config.model.args


def meta_model(config: RunConfig, manifest: DatasetManifest | None) -> nn.Module:
    """The recipe's model without memory for its parameters."""
    with torch.device("meta"):
        if manifest is not None:
            return build_model(config, manifest)
        model: nn.Module = load_reference(config.model.factory, "model.factory")(**config.model.args)
        return model


def plan_of(config: RunConfig, manifest: DatasetManifest | None) -> Plan:
    """The plan of the recipe's block for its model. ManifestError where its size comes from a missing dataset."""
    if manifest is None and not knows_its_size(config):
        raise ManifestError("the model's size comes from the dataset, which is not built; run `sparkring etl` first")
    settings = ParallelSettings(**config.parallel.model_dump())
    mesh = resolve_mesh(config.launch.world, dp=settings.dp, cp=settings.cp, pp=settings.pp, tp=settings.tp)
    return make_plan(
        meta_model(config, manifest),
        settings,
        mesh,
        choose_engine(settings, mesh),
        inputs=one_row(config, manifest),
        global_batch=config.train.global_batch,
        optimizer=config.optim.name,
        element_bytes=8 if config.train.dtype == "float64" else 4,
    )


def one_row(config: RunConfig, manifest: DatasetManifest | None) -> tuple[Any, ...]:
    """The model's positional inputs for one row, on the meta device."""
    if config.model.task == "language_model":
        length = manifest.column("tokens").shape[0] - 1 if manifest is not None else sequence_length(config)
        return (torch.zeros(1, length, dtype=torch.int64, device="meta"),)
    assert manifest is not None
    columns = pick_columns(manifest, config.model.inputs, config.model.label)
    rows = {}
    for name in columns.read:
        column = manifest.column(name)
        rows[name] = torch.zeros(1, *column.shape, dtype=getattr(torch, column.dtype), device="meta")
    return build_task(config.model.task, columns.features, columns.label, config.model.inputs).inputs(rows)


def sequence_length(config: RunConfig) -> int:
    if config.etl is None or config.etl.text is None:
        raise ManifestError("the sequence length comes from the dataset, which is not there; give an etl.text block")
    return config.etl.text.seq_len - 1


def show_plan(config: RunConfig) -> str:
    """The table as text."""
    return format_rows(rows_of(plan_of(config, known_manifest(config))))


def plan_and_measured(config: RunConfig, manifest: DatasetManifest, measured: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of the table after training: what was predicted, and what the ranks measured."""
    return rows_of(plan_of(config, manifest), measured)


def known_manifest(config: RunConfig) -> DatasetManifest | None:
    """The dataset's manifest where it can be had without building anything."""
    if config.dataset is not None:
        folder = open_storage(config.dataset)
        return read_manifest(folder) if folder.exists("_manifest.json") else None
    try:
        found = etl_job.find(config, etl_job.wanted_fingerprint(config))
    except ValueError:  # sources are not there
        return None
    return found.manifest if found is not None else None
