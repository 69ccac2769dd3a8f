"""The recipe's `notify` block: where notices of ended jobs are sent."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, model_validator

from sparkring.conf.schema import Strict
from sparkring.conf.secrets import is_secret_url

EventName = Literal["failed", "rejected", "held", "late", "recovered"]
EVENTS: tuple[EventName, ...] = ("failed", "rejected", "held", "late", "recovered")
Variable = Annotated[
    str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")
]  # of the environment; what has lower case may be a secret


class _UrlTarget(Strict):
    """A target that is reached by a URL."""

    url: str | None = Field(None, description="one without secrets: it is tracked with the recipe")
    url_env: Variable | None = Field(None, description="environment variable that holds the URL")

    @model_validator(mode="after")
    def _one_url(self) -> Self:
        if (self.url is None) == (self.url_env is None):
            raise ValueError("needs either url or url_env")
        if self.url is not None and is_secret_url(self.url):
            raise ValueError(
                "url holds a secret, or a long random word that may be one, which would be logged and tracked; put the "
                "URL into an environment variable and give its name by url_env"
            )
        return self


class WebhookTarget(_UrlTarget):
    """A URL that events are posted to as JSON."""

    kind: Literal["webhook"]
    hmac_env: Variable | None = Field(
        None, description="environment variable with the key of the signature in X-Sparkring-Signature (HMAC-SHA256)"
    )


class CommandTarget(Strict):
    """A program that is started for each event, with the event's JSON as its standard input."""

    kind: Literal["command"]
    command: Annotated[list[str], Field(min_length=1)] = Field(description="program and arguments; no shell is used")


class PingTarget(_UrlTarget):
    """A URL that is asked for (GET) after every job that trained or had nothing to do, and `<url>/fail` after others.

    A monitor that expects the ping also notices the night that never began.
    """

    kind: Literal["ping"]


Target = Annotated[WebhookTarget | CommandTarget | PingTarget, Field(discriminator="kind")]


class NotifyConfig(Strict):
    """Targets of the notice that a job has ended. None can change its exit code, or hold it longer than `timeout_s`."""

    events: list[EventName] = Field(
        list(EVENTS), description="sent to webhooks and commands; pings do not depend on it"
    )
    targets: list[Target] = []
    http_hosts: list[str] = Field([], description="hosts that may be reached by http; all others by https only")
    timeout_s: Annotated[PositiveFloat, Field(le=60)] = Field(5.0, description="for all targets together")

    @model_validator(mode="after")
    def _urls_allowed(self) -> Self:
        for number, target in enumerate(self.targets):
            url = getattr(target, "url", None)
            if url is not None and (problem := url_problem(url, self.http_hosts)):
                raise ValueError(f"targets.{number}.url: {problem}")
        return self


def url_problem(url: str, http_hosts: Sequence[str]) -> str | None:
    """Explain why no event may be sent to the URL; None where it may. Shows no more of it than scheme and host."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return "holds a blank, a line break or another character that no URL has; write it percent-encoded (%20)"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "is no URL, such as https://hooks.example.com/nights; its port, if any, is a number up to 65535"
    if port == 0:
        return "has the port 0, which nothing listens on"
    if parts.scheme not in ("http", "https") or not host:
        return "is no http(s) URL, such as https://hooks.example.com/nights"
    if parts.scheme == "http" and host not in http_hosts:
        shown = "<host>" if "@" in url else host  # where a password has a `/`, the user's name looks like a host
        return (
            f"http://{shown}: events hold scores and paths, and http is read by everybody on the way; use https, or "
            f"add {shown!r} to notify.http_hosts"
        )
    return None


def target_url(target: WebhookTarget | PingTarget, environment: Mapping[str, str]) -> str:
    """Return the target's URL; empty if its environment variable is not set."""
    return target.url if target.url is not None else environment.get(target.url_env or "", "").strip()


def notify_problems(config: NotifyConfig, environment: Mapping[str, str]) -> list[str]:
    """List the `notify` settings that cannot work in this environment, one line each."""
    problems = []
    for number, target in enumerate(config.targets):
        key = f"notify.targets.{number}"
        if isinstance(target, CommandTarget):
            continue
        if target.url_env is not None:
            url = target_url(target, environment)
            problem = url_problem(url, config.http_hosts) if url else "is not set in the environment of this job"
            problems += [f"{key}.url_env = {target.url_env!r}: {problem}"] if problem else []
        if isinstance(target, WebhookTarget) and target.hmac_env and not environment.get(target.hmac_env):
            problems.append(f"{key}.hmac_env = {target.hmac_env!r}: is not set in the environment of this job")
    return problems
