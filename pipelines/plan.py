"""What a parallel block means for a model, before anything starts: refusals, and the table of `sparkring plan show`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from conf.capabilities import strategy_notes
from conf.manifest import DatasetManifest, ManifestError, read_manifest
from conf.schema import RunConfig
from conf.storage import open_storage
from pipelines import etl_step
from training.data.batch import SAMPLE
from training.data.columns import is_fixed
from training.models.dropout import draws_masks
from training.parallel.check import layout_problems
from training.parallel.compose import choose_engine
from training.parallel.settings import ParallelSettings
from training.parallel.world import Mesh, resolve_mesh
from training.planner import Plan, Untraceable, first_line, format_rows, make_plan, rows_of
from training.tasks import TABLE_TASKS, build_task, model_class
from training.worker import build_model, pick_columns

log = logging.getLogger(__name__)
UNPLANNED = "activations, and what is sent for them, are not planned"


def layout_problems_of(config: RunConfig, manifest: DatasetManifest | None = None) -> list[str]:
    """Why the parallel block cannot run, one line each, key first. `manifest` adds what depends on the model."""
    try:
        model = meta_model(config, manifest) if manifest is not None or knows_its_size(config) else None
    except ValueError as error:  # names model.factory or model.args, and what is wrong with them
        return [str(error)]
    settings = ParallelSettings(**config.parallel.model_dump())
    problems = layout_problems(settings, config.launch.world, config.train.global_batch, device_of(config), model)
    return [*problems, *input_problems(config)]


def input_problems(config: RunConfig) -> list[str]:
    """A pipeline's first stage takes one tensor; a task of one's own may make one of many columns."""
    columns = config.model.inputs or []
    if config.parallel.pp == 1 or len(columns) < 2 or config.model.task not in TABLE_TASKS:
        return []
    return [
        f"parallel.pp = {config.parallel.pp}: a pipeline's first stage takes one tensor, and model.inputs names "
        f"{len(columns)} columns; give one vector column, or a model.task of your own whose inputs make one of them"
    ]


def knows_its_size(config: RunConfig) -> bool:
    """Whether the model can be built without a dataset: a language model whose vocabulary the recipe gives."""
    return "vocab" in config.model.args


def meta_model(config: RunConfig, manifest: DatasetManifest | None) -> nn.Module:
    """The recipe's model without memory for its parameters, where it can be made so: not where it reads values of
    tensors as it is made (`linspace(0, rate, depth).tolist()`). Then, or where it is wrong, it is made as the ranks do.
    """

    def build() -> nn.Module:
        if manifest is not None:
            return build_model(config, manifest)
        model: nn.Module = model_class(config.model.factory)(**config.model.args)
        return model

    try:
        with torch.device("meta"):
            return build()
    except Exception:  # what is said of values that are not there is of many types
        return build()


def mesh_of(config: RunConfig) -> tuple[ParallelSettings, Mesh, str]:
    """The parallel block, its mesh on launch.world ranks, and the engine of its data ranks."""
    settings = ParallelSettings(**config.parallel.model_dump())
    mesh = resolve_mesh(config.launch.world, dp=settings.dp, cp=settings.cp, pp=settings.pp, tp=settings.tp)
    return settings, mesh, choose_engine(settings, mesh)


def device_of(config: RunConfig) -> str:
    return "cuda" if config.train.device == "cuda" else "cpu"


def plan_of(config: RunConfig, manifest: DatasetManifest | None) -> Plan:
    """The plan of the recipe's block for its model. ManifestError where its size comes from a missing dataset."""
    if manifest is None and not knows_its_size(config):
        raise ManifestError("the model's size comes from the dataset, which is not built; run `sparkring etl` first")
    settings, mesh, engine = mesh_of(config)
    model = meta_model(config, manifest)
    return make_plan(
        model,
        settings,
        mesh,
        engine,
        inputs=one_row(config, manifest, draws_masks(model)),
        global_batch=config.train.global_batch,
        optimizer=config.optim.name,
        element_bytes=8 if config.train.dtype == "float64" else 4,
    )


def one_row(
    config: RunConfig, manifest: DatasetManifest | None, samples: bool = False
) -> tuple[Any, ...] | Untraceable:
    """The model's positional inputs for one row, on the meta device; or why no row can be made up."""
    if config.model.task == "language_model":
        length = manifest.column("tokens").shape[0] - 1 if manifest is not None else sequence_length(config)
        return (torch.zeros(1, length, dtype=torch.int64, device="meta"),)
    assert manifest is not None
    columns = pick_columns(manifest, config.model.inputs, config.model.label, samples)
    rows = {SAMPLE: torch.zeros(1, dtype=torch.int64, device="meta")}
    for name in columns.read:
        if name in rows:
            continue
        column = manifest.column(name)
        if not is_fixed(column):
            return Untraceable(f"column {name!r} is {column.layout}: only its values say how large a row is")
        rows[name] = torch.zeros(1, *column.shape, dtype=getattr(torch, column.dtype), device="meta")
        if column.mask is not None:
            rows[column.mask] = torch.ones(1, dtype=torch.bool, device="meta")
    try:
        return build_task(config.model.task, columns.features, columns.label, config.model.inputs).inputs(rows)
    except Exception as error:  # a task of the user's own may want values too
        return Untraceable(f"model.task = {config.model.task!r} cannot make inputs of shapes: {first_line(error)}")


def sequence_length(config: RunConfig) -> int:
    if config.etl is None or config.etl.text is None:
        raise ManifestError("the sequence length comes from the dataset, which is not there; give an etl.text block")
    return config.etl.text.seq_len - 1


def show_plan(config: RunConfig) -> str:
    """The table as text, what it cannot say, and settings that have no effect."""
    plan = plan_of(config, known_manifest(config))
    settings, mesh, engine = mesh_of(config)
    notes = strategy_notes(asdict(settings), asdict(mesh), engine, device_of(config))
    untraced = [f"{UNPLANNED}: {plan.untraced}"] if plan.untraced else []
    return "\n\n".join([format_rows(rows_of(plan)), *untraced, *notes])


def plan_and_measured(config: RunConfig, manifest: DatasetManifest, measured: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of the table after training: what was predicted, and what the ranks measured.

    Never raises: the model is trained by now, and no table is worth losing it for.
    """
    try:
        plan = plan_of(config, manifest)
    except Exception as error:
        log.warning("no plan can be made to compare with what was measured: %s", first_line(error))
        return [{"quantity": q, "unit": "", "predicted": None, "measured": value} for q, value in measured.items()]
    if plan.untraced:
        log.warning("%s: %s", UNPLANNED, plan.untraced)
    return rows_of(plan, measured)


def planned_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What MLflow is told of the table: `plan/<quantity>`, and what was measured beside it."""
    told: dict[str, float] = {}
    for row in (row for row in rows if row["measured"] is not None):
        told[f"plan/{row['quantity']}_measured"] = float(row["measured"])
        if row["predicted"] is not None:
            told[f"plan/{row['quantity']}"] = float(row["predicted"])
    return told


def known_manifest(config: RunConfig) -> DatasetManifest | None:
    """The dataset's manifest where it can be had without building anything."""
    if config.dataset is not None:
        folder = open_storage(config.dataset)
        return read_manifest(folder) if folder.exists("_manifest.json") else None
    try:
        found = etl_step.find(config, etl_step.wanted_fingerprint(config, etl_step.pin(config)))
    except ValueError:  # sources are not there
        return None
    return found.manifest if found is not None else None
