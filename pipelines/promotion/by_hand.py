"""`sparkring promote` and `sparkring rollback`: a person moves the alias, and says why.

No rule is asked, and the date may be any: a person has decided. The reason is kept in the version's tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.store.registry import CHAMPION_BEFORE, PREVIOUS, Registry
from sparkring.pipelines.tracking.tags import DECISION, NO_CHAMPION, REASON

ROLLED_BACK = "rolled_back"  # the decision in the tags of a version that lost the alias to the one before it


@dataclass(frozen=True)
class Moved:
    """What `alias` was moved from and to. `before`: None where no version had it."""

    model: str
    alias: str
    to: str
    before: str | None

    @property
    def text(self) -> str:
        """In a line."""
        was = "no version had it" if self.before is None else f"was version {self.before}, now {PREVIOUS!r}"
        return f"{self.model}: {self.alias} is version {self.to} ({was})"


def promote_by_hand(config: RunConfig, version: str, reason: str) -> Moved:
    """Move the alias to a version. ConfigError where there is no such version; StoreUnreachable as of the registry."""
    tracking = _tracking(config)
    with client_limits(tracking):
        registry = Registry(tracking)
        target = registry.version(version) if version.isdecimal() else None
        if target is None:
            raise ConfigError(
                f"promote {config.name} {version}",
                [f"{registry.name!r} has no version {version!r}; `sparkring ui` shows those there are"],
            )
        with registry.lock():
            current = registry.with_alias(tracking.alias)
            if current is not None and current.version == target.version:
                raise ConfigError(
                    f"promote {config.name} {version}", [f"version {version} has the alias {tracking.alias!r} already"]
                )
            before = current.version if current else None
            registry.set(tracking.alias, target.version, before)
            text = f"by hand: {reason}" if reason else "by hand"
            registry.tag(target.version, {DECISION: "promoted", REASON: text, CHAMPION_BEFORE: before or NO_CHAMPION})
    return Moved(registry.name, tracking.alias, target.version, before)


def rollback(config: RunConfig, reason: str) -> Moved:
    """Move the alias to the version that had it before; a second rollback undoes the first. Errors as above."""
    tracking = _tracking(config)
    with client_limits(tracking):
        registry = Registry(tracking)
        with registry.lock():
            current, target = registry.with_alias(tracking.alias), registry.with_alias(PREVIOUS)
            if target is None or (current is not None and current.version == target.version):
                has = "no version" if target is None else f"version {target.version}, which is {tracking.alias!r} too,"
                raise ConfigError(
                    f"rollback {config.name}",
                    [f"{has} of {registry.name!r} has the alias {PREVIOUS!r}; say which: `sparkring promote "
                     f"{config.name} VERSION`"],
                )  # fmt: skip
            before = current.version if current else None
            registry.set(tracking.alias, target.version, before)
            text = f"rollback from version {before}" + (f": {reason}" if reason else "")
            registry.tag(target.version, {DECISION: "promoted", REASON: text, CHAMPION_BEFORE: before or NO_CHAMPION})
            if before is not None:
                why = f"rolled back to version {target.version}" + (f": {reason}" if reason else "")
                registry.tag(before, {DECISION: ROLLED_BACK, REASON: why})
    return Moved(registry.name, tracking.alias, target.version, before)


def _tracking(config: RunConfig) -> TrackingConfig:
    """Return the tracking block with its names. ConfigError without a store, since opening makes one."""
    tracking = config.tracking.named(config.name)
    problem = None
    if not tracking.enabled:
        problem = "tracking.enabled is false, so no version is registered"
    elif tracking.uri is None and not (Path(tracking.root) / "mlflow.db").exists():
        problem = f"tracking.root = {tracking.root!r}: there is no store yet; run `sparkring run {config.name}` first"
    if problem is not None:
        raise ConfigError(config.name, [problem])
    return tracking
