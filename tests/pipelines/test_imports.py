"""A command imports what it runs: what must not be in `sys.modules` after it, seen in a process of its own."""

from __future__ import annotations

import json
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
WITHOUT_A_JOB = ("mlflow", "pandas", "scipy", "xgboost", *REPORT)
RECIPE = (*JOB, *SPARK, "numpy", "pyarrow")
NOTHING = (*RECIPE, "pydantic", "yaml", "importlib.metadata")

NOT_IMPORTED = {  # what a command imports stays for those below it, which may import no less
    "--help": NOTHING,
    "run --help": NOTHING,
    "completion bash": RECIPE,
    "config show flights": RECIPE,
    "config schema": RECIPE,
    "status {nights}": RECIPE,
    "config show no-such-recipe": RECIPE,
    "config show flights no.such=1": RECIPE,
    "config validate flights no.such=1": RECIPE,
    "plan show flights no.such=1": RECIPE,
    "plan search flights no.such=1 --devices 2": RECIPE,
    "run {nights} --date 1999-01-01": (*JOB, *SPARK),  # before the recipe's first date: refused
    "config validate flights --no-tables": (*WITHOUT_A_JOB, *TORCH_PARTS),
    "plan show flights": (*WITHOUT_A_JOB, *TORCH_PARTS),  # whose dataset is not built: refused
}
BEFORE_A_RECIPE_IS_CHECKED = ("mlflow", "xgboost", "matplotlib", "sklearn", "scipy", "pyspark.ml", *TORCH_PARTS)
PROGRAM = """
import json, sys
from sparkring.pipelines.cli import main
after = {}
for command, unwanted in json.loads(sys.argv[1]).items():
    try:
        code = main(command.split())
    except SystemExit as end:
        code = end.code
    after[command] = int(code), [name for name in unwanted if name in sys.modules]
print(json.dumps(after))
"""


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """Command -> its exit code, and which of its unwanted modules were there after it."""
    words = json.dumps({spelled(command): unwanted for command, unwanted in NOT_IMPORTED.items()})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        cwd=tmp_path_factory.mktemp("commands"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, tuple[int, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def spelled(command: str) -> str:
    return command.format(nights=ROOT / "examples/nights/clicks.yaml")


@pytest.mark.parametrize("command", NOT_IMPORTED)
def test_a_command_imports_only_what_it_runs(command: str, after: dict[str, tuple[int, list[str]]]) -> None:
    code, imported = after[spelled(command)]
    assert code in (Exit.OK, Exit.USAGE, Exit.DATA) and not imported


RUNS_HERE = """
from sparkring.conf.load import load_config
from sparkring.pipelines.model.plan import runs_here
assert runs_here(load_config("flights", []).config)
"""
MODULES = ("run.spark_settings", "launch.slots", "validate.recipe", "job.job")
STATEMENTS = {  # in one process: none imports more than those below it may
    "run.spark_settings": ("pyspark", "torch", *BEFORE_A_RECIPE_IS_CHECKED),
    "launch.slots": ("pyspark", "torch", *BEFORE_A_RECIPE_IS_CHECKED),
    RUNS_HERE: ("pyspark",),
    "validate.recipe": ("pyspark", *BEFORE_A_RECIPE_IS_CHECKED),
    "job.job": BEFORE_A_RECIPE_IS_CHECKED,  # the rest while Spark starts: `import_later_parts`
}
IMPORTING = """
import json, sys
for statement, unwanted in json.loads(sys.argv[1]).items():
    exec(statement if "import" in statement else f"import sparkring.pipelines.{statement}")
    print(json.dumps([statement, [name for name in unwanted if name in sys.modules]]), flush=True)
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """Statement -> which of its unwanted modules were there after it."""
    command = [sys.executable, "-c", IMPORTING, json.dumps(STATEMENTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_leaves_to_others_what_only_later_work_needs(module: str, imported: dict[str, list[str]]) -> None:
    assert imported[module] == []


def test_where_ranks_will_run_is_known_without_pyspark(imported: dict[str, list[str]]) -> None:
    """Also after it was asked whether there is a session: who has one has imported it."""
    assert imported[RUNS_HERE] == []


COLLECTIONS = """
import gc
from sparkring.pipelines.cli import entry
began, before = gc.get_stats()[0]["collections"], gc.get_threshold()
entry.main(["config", "show", "flights"])
print(gc.get_stats()[0]["collections"] - began <= 1, gc.get_threshold() == before, gc.callbacks)
entry.IMPORTED = 1000
with entry._few_collections():
    first = gc.get_threshold()[0]
    kept = [[] for _ in range(2000)]
    print(first, gc.get_threshold()[0] == entry.OBJECTS)
"""


def test_a_command_collects_garbage_seldom_and_leaves_the_process_as_it_was() -> None:
    """What is imported stays, and each of dozens of collections would go through it; later ones go through little."""
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-2:] == ["True True []", "1000 True"], (done.stdout[-500:], done.stderr[-2000:])
