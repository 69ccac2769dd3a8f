"""Check a recipe's parallel block before anything starts, and predict its cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.manifest import MANIFEST_NAME, DatasetManifest, ManifestError, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.context.footers import mean_lengths
from sparkring.pipelines.model.reading import reader_bytes
from sparkring.pipelines.model.table_work import planned_tables
from sparkring.pipelines.run.installed import has_spark
from sparkring.training.data.batch import SAMPLE, Columns
from sparkring.training.data.decoding.columns import is_fixed
from sparkring.training.loop.optim.own import states_per_parameter
from sparkring.training.model.recipe_model import build_model, pick_columns, recipe_task
from sparkring.training.models.dropout import draws_masks
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.models.task import Task
from sparkring.training.models.torch_private import meta_device
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.engine import decide_engine
from sparkring.training.parallel.gradients import check_trainable
from sparkring.training.parallel.mesh import Mesh, resolve_mesh
from sparkring.training.planner import CostPlan, Untraceable, Workload, make_plan, table_rows
from sparkring.training.planner.trace import MeanRow
from sparkring.training.planner.workload import OPTIMIZER_STATES
from sparkring.training.tasks import model_class
from sparkring.training.worker.device import expected_device_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.etl.build import PinnedDataset

log = logging.getLogger(__name__)
UNKNOWN_ROWS = 1 << 62
UNPLANNED_TREES = "each rank holds its rows, and ranks add up histograms; there is no layout to plan"
UNPLANNED = "activations, and what is sent for them, are not planned"


def layout_problems_of(config: RunConfig, manifest: DatasetManifest | None = None) -> list[str]:
    """List problems of the parallel block, key first. `manifest` adds those of the model.

    Trees have none: settings they cannot use are refused when the recipe is read (conf/rules/trees.py).
    """
    if config.model.is_trees:
        return []
    try:
        model = meta_model(config, manifest) if manifest is not None or knows_its_size(config) else None
    except ValueError as error:  # names model.factory or model.args, and what is wrong with them
        return [str(error)]
    world, global_batch = config.launch.world, config.train.global_batch
    return layout_problems(config.parallel, world, global_batch, device_of(config), model)


def knows_its_size(config: RunConfig) -> bool:
    """Return whether the recipe has the vocabulary, so that the model needs no dataset."""
    return "vocab" in config.model.args


def meta_model(config: RunConfig, manifest: DatasetManifest | None) -> nn.Module:
    """Return the recipe's model without memory for its parameters, if its constructor allows that.

    A constructor that reads values of tensors (`linspace(0, rate, depth).tolist()`), or fails, runs again with memory.
    ValueError if the model cannot be made, or has nothing to train.
    """

    def build() -> nn.Module:
        if manifest is not None:
            return build_model(config, manifest)
        model: nn.Module = model_class(config.model.factory)(**config.model.args)
        return model

    try:
        with meta_device():
            model = build()
    except Exception:  # missing values raise many exception types
        model = build()
    check_trainable(model)
    return model


def device_of(config: RunConfig) -> str:
    """Return the device type that the recipe's ranks will have, as far as known before they start."""
    return expected_device_type(config.train.device, config.launch.world, runs_here(config))


def runs_here(config: RunConfig) -> bool:
    """Return whether all ranks will be on this machine."""
    if config.launch.is_without_spark or not has_spark():
        return False
    from sparkring.pipelines.run.spark_settings import expected_master

    return expected_master(config.name, config.spark, config.launch.world).startswith("local")


def cost_plan(config: RunConfig, manifest: DatasetManifest | None) -> CostPlan:
    """Predict the step's cost. ManifestError if the model needs a missing dataset."""
    return make_plan(own_workload(config, manifest))


def own_workload(config: RunConfig, manifest: DatasetManifest | None) -> Workload:
    """Return the recipe's step in its own layout. ManifestError as for `cost_plan`."""
    mesh = resolve_mesh(config.parallel, config.launch.world)
    return plan_workload(config, manifest, mesh, decide_engine(config.parallel, mesh, device_of(config))[0])


def plan_workload(config: RunConfig, manifest: DatasetManifest | None, mesh: Mesh, engine: str) -> Workload:
    """Return the recipe's step on a mesh. ManifestError if the model needs a missing dataset."""
    if manifest is None and not knows_its_size(config):
        raise ManifestError("the model's size comes from the dataset, which is not built; run `sparkring etl` first")
    model = meta_model(config, manifest)
    dataset = etl_step.found(config, manifest) if manifest is not None else None
    row = one_row(config, manifest, list_lengths(dataset), draws_masks(model))
    return Workload(
        model=model,
        config=config.parallel,
        mesh=mesh,
        engine=engine,
        inputs=row if isinstance(row, Untraceable) else row.inputs,
        global_batch=config.train.global_batch,
        optimizer_states=optimizer_states(config.optim),
        element_bytes=8 if config.train.dtype == "float64" else 4,
        task=None if isinstance(row, Untraceable) else row.task,
        columns={} if isinstance(row, Untraceable) else row.columns,
        tables=planned_tables(config, dataset, model),
        reader_bytes=reader_bytes(config, dataset, mesh.dp),
        device_type=device_of(config),
        eval_batch=config.train.eval_batch,
        eval_rows=evaluated_split(config, manifest),
    )


def evaluated_split(config: RunConfig, manifest: DatasetManifest | None) -> int:
    """Return the rows of the largest evaluated split; without a dataset more than any batch has."""
    if manifest is None:
        return UNKNOWN_ROWS
    names = {config.train.valid_split, config.train.test_split}
    return max((split.rows for name, split in manifest.splits.items() if name in names), default=0)


def optimizer_states(optim: OptimConfig) -> int:
    """Count the optimizer's tensors of parameter size, including the weights' average."""
    own = states_per_parameter(optim) if optim.has_own_optimizer else OPTIMIZER_STATES[optim.name]
    return own + (optim.ema is not None)


class Row(NamedTuple):
    """One row of a batch on the meta device, the task that it is for, and the model's inputs."""

    columns: Columns
    task: Task
    inputs: tuple[Any, ...]


def one_row(
    config: RunConfig, manifest: DatasetManifest | None, lengths: Mapping[str, float], samples: bool = False
) -> Row | Untraceable:
    """Return one row of the batch, or why it cannot be made.

    Args:
        config: resolved configuration of the run.
        manifest: manifest of the dataset; without one, `etl.text` gives a language model's length.
        lengths: mean number of values per row, by list column.
        samples: whether the model needs the rows' numbers too.
    """
    if manifest is None:
        tokens, task = (
            torch.zeros(1, sequence_length(config) + 1, dtype=torch.int64, device="meta"),
            LanguageModelTask(),
        )
        return Row({"tokens": tokens}, task, task.inputs({"tokens": tokens}))
    picked = pick_columns(manifest, config.model, samples)
    rows: Columns = {SAMPLE: torch.zeros(1, dtype=torch.int64, device="meta")}
    for column in (manifest.tensor(name) for name in picked.read if name != SAMPLE):
        if column.name in lengths:
            rows[column.name] = MeanRow.of(lengths[column.name], getattr(torch, column.dtype))
            continue
        is_image = column.layout == "binary" and column.shape  # decoded
        if not is_image and not is_fixed(column):
            return Untraceable(
                f"column {column.name!r} is {column.layout}: only its values determine how large a row is"
            )
        dtype = torch.uint8 if is_image else getattr(torch, column.dtype)
        rows[column.name] = torch.zeros(1, *column.shape, dtype=dtype, device="meta")
        if column.mask is not None:
            rows[column.mask] = torch.ones(1, dtype=torch.bool, device="meta")
    try:
        made = recipe_task(config.model, picked, manifest)
        return Row(rows, made, made.inputs(rows))
    except Exception as error:  # a user's task may need values
        reason = f"{type(error).__name__}: {first_line(error)}"
        return Untraceable(f"model.task = {config.model.task!r} cannot make inputs of shapes: {reason}")


def list_lengths(dataset: Dataset | None) -> dict[str, float]:
    """Return the mean length of lists of numbers over the dataset; {} if not built."""
    tensors = [] if dataset is None else dataset.manifest.tensors
    lists = {c.name for c in tensors if c.layout == "ragged" and not c.shape and hasattr(torch, c.dtype)}
    found = mean_lengths(dataset.folder, dataset.manifest) if dataset is not None and lists else {}
    return {name: length for name, length in found.items() if name in lists}


def sequence_length(config: RunConfig) -> int:
    if config.etl is None or config.etl.text is None:
        raise ManifestError("the sequence length comes from the dataset, which is not there; give an etl.text block")
    return config.etl.text.seq_len - 1


def on_world(config: RunConfig, world: int, block: ParallelConfig | None = None) -> RunConfig:
    """Return the configuration with another launch.world, and optionally another parallel block."""
    launch = config.launch.model_copy(update={"world": world})
    return config.model_copy(update={"launch": launch} | ({"parallel": block} if block is not None else {}))


def plan_and_measured(config: RunConfig, manifest: DatasetManifest, measured: dict[str, float]) -> list[dict[str, Any]]:
    """Return the table's rows after training, with predicted and measured values.

    Never raises: the model is trained by now, and no table is worth losing it for.
    """
    try:
        plan = cost_plan(config, manifest)
    except Exception as error:
        name = type(error).__name__
        log.warning("no plan can be made to compare with what was measured: %s: %s", name, first_line(error))
        return [{"quantity": q, "unit": "", "predicted": None, "measured": value} for q, value in measured.items()]
    if plan.untraced:
        log.warning("%s: %s", UNPLANNED, plan.untraced)
    return table_rows(plan, measured)


def known_manifest(config: RunConfig) -> DatasetManifest | None:
    """Return the dataset's manifest if it exists without building anything."""
    found = known_dataset(config)
    return None if found is None else found[1]


def known_dataset(config: RunConfig) -> tuple[str, DatasetManifest] | None:
    """Return the dataset's folder and manifest if it exists without building anything."""
    if config.dataset is not None:
        folder = open_storage(config.dataset)
        return (config.dataset, read_manifest(folder)) if folder.exists(MANIFEST_NAME) else None
    if not etl_step.pins_without_spark(config):
        if knows_its_size(config):
            return None
        raise ManifestError(
            "only Spark finds the dataset of a catalog's or database's tables, and this command starts nothing: name "
            "the folder that `sparkring etl` built, dataset=FOLDER"
        )
    sources = pinned_without_spark(config)
    found = None if sources is None else etl_step.find(config, etl_step.wanted_fingerprint(config, sources))
    return (found.folder.uri, found.manifest) if found is not None else None


def pinned_without_spark(config: RunConfig) -> PinnedDataset | None:
    """Pin the sources of a recipe whose sources need no Spark; None if they, or pyspark, are missing."""
    if not has_spark():
        return None
    try:
        return etl_step.pin(config, _no_session)
    except ValueError:
        return None


def _no_session() -> SparkSession:
    raise AssertionError("these sources are pinned without Spark")
