"""Nights of flights that must not be promoted, and what a backfill and a correction do, each a command of its own.

    python benchmarks/nights_gates.py --out benchmarks/results/nights_gates_2core_202611.md

The lake and the recipe are those of nights.py, with a window of a week whose last day is the test rows, rules of
`promote` and `drift`, a start from the champion, and a webhook that this process receives. In turn: a first night; one
whose labels are permuted; one whose model predicts something else; one as it should be; one with a correction two days
back; and a backfill of 14 dates that trains on the last. Ends with exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml
from mlflow import MlflowClient

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from machine import measured_with, publish  # noqa: E402

from benchmarks.nights import FIRST, NAME, Nights  # noqa: E402
from sparkring.conf.storage import open_storage  # noqa: E402
from sparkring.training.worker.result import MODEL, TrainResult, read_result  # noqa: E402

WINDOW, BACKFILLED = 7, 14
GATES: dict[str, Any] = {
    "promote": {"rules": [{"metric": "auc", "threshold": 0.6}, {"metric": "brier", "min_relative_change": 0.0}]},
    "drift": {"rules": [{"columns": ["prediction"], "measure": "psi", "max": 1.0, "action": "hold"}]},
    "warm_start": {"from": "champion"},
}
ONLY_DRIFT = ("promote.rules=[]",)
UNTRAINED = ("optim.lr=1e-9", "warm_start=null")  # predicts the same for every row


@contextmanager
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Give the URL of a server, and the list of what it is told."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", heard
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class GatedNights(Nights):
    """As of nights.py, with gates and somebody who is told."""

    def prepare_gates(self, url: str) -> None:
        self.prepare()
        block = yaml.safe_load(self.recipe.read_text()) | GATES
        block["etl"]["split"] = {
            "kind": "time", "column": "time_hour", "boundaries": {"valid": "{ds - 1d}", "test": "{ds}"},
        }  # fmt: skip
        block["notify"] = {
            "events": ["rejected", "held"], "targets": [{"kind": "webhook", "url": url}], "http_hosts": ["127.0.0.1"],
        }  # fmt: skip
        self.recipe.write_text(yaml.safe_dump(block, sort_keys=False))

    def try_night(self, day: date, *overrides: str) -> tuple[int, dict[str, Any]]:
        """Run a date: its exit code, and the JSON of its last line."""
        self.show(day - timedelta(days=2), day)
        code, line = self.run("run", *overrides, "--date", str(day))
        print(f"{day}: exit code {code}", flush=True)
        return code, line

    def champion(self) -> str:
        client = MlflowClient(f"sqlite:///{self.folder}/mlflow/mlflow.db")
        return str(client.get_model_version_by_alias(NAME, "champion").version)

    def result(self, day: date) -> TrainResult:
        return read_result(open_storage(str(self.folder / "runs")).at(NAME).at(str(self.record(day).run)))

    def rebuilt(self, day: date) -> list[str]:
        """The intervals of the day before's dataset whose parts are others in this one's."""
        before, now = self.record(day - timedelta(days=1)).parts, self.record(day).parts
        return sorted(label for label in now if label in before and now[label] != before[label])

    def parts_made(self) -> int:
        return len([*self.folder.glob(f"datasets/parts/{NAME}/*/*/_part.json")])

    def runs_made(self) -> int:
        return len([*self.folder.glob(f"runs/{NAME}/2*")])


def permute(file: Path) -> str:
    """Exchange the arrival delays of a file's rows at random; returns its text as it was."""
    text = file.read_text()
    rows = [*csv.DictReader(text.splitlines())]
    delays = [row["arr_delay"] for row in rows]
    random.Random(1).shuffle(delays)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0].keys())
        writer.writeheader()
        writer.writerows(row | {"arr_delay": delay} for row, delay in zip(rows, delays, strict=True))
    return text


def check_permuted(nights: GatedNights, day: date, heard: list[dict[str, Any]]) -> None:
    file = nights.days / f"date={day}/flights.csv"
    text = permute(file)
    code, line = nights.try_night(day)
    file.write_text(text)
    scores = [(told["event"], told["scores"].get("auc"), told["champion_scores"].get("auc")) for told in heard]
    both = len(scores) == 1 and scores[0][0] == "rejected" and None not in scores[0]
    nights.check(
        code == 6 and nights.champion() == "1" and both,
        f"labels of {day} permuted: exit code {code} ({line['promotion']['decision']}), champion is version "
        f"{nights.champion()}; the webhook was told (event, AUC, champion's AUC on the same rows): {scores}",
    )
    heard.clear()


def check_shifted(nights: GatedNights, day: date, heard: list[dict[str, Any]]) -> None:
    code, line = nights.try_night(day, *ONLY_DRIFT, *UNTRAINED)
    told = [each["event"] for each in heard]
    nights.check(
        code == 6 and line["promotion"]["decision"] == "held" and nights.champion() == "1" and told == ["held"],
        f"a model that predicts something else on {day}: exit code {code}, {line['promotion']['reasons'][0]}; the "
        f"webhook was told {told}",
    )
    again = nights.rebuilt(day)
    nights.check(again == [str(day - timedelta(days=1))], f"and the labels as they should be again: rebuilt {again}")
    heard.clear()


def check_correction(nights: GatedNights, day: date) -> None:
    corrected = day - timedelta(days=2)
    file = nights.days / f"date={corrected}/flights.csv"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-5]))
    code, _ = nights.try_night(day)
    again, start = nights.rebuilt(day), nights.result(day).start
    nights.check(
        code in (0, 6) and again == [str(corrected)] and start.startswith("from scratch") and str(corrected) in start,
        f"{corrected} corrected before {day}: rebuilt {again}; training started {start}",
    )


def check_backfill(nights: GatedNights, first: date) -> None:
    last = first + timedelta(days=BACKFILLED - 1)
    nights.show(first - timedelta(days=2), last)
    parts, runs, champion = nights.parts_made(), nights.runs_made(), nights.champion()
    code, _ = nights.run("backfill", "--from-date", str(first), "--to-date", str(last), "--train", "last")
    made, trained, now = nights.parts_made() - parts, nights.runs_made() - runs, nights.champion()
    nights.check(
        (code, made, trained, now) == (0, BACKFILLED, 1, champion),
        f"backfill of {first} to {last}, --train last: exit code {code}, {made} parts, {trained} training; champion "
        f"was version {champion} and is version {now}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="use every n-th flight of a day")
    parser.add_argument("--folder", type=Path, default=Path("build/nights_gates"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder}: exists; remove it, or choose another --folder")
    folder.mkdir(parents=True)
    nights = GatedNights(folder, WINDOW, arguments.every)
    days = [FIRST + timedelta(days=n) for n in range(6)]
    with receiver() as (url, heard):
        nights.prepare_gates(url)
        nights.show(days[0] - timedelta(days=WINDOW - 1), days[0])
        code, first = nights.run("run", "--date", str(days[0]))
        auc = first.get("scores", {}).get(MODEL, {}).get("auc")
        nights.check(
            code == 0 and nights.champion() == "1", f"{days[0]}: exit code {code}, AUC {auc:.4f}, the champion"
        )
        check_permuted(nights, days[1], heard)
        check_shifted(nights, days[2], heard)
        code, line = nights.try_night(days[3])
        nights.check(code in (0, 6), f"{days[3]} as it should be: exit code {code}, {line['promotion']['decision']}")
        if (version := line["model_version"]) != nights.champion():  # the next starts from it all the same
            nights.run("promote", version, "--reason", "so that the next night starts from it")
        check_correction(nights, days[4])
        check_backfill(nights, days[5])
    text = f"""# Nights that must not be promoted, a correction and a backfill

{measured_with("pyspark", "torch", "mlflow")}

Flights of 2013, a window of {WINDOW} days, the last one its test rows; rules: AUC at least 0.6, Brier score not worse
than the champion's on the same rows; predictions within a PSI of 1.0 of the champion's.

{chr(10).join(nights.lines)}
"""
    publish(text, arguments.out)
    sys.exit(1 if nights.failed else 0)


if __name__ == "__main__":
    main()
