"""What `retention` and `notify` take, and what they refuse with the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.blocks.housekeeping import NotifyConfig, notify_problems
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


def test_a_url_with_a_secret_belongs_in_the_environment(tmp_path: Path) -> None:
    block = "notify: {targets: [{kind: webhook, url: 'https://user:hunter2@hooks.example/x'}]}"
    message = problems_of(tmp_path, block)
    assert "url_env" in message and "hunter2" not in message


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
