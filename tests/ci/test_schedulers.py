"""The schedulers' examples give commands that the command line takes, with the date of the day that ended last."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkring.conf.load import load_config
from sparkring.conf.schedule.dated import DateRequest
from sparkring.pipelines.cli import parse
from sparkring.pipelines.run.exit_codes import Exit

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/schedulers"
FINAL = {Exit.USAGE, Exit.DATA, Exit.QUALITY}  # after which another try changes nothing


def words_of(shell: str) -> list[str]:
    """The words behind `sparkring` in a line of shell, as its shell would give them."""
    command = re.split(r"\s(?:>>|>|2>)", shell[shell.index("sparkring ") + len("sparkring ") :])[0]
    return shlex.split(
        subprocess.run(["sh", "-c", f"echo {command}"], capture_output=True, text=True, check=True).stdout
    )


def cron_commands() -> list[str]:
    lines = (EXAMPLES / "crontab").read_text().splitlines()
    return [line.split(maxsplit=5)[5].replace(r"\%", "%") for line in lines if re.match(r"[\d*]", line)]


def unit(name: str) -> dict[str, list[str]]:
    """Keys of a unit file, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (EXAMPLES / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def manifest(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def container() -> Any:
    (found,) = manifest("kubernetes_cronjob.yaml")["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return found


def test_the_recipe_for_every_night_is_valid_and_its_commands_are_taken() -> None:
    recipe = EXAMPLES.parent / "nights/clicks.yaml"
    assert load_config(str(recipe), (), DateRequest("2026-06-05")).interval is not None
    commands = re.findall(r"^# +sparkring (.+)$", recipe.read_text(), re.MULTILINE)
    assert len(commands) == 5 and all(parse(shlex.split(command)) for command in commands)


def yesterday() -> str:
    return (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")


@pytest.mark.parametrize("where", ["cron", "systemd", "kubernetes"])
def test_a_scheduler_runs_the_day_that_ended_last(where: str) -> None:
    shell = {
        "cron": cron_commands()[0],
        "systemd": unit("sparkring.service")["ExecStart"][0].replace("$$", "$").replace("%%", "%").rstrip("'"),
        "kubernetes": container()["args"][0],
    }[where]
    arguments = parse(words_of(shell))
    assert arguments.date == yesterday() and "clicks" in arguments.recipe


def test_cron_watches_the_age_of_the_last_success() -> None:
    arguments = parse(words_of(cron_commands()[1]))
    assert (arguments.last, arguments.max_age) == (1, 26 * 3600)


def test_the_spark_operators_arguments_are_a_dated_run() -> None:
    arguments = parse(manifest("spark_operator.yaml")["spec"]["arguments"])
    assert arguments.date == "2026-06-05" and arguments.overrides == ["launch.world=4"]


def test_no_scheduler_tries_again_what_another_try_cannot_change() -> None:
    (prevented,) = unit("sparkring.service")["RestartPreventExitStatus"]
    (rule, _) = manifest("kubernetes_cronjob.yaml")["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    dag = (EXAMPLES / "airflow_dag.py").read_text()
    (in_dag,) = re.findall(r"^FINAL = \{([\d, ]+)\}", dag, re.MULTILINE)
    assert {int(code) for code in prevented.split()} == FINAL
    assert {*rule["onExitCodes"]["values"]} == FINAL and rule["action"] == "FailJob"
    assert {int(code) for code in in_dag.split(",")} == FINAL


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units() -> None:
    units = [str(EXAMPLES / name) for name in ("sparkring.service", "sparkring.timer")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "sparkring" not in done.stderr, done.stderr
