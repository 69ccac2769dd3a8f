"""List the results that are older than the code they measure: `python benchmarks/stale.py`.

A result names the commit it was measured at; one that names none, or one of another history, counts from the commit
that wrote its file. Its age is the number of commits since then that changed what it measures. This only lists: whether
a result still holds is a person's judgment, and measuring again takes hours.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MOST = 50  # commits on what a result measures before it is listed
COMMIT = re.compile(r'\bcommit"?:? "?([0-9a-f]{7,40})\b')

# What each result measures, by the beginning of its name; the longest that fits counts.
MEASURES: dict[str, tuple[str, ...]] = {
    "airflow": ("pipelines/schedule", "examples/schedulers"),
    "arena": ("pipelines/init", "training/models/tabular.py", "training/trees", "pipelines/job/blend.py"),
    "arena_both": ("training/models/tabular.py", "training/trees", "pipelines/init", "pipelines/job/blend.py"),
    "arena_leaves": ("training/trees", "pipelines/init"),
    "arena_refit": ("training/trees", "training/worker/train_trees.py"),
    "averaging": ("training/parallel/averaging",),
    "bound_quality": ("training/servers", "training/parallel/servers"),
    "busy_machine": ("training/launch/host/fork_server.py",),
    "checkpoint_stall": ("training/checkpoint",),
    "codecs": ("training/parallel/data_parallel",),
    "compare": ("training/parallel",),
    "contributions": ("training/model/contributions.py", "training/trees"),
    "control_channel": ("training/launch",),
    "data": ("training/data",),
    "etl": ("etl",),
    "fuzz": ("tests/fuzz", "conf", "training/trees/stored.py", "training/model/folder.py"),
    "gpu": ("training/parallel", "training/models", "training/data/transfer.py"),
    "hosts": ("training/launch", "pipelines/job/hosts.py"),
    "house": ("training", "pipelines", "etl", "conf"),
    "lag_quality": ("training/tables",),
    "launch": ("training/launch", "pipelines/launch"),
    "launch_connect": ("training/launch", "pipelines/launch", "etl/spark_platform"),
    "loop": ("training/loop/fit.py", "training/worker/train.py", "training/parallel"),
    "matrix": ("etl/spark_platform", "pipelines/launch", "pipelines/run/spark.py"),
    "new_user": ("pipelines/init",),
    "night_pages": ("pipelines/tracking",),
    "nights": ("pipelines/schedule", "pipelines/job/job.py", "pipelines/promotion"),
    "petastorm_suite": ("training/data/petastorm_adapter",),
    "plan_here": (
        "training/planner/timing",
        "training/parallel",
        "pipelines/launch/measure.py",
        "training/worker/hardware.py",
    ),
    "planner": ("training/planner", "conf/clusters"),
    "predict": ("pipelines/predict",),
    "recipe_choice": ("training/models", "conf/recipes"),
    "recommender": ("training/models", "training/tables"),
    "scoring": ("pipelines/evaluation",),
    "seconds": ("etl", "training", "pipelines"),
    "servers": ("training/servers", "training/parallel/servers"),
    "slow_tests": ("tests",),
    "soak": ("training/launch", "pipelines/launch", "training/checkpoint", "training/servers"),
    "sparse_tables": ("training/tables", "training/parallel/sparse.py"),
    "split_warnings": ("pipelines/init",),
    "strategies": ("training/parallel",),
    "suite": ("tests",),
    "tables": ("pipelines/init", "training/models/tabular.py", "training/trees"),
    "threads": ("training/worker/threads.py",),
    "trees": ("training/trees", "training/worker/train_trees.py", "training/loop/rounds.py"),
    "whole_line": ("etl", "training", "pipelines"),
}


def measured(name: str) -> tuple[str, ...]:
    """What the result file of this name measures. KeyError where MEASURES has nothing for it."""
    return MEASURES[max(filter(name.startswith, MEASURES), key=len, default=name)]


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of(result: Path) -> str:
    """The last commit that the result names and that this history has, else the one that wrote the file last."""
    named = [
        found for found in COMMIT.findall(result.read_text()) if git("rev-parse", "--verify", f"{found}^{{commit}}")
    ]
    return named[-1] if named else git("log", "-1", "--format=%h", "--", str(result.relative_to(ROOT)))


def age(result: Path) -> int:
    """Commits since the result that changed what it measures; 0 where this is no checkout."""
    count = git("rev-list", "--count", f"{commit_of(result)}..HEAD", "--", *measured(result.name))
    return int(count or 0)


def main() -> int:
    ages = {result.name: age(result) for result in sorted(RESULTS.iterdir())}
    old = {name: commits for name, commits in ages.items() if commits > MOST}
    for name, commits in sorted(old.items(), key=lambda item: -item[1]):
        print(f"benchmarks/results/{name}: {commits} commits older than {', '.join(measured(name))}")
    print(f"{len(old)} of {len(ages)} results are more than {MOST} commits older than what they measure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
