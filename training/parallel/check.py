"""Everything that can be known to be wrong with a layout before any process starts, all at once."""

from __future__ import annotations

from dataclasses import asdict

from torch import nn

from conf.capabilities import batch_problem, strategy_problems
from training.models.plan import plan_of
from training.parallel.compose import choose_engine
from training.parallel.layout import check_widths
from training.parallel.model_parallel.pipeline import chain_names, cut_chain, estimated_costs
from training.parallel.model_parallel.schedules import schedule_problem
from training.parallel.settings import ParallelSettings
from training.parallel.world import Mesh, resolve_mesh


def layout_problems(
    settings: ParallelSettings,
    world: int,
    global_batch: int,
    device_type: str = "cpu",
    model: nn.Module | None = None,
) -> list[str]:
    """One line per problem, key first; empty when `build_strategy` and `prepare` will accept it. Needs no processes.

    `model` (on any device, meta too) adds what depends on it: heads, stages, sharding plan.
    """
    try:
        mesh = resolve_mesh(world, dp=settings.dp, cp=settings.cp, pp=settings.pp, tp=settings.tp)
    except ValueError as error:
        return [str(error)]
    problems = []
    engine = "torch"
    try:
        engine = choose_engine(settings, mesh)
    except ValueError as error:
        problems.append(str(error))
    ruled = strategy_problems(asdict(settings), asdict(mesh), engine, device_type)
    problems = ruled or problems  # where both refuse, the table says it better
    if mesh.pp > 1:
        micro = settings.micro_batches * settings.accumulate
        problems += _known(schedule_problem(settings.schedule, mesh.pp, micro, settings.stages_per_rank))
    problems += _known(batch_problem(global_batch, mesh.dp, mesh.pp, settings.micro_batches, settings.accumulate))
    return problems + (_model_problems(model, settings, mesh) if model is not None else [])


def _known(problem: str | None) -> list[str]:
    return [problem] if problem else []


def _model_problems(model: nn.Module, settings: ParallelSettings, mesh: Mesh) -> list[str]:
    plan = plan_of(model)
    problems = []
    try:
        check_widths(model, plan, mesh)
    except ValueError as error:
        problems.append(str(error))
    if mesh.pp > 1:
        try:
            names = chain_names(model, plan)
            cut_chain(names, estimated_costs(model, names), mesh.pp * settings.stages_per_rank)
        except ValueError as error:
            problems.append(str(error))
    if mesh.tp * mesh.cp > 1 and plan is None:
        problems.append(
            f"parallel.tp or cp > 1: {type(model).__name__} has no sharding plan; define PLAN = ShardingPlan(...) "
            f"beside the class (training/models/plan.py says how)"
        )
    return problems
