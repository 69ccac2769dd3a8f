"""`sparkring launch`: what travels, what is refused, and a whole run as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sparkring.conf.load import ConfigError
from sparkring.pipelines.cli import main
from sparkring.pipelines.exit_codes import Exit
from sparkring.pipelines.launch import script as launch

ROOT = Path(__file__).parents[3]


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_the_working_directory_travels_without_what_is_hidden_cached_or_an_environment(tmp_path: Path) -> None:
    names = ("train.py", "sub/m.py", "sub/data.csv", ".env", ".git/config", "sub/__pycache__/m.pyc", ".secret/a/b")
    folder = make(tmp_path / "f", *names, "venv/pyvenv.cfg", "venv/lib/x.py")
    (folder / "gone").symlink_to(folder / "nothing")
    archive = launch.pack_folder(folder, str(folder / "train.py"), [".env", ".secret", "sub/m.py"], tmp_path)
    with zipfile.ZipFile(archive) as files:
        assert sorted(files.namelist()) == [".env", ".secret/a/b", "sub/data.csv", "sub/m.py", "train.py"]


def test_what_cannot_travel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, script = make(tmp_path / "f", "train.py", "data.bin"), str(tmp_path / "f/train.py")
    outside = str(make(tmp_path / "g", "train.py") / "train.py")
    with pytest.raises(ConfigError, match="not below the working directory"):
        launch.pack_folder(folder, outside, [], tmp_path)
    for name in ("nowhere", "../g/train.py"):
        with pytest.raises(ConfigError, match=f"--files {name}: no file or folder below"):
            launch.pack_folder(folder, script, [name], tmp_path)
    monkeypatch.setattr(launch, "MAX_FOLDER_BYTES", 8)
    with pytest.raises(ConfigError, match=r"at most .* the largest are (train\.py|data\.bin) \(0 MiB\)"):
        launch.pack_folder(folder, script, [], tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "0", "train.py"], "'0': a whole number, at least 1"),
        (["--master", "spark://h:7077", "train.py"], "--world: say how many ranks"),
        (["--world", "2", "nothing.py"], "no such script"),
    ],
)
def test_a_command_that_cannot_be_run_is_a_usage_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["launch", *words])
    except SystemExit as end:  # argparse's own
        code = int(end.code or 0)
    assert code == Exit.USAGE and said in capsys.readouterr().err


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("sum", x.item(), sys.argv[1:], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.destroy_process_group()
if os.environ["RANK"] == "0":
    print("\\n".join(f"line {i}" for i in range(20000)))
if sys.argv[1:] != ["--lr", "1"] or (os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"):
    sys.exit(7)
"""


@pytest.mark.spark
def test_a_script_of_two_ranks_fails_once_and_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "launch", "--world", "2", "--max-attempts", "2"]
    done = subprocess.run(
        [*command, "train.py", "--lr", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "sum" in line]
    assert sorted(said)[-1] == "[rank 1] sum 2.0 ['--lr', '1'] 1" and len(said) == 4
    lines = [line for line in done.stdout.splitlines() if "line" in line]
    assert lines[-20000:] == [f"[rank 0] line {i}" for i in range(20000)]
    assert "rank 1 on" in done.stderr and "exited with code 7" in done.stderr


HANDLER = """
import os, signal, sys, time
def end(number, frame):
    print("saved", flush=True)
    sys.exit(int(os.environ["RANK"]))
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.spark
def test_a_script_with_a_handler_for_sigterm_hears_of_the_end_by_it(tmp_path: Path) -> None:
    """One rank ends well and one with an exit code: the command was told to end, and says so by its own."""
    (tmp_path / "train.py").write_text(HANDLER)
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "launch", "--world", "2", "train.py"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "err").open("w"),
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[rank 0] ready\n", "[rank 1] ready\n"]
        process.send_signal(signal.SIGTERM)
        lines, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert sorted(lines.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]
    assert process.returncode == Exit.TERMINATED, (tmp_path / "err").read_text()
