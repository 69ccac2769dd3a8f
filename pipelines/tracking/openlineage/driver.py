"""The driver's side of OpenLineage events, which needs no package of OpenLineage's: what may be asked, what waits."""

from __future__ import annotations

import importlib.util
import logging
import re
from functools import cache
from pathlib import Path

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.secrets import redact
from sparkring.conf.stored import parse
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.ops import LineageParent, State
from sparkring.pipelines.tracking.run_owner import end_status

log = logging.getLogger(__name__)
EVENTS_WAIT_S = 10.0  # for the collector, at the end of a job
PARENT = "OPENLINEAGE_PARENT_ID"  # as other producers read it
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
INSTALL = "pip install openlineage-python==1.54.0"


def is_installed() -> bool:
    try:
        return importlib.util.find_spec("openlineage.client") is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def check_installed(tracking: TrackingConfig) -> None:
    """Raise ConfigError for a recipe that asks for events which nothing here can send."""
    if tracking.openlineage is not None and not is_installed():
        asked = f"openlineage = {tracking.openlineage!r}"
        raise ConfigError("tracking", [f"{asked}: its events are sent by the package openlineage-python: {INSTALL}"])


def events_wait(root: Path) -> bool:
    """Return whether a journal on disk has events, sent or not; damaged ones do not count."""
    return any(_has_events(path) for path in (root / "buffer").glob("*/state.json"))


def _has_events(path: Path) -> bool:
    try:
        return "openlineage" in parse(State, path.read_bytes(), str(path)).get("settings", {})
    except (OSError, ValueError):
        return False


def send_events_left_behind(config: TrackingConfig) -> None:
    """Send the events that earlier jobs left, at most for EVENTS_WAIT_S; for a job that has none itself."""
    if config.openlineage is not None and events_wait(Path(config.root)):
        from sparkring.pipelines.tracking.openlineage.send import EventSender

        EventSender(config, None).close(EVENTS_WAIT_S)


def replay_events(config: TrackingConfig) -> int:
    """Send the events that dead jobs on this machine left; their number. Raises StoreUnreachable."""
    if not events_wait(Path(config.root)):
        return 0
    if not is_installed():
        raise StoreUnreachable(f"OpenLineage events wait in {config.root}/buffer for openlineage-python: {INSTALL}")
    from sparkring.pipelines.tracking.openlineage.send import make_client, send_left

    return send_left(config, cache(make_client))


def failure(error: BaseException | None) -> str:
    """Return why a job failed, for its final event; "" if it did not."""
    return (str(error) or type(error).__name__)[:4000] if end_status(error) == "FAILED" else ""


def parent_of(text: str) -> LineageParent | None:
    """Parse the run that started this job from schedulers' `namespace/job/run id`; None for other text."""
    first, _, run_id = text.rpartition("/")
    namespace, _, name = first.rpartition("/")
    if namespace and name and UUID.fullmatch(run_id):
        return {"namespace": namespace, "name": name, "run_id": run_id}
    if text:
        log.warning("%s = %r: is not namespace/job/run id (a UUID); events name no parent", PARENT, redact(text))
    return None
