"""Commands in this process, on the suite's session: where the claim is about a process, a test starts one."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

from sparkring.pipelines.cli import main
from sparkring.pipelines.run.spark import variables


def run_here(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Run a command in `folder`, with `environment` added to the variables; its exit code, output, errors and log."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(folder), variables(environment or {}), redirect_stdout(out), redirect_stderr(err), logged(err):
        code = main(words)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextmanager
def logged(stream: io.StringIO) -> Iterator[None]:
    """Write the log from INFO up to the stream, as `sparkring` does where nobody has set up logging."""
    root, handler = logging.getLogger(), logging.StreamHandler(stream)
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
