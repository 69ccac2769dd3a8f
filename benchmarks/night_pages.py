"""MLflow's pages of a year of nights, in a real browser: what they show, and how long they take.

    make pages
    python benchmarks/night_pages.py --nights 365 --out benchmarks/results/pages_2core_202611.md

Two nights of flights are run as a scheduler runs them, and the journal of the second is kept: all that such a night
tells MLflow. For each date it is sent again by our own sender to an embedded store, with the date, the times, the
identities (run folder, dataset, weights) and the values of metrics exchanged. The values are drawn by a seeded
generator, since they are only to be looked at; decisions follow from them by the rules of `promote` and `drift`; some
nights fail in training. Then `sparkring ui` serves the store, and a headless Chromium opens the pages. A page counts as
open when the text that its reader is after is rendered. Needs `chromium` on PATH. Ends with exit code 1 where a page
does not show what it should.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import yaml
from mlflow import MlflowClient

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from browser import Browser, browser_version, dates_shown, find_chromium, served  # noqa: E402
from machine import measured_with, publish  # noqa: E402

from benchmarks.nights import FIRST, Nights  # noqa: E402
from sparkring.conf.blocks.promote import PromoteConfig  # noqa: E402
from sparkring.conf.blocks.tracking import TrackingConfig  # noqa: E402
from sparkring.conf.stored import parse  # noqa: E402
from sparkring.pipelines.promotion.drift import line_of  # noqa: E402
from sparkring.pipelines.promotion.gate import Compared, Seen, conclude  # noqa: E402
from sparkring.pipelines.promotion.rules import judge, reasons_of  # noqa: E402
from sparkring.pipelines.tracking import ops  # noqa: E402
from sparkring.pipelines.tracking.journal import Journal  # noqa: E402
from sparkring.pipelines.tracking.store.registry import Registry  # noqa: E402
from sparkring.pipelines.tracking.store.sink import MlflowSink  # noqa: E402
from sparkring.pipelines.tracking.tags import HISTORY, NO_CHAMPION  # noqa: E402
from sparkring.pipelines.tracking.views import links  # noqa: E402
from sparkring.training.worker.result import DriftFinding  # noqa: E402

NAME = "flights"
WINDOW = 7  # days
GATES = {
    "promote": {"rules": [{"metric": "auc", "threshold": 0.5}, {"metric": "loss", "min_relative_change": 0.0}]},
    "drift": {"rules": [{"columns": ["distance", "carrier", "origin", "prediction"], "measure": "psi", "max": 0.2}]},
}
DRIFT_MAX = 0.2
TRAINED = datetime(2000, 1, 1, 4, 30)  # when, in the morning after its date, a night begins; UTC
FAILS = 0.02  # share of nights
TARGET_S = 3.0
RECORD = """
import shutil, sys
from pathlib import Path
from sparkring.pipelines import cli
from sparkring.pipelines.tracking.journal import Journal

recipe, kept, *days = sys.argv[1:]
close = Journal.close

def keep(journal, delete):
    shutil.copytree(journal.folder, Path(kept) / day)
    close(journal, delete)

Journal.close = keep
for day in days:
    code = cli.main(["run", recipe, "--date", day])
    if code not in (0, 6):
        sys.exit(code)
"""


# --- a real night


def record_night(folder: Path) -> Path:
    """Run two nights of flights, and keep the second's journal, which has a champion: its folder."""
    nights = Nights(folder, WINDOW, every=1)
    folder.mkdir(parents=True)
    nights.prepare()
    block = yaml.safe_load(nights.recipe.read_text())
    nights.recipe.write_text(yaml.safe_dump(block | GATES | {"name": NAME}, sort_keys=False))
    days = [FIRST, FIRST + timedelta(days=1)]
    nights.show(FIRST - timedelta(days=WINDOW - 1), days[-1])
    words = [sys.executable, "-c", RECORD, str(nights.recipe), str(folder / "journals"), *map(str, days)]
    with (folder / "log").open("a") as log:
        code = subprocess.run(words, stdout=log, stderr=log, cwd=folder).returncode
    if code:
        sys.exit(f"the nights to be recorded ended with exit code {code}; see {folder / 'log'}")
    return folder / "journals" / str(days[-1])


# --- a year of them


@dataclass(frozen=True)
class Night:
    """What was drawn for a date."""

    ds: str
    decision: str  # or "failed"
    reason: str
    job: str  # id of its run


@dataclass
class Template:
    """The recorded journal, and what is exchanged in it."""

    folder: Path
    ds: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)  # texts that are other ones every night
    began: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> Template:
        lines = [json.loads(line) for line in (folder / "ops.jsonl").read_text().splitlines()]
        job = next(line["tags"] for line in lines if line["op"] == "start")
        described = next(line["tags"] for line in lines if "sparkring.fingerprint" in line.get("tags", {}))
        model = next(line for line in lines if line["op"] == "model")
        identities = [
            job["sparkring.job"].rpartition("/")[2], described["sparkring.fingerprint"],
            described["sparkring.config_digest"], described["sparkring.application_id"], model["sha256"],
        ]  # fmt: skip
        return cls(folder, folder.name, lines, identities, lines[0]["at"])

    def scores(self) -> dict[str, float]:
        """The recorded values of the history, by name."""
        return dict(next(line for line in self.lines if line["op"] == "history")["values"])


def drawn(ds: str, name: str, value: float) -> float:
    """A value for the date: the recorded one, moved by some percent; the same wherever the name occurs.

    The champion's moves with the model's own, since both are scored on the same rows.
    """
    if value == int(value):
        return value
    rows = 0.02 * random.Random(f"{ds}/{name.replace('champion/', '')}").gauss(0, 1)
    model = 0.005 * random.Random(f"{ds}/{name}/model").gauss(0, 1)
    return value * (1 + rows) * (1 + model)


def identity_of(ds: str, text: str) -> str:
    """Another text of the same length for the date."""
    found = hashlib.sha256(f"{ds}/{text}".encode()).hexdigest() * 2
    return f"{ds.replace('-', '')}-{found}"[: len(text)] if not text.isalnum() else found[: len(text)]


def decide(ds: str, scores: dict[str, float], is_compared: bool) -> tuple[str, str, str]:
    """Decision, reason and drift of a date, by the rules of the recipe on the values drawn for it."""
    own = {name.removeprefix("test/"): v for name, v in scores.items() if name.count("/") == 1}
    champion = {
        name.removeprefix("test/champion/"): v for name, v in scores.items() if "champion" in name and is_compared
    }
    promote = PromoteConfig.model_validate(GATES["promote"])
    psi = random.Random(f"{ds}/drift").expovariate(25)
    drift = DriftFinding(
        column="prediction", measure="psi", value=psi, max=DRIFT_MAX, action="hold", exceeded=psi > DRIFT_MAX
    )
    drifted = [line_of(drift)] if drift.exceeded else []
    seen = Seen(reasons_of(judge(promote, "binary", own, champion, None)), Compared(), drifted)
    decision, reasons = conclude(seen, promote.mode)
    return decision, "; ".join(reasons), "; ".join(drifted)


class Year:
    """Sends the recorded night for one date after another to the embedded store."""

    def __init__(self, template: Template, config: TrackingConfig, nights: list[Night], first: date) -> None:
        self.first = first
        self.template, self.config, self.registry = template, config, Registry(config)
        self.nights = nights

    def add(self, ds: str) -> None:
        journal = Journal.create(Path(self.config.root), NAME)
        shutil.copytree(self.template.folder / "files", journal.folder / "files", dirs_exist_ok=True)
        fails = random.Random(f"{ds}/fails").random() < FAILS
        decision, reason = ("failed", "") if fails else self._append(journal, ds)
        if fails:
            self._append_failed(journal, ds)
        sink = MlflowSink(self.config, journal)
        sink.drain()
        self.nights.append(Night(ds, decision, reason, sink.runs["job"]))
        journal.close(delete=True)

    def _append(self, journal: Journal, ds: str) -> tuple[str, str]:
        scores = {name: drawn(ds, name, v) for name, v in self.template.scores().items() if name.startswith("test/")}
        champion = self.registry.with_alias(self.config.alias)
        decision, reason, drift = decide(ds, scores, champion is not None)
        against = NO_CHAMPION if champion is None else champion.version
        for op in self._ops(ds):
            if isinstance(op, ops.Promote):
                if drift:
                    tags = {"sparkring.drift": drift}
                    journal.append(ops.Tags(key="job", at=op.at, tags=tags))
                op = replace(op, decision=decision, reason=reason, judged_against=against)  # type: ignore[arg-type]
            journal.append(op)
        return decision, reason

    def _append_failed(self, journal: Journal, ds: str) -> None:
        """The night up to its first metrics of training, and the ends that an exception gives."""
        for op in self._ops(ds):
            if isinstance(op, ops.Metrics) and op.key == "train":
                for key in ("train", "job"):
                    journal.append(ops.End(key=key, at=op.at, status="FAILED", error="no room on /data"))
                return
            journal.append(op)

    def _ops(self, ds: str) -> Iterator[ops.Op]:
        begins = datetime.fromisoformat(f"{ds}T00:00:00+00:00") + timedelta(days=1)
        later = (begins + timedelta(hours=TRAINED.hour, minutes=TRAINED.minute)).timestamp() - self.template.began
        days = (date.fromisoformat(ds) - date.fromisoformat(self.template.ds)).days
        for line in self.template.lines:
            text = json.dumps(self._moved(line, ds, later, days))
            for identity in self.template.identities:
                text = text.replace(identity, identity_of(ds, identity))
            yield parse(ops.StoredOp, text.replace(self.template.ds, ds).encode(), "the recorded night").root

    def _moved(self, line: dict[str, Any], ds: str, later: float, days: int) -> dict[str, Any]:
        """The operation at another time, with other values. later: seconds."""
        moved = line | {"at": line["at"] + later}
        if line["op"] == "metrics":
            moved["points"] = [
                # the step of a system metric is a time
                [name, drawn(ds, name, v), step + int(later) if step > 1e9 else step, at_ms + int(later * 1000)]
                for name, v, step, at_ms in line["points"]
            ]
        if line["op"] == "model":
            moved["scores"] = {name: drawn(ds, name, v) for name, v in line["scores"].items()}
        if line["op"] == "history":
            moved["number"], moved["begins"] = line["number"] + days, line["begins"] + days * 86_400.0
            moved["values"] = {name: drawn(ds, name, v) for name, v in line["values"].items()}
        if line["op"] == "history_figure":
            moved["step"] = (date.fromisoformat(ds) - self.first).days
        return moved


def filled(template: Template, config: TrackingConfig, count: int, last: date) -> Year:
    """A store with so many nights; one that is there and holds as many is used again."""
    done, first = Path(config.root) / "nights.json", last - timedelta(days=count - 1)
    if done.exists():
        year = Year(template, config, [Night(**each) for each in json.loads(done.read_text())], first)
        if len(year.nights) == count:
            return year
    shutil.rmtree(config.root, ignore_errors=True)  # other nights, or a store that was never finished
    year = Year(template, config, [], first)
    for back in range(count - 1, -1, -1):
        year.add(str(last - timedelta(days=back)))
        if back % 25 == 0:
            print(f"{len(year.nights)} nights", flush=True)
    done.write_text(json.dumps([vars(night) for night in year.nights]))
    return year


# --- the pages

CHARTS = "document.querySelectorAll('.js-plotly-plot').length > 1"


@dataclass(frozen=True)
class Page:
    """A page, and what must be seen on it."""

    name: str
    path: str  # behind the server's address
    texts: tuple[str, ...]
    ready: str = "true"  # JavaScript that must hold too
    absent: tuple[str, ...] = ()
    picture: str = ""  # file name of its screenshot


def pages_of(year: Year, client: MlflowClient) -> list[Page]:
    """The pages that a reader opens in the morning, with what is true of this year."""
    nights = year.nights
    experiment = client.get_experiment_by_name(NAME).experiment_id
    history = client.search_runs([experiment], f"tags.`{HISTORY}` = '{NAME}'")[0].info.run_id
    found = links(NAME, experiment, NAME)
    newest = tuple(f"{NAME} {night.ds}" for night in nights[:-8:-1])
    done = [night for night in nights if night.decision != "failed"]
    rejected = [night for night in nights if night.decision == "rejected"]
    summer = nights[len(nights) // 2]
    search = f"{found['nights']}&orderByKey=tags.%60sparkring.date%60&orderByAsc=false&searchFilter="
    versions = [year.registry.with_alias(alias) for alias in ("champion", "previous", "challenger")]
    numbers = [version.version for version in versions if version is not None]
    shown = next(night for night in reversed(nights) if night.decision == "rejected")
    child = f"tags.`mlflow.parentRunId` = '{shown.job}' and tags.`sparkring.key` = 'train'"
    training = client.search_runs([experiment], child)[0].info.run_id
    return [
        Page("runs, as MLflow lists them", f"#/experiments/{experiment}/runs", newest),
        Page(
            "nights (saved view)", found["nights"],
            (*newest, "test/auc", "test/champion/auc", "promoted", "rejected", nights[-1].reason[:20]),
            picture="nights.png",
        ),
        Page(
            "nights that were rejected", search + quote_plus("tags.`sparkring.decision` = 'rejected'"),
            tuple(f"{NAME} {night.ds}" for night in rejected[: -8 : -1]),
            absent=(f"{NAME} {next(n.ds for n in reversed(nights) if n.decision == 'promoted')}",),
        ),
        Page(
            "one date", search + quote_plus(f"tags.`sparkring.date` = '{summer.ds}'"),
            (f"{NAME} {summer.ds}", "1 matching run"),
        ),
        Page("history (saved view), a chart per score", found["history"], (f"{NAME} history",),
             ready=dates_shown(len(done)), picture="nights_history.png"),
        Page("history run, its own charts", f"#/experiments/{experiment}/runs/{history}/model-metrics",
             (f"{NAME} history", "test/champion"), ready=CHARTS),
        Page("model versions", found["model versions"], tuple(f"Version {number}" for number in numbers[:1]),
             picture="nights_models.png"),
        Page("one night", f"#/experiments/{experiment}/runs/{shown.job}",
             (f"{NAME} {shown.ds}", "sparkring.decision", "rejected", shown.reason[:30], "test/auc")),
        Page("one night's training", f"#/experiments/{experiment}/runs/{training}/model-metrics",
             (f"train {shown.ds}", "train/loss"), ready=CHARTS),
        Page("one model version", f"#/models/{NAME}/versions/{numbers[0]}", (f"Version {numbers[0]}", "Limits")),
    ]  # fmt: skip


def shows(browser: Browser, address: str, page: Page) -> float:
    """Open a page: the seconds until it shows what it should. AssertionError where it shows what it should not."""
    took = browser.open(f"{address}/{page.path}", *page.texts, ready=page.ready)
    wrong = [text for text in page.absent if text in browser.text()]
    assert not wrong, f"{page.name}: shows {wrong}"
    return took


def measure(address: str, pages: list[Page], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each page: in browsers that have never seen the server, and in one that has."""
    cold: dict[str, list[float]] = {page.name: [] for page in pages}
    warm: dict[str, list[float]] = {page.name: [] for page in pages}
    for page in pages:
        for _ in range(rounds):
            with Browser() as fresh:
                cold[page.name].append(shows(fresh, address, page))
    with Browser() as used:
        for page in pages * (rounds + 1):
            warm[page.name].append(shows(used, address, page))
    return {page.name: (cold[page.name], warm[page.name][1:]) for page in pages}


def take_pictures(address: str, pages: list[Page], into: Path) -> None:
    """Screenshots, once the page is at rest, without the panel that MLflow opens on a first visit."""
    into.mkdir(parents=True, exist_ok=True)
    with Browser(1440, 810) as browser:
        for page in [each for each in pages if each.picture]:
            shows(browser, address, page)
            closing = "document.querySelector('[aria-label=\"Close\"]')"
            if browser.evaluate(f"document.body.innerText.includes('MLflow Assistant') && !!{closing}"):
                browser.click(closing)
            time.sleep(2)
            browser.screenshot(into / page.picture)


def table(measured: dict[str, tuple[list[float], list[float]]]) -> str:
    lines = ["| page | new browser s | known browser s |", "|---|---|---|"]
    for name, (cold, warm) in measured.items():
        lines.append(
            f"| {name} | {statistics.median(cold):.2f} ({max(cold):.2f}) | ",
        )
        lines[-1] += f"{statistics.median(warm):.2f} ({max(warm):.2f}) |"
    return "\n".join(lines)


def result(
    year: Year, client: MlflowClient, measured: dict[str, tuple[list[float], list[float]]], start_s: float
) -> str:
    """The text of the result file."""
    experiment = client.get_experiment_by_name(NAME).experiment_id
    counts = Counter(night.decision for night in year.nights)
    runs = sum(1 for _ in all_runs(client, experiment))
    versions = client.get_registered_model(NAME).latest_versions
    megabytes = (Path(year.config.root) / "mlflow.db").stat().st_size / 2**20
    decisions = ", ".join(f"{count} {decision}" for decision, count in counts.most_common())
    slowest = max(statistics.median(seconds) for both in measured.values() for seconds in both)
    return f"""# MLflow's pages of {len(year.nights)} nights, on the embedded store

{measured_with("mlflow")}; {browser_version()}.

{runs:,} runs, {max(int(version.version) for version in versions)} model versions, {megabytes:.0f} MiB of sqlite;
nights: {decisions}. What a night records is that of a real one; the values of its metrics are drawn. `sparkring ui`
answers {start_s:.1f} s after the command.

Seconds from the navigation until the page shows what it is opened for, median and in brackets the most of
{len(next(iter(measured.values()))[0])}: in a browser that has never been there, and in one that has.

{table(measured)}

Target: 3 s. The slowest: {slowest:.2f} s.
"""


def all_runs(client: MlflowClient, experiment: str) -> Iterator[Any]:
    token = None
    while True:
        found = client.search_runs([experiment], max_results=1000, page_token=token)
        yield from found
        if not (token := found.token):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=365)
    parser.add_argument("--last", type=date.fromisoformat, default=datetime.now(UTC).date() - timedelta(days=1))
    parser.add_argument("--rounds", type=int, default=5, help="times that a page is opened, each way")
    parser.add_argument("--folder", type=Path, default=Path("build/pages"), help="a store that it holds is used again")
    parser.add_argument("--pictures", type=Path, help="write screenshots into this folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    find_chromium()
    folder = arguments.folder.resolve()
    config = TrackingConfig(root=str(folder / "mlflow"), system_metrics=False).named(NAME)
    recorded = folder / f"real/journals/{FIRST + timedelta(days=1)}"
    if not recorded.exists():
        shutil.rmtree(folder / "real", ignore_errors=True)
        record_night(folder / "real")
    year = filled(Template.read(recorded), config, arguments.nights, arguments.last)
    client = MlflowClient(config.store_uri)
    pages = pages_of(year, client)
    with served(folder / "real/nightly.yaml", Path(config.root)) as (address, start_s):
        measured = measure(address, pages, arguments.rounds)
        if arguments.pictures:
            take_pictures(address, pages, arguments.pictures)
    publish(result(year, client, measured, start_s), arguments.out)


if __name__ == "__main__":
    main()
