"""A real Airflow runs the example DAG: two dates by hand and a backfill, each read back from the ledger.

    make airflow        its environment in build/airflow, then this; minutes

Airflow's scheduler, DAG processor and API server run as `airflow standalone` with a home of their own. Exits non-zero
where a date is missing, was trained twice, or Airflow's own return value of a task is not the command's last line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AIRFLOW = ROOT / "build/airflow/bin/airflow"
DAG = "sparkring_nightly"
BY_HAND = ("2013-03-01", "2013-03-02")
BACKFILL = ("2013-03-03", "2013-03-05")


def airflow(env: dict[str, str], *words: str) -> str:
    done = subprocess.run([AIRFLOW, *words], env=env, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise SystemExit(f"airflow {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def runs_of(env: dict[str, str]) -> list[dict[str, Any]]:
    """Airflow's runs of the DAG."""
    rows: list[dict[str, Any]] = json.loads(airflow(env, "dags", "list-runs", DAG, "-o", "json").splitlines()[-1])
    return rows


def wait_for(env: dict[str, str], count: int, limit_s: float) -> list[dict[str, Any]]:
    """The DAG's runs, once `count` have ended."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        runs = runs_of(env)
        if sum(run["state"] in ("success", "failed") for run in runs) >= count:
            return runs
        time.sleep(5)
    raise SystemExit(f"after {limit_s:.0f} s: {runs_of(env)}")


def main(recipe: Path, folder: Path) -> None:
    """Run the DAG on `recipe` in `folder`, and print what Airflow and the ledger say."""
    with tempfile.TemporaryDirectory() as home:
        env = os.environ | {
            "AIRFLOW_HOME": home,
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "examples/schedulers"),
            "AIRFLOW__API__PORT": "18080",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": "http://localhost:18080/execution/",
            "SPARKRING": str(ROOT / ".venv/bin/sparkring"),
            "SPARKRING_FOLDER": str(folder),
            "SPARKRING_RECIPE": str(recipe),
        }
        env.pop("PYTHONPATH", None)
        log = open(Path(home) / "standalone.log", "w")  # noqa: SIM115 (the process writes it to its end)
        server = subprocess.Popen([AIRFLOW, "standalone"], env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + 180
            while DAG not in subprocess.run([AIRFLOW, "dags", "list"], env=env, capture_output=True, text=True).stdout:
                if time.monotonic() > until:
                    raise SystemExit((Path(home) / "standalone.log").read_text()[-4000:])
                time.sleep(3)
            airflow(env, "dags", "unpause", DAG, "-y")
            for date in BY_HAND:  # a run by hand is for the last day that has ended at its logical date
                day_after = time.strftime("%Y-%m-%d", time.gmtime(time.mktime(time.strptime(date, "%Y-%m-%d")) + 86400))
                airflow(env, "dags", "trigger", DAG, "-l", f"{day_after}T00:00:00+00:00")
            wait_for(env, len(BY_HAND), 600)
            airflow(env, "backfill", "create", "--dag-id", DAG, "--from-date", BACKFILL[0], "--to-date", BACKFILL[1])
            for run in wait_for(env, len(BY_HAND) + 3, 900):
                print(run["run_id"], run["state"])
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
    last = subprocess.run(
        [env["SPARKRING"], "status", str(recipe), "--last", "5", "--json"], cwd=folder, capture_output=True, text=True
    )
    print(last.stdout, last.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
