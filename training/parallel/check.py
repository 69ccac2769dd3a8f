"""Find everything that is wrong with a layout before any process starts, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rules.rule import find_problems
from sparkring.conf.rules.strategies import LAYOUT
from sparkring.training.models.sharding_plan import plan_of, required_plan
from sparkring.training.parallel.engine import decide_engine
from sparkring.training.parallel.mesh import Mesh, layout_of, resolve_mesh, used_axes
from sparkring.training.parallel.model_parallel.pipeline import estimated_costs, layer_names, partition
from sparkring.training.parallel.model_parallel.schedules import schedule_problem

CUT_DIM = {"column": 0, "row": 1}  # of a Linear's weight


def layout_problems(
    config: ParallelConfig,
    world: int,
    global_batch: int,
    device_type: str = "cpu",
    model: nn.Module | None = None,
) -> list[str]:
    """List problems with a layout, key first; [] if `build_strategy` and `prepare` accept it.

    Args:
        config: block `parallel` of the recipe.
        world: number of ranks.
        global_batch: rows per step of all ranks.
        device_type: either `cpu` or `cuda`.
        model: model on any device, including meta, to also check heads, stages and sharding plan.
    """
    try:
        mesh = resolve_mesh(config, world)
    except ValueError as error:
        return [str(error)]
    problems = find_problems(LAYOUT, layout_of(config, mesh, device_type, global_batch))
    if not problems:
        problems = _refusal(lambda: decide_engine(config, mesh, device_type))
    if mesh.pp > 1:
        problem = schedule_problem(config.schedule, mesh.pp, config.passes, config.stages_per_rank)
        problems += [problem] if problem else []
    return problems + (_model_problems(model, config, mesh) if model is not None else [])


def _refusal(check: Callable[[], object]) -> list[str]:
    """Return the message of the ValueError that `check` raises, if any."""
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def _model_problems(model: nn.Module, config: ParallelConfig, mesh: Mesh) -> list[str]:
    def partitioned() -> None:
        names = layer_names(model)
        partition(names, estimated_costs(model, names), mesh.pp * config.stages_per_rank)

    problems = _refusal(lambda: check_widths(model, mesh))
    if mesh.pp > 1:
        problems += _refusal(partitioned)
    for axis, size in (("tp", mesh.tp), ("cp", mesh.cp)):
        if size > 1:
            problems += _refusal(lambda axis=axis: required_plan(model, axis))  # type: ignore[misc]
    return problems


def check_widths(model: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError if heads or matrices do not divide by the mesh, with the counts.

    Attention is cut by whole heads, matrices into equal parts (a vocabulary need not be).
    """
    plan = plan_of(model, "tp" if mesh.tp > 1 else "cp") if mesh.tp * mesh.cp > 1 else None
    if plan is None:
        return
    for name in plan.attention_names(model):
        attention: Any = model.get_submodule(name)
        if attention.heads % (mesh.tp * mesh.cp) or attention.kv_heads % (mesh.tp * mesh.cp):
            raise ValueError(
                f"{name} has {attention.heads} heads and {attention.kv_heads} key/value heads, not divisible by "
                f"{used_axes(Mesh(tp=mesh.tp, cp=mesh.cp))}; change model.args.heads or kv_heads, or parallel.tp or cp"
            )
    cut = {name: kind for name, kind in plan.kinds(model).items() if kind in CUT_DIM and mesh.tp > 1}
    for name, kind in cut.items():
        width = model.get_parameter(f"{name}.weight").shape[CUT_DIM[kind]]
        if width % mesh.tp:
            sides = "outputs" if kind == "column" else "inputs"
            raise ValueError(
                f"{name} has {width} {sides}, not divisible by tp({mesh.tp}): "
                f"change the width in model.args, or parallel.tp, or make it 'replicate' in the sharding plan"
            )
