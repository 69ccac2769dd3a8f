"""Send the OpenLineage events of journals, in a thread of their own: neither training nor MLflow waits for a collector.

An event follows the operation it is made of once that is in MLflow, which gives run ids and model versions. Its time is
that of the operation. What the collector has is counted on disk, so that the next job or `replay` continues behind it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import requests
from openlineage.client import OpenLineageClient, event_v2

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import error_line
from sparkring.conf.stored import StoredError
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.journal import Journal, abandoned_journals
from sparkring.pipelines.tracking.openlineage.events import JobEvents
from sparkring.pipelines.tracking.ops import Op

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 60.0
REFUSED = {400, 413, 422}  # statuses of a collector that will never take this event
QUEUE_S = 5.0  # for a transport that queues events, at the end of a job
PREFIX = "OPENLINEAGE__"
Client = Callable[[], OpenLineageClient]


class EventSink:
    """Sends the events of one journal. Used from one thread."""

    def __init__(self, config: TrackingConfig, journal: Journal, client: Client):
        settings = journal.state.get("settings")
        tracking = config if settings is None else config.model_copy(update={"uri": settings["uri"]})
        self.journal, self._client = journal, client
        self._events = JobEvents(tracking, journal.folder.name)
        self._position = 0
        self._made, self._sent = 0, journal.sent  # events
        self._due: event_v2.RunEvent | None = None

    def drain(self) -> int:
        """Send the events of all operations that are in MLflow; their number.

        Raises StoreUnreachable, with the rest still to be sent; StoredError where the journal is damaged.
        """
        before = self._sent
        self._send_due()
        for op, position in self._applied():
            state = self.journal.state
            self._make(partial(self._events.take, op, state["runs"], state.get("versions", {})))
            self._position = position
            self._send_due()
        return self._sent - before

    def end_left(self) -> int:
        """Send the end of a job whose driver died before recording it; the number of events. After `drain`."""
        before = self._sent
        self._make(partial(self._events.abandoned, self.journal.state["runs"]))
        self._send_due()
        if self._sent > self._made:
            where = f"{self.journal.folder}/sent.json"
            raise StoredError(f"{where}: events = {self._sent}, but its operations make {self._made}")
        return self._sent - before

    @property
    def is_done(self) -> bool:
        """Whether every operation is in MLflow, and every event sent."""
        return self._due is None and not self.journal.read(self._position, 1)

    def _applied(self) -> Iterator[tuple[Op, int]]:
        """Yield the next operations that are in MLflow."""
        while batch := self.journal.read(self._position):
            done: int = self.journal.state["done"]
            applied = [(op, position) for op, position in batch if position <= done]
            yield from applied
            if len(applied) < len(batch):
                return

    def _make(self, event: Callable[[], event_v2.RunEvent | None]) -> None:
        try:
            self._due = event()
        except Exception:  # a fault in this program, which must not hold up the events behind it
            log.exception("an OpenLineage event of %s could not be made", self.journal.folder)
        if self._due is not None:
            self._made += 1

    def _send_due(self) -> None:
        if self._due is not None and self._made > self._sent:
            emit(self._client(), self._due)
            self._sent = self._made
            self.journal.note_sent(self._sent)
        self._due = None


def emit(client: OpenLineageClient, event: event_v2.RunEvent) -> None:
    """Send an event; rejected events (4xx) are logged and dropped. Other errors raise StoreUnreachable."""
    try:
        client.emit(event)
    except Exception as error:  # of whichever transport the user has set
        answer = getattr(error, "response", None) if isinstance(error, requests.HTTPError) else None
        shown = error_line(error)
        if answer is None or answer.status_code not in REFUSED:
            raise StoreUnreachable(f"the OpenLineage collector does not take events: {shown}") from error
        log.warning("the OpenLineage collector refuses the event %s: %s", event.eventType, shown)


class _Client(OpenLineageClient):
    """The client without the `openlineage.yml` of the working directory, which may be another's and names a class."""

    @staticmethod
    def _find_yaml_config_path() -> str | None:  # of openlineage-python 1.x
        files = (os.environ.get("OPENLINEAGE_CONFIG", ""), os.path.expanduser("~/.openlineage/openlineage.yml"))
        if os.path.exists("openlineage.yml") and not files[0]:
            log.warning(
                "openlineage.yml of the working directory is not read; OPENLINEAGE_CONFIG=openlineage.yml reads it"
            )
        return next((file for file in files if file and os.access(file, os.R_OK) and os.path.isfile(file)), None)


def make_client() -> OpenLineageClient:
    """Create the client from its settings: OPENLINEAGE_URL, OPENLINEAGE__* variables, OPENLINEAGE_CONFIG.

    It copies the first into variables of the second kind, which started processes would inherit; they are removed again
    here. With its facet of the source code switched on, it reads the remote of whatever checkout it is started in,
    which may hold a password and need not be the job's: off, unless the repository is named.
    """
    before = {name for name in os.environ if name.startswith(PREFIX)}
    try:
        client = _Client()
    finally:
        for name in [name for name in os.environ if name.startswith(PREFIX) and name not in before]:
            del os.environ[name]
    location = client.config.facets.source_code_location
    location.disabled = location.disabled or location.repo_url is None
    return client


class EventSender:
    """Sends the events of a job, and before them those that earlier jobs left, until it is closed.

    `journal`: None where there are only earlier jobs' events.
    """

    def __init__(self, config: TrackingConfig, journal: Journal | None):
        self._config, self._journal = config, journal
        self._client: Client = cache(make_client)
        self._sink: EventSink | None = None
        self._left_sent, self._warned = False, False
        self._stop, self._wake, self._give_up = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="openlineage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Send until the end, with growing pauses while the collector is away."""
        pause_s = 0.0
        while not self._give_up.is_set():
            stopping = self._stop.is_set()
            try:
                self._send()
                if stopping:
                    self._client().close(QUEUE_S)
                pause_s, self._warned = 0.0, False
            except Exception as error:
                self._warn(error)
                pause_s = min(max(2 * pause_s, self._config.flush_every_s), LONGEST_PAUSE_S)
            if stopping:
                return
            self._wake.wait(pause_s or self._config.flush_every_s)
            self._wake.clear()

    def _send(self) -> None:
        if not self._left_sent:
            send_left(self._config, self._client)
            self._left_sent = True
        if self._journal is not None:
            self._sink = self._sink or EventSink(self._config, self._journal, self._client)
            self._sink.drain()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning("%s; events wait in %s/buffer", error_line(error), self._config.root)
        self._warned = True

    def close(self, timeout_s: float) -> bool:
        """Send the rest, at most for `timeout_s`; whether every event of the journal is sent."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up.set()
            return False
        return self._sink is not None and self._sink.is_done

    @property
    def is_alive(self) -> bool:
        """Whether it still uses the journal, though it was closed: the collector hangs."""
        return self._thread.is_alive()


def send_left(config: TrackingConfig, client: Client) -> int:
    """Send the events that dead jobs on this machine left; their number. Journals that are sent are deleted.

    Those that are not yet in MLflow stay. Raises StoreUnreachable.
    """
    count = 0
    for journal in abandoned_journals(Path(config.root)):
        delete = False
        try:
            if "openlineage" in journal.state.get("settings", {}) and not journal.pending(1):
                sink = EventSink(config, journal, client)
                count += sink.drain() + sink.end_left()
                delete = True
        except StoredError as error:
            aside = journal.set_aside()
            log.warning("%s is damaged (%s) and set aside", aside, error_line(error))
        except OSError as error:
            log.warning("%s cannot be read and stays: %s", journal.folder, error)
        finally:
            journal.close(delete)
    return count
