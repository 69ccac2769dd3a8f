"""A real Airflow runs the example DAG: two dates one by one and two in a backfill, each read back from the ledger.

    make airflow        its environment in build/airflow, then this; minutes

Airflow's scheduler, DAG processor and API server run as `airflow standalone` with a home of their own. Ends with exit
code 1 where a date is missing or was trained twice, or where Airflow did not get the command's last line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from machine import measured_with, publish  # noqa: E402

from benchmarks.nights import FIRST, NAME, Nights  # noqa: E402

AIRFLOW = HERE.parent / "build/airflow/bin/airflow"
DAG = f"sparkring_{NAME}"
DAYS = [FIRST + timedelta(days=n) for n in range(4)]
BY_HAND, BACKFILLED = DAYS[:2], DAYS[2:]
PORT = 18080
START_S, RUN_S = 240, 900  # at most


class Airflow:
    """An Airflow with a home of its own."""

    def __init__(self, home: Path, nights: Nights) -> None:
        self.home = home
        self.env = os.environ | {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://localhost:{PORT}/execution/",
            "AIRFLOW__API__PORT": str(PORT),
            "SPARKRING": str(Path(sys.executable).with_name("sparkring")),
            "SPARKRING_FOLDER": str(nights.folder),
            "SPARKRING_RECIPE": str(nights.recipe),
            "PATH": f"{AIRFLOW.parent}:{os.environ['PATH']}",
        }
        (home / "dags").mkdir()
        shutil.copy(HERE.parent / "examples/schedulers/airflow_dag.py", home / "dags")

    def call(self, *words: str) -> str:
        done = subprocess.run([AIRFLOW, *words], env=self.env, capture_output=True, text=True, timeout=180)
        if done.returncode:
            raise SystemExit(f"airflow {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def rows(self, *words: str) -> list[dict[str, Any]]:
        found = self.call(*words, "-o", "json")
        for line in found.splitlines():  # Airflow logs to stdout too, with lines that begin with `[2026-`
            with suppress(json.JSONDecodeError):
                if isinstance(rows := json.loads(line), list):
                    return rows
        raise SystemExit(f"airflow {' '.join(words)}: no rows in {found!r}")

    @contextmanager
    def standalone(self) -> Iterator[None]:
        """Scheduler, DAG processor and API server, until the block ends."""
        log = self.home / "standalone.log"
        with log.open("w") as out:
            server = subprocess.Popen(
                [AIRFLOW, "standalone"], env=self.env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            until = time.monotonic() + START_S
            while time.monotonic() < until and not (self.home / "airflow.db").exists():
                time.sleep(2)
            while time.monotonic() < until and DAG not in self._dags():
                time.sleep(5)
            if DAG not in self._dags():
                raise SystemExit(f"no {DAG} after {START_S} s:\n{log.read_text()[-4000:]}")
            yield
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)

    def _dags(self) -> str:
        return subprocess.run([AIRFLOW, "dags", "list"], env=self.env, capture_output=True, text=True).stdout

    def backfill(self, first: date, last: date) -> None:
        """Ask for a backfill, once the one before it has been closed."""
        words = ["backfill", "create", "--dag-id", DAG, "--from-date", str(first), "--to-date", str(last)]
        until = time.monotonic() + RUN_S
        while True:
            done = subprocess.run([AIRFLOW, *words], env=self.env, capture_output=True, text=True, timeout=180)
            if not done.returncode:
                return
            if "AlreadyRunningBackfill" not in done.stderr or time.monotonic() > until:
                raise SystemExit(f"airflow {' '.join(words)}: {done.stderr}")
            time.sleep(5)

    def ended(self, count: int) -> list[dict[str, Any]]:
        """The runs of backfills, once so many have ended. Airflow starts one for yesterday by itself, without data."""
        until = time.monotonic() + RUN_S
        while time.monotonic() < until:
            runs = [run for run in self.rows("dags", "list-runs", DAG) if run["run_id"].startswith("backfill")]
            if sum(run["state"] in ("success", "failed") for run in runs) >= count:
                return runs
            time.sleep(10)
        raise SystemExit(f"after {RUN_S} s: {self.rows('dags', 'list-runs', DAG)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        nights = Nights(Path(scratch) / "nights", window=3, every=20)
        nights.folder.mkdir()
        nights.prepare()
        nights.show(FIRST - timedelta(days=2), DAYS[-1])
        home = Path(scratch) / "airflow"
        home.mkdir()
        airflow = Airflow(home, nights)
        with airflow.standalone():
            airflow.call("dags", "unpause", DAG, "-y")
            # Not `dags trigger`: whatever its logical date, Airflow's command takes the last day that has ended.
            for first, last in [(day, day) for day in BY_HAND] + [(BACKFILLED[0], BACKFILLED[-1])]:
                airflow.backfill(first, last)
                runs = airflow.ended(DAYS.index(last) + 1)
        succeeded = all(run["state"] == "success" for run in runs)
        nights.check(succeeded, f"{len(runs)} runs of the DAG have succeeded")
        if not succeeded:
            sys.exit("\n".join(log.read_text()[-4000:] for log in sorted(home.glob("logs/dag_id=*/**/*.log"))))
        check_ledger(nights, DAYS)
        text = f"# Four nights by Airflow\n\n{measured_with('pyspark')}\n\n" + "\n".join(nights.lines) + "\n"
    publish(text, arguments.out)
    sys.exit(1 if nights.failed else 0)


def check_ledger(nights: Nights, days: list[date]) -> None:
    for day in days:
        record = nights.record(day)
        done = record.status == "succeeded" and record.attempts == 1
        nights.check(done, f"{day}: {record.status} after {record.attempts} attempt, trained in {record.run}")


if __name__ == "__main__":
    main()
