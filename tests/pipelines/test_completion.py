"""The completion script, asked as the shell asks it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sparkring.conf.load import leaves, load_config
from sparkring.conf.tasks import TABLE_TASKS
from sparkring.pipelines.cli import main, parser
from sparkring.pipelines.cli.completion import completion

# What each shell does before it calls the function; zsh's bashcompinit has the arrays of ksh.
ASKED = {
    "bash": 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sparkring; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": 'source "$0"; emulate ksh; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sparkring; '
    'printf "%s\\n" "${COMPREPLY[@]}"',
}


@pytest.fixture(params=["bash", "zsh"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} on this machine")
    (tmp_path / "script").write_text(completion(parser(), request.param))
    (tmp_path / "mine.yaml").touch()
    return str(request.param)


def complete(shell: str, folder: Path, *words: str) -> set[str]:
    """What is offered for the last of the words."""
    command = [shell, *(["-f"] if shell == "zsh" else ["--norc"]), "-c", ASKED[shell], "./script", "sparkring", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "not found" not in done.stderr, done.stderr
    found = set(done.stdout.split())
    return {word for word in found if word.startswith(words[-1])} if shell == "zsh" else found  # which does so itself


def test_commands_options_choices_recipes_and_keys_are_offered(shell: str, tmp_path: Path) -> None:
    assert complete(shell, tmp_path, "ro") == {"rollback"}
    assert complete(shell, tmp_path, "-v", "config", "") >= {"show", "validate", "schema"}
    assert complete(shell, tmp_path, "config", "validate", "--no") == {"--no-tables"}
    assert complete(shell, tmp_path, "init", "table", "--task", "") == {*TABLE_TASKS}
    assert complete(shell, tmp_path, "run", "fl") == {"flights"}
    assert complete(shell, tmp_path, "run", "mi") == {"mine.yaml"}
    assert complete(shell, tmp_path, "run", "flights", "opt") == {"optim."}
    assert complete(shell, tmp_path, "run", "flights", "optim.lr") == {"optim.lr="}
    assert complete(shell, tmp_path, "lineage", "models:/x/1", "tracking.r") >= {
        "tracking.root=",
        "tracking.registered_model=",
    }
    assert complete(shell, tmp_path, "lineage", "models:/x/1", "optim.") == set()
    assert complete(shell, tmp_path, "package", "optim.") == set()


def test_every_key_of_a_recipe_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    keys = {word.rstrip("=") for word in capsys.readouterr().out.replace('"', " ").split() if word.endswith("=")}
    for key, _ in leaves(load_config("flights").as_dict()):
        assert any(f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}.") for known in keys), key
    assert {"promote.rules", "data.petastorm.url"} <= keys
