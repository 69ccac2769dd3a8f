"""Check before ranks are started that their hosts are equal and can reach each other.

Hosts are checked when their agents have reported, while the fork servers are importing torch anyway: it costs no extra
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.failure import PreflightError
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host.info import (
    collect_host_info,
    problems,
    short_of_shared_memory,
    unfit_for_horovod,
)
from sparkring.training.launch.messages import PeerFailure
from sparkring.training.launch.topology import AgentInfo


def check_hosts(group: WorkerGroup, agents: list[AgentInfo], code: str | None, horovod: bool = False) -> None:
    """Raise PreflightError with every reason why ranks would fail later.

    Args:
        group: group with agents that have reported their hosts.
        agents: agents that are about to run ranks.
        code: expected digest of the code; None skips the comparison.
        horovod: whether the ring may be Horovod's.
    """
    first = {agent.host_key: agent for agent in reversed(agents)}  # one agent speaks for its host
    reported = {group.name_of(agent): group.host_of(agent) for agent in agents}
    hosts = {name: host for name, (host, _) in reported.items()}
    skews_s = {name: skew_s for name, (_, skew_s) in reported.items()}
    found = problems(replace(collect_host_info(), code=code), hosts, skews_s)
    found += short_of_shared_memory(hosts, Counter(group.name_of(agent) for agent in agents))
    if len(first) > 1:
        names = {agent.name: group.name_of(agent) for agent in first.values()}
        found += unreachable(names, group.reach(list(first.values())))
        if horovod:
            found += unfit_for_horovod({name: hosts[name] for name in names.values()})
    if found:
        raise PreflightError(f"preflight: {count_of(len(found), 'problem')}\n" + "\n".join(f"  - {p}" for p in found))


def unreachable(names: Mapping[str, str], failed: Mapping[str, Sequence[PeerFailure]]) -> list[str]:
    """List what agents could not connect to. `names`: of the agents' hosts."""
    return [
        f"{names[agent]}: cannot reach {peer.address}:{peer.port} ({peer.reason}); "
        "open the ports between hosts or set launch.interface"
        for agent, peers in failed.items()
        for peer in peers
    ]
