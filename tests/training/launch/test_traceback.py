"""A traceback as a user should see it: their own lines, and the rest folded."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path

import torch
from torch import nn

from sparkring.conf.errors import fold_traceback
from sparkring.training.launch.failure import Failure, WorkerFailed
from sparkring.training.launch.topology import Child

MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x):
        return self.mix(x)

    def mix(self, x):
        return self.layer(x)

def wrong(x):
    try:
        Net()(x)
    except RuntimeError as error:
        raise ValueError("bad input") from error
"""


def text_of(tmp_path: Path, name: str) -> str:
    (tmp_path / "net.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("net_of_test", tmp_path / "net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    called = module.Net() if name == "Net" else module.wrong
    try:
        nn.Sequential(called)(torch.ones(3, 3)) if name == "Net" else called(torch.ones(3, 3))
    except (RuntimeError, ValueError) as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("it does not fail")


def test_the_users_frames_stand_out_and_the_innermost_says_where_it_arose(tmp_path: Path) -> None:
    whole = text_of(tmp_path, "Net")
    lines = fold_traceback(whole).splitlines()
    assert len(whole.splitlines()) > 25 and len(lines) <= 12
    files = [line.split('"')[1].rpartition("/")[2] for line in lines if line.startswith("  File")]
    assert files == ["test_traceback.py", "net.py", "net.py", "linear.py"]
    assert "        return self.layer(x)".strip() in [line.strip() for line in lines]
    assert lines[0] == "Traceback (most recent call last):" and "mat1 and mat2" in lines[-1]
    assert sum("frames of Python, packages and sparkring]" in line for line in lines) == 2


def test_a_chain_of_errors_is_kept(tmp_path: Path) -> None:
    folded = fold_traceback(text_of(tmp_path, "wrong"))
    assert "mat1 and mat2" in folded and "ValueError: bad input" in folded
    assert "The above exception was the direct cause" in folded
    assert folded.index("mat1") < folded.index("bad input")


def test_a_traceback_without_a_line_of_the_users_is_left_whole() -> None:
    text = "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "/a/sparkring-1.zip/sparkring/training/worker.py", line 3, in train',
            "    x()",
            '  File "/a/lib/python3.11/site-packages/torch/x.py", line 5, in x',
            "    y()",
            "KeyError: 'z'",
        ]
    )
    assert fold_traceback(text) == text


def test_a_failure_shows_one_traceback_and_keeps_it_whole(tmp_path: Path) -> None:
    whole = text_of(tmp_path, "Net")
    error = WorkerFailed(Failure(Child("rank", 0), "host", "exception", "raised RuntimeError: mat1", traceback=whole))
    assert str(error).count("Traceback (most") == 1 and len(str(error).splitlines()) < 16
    assert error.failure.traceback == whole


def test_a_cell_of_a_notebook_is_the_users() -> None:
    text = "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "/a/sparkring-1.zip/sparkring/training/launch/host/rank.py", line 3, in call_entry',
            "    x()",
            '  File "<ipython-input-3>", line 5, in train',
            "    y()",
            '  File "<frozen importlib._bootstrap>", line 5, in z',
            '  File "/usr/lib/python3.11/json/decoder.py", line 5, in w',
            "    w()",
            "KeyError: 'z'",
        ]
    )
    assert [line.split(",")[0] for line in fold_traceback(text).splitlines() if "File" in line] == [
        '  File "<ipython-input-3>"',
        '  File "/usr/lib/python3.11/json/decoder.py"',
    ]
