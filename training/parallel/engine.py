"""Choose what carries the gradients; imports no strategy, since a driver asks too."""

from __future__ import annotations

import logging

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rules.rule import find_problems
from sparkring.conf.rules.strategies import HOROVOD_LIMITS
from sparkring.training.parallel.data_parallel.horovod_ring import available
from sparkring.training.parallel.mesh import Mesh, layout_of

log = logging.getLogger(__name__)


def choose_engine(config: ParallelConfig, mesh: Mesh, device_type: str) -> str:
    """Return `decide_engine`'s choice; if `auto` does not take Horovod, log the reason."""
    engine, why = decide_engine(config, mesh, device_type)
    if why:
        log.info("parallel.engine=auto: torch.distributed carries the gradients, since %s", why)
    return engine


def decide_engine(config: ParallelConfig, mesh: Mesh, device_type: str) -> tuple[str, str]:
    """Choose (`none`, `servers`, `horovod` or `torch`, reason why `auto` does not take Horovod).

    ValueError when Horovod is configured and cannot be used on `device_type` (`cpu` or `cuda`); what it cannot do is in
    conf/rules/strategies.py.
    """
    if config.servers.per_host:
        return "servers", ""
    if mesh.world == 1:
        return "none", ""
    if config.engine == "torch":
        return "torch", ""
    missing = available(device_type)
    if config.engine == "horovod":
        if missing:
            raise ValueError(f"parallel.engine=horovod: {missing}; use parallel.engine=torch")
        return "horovod", ""
    reasons = find_problems(HOROVOD_LIMITS, layout_of(config, mesh, device_type))
    if config.zero:
        reasons.append(f"parallel.zero={config.zero} runs on fully_shard unless parallel.engine=horovod is set")
    if missing:
        reasons.append(missing)
    return ("torch", reasons[0]) if reasons else ("horovod", "")
