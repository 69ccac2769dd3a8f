"""Tell the targets of `notify` how a job ended. Nothing here raises or waits longer than `notify.timeout_s`.

A webhook's signature has the form of MLflow's own webhooks (and of Standard Webhooks): base64 of HMAC-SHA256 over
`<delivery id>.<timestamp>.<body>`. How a receiver checks it is in docs/how-to/housekeeping.md.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from http.client import HTTPMessage
from typing import IO, Any, NotRequired
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit

from typing_extensions import TypedDict

from sparkring.conf.blocks.notify import CommandTarget, NotifyConfig, PingTarget, Target, WebhookTarget, target_url
from sparkring.conf.config import RunConfig
from sparkring.conf.errors import error_line
from sparkring.conf.secrets import hide_values, redact, url_secrets
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import CLOSED, OPEN, Finite, StoredError, read
from sparkring.pipelines.housekeeping.events import (
    Event,
    JobEnd,
    Outcome,
    decide_event,
    is_before,
    is_repeated,
    make_event,
    outcome_of,
    ping_suffix,
)
from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.run.runs import Runs
from sparkring.training.worker.result import MODEL, SUMMARY

log = logging.getLogger(__name__)
OUTCOME = (
    "last_outcome.json"  # next to the run folders of a recipe; of `predict` another, as one says nothing of the other
)
PREDICT_OUTCOME = "last_predict_outcome.json"
ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class LastOutcome:
    """last_outcome.json: how the recipe's last job ended. `ds`: the date it was for, if any."""

    __pydantic_config__ = CLOSED

    outcome: Outcome
    ds: str | None = None


@OPEN
class _Promotion(TypedDict):
    decision: str
    reasons: NotRequired[list[str]]
    champion_scores: NotRequired[dict[str, Finite]]


@OPEN
class _Summary(TypedDict):
    """Of summary.json, what is sent."""

    scores: dict[str, dict[str, Finite]]
    tracking_url: str | None
    promotion: NotRequired[_Promotion | None]


def announce(
    config: RunConfig, code: int, command: Sequence[str], error: BaseException | None = None, ds: str | None = None
) -> None:
    """Tell the targets that a job of this process has ended. Never raises.

    Args:
        config: resolved configuration of the recipe.
        code: exit code of the job.
        command: command line of the job, to suggest the next one.
        error: error that ended it.
        ds: start of its data interval.
    """
    if not config.notify.targets:
        return
    try:
        end = describe_end(config, code, error, ds)
        if is_repeated(end):
            return send(config.notify, None, end.code)
        folder = open_storage(config.storage.runs).at(config.name)
        name = PREDICT_OUTCOME if command[1:2] == ["predict"] else OUTCOME
        last = last_outcome(folder, name)
        event = decide_event(end, None if last is None or is_before(end, last.ds) else last.outcome)
        outcome = outcome_of(end.code, end.decision)
        if outcome is not None and not (outcome == "ok" and last is not None and is_before(end, last.ds)):
            put_outcome(folder, name, LastOutcome(outcome, ds))
        send(config.notify, None if event is None else _event(event, end, command), end.code)
    except Exception as failure:
        log.error("the end of the job could not be announced: %s", redact(str(failure)))


def announce_late(config: RunConfig, command: Sequence[str], ds: str | None = None) -> None:
    """Tell webhooks and commands that the schedule's deadline has passed while the job continues. Never raises."""
    try:
        end = JobEnd(recipe=config.name, code=0, ds=ds, late=True)
        send(config.notify, _event("late", end, command), None)
    except Exception as failure:
        log.error("that the job is late could not be announced: %s", redact(str(failure)))


def _event(name: Any, end: JobEnd, command: Sequence[str]) -> Event:
    return make_event(name, end, command, datetime.now(UTC).isoformat(timespec="seconds"))


def describe_end(config: RunConfig, code: int, error: BaseException | None, ds: str | None) -> JobEnd:
    """Describe the end of a job, with the scores of this process's latest run."""
    here, runs = this_process(), Runs(config.storage.runs, config.name)
    mine = [r for r in runs.records() if (r.host, r.pid, r.start_ticks) == (here.host, here.pid, here.start_ticks)]
    text = "" if error is None else (str(error) or type(error).__name__)[:ERROR_CHARACTERS]
    end = JobEnd(recipe=config.name, code=code, ds=ds, error=text)
    if not mine:
        return end
    folder = runs.at(mine[-1])
    summary = _summary(folder) if mine[-1].status == "finished" else None
    if summary is None:
        return replace(end, links={"run": folder.uri})
    promotion = summary.get("promotion") or _Promotion(decision="")
    links = {"run": folder.uri, "report": folder.at("report.html").uri, "mlflow": summary["tracking_url"] or ""}
    return replace(
        end,
        decision=promotion["decision"] or None,
        reasons=promotion.get("reasons", []),
        scores=summary["scores"].get(MODEL, {}),
        champion_scores=promotion.get("champion_scores", {}),
        links={what: uri for what, uri in links.items() if uri},
    )


def _summary(folder: Storage) -> _Summary | None:
    try:
        return read(_Summary, folder, SUMMARY)
    except StoredError as error:  # also where it is missing
        log.warning("%s", error)
        return None


def last_outcome(folder: Storage, name: str) -> LastOutcome | None:
    """Return how the recipe's previous job ended; None if unknown. `name`: name of the file."""
    if not folder.exists(name):
        return None
    try:
        return read(LastOutcome, folder, name)
    except StoredError as error:
        log.warning("%s", error)
        return None


def put_outcome(folder: Storage, name: str, outcome: LastOutcome) -> None:
    """Store how this job ended, for the next one. `name`: of the file."""
    try:
        folder.put_atomic(name, json.dumps(asdict(outcome)).encode())
    except OSError as error:
        log.warning("%s/%s: %s", folder.uri, name, error)


# -- sending


def send(config: NotifyConfig, event: Event | None, code: int | None) -> None:
    """Send the event to webhooks and commands, and the exit code to pings, all at a time; what fails is logged.

    Args:
        config: with the targets.
        event: what happened, or None; one that `events` does not name is not sent.
        code: None: no ping is sent.
    """
    deadline = time.monotonic() + config.timeout_s
    wanted = event if event is not None and event.event in config.events else None
    threads = []
    for number, target in enumerate(config.targets):
        if (work := _work(target, wanted, code, config.timeout_s)) is None:
            continue
        name = f"notify.targets.{number} ({target.kind})"
        secrets = {} if isinstance(target, CommandTarget) else _secrets(target)
        threads.append(threading.Thread(target=_logged, args=(name, work, secrets), name=name, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, deadline + 0.5 - time.monotonic()))  # each has its own limit; this is for one that hangs
        if thread.is_alive():
            log.error("%s: no answer within %g s; not sent", thread.name, config.timeout_s)


def _work(target: Target, event: Event | None, code: int | None, timeout_s: float) -> Callable[[], None] | None:
    """Return the function that notifies a target; None if there is nothing to send."""
    if isinstance(target, PingTarget):
        suffix = None if code is None else ping_suffix(code)
        return None if suffix is None else lambda: _ping(target_url(target, os.environ), suffix, timeout_s)
    if event is None:
        return None
    body = json.dumps(event.payload()).encode()
    if isinstance(target, CommandTarget):
        return lambda: run_command(target.command, body, timeout_s)
    return lambda: _post(target, body, timeout_s)


def _secrets(target: WebhookTarget | PingTarget) -> dict[str, str]:
    """Return the secrets of a target's URL, by the variable that holds them."""
    url = target_url(target, os.environ) if target.url_env is not None else ""
    parts = urlsplit(url)
    port = parts.netloc.rpartition("@")[2].rpartition(":")[2]
    pieces = {parts.path, parts.query, *parts.path.split("/"), *([] if port.isdigit() else [port])} - {"", "/"}
    return dict.fromkeys(url_secrets(url) - {parts.netloc} | pieces, target.url_env or "")


def _logged(name: str, work: Callable[[], None], secrets: Mapping[str, str]) -> None:
    """Do the work, and log its outcome. `secrets`: hidden, each with the variable that holds it."""
    try:
        work()
    except Exception as error:  # of the network, of the operating system, of what a server answers
        log.error("%s: %s", name, hide_values(error_line(error), secrets))
    else:
        log.info("%s: sent", name)


def _post(target: WebhookTarget, body: bytes, timeout_s: float) -> None:
    secret = os.environ.get(target.hmac_env, "") if target.hmac_env else ""
    headers = {"Content-Type": "application/json"} | signature_headers(secret, body, uuid.uuid4().hex, time.time())
    _open(urllib.request.Request(target_url(target, os.environ), body, headers, method="POST"), timeout_s)


def _ping(url: str, suffix: str, timeout_s: float) -> None:
    parts = urlsplit(url)
    _open(urllib.request.Request(urlunsplit(parts._replace(path=parts.path.rstrip("/") + suffix))), timeout_s)


def signature_headers(secret: str, body: bytes, delivery_id: str, at_s: float) -> dict[str, str]:
    """Return the headers that identify a delivery, signed if a secret is set.

    Args:
        secret: signing key; empty for no signature.
        body: bytes of the body as sent.
        delivery_id: unique identifier of the delivery.
        at_s: time in seconds since 1970.
    """
    headers = {"X-Sparkring-Delivery-Id": delivery_id, "X-Sparkring-Timestamp": f"{at_s:.0f}"}
    if secret:
        signed = f"{delivery_id}.{at_s:.0f}.".encode() + body
        digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
        headers["X-Sparkring-Signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it may lead to another host, or from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Return None, so that the request ends with the redirect's own code.

        Args:
            req: request that was sent.
            fp: stream of the answer's body.
            code: status code of the answer.
            msg: reason phrase of the answer.
            headers: headers of the answer.
            newurl: target of the redirect.
        """
        return None


def _open(request: urllib.request.Request, timeout_s: float) -> None:
    """Send a request, with the user and password of its URL. HTTPError for any answer but 2xx."""
    parts = urlsplit(request.full_url)
    login, at, server = parts.netloc.rpartition("@")
    if at:  # urllib takes what is behind the colon for a port
        pair = login if ":" in login else f"{login}:"
        request.full_url = urlunsplit(parts._replace(netloc=server))
        request.add_header("Authorization", f"Basic {base64.b64encode(unquote(pair).encode()).decode()}")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as answer:
        if not 200 <= answer.status < 300:
            raise HTTPError(request.full_url, answer.status, answer.reason, answer.headers, None)


def run_command(
    command: Sequence[str], body: bytes, timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run a program with the event as its input. OSError where it cannot start, RuntimeError where it fails.

    Args:
        command: program and arguments.
        body: its standard input.
        timeout_s: after which it and what it has started are killed.
        environment: None: this process's.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            _, complaint = process.communicate(body, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"{command[0]}: took longer than {timeout_s:g} s and was killed") from None
    if process.returncode:
        words = complaint.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{command[0]}: exit code {process.returncode}" + (f": {words[-1][:300]}" if words else ""))
