"""Check a recipe whole: the model and task by importing them, the layout, and what both ask of the dataset."""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.load import ConfigError
from sparkring.conf.manifest import DatasetManifest, ManifestError, read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.dataset import DATASET, DECLARED, OnDataset
from sparkring.conf.rules.foreseen import foreseen_names, foreseen_problems
from sparkring.conf.rules.recipe import RECIPE, metric_problems
from sparkring.conf.rules.rule import Rule, find_problems
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.launch.slots import slots_ceiling, too_few_slots
from sparkring.pipelines.model.model_start import start_problems
from sparkring.pipelines.model.plan import device_of, knows_its_size, layout_problems_of, runs_here
from sparkring.pipelines.run.installed import has_spark, is_installed
from sparkring.pipelines.run.problems import Problems, refusals
from sparkring.pipelines.validate.folders import storage_problems
from sparkring.pipelines.validate.labels import label_range_problems, one_label_problems, warn_of_labels
from sparkring.pipelines.validate.tables import examine, table_problems
from sparkring.training.data.decoding.cells import own_decoder
from sparkring.training.hooks import hook_problems
from sparkring.training.loop.optim.own import optimizer_problems
from sparkring.training.loop.optim.schedules import schedule_problems
from sparkring.training.model.recipe_model import ModelColumns, pick_columns, recipe_task
from sparkring.training.model.starting import change_since, starting_model
from sparkring.training.models.arguments import argument_problems
from sparkring.training.models.groups import freeze
from sparkring.training.models.torch_private import meta_device
from sparkring.training.tasks import check_takes_weights, model_class
from sparkring.training.worker.device import NO_GPU

OURS = "sparkring."  # begins the modules whose `from_manifest` hands its arguments to the constructor


def validate(config: RunConfig, tables: bool = True) -> Problems:
    """Find everything that can be found without Spark. Nothing is written.

    `tables`: False where they, the dataset and the storage are on other machines. The etl block is left out then
    where pyspark, which knows its types, is not installed.
    """
    problems = recipe_problems(config)
    if config.etl is not None and (tables or has_spark()):
        from sparkring.etl.examine import Examined

        problems += table_problems(config, examine(config) if tables else Examined())
    problems += storage_problems(config) if tables else Problems()
    if config.dataset is None or not tables:
        return problems
    try:
        folder = open_storage(config.dataset)
        manifest = read_manifest(folder)
        return problems + _dataset_problems(config, manifest, folder)
    except (ManifestError, OSError) as error:
        return problems + Problems(data=[f"dataset = {config.dataset!r}: {error}"])


def check_recipe(config: RunConfig) -> None:
    """Raise one error with everything that is wrong with a recipe itself, before any table is looked at."""
    recipe_problems(config).raise_any(config.name)


def recipe_problems(config: RunConfig) -> Problems:
    """List problems with the recipe, its code, and the slots that its own Spark would have."""
    code = find_problems(CODE, config)
    recipe = refusals(
        foreseen_problems(config), code, [] if code else layout_problems_of(config), warm_start_problems(config)
    )
    start = start_problems(config) if not recipe else Problems()
    return Problems(recipe, resources=find_problems(CLUSTER, config)) + start


def check_against(config: RunConfig, dataset: Dataset) -> None:
    """Raise one error with what this dataset cannot give, before a process is started; warn of its labels."""
    _dataset_problems(config, dataset.manifest, dataset.folder).raise_any(dataset.folder.uri)
    warn_of_labels(config, dataset.manifest, dataset.folder)


def _dataset_problems(config: RunConfig, manifest: DatasetManifest, folder: Storage) -> Problems:
    """Return the settings that this dataset cannot satisfy, or that all its labels are equal."""
    found = against_problems(config, manifest) or label_range_problems(config, manifest, folder)
    return Problems(found, data=[] if found else one_label_problems(config, manifest, folder))


def check_foreseen(config: RunConfig, manifest: DatasetManifest | None) -> None:
    """Raise ConfigError for what a dataset of these columns, of which nothing is measured yet, cannot give."""
    if manifest is None:
        return
    problems = refusals(find_problems(DECLARED, OnDataset(config, manifest)), metric_problems_of(config, manifest))
    if not problems and model_class(config.model.factory).__module__.startswith(OURS):  # another may want real values
        problems = layout_problems_of(config, manifest)
    if problems:
        raise ConfigError(config.name, problems)


def against_problems(config: RunConfig, manifest: DatasetManifest) -> list[str]:
    """List recipe settings this dataset cannot satisfy."""
    problems = refusals(find_problems(DATASET, OnDataset(config, manifest)), metric_problems_of(config, manifest))
    problems = problems or layout_problems_of(config, manifest) or warm_start_problems(config, manifest)
    return problems or start_problems(config, manifest).recipe


def slot_problems(config: RunConfig) -> list[str]:
    """Check that the recipe's own local Spark has a slot for every rank."""
    if config.launch.is_without_spark or not has_spark():
        return []
    from sparkring.pipelines.run.spark_settings import expected_master, session_settings, submitted

    master = expected_master(config.name, config.spark, config.launch.world)
    if submitted() or master.startswith("sc://"):
        return []
    settings = session_settings(config.name, config.spark, config.launch.world, is_submitted=False)
    if config.launch.cpus_per_rank is not None:
        settings["spark.task.cpus"] = str(config.launch.cpus_per_rank)
    key = "launch.world" if config.launch.min_world is None else "launch.min_world"
    least = config.launch.min_world or config.launch.world
    try:
        ceiling = slots_ceiling(master, settings)
    except ValueError:  # a setting that is no number, which Spark names
        return []
    return [too_few_slots(least, ceiling, master, key)] if ceiling is not None and least > ceiling else []


def device_problems(config: RunConfig) -> Iterator[str]:
    """Yield that GPUs are wanted where the ranks run on this host, which has none, or fewer than ranks."""
    if config.train.device != "cuda" or not runs_here(config):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        yield NO_GPU
    elif count < config.launch.world and not config.parallel.servers.per_host:
        yield (
            f"train.device = 'cuda': launch.world = {config.launch.world}: each rank needs a GPU, and torch sees "
            f"{count} on this host; set launch.world={count}, or train.device=cpu"
        )


# --- the user's code


def family_problems(config: RunConfig) -> Iterable[str]:
    """Check the package of trees, and import the network, as far as they are trained."""
    problems = {"trees": trees_problems, "net": factory_problems}
    return [line for family in config.model.families for line in problems[family](config)]


def factory_problems(config: RunConfig) -> Iterator[str]:
    """Import `model.factory` and compare `model.args` with its signature; make the model, if it needs no dataset."""
    model = config.model
    try:
        factory = model_class(model.factory)
    except ValueError as error:
        yield str(error)
        return
    except Exception as error:  # the module's own code runs
        yield f"model.factory = {model.factory!r}: its import fails: {type(error).__name__}: {first_line(error)}"
        return
    if problem := _unbound(factory, model.args):
        takes = f"; it takes {', '.join(found)}" if (found := _takes(factory)) else ""
        yield f"model.args = {model.args}: {model.factory} does not take them: {problem}{takes}"
    elif factory.__module__.startswith(OURS) and (wrong := _argument_problems(config, factory)):
        yield from wrong
    elif not hasattr(factory, "from_manifest") and not knows_its_size(config):
        yield from _unmade(lambda: factory(**model.args), f"model.args = {model.args}: {model.factory}")
        yield from _group_problems(config, lambda: factory(**model.args))
    if model.inputs and model.kind.is_table and (problem := _not_taken(factory, len(model.inputs))):
        yield f"model.inputs: {model.factory}.forward does not take {count_of(len(model.inputs), 'column')}: {problem}"


def _argument_problems(config: RunConfig, factory: type[nn.Module]) -> list[str]:
    """Check the arguments of a built-in model, and this machine's memory if its CPUs train."""
    trains_here = runs_here(config) and device_of(config) == "cpu"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if trains_here else None
    return list(argument_problems(factory, config.model.args, 8 if config.train.dtype == "float64" else 4, memory))


def trees_problems(config: RunConfig) -> list[str]:
    """Check that the package for trees is installed and can be imported."""
    setting = f"model.family = {config.model.family!r}"
    if missing := not_installed(setting, "XGBoost", "xgboost", "trees"):
        return missing
    try:
        _load_xgboost()
    except Exception as error:  # XGBoostError and OSError too, where its compiled library does not load
        what = f"{type(error).__name__}: {first_line(error)}"
        return [f"{setting}: XGBoost's import fails: {what}; pip install --force-reinstall 'sparkring[trees]'"]
    return []


def _load_xgboost() -> None:
    """Load XGBoost's compiled library alone, as its import takes a second for pandas and scikit-learn."""
    spec = find_spec("xgboost")
    library = Path(spec.origin).parent / "lib" / "libxgboost.so" if spec is not None and spec.origin else Path()
    if library.is_file():
        ctypes.CDLL(str(library))
    else:  # where it is stored elsewhere
        import_module("xgboost")


def reader_problems(config: RunConfig) -> list[str]:
    """Check that petastorm is installed if its reader is used."""
    if config.data.reader != "petastorm":
        return []
    return not_installed("data.reader = 'petastorm'", "petastorm", "petastorm", "petastorm")


def ray_problems(config: RunConfig) -> list[str]:
    """Check that ray is installed for ranks on Ray."""
    return [] if config.launch.on != "ray" else not_installed("launch.on = 'ray'", "Ray", "ray", "ray")


def not_installed(setting: str, package: str, module: str, extra: str) -> list[str]:
    """Return the problem of a setting whose package is not installed; [] if it is.

    Args:
        setting: text of the form `key = value`.
        package: name as its project spells it.
        module: name by which it is imported.
        extra: extra of sparkring that installs it.
    """
    if is_installed(module):
        return []
    return [f"{setting}: needs {package}, which is not installed: pip install 'sparkring[{extra}]'"]


def training_problems(config: RunConfig) -> list[str]:
    """Import an optimizer and a schedule of the user's, and try them; import the hooks."""
    if config.model.is_trees:
        return hook_problems(config.train.hooks)
    parallel = config.parallel
    is_sharded = parallel.zero > 0 or parallel.tp != 1 or parallel.servers.per_host > 0
    own = [*optimizer_problems(config.optim, is_sharded), *schedule_problems(config.optim, config.train.steps)]
    return [*own, *hook_problems(config.train.hooks)]


def cluster_problems(config: RunConfig) -> Iterable[str]:
    """Check that the recipe's cluster can be read, and describes what its ranks run on."""
    name = config.launch.cluster
    if name is None:
        return
    try:
        cluster = load_cluster(name)
    except ConfigError as error:
        yield from (f"launch.cluster = {name!r}: {problem}" for problem in error.problems)
        return
    device = device_of(config)
    if cluster.device.type != device and (config.train.device != "auto" or runs_here(config)):
        yield (
            f"launch.cluster = {name!r}: its devices are {cluster.device.type}, and ranks would be on {device} "
            f"(train.device = {config.train.device!r}); name the cluster that they run on, or set train.device"
        )


def decoder_problems(config: RunConfig) -> Iterator[str]:
    """Import the recipe's own decoders."""
    for column, reference in config.data.decoders.items():
        if reference == "image":
            continue
        try:
            own_decoder(column, reference)
        except ValueError as error:
            yield str(error)
        except Exception as error:  # the module's own code runs
            what = f"data.decoders.{column} = {reference!r}"
            yield f"{what}: its import fails: {type(error).__name__}: {first_line(error)}"


def _unbound(factory: type[nn.Module], args: dict[str, Any]) -> str:
    """Return why a call cannot take these arguments; "" if it can, or only the call can tell."""
    method: Any = getattr(factory, "from_manifest", None)
    try:
        if method is None:
            inspect.signature(factory).bind(**args)
            return ""
        signature = inspect.signature(method)
        signature.bind(None, **args)
        hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        if hands_on and factory.__module__.startswith(OURS):
            inspect.signature(factory).bind_partial(**args)
    except TypeError as error:
        return str(error)
    except ValueError:  # no signature, as of some compiled code
        return ""
    return ""


def _takes(factory: type[nn.Module]) -> list[str]:
    """List the arguments that `model.args` may give; [] if unknown."""
    method: Any = getattr(factory, "from_manifest", factory)
    try:
        given = [*inspect.signature(method).parameters.values()][int(method is not factory) :]
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given) and factory.__module__.startswith(OURS):
            ours = inspect.signature(factory).parameters.values()
            given += [p for p in ours if p.default is not inspect.Parameter.empty]  # others are made of the manifest
    except (TypeError, ValueError):
        return []
    named = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return list(dict.fromkeys(p.name for p in given if p.kind in named))


def _group_problems(config: RunConfig, make: Callable[[], nn.Module]) -> Iterator[str]:
    """Check that each group of parameters (optim.groups) matches a parameter of the model."""
    if not config.optim.groups:
        return
    try:
        with meta_device():
            model = make()
    except Exception:  # needs values to be made; ranks find it
        return
    try:
        freeze(model, config.optim.groups)
    except ValueError as error:
        yield str(error)


def _not_taken(factory: type[nn.Module], inputs: int) -> str:
    """Return why the model's forward does not take so many columns; "" if it does, or if unknown."""
    try:
        inspect.signature(factory.forward).bind(None, *range(inputs))
    except TypeError as error:
        return str(error)
    except (ValueError, AttributeError):  # a function that makes a module, or compiled code
        return ""
    return ""


def _unmade(make: Callable[[], Any], what: str) -> Iterator[str]:
    """Yield why a call fails. Models are made without memory first, if their constructors allow it."""
    try:
        with meta_device():
            make()
    except Exception:  # missing values raise many exception types
        try:
            make()
        except Exception as error:
            yield f"{what} cannot be made: {type(error).__name__}: {first_line(error)}"


def metric_problems_of(config: RunConfig, manifest: DatasetManifest | None = None) -> list[str]:
    """Check the task's metrics and columns; without a manifest, by the columns of the recipe."""
    model, own = config.model, config.model.kind.is_own
    if manifest is None and own and config.etl is None:
        return []
    try:
        if manifest is not None:
            columns = pick_columns(manifest, model)
        elif own and config.etl is not None:
            names = foreseen_names(config.etl)
            label = model.label or config.etl.label
            unseen = (*config.etl.labels, model.label, config.etl.weight, *config.etl.keep)
            features = model.inputs or [name for name in names.tensors if name not in unseen]
            columns = ModelColumns(features, label, [])
        else:
            columns = ModelColumns([], "", [])
        task = recipe_task(model, columns)
        weighed_by = manifest or config.etl
        if weighed_by is not None and weighed_by.weight is not None:
            check_takes_weights(task)
    except ValueError as error:  # names model.inputs, model.label or model.task, and what is wrong with them
        return [str(error)]
    except Exception as error:  # the user's own code runs
        return [f"model.task = {model.task!r}: cannot be made: {type(error).__name__}: {first_line(error)}"]
    return metric_problems(config, ["loss", *task.metric_names(), *task.split_metric_names()])


CODE: tuple[Rule[RunConfig], ...] = (
    Rule(("model.family", "model.factory", "model.args", "model.inputs", "optim.groups"), family_problems),
    Rule(("data.reader",), reader_problems),
    Rule(("launch.on",), ray_problems),
    Rule(("data.decoders",), decoder_problems),
    Rule(("train.best_metric", "train.early_stopping", "promote.rules", "model.task"), metric_problems_of),
    Rule(("launch.cluster", "train.device"), cluster_problems),
    Rule(("optim.name", "optim.schedule", "train.hooks", "parallel.zero", "parallel.tp"), training_problems),
)
PARALLEL = tuple(rule for rule in (*RECIPE, *CODE) if any(key.startswith("parallel.") for key in rule.keys))


def block_problems(config: RunConfig) -> list[str]:
    """List objections to the recipe's `parallel` block; layouts have separate rules."""
    return find_problems(PARALLEL, config)


CLUSTER: tuple[Rule[RunConfig], ...] = (
    Rule(("launch.world", "launch.min_world", "launch.cpus_per_rank", "spark"), slot_problems),
    Rule(("train.device", "launch.world"), device_problems),
)


def warm_start_problems(config: RunConfig, manifest: DatasetManifest | None = None) -> list[str]:
    """Check that the model can start from `warm_start.model`; without a manifest, as far as known."""
    if config.warm_start is None or config.warm_start.model is None:  # `from` is decided when the run has begun
        return []
    try:
        trained = starting_model(config, config.warm_start)
        if manifest is not None:
            change_since(trained, config, manifest)
    except (StoredError, OSError, ValueError) as error:
        return [f"warm_start.model: {error}"]
    return []
