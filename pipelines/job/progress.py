"""Show training to a person: a bar, or a line every few seconds, and output."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

from sparkring.conf.plain_text import count_of, score_text
from sparkring.training.launch.messages import (
    AttemptStarted,
    ChildEvent,
    Event,
    Heartbeat,
    LogLines,
    RankMetrics,
    RankReplaced,
)
from sparkring.training.launch.topology import Child

log = logging.getLogger("train")
LINE_EVERY_S, EVALUATION_EVERY_S = 5.0, 1.0
BESIDE_STEPS = ("evaluate ", "test ", "export ")  # how the phases begin that take long, and are no steps


class ProgressDisplay:
    """Shows the launcher's events. Call `close` at the end."""

    def __init__(self, interactive: bool | None = None) -> None:
        """Prepare the display. `interactive`: show a bar; None: if stderr is a terminal."""
        self.interactive = sys.stderr.isatty() if interactive is None else interactive
        self.total, self.per_epoch, self.unit = 0, 1, "step"
        self.began = (0, time.monotonic())  # step and time at which this attempt's training began
        self.bar: tqdm[Any] | None = None
        self.last_line = self.last_evaluation = 0.0
        self.unshown = ""  # the newest evaluation, where others were shown a moment ago

    def on_event(self, event: Event) -> None:
        match event:
            case LogLines():
                for line in event.lines:
                    self._print(f"[{event.child}] {line}")
            case RankReplaced():
                self._print(f"rank {event.rank} runs again after {event.took_s:.1f} s; the others went on")
            case AttemptStarted():
                self._print(f"{count_of(event.world, 'rank')} started in {event.start_s:.1f} s")
            case ChildEvent(child=Child("rank", 0)):
                self._rank_event(event.name, event.data)
            case RankMetrics(rank=0):
                self._metrics(event.step, event.values)
            case Heartbeat(rank=0) if event.phase.startswith(BESIDE_STEPS):
                self._beside_steps(event.phase)

    def _rank_event(self, name: str, data: dict[str, Any]) -> None:
        if name == "ring":
            self._print(f"ring of {data['world']} formed, engine {data['engine']}")
        elif name == "training":
            self.total, self.per_epoch, self.unit = data["steps"], data["per_epoch"], data.get("unit", "step")
            self.began = (data["from_step"], time.monotonic())
            epochs = f", {count_of(-(-self.total // self.per_epoch), 'epoch')}" if self.unit == "step" else " at most"
            self._print(f"training from {self.unit} {data['from_step']} to {self.total}{epochs}")
            if self.interactive:
                self.bar = tqdm(total=self.total, initial=data["from_step"], unit=self.unit, dynamic_ncols=True)
        elif name == "resumed":
            self._print(f"resumed from the checkpoint of step {data['step']}")
            for reason in data["skipped"]:
                self._print(f"checkpoint skipped: {reason}")
        elif name == "step_skipped":
            self._print(f"step {data['step']} skipped: gradients not finite, first on rank {data['rank']}")

    def _metrics(self, step: int, values: dict[str, float]) -> None:
        valid = {k.removeprefix("valid/"): v for k, v in values.items() if k.startswith("valid/")}
        if valid:
            self.unshown = f"{self.unit} {step}: valid " + " ".join(f"{k} {score_text(v)}" for k, v in valid.items())
            if (now := time.monotonic()) - self.last_evaluation >= EVALUATION_EVERY_S:
                self.last_evaluation = now
                self._show_evaluation()
        elif "train/loss" in values:
            epoch = f"epoch {-(-step // self.per_epoch)}" if self.unit == "step" else "all rows"
            shown = f"loss {score_text(values['train/loss'])}, {values.get('perf/rows_per_s', 0.0):,.0f} rows/s"
            if self.bar is not None:
                self.bar.set_description_str(epoch, refresh=False)
                self.bar.n = step
                self.bar.set_postfix_str(shown)
            elif (now := time.monotonic()) - self.last_line >= LINE_EVERY_S:
                self.last_line = now
                left = time_left(step, self.total, self.began, now) if self.unit == "step" else ""  # ends early
                self._print(f"{self.unit} {step} of {self.total}, {epoch}: {shown}{left}")

    def _beside_steps(self, phase: str) -> None:
        """Show how far an evaluation or the export is: `evaluate batch 20 of 300`."""
        if self.bar is not None:
            self.bar.set_description_str(phase)
        elif (now := time.monotonic()) - self.last_line >= LINE_EVERY_S:
            self.last_line = now
            self._print(phase)

    def _show_evaluation(self) -> None:
        if self.unshown:
            self._print(self.unshown)
            self.unshown = ""

    def _print(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        log.info("%s", text)

    def close(self) -> None:
        """End the bar; the last evaluation is shown in any case."""
        self._show_evaluation()
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def time_left(step: int, total: int, began: tuple[int, float], now: float) -> str:
    """Format `, 45 s left` at the rate since `began` (step, time in s); "" before a step is done."""
    done = step - began[0]
    if done <= 0:
        return ""
    seconds = (total - step) * (now - began[1]) / done
    minutes = round(seconds / 60)
    if minutes < 2:
        return f", {seconds:.0f} s left"
    return f", {minutes} min left" if minutes < 120 else f", {minutes // 60} h {minutes % 60:02} min left"
