"""Make pipeline schedules as tables of ints, and simulate them.

gpipe        all forwards, then all backwards (https://arxiv.org/abs/1811.06965); with several stages per rank this is
             the breadth-first order of https://arxiv.org/abs/2211.05953
1f1b         one forward, one backward in turn, at most p micro-batches alive (https://arxiv.org/abs/2006.09503)
interleaved  v stages per rank, depth first (https://arxiv.org/abs/2104.04473, section 2.2)
zero-bubble  backward in two halves, I for the input, W for the weights, W filling what would be idle
             (ZB-H1 of https://arxiv.org/abs/2401.10241, over v stages per rank)

Stage s is on rank s mod p. Bubble over ideal time, with F = I = W = 1 and B = 2: (p-1)/m, (p-1)/(vm), (p-1)/(3vm).
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import NamedTuple

from sparkring.conf.plain_text import count_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
COST = {"F": 1, "B": 2, "I": 1, "W": 1}


class Action(NamedTuple):
    """kind: F forward, B whole backward, I backward to the input, W backward to the weights."""

    kind: str
    stage: int
    micro: int


Table = list[list[Action]]  # per rank, in order


def schedule_problem(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> str | None:
    """Return why the schedule cannot run, or None.

    Args:
        name: value of `parallel.schedule`.
        ranks: p, ranks of the pipeline.
        micro_batches: m, micro-batches of a pass.
        stages_per_rank: v, stages per rank.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.0)[0]
        return f"parallel.schedule = {name!r} is unknown, nearest is {near!r}; there are {', '.join(SCHEDULES)}"
    if name == "1f1b" and stages_per_rank > 1:
        return f"parallel.stages_per_rank = {stages_per_rank}: schedule 1f1b has one per rank; use interleaved"
    if name == "interleaved" and stages_per_rank < 2:
        return "parallel.schedule = 'interleaved' needs parallel.stages_per_rank >= 2; with 1 it is 1f1b"
    rounds = max(1, micro_batches // ranks)
    if stages_per_rank > 1 and name != "gpipe" and micro_batches % rounds:
        return (
            f"parallel.schedule = {name!r}: {micro_batches} micro-batches (micro_batches x accumulate) over pp({ranks})"
            f" make {rounds} rounds, which must divide them; take a multiple of {ranks}"
        )
    return None


def schedule_table(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Table:
    """Return each rank's actions, in order. Arguments and ValueError as in `schedule_problem`."""
    problem = schedule_problem(name, ranks, micro_batches, stages_per_rank)
    if problem:
        raise ValueError(problem)
    if name == "gpipe":
        return [_breadth_first(rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks)]
    split = name == "zero-bubble"
    return [_depth_first(rank, ranks, micro_batches, stages_per_rank, split) for rank in range(ranks)]


def _breadth_first(rank: int, ranks: int, micro: int, per_rank: int) -> list[Action]:
    stages = [rank + ranks * local for local in range(per_rank)]
    forward = [Action("F", stage, m) for stage in stages for m in range(micro)]
    return forward + [Action("B", stage, m) for stage in reversed(stages) for m in range(micro)]


def _order(kind: str, rank: int, ranks: int, micro: int, per_rank: int) -> list[Action]:
    """List one rank's actions of a kind, depth first: rounds of micro-batches; in a round, stage by stage.

    Args: kind (stages of F go up, of others down), rank of `ranks`, micro-batches, stages per rank.
    """
    size = micro if per_rank == 1 else micro // max(1, micro // ranks)
    locals_ = range(per_rank) if kind == "F" else reversed(range(per_rank))
    stages = [rank + ranks * local for local in locals_]
    return [Action(kind, s, m) for start in range(0, micro, size) for s in stages for m in range(start, start + size)]


def _depth_first(rank: int, ranks: int, micro: int, per_rank: int, split: bool) -> list[Action]:
    """List warm-up forwards, then one forward and one backward alternating; `split` W actions fill idle time.

    Args: rank of `ranks`, micro-batches, stages per rank, whether backward is split in I and W.
    """
    forward = _order("F", rank, ranks, micro, per_rank)
    backward = _order("I" if split else "B", rank, ranks, micro, per_rank)
    hops = ranks - 1 - rank
    warmup = (per_rank - 1) * (micro // max(1, micro // ranks)) + (2 if per_rank > 1 and not split else 1) * hops
    warmup = min(warmup, len(forward))
    actions = forward[:warmup]
    weights = 0
    for done, back in enumerate(backward):
        actions += [*forward[warmup + done : warmup + done + 1], back]
        if split and done >= rank:
            actions.append(backward[weights]._replace(kind="W"))
            weights += 1
    return actions + [back._replace(kind="W") for back in backward[weights:] if split]


class Deadlock(RuntimeError):
    """No rank can continue; the message has the action each rank waits at."""


class SimulatedRun(NamedTuple):
    makespan: int  # in units of one stage's forward
    bubble: float  # idle time of the busiest rank over its work
    peak_alive: list[int]  # per rank, most micro-batch x stage activations alive at once


@lru_cache(maxsize=4096)
def schedule_run(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> SimulatedRun:
    """Simulate a schedule's table; cached, since many layouts share one. ValueError as in `schedule_problem`."""
    return simulate(schedule_table(name, ranks, micro_batches, stages_per_rank), ranks * stages_per_rank)


def simulate(table: Table, stages: int) -> SimulatedRun:
    """Run the table without communication time. Deadlock when it cannot end."""
    finished: dict[Result, int] = {}
    at, clock = [0] * len(table), [0] * len(table)
    alive, peak = [0] * len(table), [0] * len(table)
    while any(at[rank] < len(actions) for rank, actions in enumerate(table)):
        moved = False
        for rank, actions in enumerate(table):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needed = _needs(action, stages)
                if not all(each in finished for each in needed):
                    break
                clock[rank] = max([clock[rank], *(finished[each] for each in needed)]) + COST[action.kind]
                finished[_result(action)] = clock[rank]
                alive[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
                peak[rank] = max(peak[rank], alive[rank])
                at[rank] += 1
                moved = True
        if not moved:
            stuck = [f"rank {r} at {a[at[r]]}" for r, a in enumerate(table) if at[r] < len(a)]
            raise Deadlock(f"the schedule cannot continue: {'; '.join(stuck)}")
    work = max(sum(COST[action.kind] for action in actions) for actions in table)
    return SimulatedRun(max(clock), (max(clock) - work) / work, peak)


Result = tuple[str, int, int]  # F, the outputs; B, the input's gradient; or W, the weights' own; stage; micro-batch


def _result(action: Action) -> Result:
    """Return the result of an action that others wait for."""
    return ("B", action.stage, action.micro) if action.kind == "I" else action


def _needs(action: Action, stages: int) -> list[Result]:
    """List the results an action waits for."""
    kind, stage, micro = action
    if kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [("B", stage, micro)]
    own: list[Result] = [("F", stage, micro)]
    return [*own, ("B", stage + 1, micro)] if stage + 1 < stages else own


def balance(costs: list[float], stages: int) -> list[int]:
    """Cut consecutive costs into `stages` non-empty runs whose largest sum is smallest; returns where each run ends.

    Dynamic programming over (run, end); among equals the earlier cuts are as late as possible.
    """
    if stages > len(costs):
        raise ValueError(
            f"{count_of(len(costs), 'layer is')} fewer than {count_of(stages, 'stage')} (parallel.pp x "
            f"parallel.stages_per_rank); a stage needs at least one layer"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[float("inf")] * (len(costs) + 1) for _ in range(stages + 1)]
    cut = [[0] * (len(costs) + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for run in range(1, stages + 1):
        for end in range(run, len(costs) - (stages - run) + 1):
            for start in range(run - 1, end):
                worst = max(best[run - 1][start], total[end] - total[start])
                if worst <= best[run][end]:
                    best[run][end], cut[run][end] = worst, start
    ends = [len(costs)]
    for run in range(stages, 1, -1):
        ends.append(cut[run][ends[-1]])
    return ends[::-1]
