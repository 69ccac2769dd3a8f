"""What `retention` and `notify` take, and what they refuse with the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.blocks.notify import NotifyConfig, notify_problems
from sparkring.conf.load import ConfigError, load_config

RECIPE = "name: keep\ndataset: d\nmodel: {factory: sparkring.training.models.tabular:Tabular}\n"


def problems_of(folder: Path, block: str) -> str:
    (folder / "keep.yaml").write_text(RECIPE + block)
    with pytest.raises(ConfigError) as error:
        load_config(str(folder / "keep.yaml"))
    return str(error.value)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("retention: {runs: {keep: 0}}", ["retention.runs.keep", "greater than 0"]),
        ("retention: {runs: {keep: -3}}", ["retention.runs.keep", "greater than 0"]),
        ("retention: {datasets: {days: 0}}", ["retention.datasets.days", "greater than 0"]),
        ("retention: {parts: {days: -1}}", ["retention.parts.days", "greater than 0"]),
        ("retention: {checkpoints: {}}", ["retention.checkpoints", "keep, days or both"]),
        ("retention: {models: {keep: 3}}", ["retention.models"]),
        ("notify: {events: [failed, broken]}", ["notify.events.1", "broken", "'failed', 'rejected', 'held'"]),
        ("notify: {targets: [{kind: mail}]}", ["notify.targets.0", "mail"]),
        ("notify: {targets: [{kind: command, command: []}]}", ["notify.targets.0", "at least 1"]),
        ("notify: {targets: [{kind: webhook}]}", ["notify.targets.0", "either url or url_env"]),
        ("notify: {targets: [{kind: ping, url: 'https://a.example', url_env: A}]}", ["either url or url_env"]),
        (
            "notify: {targets: [{kind: webhook, url: 'http://hooks.example/x'}]}",
            ["http://hooks.example", "use https", "notify.http_hosts"],
        ),
        ("notify: {targets: [{kind: ping, url: 'ftp://a.example'}]}", ["no http(s) URL"]),
        ("notify: {targets: [{kind: ping, url: 'https://'}]}", ["no http(s) URL"]),
        ("notify: {targets: [{kind: ping, url: 'https://[a'}]}", ["no URL"]),
        ("notify: {timeout_s: 0}", ["notify.timeout_s"]),
        ("notify: {timeout_s: 3600}", ["notify.timeout_s"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path: Path, block: str, words: list[str]) -> None:
    message = problems_of(tmp_path, block)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@hooks.example/x",
        "https://discord.com/api/webhooks/12345/hunter2-x",
        "https://discordapp.com/api/v10/webhooks/12345/hunter2",
        "https://hc-ping.com/hunter2/nights",
        "https://hc-ping.com/0f5d1c6e-8c4b-4d53-9a57-9f2f5d6fe001",
        "https://acme.webhook.office.com/webhookb2/hunter2@tenant/IncomingWebhook/1/2",
        "https://api.telegram.org/bot123456:hunter2/sendMessage",
        "https://hooks.zapier.com/hooks/catch/1/hunter2",
        "https://maker.ifttt.com/trigger/night/with/key/hunter2",
        "https://events.pagerduty.com/integration/hunter2/enqueue",
        "https://nosnch.in/hunter2",
        "https://ntfy.sh/hunter2",
        "https://hooks.slack-gov.com/services/T0/B0/hunter2",
        "https://betteruptime.com/api/v1/heartbeat/hunter2",
        "https://kuma.example/api/push/hunter2",
        "https://webhook.site/hunter2",
        "https://alert.victorops.com/integrations/generic/1/alert/hunter2/nights",
        "https://api.flock.com/hooks/sendMessage/hunter2",
        "https://mattermost.example/hooks/hunter2qwertyuiop1234567890",
        "https://kuma.example/api/push/hunter2AbCdEf9876?status=up",
        "https://checks.example/ping/0f5d1c6e-8c4b-4d53-9a57-9f2f5d6fe001",
        "https://n8n.example/webhook/%30f5d1c6e-8c4b-4d53-9a57-9f2f5d6fe001",
        "https://prod-1.westeurope.logic.azure.com/workflows/a/triggers/manual/paths/invoke?sig=hunter2",
    ],
)
def test_a_url_with_a_secret_belongs_in_the_environment(tmp_path: Path, url: str) -> None:
    message = problems_of(tmp_path, f"notify: {{targets: [{{kind: webhook, url: '{url}'}}]}}")
    assert "url_env" in message and "hunter2" not in message and "0f5d1c6e" not in message


@pytest.mark.parametrize(
    "url", ["https://hooks.example.com/nights/2026-11-25/team_a", "https://ping.example:8443/flights-nightly-eu-west-1"]
)
def test_a_url_without_a_secret_may_stand_in_a_recipe(url: str) -> None:
    assert NotifyConfig.model_validate({"targets": [{"kind": "ping", "url": url}]}).targets


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example/hunter2 x", "https://hooks.example/hunter2\nx", "https://hooks.example/hunter2\x00",
        "https://hooks.example:hunter2/x", "https://hooks.example:99999/hunter2", "https://hooks.example:0/hunter2",
        "https://u:hunter2#@hooks.example/x", "https://u:hunter2/x@hooks.example", "https://[hunter2/x", "hunter2",
        "http://hunter2/x@hooks.example", "https://hooks.example/hunter2\u00fc", "ftp://hooks.example/hunter2",
        "https:///hunter2", "https://hooks.example/\x1b[31mhunter2",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_called_is_refused_before_the_job_and_not_shown(url: str) -> None:
    config = NotifyConfig.model_validate({"targets": [{"kind": "webhook", "url_env": "HOOK"}]})
    (problem,) = notify_problems(config, {"HOOK": url})
    assert problem.startswith("notify.targets.0.url_env = 'HOOK': ") and "hunter2" not in problem


def test_http_is_allowed_to_a_host_that_is_listed() -> None:
    targets = [{"kind": "webhook", "url": "http://localhost:8080/x"}]
    assert NotifyConfig.model_validate({"targets": targets, "http_hosts": ["localhost"]}).targets[0].kind == "webhook"


def test_what_the_environment_lacks_is_found_before_a_job_begins() -> None:
    config = NotifyConfig.model_validate(
        {
            "targets": [
                {"kind": "webhook", "url_env": "HOOK", "hmac_env": "HOOK_KEY"},
                {"kind": "ping", "url_env": "PING"},
            ]
        }
    )
    good = {"HOOK": "https://hooks.example/x", "HOOK_KEY": "k", "PING": "https://ping.example/1"}
    assert notify_problems(config, good) == []
    assert notify_problems(config, {}) == [
        "notify.targets.0.url_env = 'HOOK': is not set in the environment of this job",
        "notify.targets.0.hmac_env = 'HOOK_KEY': is not set in the environment of this job",
        "notify.targets.1.url_env = 'PING': is not set in the environment of this job",
    ]
    (problem,) = notify_problems(config, good | {"HOOK": "http://hooks.example/token"})
    assert "http://hooks.example:" in problem and "token" not in problem
