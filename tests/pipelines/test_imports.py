"""A command imports what it runs: what must not be in `sys.modules` after it, seen in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkring.pipelines.run.exit_codes import Exit

ROOT = Path(__file__).parents[2]
REPORT = ("matplotlib", "sklearn", "jinja2")
TORCH_PARTS = ("torch._dynamo", "sympy", *(f"torch.distributed.{part}" for part in ("tensor", "fsdp", "checkpoint")))
JOB = ("torch", "mlflow", "pandas", "scipy", "xgboost", *REPORT)
SPARK = ("pyspark", "py4j", "sqlglot")
RECIPE = (*JOB, *SPARK, "numpy", "pyarrow")
NOTHING = (*RECIPE, "pydantic", "yaml", "importlib.metadata")

NOT_IMPORTED = {
    "--help": NOTHING,
    "run --help": NOTHING,
    "completion bash": RECIPE,
    "config show flights": RECIPE,
    "config schema": RECIPE,
    "config validate flights --no-tables": ("mlflow", "pandas", "scipy", "xgboost", *REPORT, *TORCH_PARTS),
    "plan show flights": (
        "mlflow",
        "pandas",
        "scipy",
        "xgboost",
        *REPORT,
        *TORCH_PARTS,
    ),  # whose dataset is not built: refused
    "status {nights}": RECIPE,
    "run {nights} --date 1999-01-01": (*JOB, *SPARK),  # before the recipe's first date: refused
    "config show no-such-recipe": RECIPE,
    "config show flights no.such=1": RECIPE,
    "config validate flights no.such=1": RECIPE,
    "plan show flights no.such=1": RECIPE,
    "plan search flights no.such=1 --devices 2": RECIPE,
}
BEFORE_A_RECIPE_IS_CHECKED = ("mlflow", "xgboost", "matplotlib", "sklearn", "scipy", "pyspark.ml", *TORCH_PARTS)
PROGRAM = """
import sys
from sparkring.pipelines.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
found = [name for name in sys.argv[1].split(",") if name in sys.modules]
print("exit code", int(code), "imported:", *found)
"""


@pytest.mark.parametrize("command", NOT_IMPORTED)
def test_a_command_imports_only_what_it_runs(command: str, tmp_path: Path) -> None:
    words = command.format(nights=ROOT / "examples/nights/clicks.yaml").split()
    unwanted = ",".join(NOT_IMPORTED[command])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, unwanted, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    code, _, imported = done.stdout.splitlines()[-1].removeprefix("exit code ").partition(" imported:")
    assert int(code) in (Exit.OK, Exit.USAGE, Exit.DATA) and not imported, (code, imported, done.stderr[-2000:])


def test_a_job_imports_what_it_does_at_its_end_after_its_recipe_is_checked() -> None:
    """While Spark starts: see `import_later_parts`."""
    program = "import sys, sparkring.pipelines.job.job; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    command = [sys.executable, "-c", program, *BEFORE_A_RECIPE_IS_CHECKED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "\n"), (done.stdout, done.stderr[-2000:])


COLLECTIONS = """
import gc
from sparkring.pipelines.cli import main
began, before = gc.get_stats()[0]["collections"], gc.get_threshold()
main(["config", "show", "flights"])
print(gc.get_stats()[0]["collections"] - began < 20, gc.get_threshold() == before)
"""


def test_a_command_collects_garbage_seldom_and_leaves_the_process_as_it_was() -> None:
    """What is imported stays, and each of the dozens of collections would go through it."""
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "True True", (done.stdout[-500:], done.stderr[-2000:])
