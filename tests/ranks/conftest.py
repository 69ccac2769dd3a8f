"""`launch`: run one function of a module beside the tests in several processes and get every rank's result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.parallel.ring_horovod import available

HERE = Path(__file__).resolve().parent
Launch = Callable[..., list[Any]]


class RanksFailed(AssertionError):
    """Carries what every rank said."""


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A launch with Horovod where it is not installed skips the test and says so."""
    runs = iter(range(1000))

    def run(
        world: int,
        function: str,
        payload: dict[str, Any] | None = None,
        engine: str = "torch",
        timeout_s: float = 400,
        prefix: tuple[str, ...] = (),
    ) -> list[Any]:
        if engine == "horovod" and (why := available()):
            pytest.skip(f"{why}: nothing was checked on Horovod")
        out = tmp_path / f"run{next(runs)}"
        out.mkdir()
        (out / "payload.json").write_text(json.dumps({"tmp": str(tmp_path), **(payload or {})}))
        command = [*prefix, sys.executable, str(HERE / "zygote.py"), str(world), function]
        command += [str(out / "payload.json"), str(out), engine]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            raise RanksFailed(f"no end after {timeout_s} s:\n{text[-6000:]}") from None
        if process.returncode != 0:
            errors = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(out.glob("*.error")))
            raise RanksFailed(f"exit code {process.returncode}\n{text[-3000:]}\n{errors}")
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return run
