"""`sparkring train` on hosts that were each started with it, without Spark (launch.on: hosts).

Host 0 is the driver, and does what a job on Spark does with a dataset that is there; the others run ranks until it
sends them away, and end with its exit code.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.code import code_digest
from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.errors import ConfigError, first_line
from sparkring.conf.load import Resolved
from sparkring.conf.manifest import read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redact
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.job.job import check_without_spark, run_on_platform
from sparkring.pipelines.job.train_step import preload_of
from sparkring.pipelines.launch.check_hosts import check_hosts
from sparkring.pipelines.launch.recover import Platform
from sparkring.pipelines.lineage.environment import user_modules
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.join.hosts import HostAgents, JoinedHosts, JoinOptions, join_driver, joined_hosts
from sparkring.training.launch.join.placement import Placement

log = logging.getLogger("sparkring")
NAME = "sparkring train"
SECRET, SECRET_FILE = "SPARKRING_SECRET", "SPARKRING_SECRET_FILE"
SHORTEST_SECRET = 16
STOPPED = (KeyboardInterrupt, SystemExit)  # by a signal
POLL_S, NOTICE_S, AFTER_GRACE_S = 0.2, 10.0, 30.0


def train_on_hosts(resolved: Resolved, placement: Placement, exit_code: Callable[[BaseException], int]) -> int:
    """Run this host of the job, and return the job's exit code. `exit_code`: of an error of the job."""
    options = join_options(resolved, placement, os.environ)
    if placement.rank:
        log.info("host %d of %d; the driver is at %s", placement.rank, placement.count, placement.address)
        return follow(join_driver(options), resolved.config.launch.grace_s, unanswered(options))
    check = partial(check_hosts, code=code_digest()[:12], horovod="horovod.torch" in options.preload)
    with joined_hosts(options, check) as hosts:
        try:
            code = drive(resolved, hosts, options)
        except BaseException as error:
            hosts.end(exit_code(error), why_ended(error), stays=not isinstance(error, STOPPED))
            raise
        hosts.end(code)
    return code


def drive(resolved: Resolved, hosts: JoinedHosts, options: JoinOptions) -> int:
    """Check the recipe and its dataset, wait for all hosts, and do the job."""
    launch, place = resolved.config.launch, options.placement
    found = check_without_spark(resolved.config)
    if place.count > 1:
        log.info("host 0 of %d, started by %s: waiting for the others", place.count, place.started_by)
    hosts.gather(launch.min_world or launch.world)
    return run_on_platform(resolved, found, platform_of(hosts))


def why_ended(error: BaseException) -> str:
    """Describe the driver's error for other hosts: one line of a failed rank, as the driver logs its traceback."""
    if isinstance(error, STOPPED):
        return "it was stopped"
    return redact(error.failure.headline if isinstance(error, WorkerFailed) else str(error) or type(error).__name__)


def platform_of(hosts: JoinedHosts) -> Platform:
    return Platform(slots=hosts.slots, open_group=hosts.open_group, leaving=lambda: hosts.leaving)


def unanswered(options: JoinOptions) -> str:
    """Return the message of a host that waits for its driver."""
    return (
        f"no driver at {options.placement.address}:{options.placement.port} so far: host 0 has not started yet, or has "
        f"ended, as its log says; this host waits up to launch.hosts_wait_s = {options.wait_s:g} s for it"
    )


def follow(agents: HostAgents, grace_s: float, unanswered: str) -> int:
    """Run ranks until the driver says bye; its exit code.

    At a signal the driver lets the ranks write a checkpoint, and continues without this host. `unanswered` is logged
    where no driver has answered within NOTICE_S.
    """
    try:
        if not agents.wait(NOTICE_S) and not agents.have_come:
            log.warning("%s", unanswered)
        while not agents.wait(POLL_S):
            pass
    except KeyboardInterrupt:
        log.warning("this host is stopped: the ranks write a checkpoint first")
        agents.leave()
        agents.wait(grace_s + AFTER_GRACE_S)
        raise
    bye = agents.result()
    if bye.why:
        log.error("the driver ended this host: %s", bye.why)
    return bye.code


def join_options(resolved: Resolved, placement: Placement, env: Mapping[str, str]) -> JoinOptions:
    """Decide how this host joins; ConfigError for a world that the hosts have no room for, or without a secret."""
    config = resolved.config
    launch = config.launch
    ranks = launch.ranks_per_host or math.ceil(launch.world / placement.count)
    if problems := room_problems(launch, placement.count, ranks):
        raise ConfigError(config.name, problems)
    fingerprint, problem = dataset_of(config)
    place = placement if launch.port is None else replace(placement, port=launch.port)
    return JoinOptions(
        placement=place,
        recipe=recipe_digest(resolved),
        dataset=fingerprint,
        problem=problem,
        ranks=ranks,
        preload=preload_of(config),
        secret=find_secret(env, placement.count),
        wait_s=launch.hosts_wait_s,
        silence_timeout_s=launch.silence_timeout_s,
        interface=launch.interface,
        lines_per_s=launch.log_lines_per_s,
    )


def room_problems(launch: LaunchConfig, hosts: int, ranks: int) -> list[str]:
    """Check that the hosts have room for all ranks."""
    if launch.world <= hosts * ranks:
        return []
    return [
        f"launch.world = {launch.world}: {count_of(hosts, 'host')} with launch.ranks_per_host = {ranks}: there is "
        f"room for {count_of(hosts * ranks, 'rank')}; set launch.world to that or less, or raise launch.ranks_per_host"
    ]


def find_secret(env: Mapping[str, str], hosts: int) -> str | None:
    """Read the secret that all hosts of a job know; ConfigError where several have none, or a short one."""
    if hosts == 1:
        return None
    place, secret = SECRET, env.get(SECRET, "").strip()
    if path := env.get(SECRET_FILE):
        place, given = f"the file {path} of {SECRET_FILE}", secret
        try:
            secret = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                NAME, [f"{SECRET_FILE} names a file that cannot be read ({first_line(error)})"]
            ) from error
        if given and given != secret:
            raise ConfigError(NAME, [f"{SECRET} is another secret than {place}; set one of the two"])
    remedy = f"make one by `openssl rand -hex 32`, and give it to every host in {SECRET}, or in a file by {SECRET_FILE}"
    if not secret and path:
        raise ConfigError(NAME, [f"{place} is empty; {remedy}"])
    if not secret:
        raise ConfigError(NAME, [f"there is no secret by which {hosts} hosts know each other; {remedy}"])
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            NAME, [f"{place} has {count_of(len(secret), 'character')}, and {SHORTEST_SECRET} are the least; {remedy}"]
        )
    return secret


def dataset_of(config: RunConfig) -> tuple[str, str]:
    """Return (fingerprint of the dataset on this host, or why it is unreadable here)."""
    assert config.dataset is not None, "a rule asks for it"
    try:
        return read_manifest(open_storage(config.dataset)).fingerprint, ""
    except (StoredError, OSError) as error:
        return "", redact(f"dataset = {config.dataset!r}: {first_line(error)}")


def recipe_digest(resolved: Resolved) -> str:
    """Hash what decides the ranks' work: the resolved recipe, but for what hosts may differ in, and the user's code."""
    recipe = resolved.as_dict()
    recipe["launch"] = {key: value for key, value in recipe["launch"].items() if key != "interface"}
    modules = {name: file.sha256 for name, file in user_modules(resolved.config).items()}
    return digest([recipe, modules])
