"""Commands that predict what training costs, and start nothing: plan show, search, measure, calibrate."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sparkring.conf.errors import ConfigError
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.cli.arguments import (
    Commands,
    add_command,
    add_group,
    add_recipe_command,
    asked_layout,
    count,
    duration,
    load,
    new_file,
    show_examples,
)
from sparkring.pipelines.run.exit_codes import Exit

if TYPE_CHECKING:
    from sparkring.conf.clusters.cluster import Cluster
    from sparkring.conf.config import RunConfig
    from sparkring.conf.load import Resolved
    from sparkring.pipelines.model.layouts import Planned
    from sparkring.training.parallel.mesh import Mesh
    from sparkring.training.planner.search import SearchResult

log = logging.getLogger(__name__)
FAR_OFF = 0.3  # mean error of a cluster's parameters that asks whether the steps are of this cluster


def add_commands(commands: Commands) -> None:
    plan, what = add_group(commands, "plan", "what a parallel block costs, and which one to take", "WHAT")
    text = (
        "mesh, memory per rank, bytes per step, bubble; with a cluster also seconds, price and advice; starts nothing"
    )
    examples = [
        "sparkring plan show gpt-7b launch.world=64 parallel.tp=8",
        "sparkring plan show gpt-7b --cluster a100-80gb-efa",
    ]
    show = add_recipe_command(what, "show", _show, text, examples)
    text = "a built-in cluster, or the YAML file of one (default: launch.cluster)"
    show.add_argument("--cluster", metavar="NAME", help=text)
    text = "the best layouts of a recipe on so many devices, with seconds, memory, price, and why others lose"
    examples = [
        "sparkring plan search gpt-70b --cluster a100-80gb-efa --devices 512",
        "sparkring plan search gpt-7b --cluster h100-80gb-efa --devices 64 --why dp=8,tp=8",
        "sparkring plan search gpt-7b --cluster h100-80gb-efa --devices 256 --within 3d",
    ]
    search = add_recipe_command(what, "search", _search, text, examples)
    text = "a built-in cluster, or the YAML file of one (default: launch.cluster)"
    search.add_argument("--cluster", metavar="NAME", help=text)
    search.add_argument("--devices", metavar="N", type=count, required=True, help="devices there are; whole machines")
    text = "what is best: seconds of a step, seconds of machines, or memory (default: time; with --within: cost)"
    search.add_argument("--objective", choices=("time", "cost", "memory"), help=text)
    text = "only layouts and numbers of devices that end the recipe in this time, such as 12h or 3d; cheapest first"
    search.add_argument("--within", metavar="T", type=duration, help=text)
    search.add_argument(
        "--why",
        metavar="AXES",
        type=asked_layout,
        help="where a mesh stands, or why it cannot be: dp=64,tp=1,pp=8; and offload=true, precision=bf16",
    )
    text = "choose the precision of compute too, which changes what is learned (default: the recipe's)"
    search.add_argument("--any-precision", action="store_true", help=text)
    search.add_argument(
        "--write", metavar="FILE", type=new_file, help="a recipe that extends this one, in the best layout"
    )
    search.add_argument("--html", metavar="FILE", type=new_file, help="a page with the layouts as figures")
    search.add_argument("--json", action="store_true", help="one object: cluster, model, tried, layouts, why")
    text = "measure the machines that the recipe would run on, and write a cluster's file; takes about a minute"
    examples = ["sparkring plan measure mine.yaml launch.world=8 --out cluster.yaml"]
    measure = add_recipe_command(what, "measure", _measure, text, examples)
    measure.add_argument(
        "--out", metavar="FILE", type=new_file, help="the cluster's file to write; default: it is printed"
    )
    text = "fit what a cluster reaches of its hardware to the steps of finished jobs in MLflow, and write its file"
    examples = ["sparkring plan calibrate --experiment gpt --cluster a100-80gb-efa --out mine.yaml"]
    calibrate = add_command(what, "calibrate", _calibrate, text, examples)
    calibrate.add_argument("--experiment", metavar="NAME", help="only this one's jobs (default: all)")
    calibrate.add_argument("--cluster", metavar="NAME", required=True, help="the hardware of the steps")
    calibrate.add_argument("--out", metavar="FILE", type=new_file, required=True, help="the cluster's file to write")
    calibrate.add_argument("overrides", nargs="*", metavar="tracking.key=value", help="where the store is")
    show_examples(plan, what)


def _show(arguments: argparse.Namespace) -> int:
    resolved = load(arguments)
    from sparkring.conf.clusters.catalog import load_cluster
    from sparkring.pipelines.model.fits import show_plan
    from sparkring.pipelines.model.plan import layout_problems_of

    config, name = resolved.config, arguments.cluster or resolved.config.launch.cluster
    cluster = load_cluster(name) if name else None
    if cluster is not None:
        _check_world(cluster, config.launch.world)
    if problems := layout_problems_of(config):
        raise ConfigError(arguments.recipe, problems)
    if config.parallel.layout == "auto":
        config = _as_launched(resolved, name)
    print(show_plan(config, cluster))
    if cluster is not None:
        from sparkring.pipelines.model.layouts import show_on_cluster
        from sparkring.training.planner import Untraceable

        try:
            print(f"\n{show_on_cluster(config, cluster)}")
        except Untraceable as error:
            print(f"\nseconds are not planned: {error}")
    return Exit.OK


def _as_launched(resolved: Resolved, cluster: str | None) -> RunConfig:
    """Return the configuration with the layout that a launch would choose, and print that layout."""
    from sparkring.pipelines.model.launch_plan import LaunchPlan
    from sparkring.pipelines.model.machine import cluster_of_recipe
    from sparkring.pipelines.model.plan import known_manifest
    from sparkring.pipelines.validate.recipe import block_problems

    config, world = resolved.config, resolved.config.launch.world
    named = config.model_copy(update={"launch": config.launch.model_copy(update={"cluster": cluster})})
    plan = LaunchPlan(config, known_manifest(config), block_problems, cluster_of_recipe(named))
    for line in plan.lines_at(world):
        print(f"{line}\n")
    return plan.resolved_at(resolved, world).config


def _search(arguments: argparse.Namespace) -> int:
    config = load(arguments).config
    from sparkring.conf.clusters.catalog import load_cluster
    from sparkring.pipelines.model.layouts import planned
    from sparkring.pipelines.model.plan import UNPLANNED_TREES, known_manifest
    from sparkring.pipelines.model.untraced import StateSearch
    from sparkring.training.planner import Untraceable

    name = arguments.cluster or config.launch.cluster
    if name is None:
        raise ConfigError("plan search", ["name the cluster to search on: --cluster NAME, or launch.cluster"])
    cluster = load_cluster(name)
    if config.model.is_trees:
        raise ConfigError(arguments.recipe, [f"model.family = trees: {UNPLANNED_TREES}"])
    _check_devices(cluster, arguments.devices, arguments.why.mesh if arguments.why else None)
    manifest = known_manifest(config)
    try:
        plan = planned(config, cluster, manifest)
    except Untraceable as error:
        _refuse_seconds(arguments, error)
        states = StateSearch(config, name, cluster, manifest, arguments.devices)
        if arguments.json:
            print(states.as_json(str(error), arguments.why))
        else:
            print(states.about(arguments.why) if arguments.why else states.report(str(error)))
        return Exit.OK
    except ValueError as error:
        raise ConfigError(arguments.recipe, [str(error)]) from None
    return _show_search(arguments, plan, name)


def _check_world(cluster: Cluster, world: int) -> None:
    """Raise ConfigError for ranks that leave a machine of the cluster partly used."""
    try:
        cluster.nodes(world)
    except ValueError as error:
        raise ConfigError(f"launch.world = {world}", [str(error)]) from None


def _check_devices(cluster: Cluster, devices: int, mesh: Mesh | None) -> None:
    """Raise ConfigError for partly used machines, or a mesh of a size that is not tried."""
    from sparkring.training.planner.search import worlds

    try:
        tried = worlds(cluster, devices)
    except ValueError as error:
        raise ConfigError(f"--devices {devices}", [str(error)]) from None
    if mesh is not None and mesh.world not in tried:
        counts = ", ".join(map(str, sorted(tried)))
        raise ConfigError(
            "--why", [f"the mesh is of {count_of(mesh.world, 'device')}, and layouts of {counts} are tried"]
        )


def _refuse_seconds(arguments: argparse.Namespace, why: Exception) -> None:
    """Raise ConfigError for options that need step times, which untraceable models lack."""
    names = ("objective", "within", "write", "html", "any_precision")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) not in (None, False)]
    if given:
        raise ConfigError(", ".join(given), [f"need seconds, which are not planned: {why}; leave them out"])


def _show_search(arguments: argparse.Namespace, plan: Planned, cluster: str) -> int:
    """Print the best layouts, or where the asked mesh stands, and write what is to be written."""
    from sparkring.pipelines.model.layouts import (
        duration_text,
        ending_within,
        recipe_text,
        search_facts,
        search_report,
        searched,
        why_lines,
    )
    from sparkring.training.planner.search import Objective, any_precision

    devices, within = arguments.devices, arguments.within
    precisions = any_precision(plan.cluster) if arguments.any_precision else ()
    objective: Objective = arguments.objective or ("time" if within is None else "cost")
    every = searched(plan, devices, objective, precisions)
    result = every if within is None else ending_within(plan, every, within)
    order_words = "" if within is None else f" and end within {duration_text(within)}"
    order_words += f"; best by {objective}"
    if arguments.write:
        write_file(arguments.write, recipe_text(arguments.recipe, plan.config, result.best[0]))
    text = "" if arguments.json or arguments.why else search_report(plan, result, devices, order_words)
    if arguments.html:
        shown = text or search_report(plan, result, devices, order_words)
        write_file(arguments.html, _search_page(plan, result, cluster, devices, shown))
    asked = why_lines(plan, every, arguments.why, objective, precisions) if arguments.why else []
    if arguments.json:
        print(json.dumps(search_facts(plan, cluster, result, devices, asked), indent=1))
    else:
        print("\n   ".join(asked) or text)
    return Exit.OK


def _search_page(plan: Planned, result: SearchResult, cluster: str, devices: int, text: str) -> str:
    """Render the layouts of a search as figures.

    Args:
        plan: recipe on its cluster.
        result: result of the search.
        cluster: name of the cluster.
        devices: number of requested devices.
        text: text below the figures.
    """
    from sparkring.pipelines.model.layouts import plan_record
    from sparkring.pipelines.report.report import plan_page  # with matplotlib

    record = plan_record(cluster, plan.cluster, result.best[0], result.best)
    return plan_page(f"{plan.config.name} on {count_of(devices, 'device')}", record, text)


def _measure(arguments: argparse.Namespace) -> int:
    from sparkring.conf.clusters.catalog import cluster_text
    from sparkring.pipelines.launch.measure import measure_machines
    from sparkring.pipelines.model.fed import unsure_notes
    from sparkring.pipelines.model.plan import known_dataset
    from sparkring.pipelines.run.spark import spark_session

    config = load(arguments).config
    with spark_session(config.name, config.spark, config.launch) as spark:
        cluster = measure_machines(spark, config, known_dataset(config))
    text = cluster_text(cluster)
    for note in [] if cluster.measured is None else unsure_notes(cluster.measured):
        log.warning(note)
    if arguments.out is None:
        print(text, end="")
    else:
        write_file(arguments.out, text)
        print(f"{arguments.out}: {cluster.description}; use it with --cluster {arguments.out}")
    return Exit.OK


def _calibrate(arguments: argparse.Namespace) -> int:
    from sparkring.conf.clusters.catalog import cluster_text, load_cluster
    from sparkring.conf.load import load_config
    from sparkring.pipelines.cli.measured_runs import job_steps
    from sparkring.pipelines.tracking.tags import MACHINES
    from sparkring.training.planner.timing.calibrate import fit_errors, fitted, predicted

    cluster, experiment = load_cluster(arguments.cluster), arguments.experiment
    tracking = load_config("flights", arguments.overrides).config.tracking  # of a command without a recipe
    name = "MLflow" if experiment is None else f"MLflow's experiment {experiment}"
    jobs = job_steps(tracking, experiment, cluster)
    if not jobs.steps:
        machines = f"its jobs' machines are the tag {MACHINES}, and --cluster names {cluster.machines}"
        raise ConfigError(name, [f"nothing to fit to: {jobs.describe()}; {machines}"])
    print(jobs.describe())
    steps, counts = jobs.steps, [step.counts for step in jobs.steps]
    try:
        found = fitted(cluster, counts, steps, name)
    except ValueError as error:
        raise ConfigError(name, [str(error)]) from None
    for key, value in found.reached.model_dump().items():
        print(f"{key:<10} {getattr(cluster.reached, key):>10.4g} -> {value:.4g}")
    as_shipped = fit_errors(predicted(counts, cluster), steps)
    print(f"{count_of(len(steps), 'step')}: {as_shipped} before")
    if as_shipped.mean > FAR_OFF:
        line = "the steps are far from what the parameters of %s predicted: did another machine make them?"
        log.warning(line, arguments.cluster)
    print(f"{count_of(len(steps), 'step')}: {fit_errors(predicted(counts, found), steps)} fitted")
    write_file(arguments.out, cluster_text(found))
    print(f"wrote {arguments.out}")
    return Exit.OK


def write_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    from sparkring.conf.storage import open_storage

    open_storage(str(path.absolute().parent)).put_atomic(path.name, text.encode())
