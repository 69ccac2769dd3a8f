"""`sparkring launch`: what travels, what is refused, and a whole run as a user types it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.load import ConfigError
from sparkring.pipelines.cli import main
from sparkring.pipelines.cli.commands.machines import FLAGS
from sparkring.pipelines.cli.entry import parse, parser
from sparkring.pipelines.launch import script as launch
from sparkring.pipelines.run.exit_codes import Exit
from tests.e2e.commands import run_here
from tests.helpers.signals import stopped_when

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
    "words",
    [
        ["--hang-timeout", "nan"],
        ["--hang-timeout", "inf"],
        ["--hang-timeout", "-1"],
        ["--hang-timeout", "0"],
        ["--min-world", "4"],
        ["--conf", "spark.executor.cores"],
        ["--conf", "=spark"],
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    assert main(["launch", "--world", "2", *words, "own.py"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "sparkring launch: 1 problem" in said and words[-1].partition(".")[0] in said and "pydantic" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "0", "train.py"], "'0': a whole number, at least 1"),
        (["--master", "spark://h:7077", "train.py"], "--world: say how many ranks"),
        (["--world", "2", "nothing.py"], "no such script"),
        (["--world", "2", "-m", "nothing.at.all"], "-m nothing.at.all: no module 'nothing' in"),
        (["--world", "2", "-m", "json.nothing"], "no module 'json.nothing' in"),
        (["--world", "2", "-m", "json"], "a package without a __main__.py cannot be run"),
        (["--world", "2", "--m=5", "train.py"], "ambiguous option: --m=5"),  # before the script it is ours
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


def test_on_a_server_of_connect_the_number_of_ranks_is_not_guessed_from_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://h:15002")
    assert main(["launch", "train.py"]) == Exit.USAGE and "--world: say how many ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "of_script",
    [
        ["--m=5"],
        ["--m", "5"],
        ["--world", "3", "--ver"],
        ["--", "-x"],
        ["-v", "-h", "--help"],
        ["-m", "other"],
        ["launch", "--master=x", "--lr=1", "-1"],
        [""],
        [],
    ],
)
@pytest.mark.parametrize(
    "ours", [[], ["--world", "2"], ["--world=2", "--conf", "a=b"], ["--hang-timeout", "5", "--"], ["--wor", "2", "-m"]]
)
def test_all_words_behind_the_script_are_its_own(ours: list[str], of_script: list[str]) -> None:
    for before in ([], ["-v"]):
        arguments = parse([*before, "launch", *ours, "train.py", *of_script])
        assert (arguments.script, arguments.words) == ("train.py", of_script)
        assert arguments.module == ("-m" in ours) and arguments.world == (2 if any("wor" in w for w in ours) else None)


def test_the_options_without_a_value_are_known_to_the_split() -> None:
    commands = next(action for action in parser()._actions if isinstance(action.choices, dict))
    assert isinstance(commands.choices, dict)
    options = [action for action in commands.choices["launch"]._actions if action.option_strings]
    assert sorted(name for action in options if action.nargs == 0 for name in action.option_strings) == sorted(FLAGS)


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
def test_a_script_of_two_ranks_fails_once_and_is_started_again(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_here(tmp_path, "launch", "--world", "2", "--max-attempts", "2", "train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "sum" in line]
    assert sorted(said)[-1] == "[rank 1] sum 2.0 ['--lr', '1'] 1" and len(said) == 4
    lines = [line for line in done.stdout.splitlines() if "line" in line]
    assert lines[-20000:] == [f"[rank 0] line {i}" for i in range(20000)]
    assert "rank 1 on" in done.stderr and "exited with code 7" in done.stderr


HANDLER = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def end(number, frame):
    (folder / f"saved-{rank}").touch()
    sys.exit(rank)
signal.signal(signal.SIGTERM, end)
(folder / f"ready-{rank}").touch()
time.sleep(600)
"""


@pytest.mark.spark
def test_a_script_with_a_handler_for_sigterm_hears_of_the_end_by_it(spark: Any, tmp_path: Path) -> None:
    """One rank ends well and one with an exit code: the command was told to end, and says so by its own."""
    (tmp_path / "train.py").write_text(HANDLER)
    ready, saved = ([tmp_path / f"{word}-{rank}" for rank in (0, 1)] for word in ("ready", "saved"))
    with pytest.raises(SystemExit) as ended, stopped_when(lambda: all(file.exists() for file in ready)):
        run_here(tmp_path, "launch", "--world", "2", "train.py", str(tmp_path))
    assert ended.value.code == Exit.TERMINATED and all(file.exists() for file in saved)


MODULE = """
import os, sys, time
from pathlib import Path
from typing import Any
from package import name
steps = 0
if os.environ["RANK"] == "0":
    while not Path("enough").exists():  # longer than the limit of the command without a newline
        print(f"\\r{steps}/100", end="", flush=True)
        steps += 1
        if steps == 45:
            Path("enough").touch()
        time.sleep(0.1)
print(flush=True)
print(__name__, __package__, name, Path(sys.argv[0]).name, sys.argv[1:], os.getcwd(), flush=True)
"""


@pytest.mark.spark
def test_a_module_that_draws_a_progress_bar_runs_to_its_end(spark: Any, tmp_path: Path) -> None:
    """The bar takes 4.5 s and ends no line, one rank prints nothing: the limit without output is 2 s."""
    make(tmp_path, "package/__init__.py").joinpath("package/__init__.py").write_text("name = 'ours'")
    (tmp_path / "package/train.py").write_text(MODULE)
    command = ("launch", "--world", "2", "--hang-timeout", "2")
    done = run_here(tmp_path, *command, "-m", "package.train", "--m=5", "--", "-v")
    assert done.returncode == 0, done.stderr
    expected = f"__main__ package ours train.py ['--m=5', '--', '-v'] {tmp_path}"
    assert sorted(line for line in done.stdout.splitlines() if "main" in line) == [
        f"[rank 0] {expected}",
        f"[rank 1] {expected}",
    ]
    states = [line for line in done.stdout.splitlines() if line.startswith("[rank 0]") and line.endswith("/100")]
    assert 2 <= len(states) < 45
