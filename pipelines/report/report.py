"""The report: what was trained on what, how good it is next to baselines, what happened on the way.

`build_report` is a pure function of its inputs. The page is self-contained (inline SVG, no script, no network), so it
opens in a browser, in MLflow's artifact viewer and in a mail.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from sparkring.conf.load import Resolved
from sparkring.conf.manifest import ManifestError, read_manifest
from sparkring.conf.schedule.dates import dates_since_begin
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.tasks import BINARY, IN_VERDICT, LOWER_IS_BETTER, TITLES, TaskKind, is_better
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.baselines.trees import TREES
from sparkring.pipelines.evaluation.evaluate import read_held_out, scored_rows
from sparkring.pipelines.evaluation.multilabel import OF_LABEL
from sparkring.pipelines.report import figures
from sparkring.pipelines.report.drawing import IMPORTANCE, Drawn, draw, tables, wrong_groups
from sparkring.pipelines.report.inputs import ReportInputs
from sparkring.pipelines.report.plan import PLAN, draw_plan, plan_facts
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.tracking.tracker import JOB, Tracker
from sparkring.training.worker.plan_record import PlanRecord
from sparkring.training.worker.result import Scores, read_result

log = logging.getLogger(__name__)
DATED = ("calibration", "confusion", "predicted_and_actual")  # of interest night by night, and before others


def write_report(tracker: Tracker, inputs: ReportInputs, folder: Storage, ds: str | None = None) -> None:
    """Write report.html into the run folder and, with its figures, into the job's run in MLflow.

    One that cannot be drawn fails no job: the model is registered by now.

    Args:
        tracker: tracker of the job.
        inputs: content of the report.
        folder: folder of the run.
        ds: date of the job, for which the recipe's history gets the figures in DATED too.
    """
    config = inputs.config
    try:
        drawn = draw_page(inputs)
        html = build_report(inputs, drawn).encode()
        tracker.artifact(JOB, html, "report.html")  # as bytes: everything in it is redacted, and its SQL is no prose
        for each in drawn:
            tracker.artifact(JOB, figures.to_png(each.figure), f"{each.name}.png", "figures")
            if ds is not None and config.schedule is not None and each.name in DATED:
                step, png = dates_since_begin(config.schedule, ds), figures.to_png(each.figure, title=ds)
                tracker.history_figure(config.name, step, f"test/{each.name}", png)
        for table in tables(inputs):
            tracker.artifact_json(JOB, table.records, f"{table.name}.json")
        folder.put_atomic("report.html", html)
    except Exception as error:
        log.exception("the report could not be drawn; once that is mended, `sparkring report` draws it")
        tracker.tags(JOB, {"sparkring.report": f"not drawn: {type(error).__name__}: {error}"})


def redraw(resolved: Resolved) -> str:
    """Draw the report of the recipe's newest finished run again, from its folder; the file's URI.

    `resolved` says where runs are, and decides nothing else. ManifestError where no run has finished.
    """
    runs = Runs(resolved.config.storage.runs, resolved.config.name)
    finished = [record for record in runs.records() if record.status == "finished"]
    if not finished:
        raise ManifestError(
            f"{runs.storage.uri}: no finished run of {resolved.config.name!r}; run `sparkring run` first"
        )
    folder = runs.at(finished[-1])
    result = read_result(folder)
    config, storage = result.run_config(), open_storage(result.dataset)
    dataset = Dataset(read_manifest(storage), storage)
    drawn_from_rows = config.train.test_split is not None and result.predictions
    rows = scored_rows(config, dataset, result) if drawn_from_rows else None
    held_out = None if rows is None else read_held_out(config, rows, folder, result).calibrated(result.calibration)
    folder.put_atomic("report.html", build_report(ReportInputs(result, dataset.manifest, held_out)).encode())
    return f"{folder.uri}/report.html"


def build_report(inputs: ReportInputs, drawn: Sequence[Drawn] | None = None) -> str:
    """Build the page as text. `drawn`: result of `draw_page(inputs)`, if already called."""
    scores, record = inputs.scores, inputs.result.planned
    svgs = as_svgs(draw_page(inputs) if drawn is None else drawn)
    errors = next((name for name in svgs if name in DATED), "")
    plan_figures = [svgs.pop(name) for name in [*svgs] if name.startswith(PLAN)]
    return render(
        "report.html",
        title=f"{inputs.config.name} - sparkring report",
        i=inputs,
        scores=scores,
        verdict=" ".join(filter(None, [inputs.beside_baselines, verdict(_but_trees(scores))])),
        loss=_title("loss", inputs.config.model.kind),
        columns=[(name, _title(name, inputs.config.model.kind)) for name in _score_columns(scores)],
        label_columns=[(name, _title(name, BINARY)) for name in OF_LABEL],
        best=_best(scores),
        errors=svgs.pop(errors, None),
        importances=svgs.pop(IMPORTANCE, None),
        figures=list(svgs.values()),
        tables=tables(inputs),
        wrong=wrong_groups(inputs),
        time_figure=Markup(figures.to_svg(figures.time_bar(inputs.stages), "Seconds by stage")),
        attempt_columns=list(dict.fromkeys(key for attempt in inputs.attempts for key in attempt)),
        planned={} if record is None else plan_facts(record),
        plan_figures=plan_figures,
    )


def plan_page(title: str, record: PlanRecord, text: str) -> str:
    """Build the page of a search. `text`: the layouts, as `sparkring plan search` prints them."""
    svgs = as_svgs(draw_plan(record))
    return render("plan.html", title=title, facts=plan_facts(record), figures=list(svgs.values()), text=text)


def draw_page(inputs: ReportInputs) -> list[Drawn]:
    """Draw every figure of the page."""
    return [*draw(inputs), *draw_plan(inputs.result.planned)]


def as_svgs(drawn: Iterable[Drawn]) -> dict[str, tuple[Drawn, Markup]]:
    """Convert figures to drawings for a page, by name."""
    return {each.name: (each, Markup(figures.to_svg(each.figure, each.caption))) for each in drawn}


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder."""
    loader = jinja2.FunctionLoader(lambda name: (resources.files(__package__) / name).read_text())
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "count": "{:,}".format, "megabytes": megabytes}
    page = environment.get_template(template).render(**values)
    return page.encode(errors="replace").decode()  # a lone surrogate has no bytes


def verdict(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Write one sentence on whether the first model beats every other on the shared metrics."""
    if len(scores) < 2:
        return ""
    (name, ours), *others = scores.items()
    compared = {other: [m for m in _compared(ours) if m in theirs] for other, theirs in others}
    lost = {
        other: [_title(m) for m in compared[other] if not is_better(m, ours[m], theirs[m])] for other, theirs in others
    }
    if not any(compared.values()):
        return ""
    if any(lost.values()):
        to = ", or ".join(f"{other} in {' or '.join(metrics)}" for other, metrics in lost.items() if metrics)
        return _sentence(f"{name} does not beat {to}.")
    by_metrics: dict[str, list[str]] = {}
    for other, metrics in compared.items():
        if metrics:
            by_metrics.setdefault(" and ".join(map(_title, metrics)), []).append(other)
    beaten = ", and ".join(f"{' and '.join(names)} in {metrics}" for metrics, names in by_metrics.items())
    return _sentence(f"{name} beats {beaten}.")


def _but_trees(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    return {name: each for name, each in scores.items() if name != TREES}


def _compared(ours: Iterable[str]) -> list[str]:
    """Return the metrics of a verdict: of whole splits, and of the first rows of lists."""
    return [m for m in ours if m in IN_VERDICT or m.startswith("ndcg_at_")]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def number(value: Any) -> str:
    """Format four significant digits, a dash for NaN; integers and texts as they are.

    Without an exponent, except where its place would be filled by zeros: scores are in the label's unit, or its square.
    """
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    if 1e-6 <= abs(value) < 1e-4:
        return f"{value:.7f}".rstrip("0")
    return f"{value:.4g}" if not 1e4 <= abs(value) < 1e12 else f"{value:,.0f}".replace(",", " ")


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB".replace(",", " ")


def _title(metric: str, kind: TaskKind | None = None) -> str:
    """Return the metric's title. That of `loss` depends on the task."""
    titles = {m.name: m.title for m in kind.metrics} if kind is not None else TITLES
    return titles.get(metric, metric.replace("_", " ").replace("ndcg", "NDCG"))


def _score_columns(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(metric for values in scores.values() for metric in values))


def _best(scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the best name per metric, if at least two can be compared."""
    found = {}
    for metric in _score_columns(scores):
        named = {name: values[metric] for name, values in scores.items() if metric in values}
        if len(named) > 1:
            found[metric] = (min if metric in LOWER_IS_BETTER else max)(named, key=lambda name: named[name])
    return found
