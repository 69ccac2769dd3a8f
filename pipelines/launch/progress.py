"""Show training to a person: a bar, or a line every few seconds, and output."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

from sparkring.training.launch.messages import AttemptStarted, Event, LogLines, RankEvent, RankMetrics

log = logging.getLogger("train")
LINE_EVERY_S = 5.0


class ProgressDisplay:
    """Shows the launcher's events. Call `close` at the end."""

    def __init__(self, interactive: bool | None = None) -> None:
        """`interactive`: show a bar; None: where stderr is a terminal."""
        self.interactive = sys.stderr.isatty() if interactive is None else interactive
        self.total = 0
        self.bar: tqdm[Any] | None = None
        self.last_line = 0.0

    def on_event(self, event: Event) -> None:
        match event:
            case LogLines():
                for line in event.lines:
                    self._print(f"[rank {event.rank}] {line}")
            case AttemptStarted():
                self._print(f"{event.world} ranks started in {event.start_s:.1f} s")
            case RankEvent(rank=0):
                self._rank_event(event.name, event.data)
            case RankMetrics(rank=0):
                self._metrics(event.step, event.values)

    def _rank_event(self, name: str, data: dict[str, Any]) -> None:
        if name == "ring":
            self._print(f"ring of {data['world']} formed, engine {data['engine']}")
        elif name == "training":
            self.total = data["steps"]
            self._print(f"training from step {data['from_step']} to {self.total}")
            if self.interactive:
                self.bar = tqdm(total=self.total, initial=data["from_step"], unit="step", dynamic_ncols=True)
        elif name == "resumed":
            self._print(f"resumed from the checkpoint of step {data['step']}")
            for reason in data["skipped"]:
                self._print(f"checkpoint skipped: {reason}")
        elif name == "step_skipped":
            self._print(f"step {data['step']} skipped: gradients not finite, first on rank {data['rank']}")

    def _metrics(self, step: int, values: dict[str, float]) -> None:
        valid = {k.removeprefix("valid/"): v for k, v in values.items() if k.startswith("valid/")}
        if valid:
            self._print(f"step {step}: valid " + " ".join(f"{k} {v:.4f}" for k, v in valid.items()))
        elif "train/loss" in values:
            shown = f"loss {values['train/loss']:.4f} {values.get('perf/rows_per_s', 0.0):,.0f} rows/s"
            if self.bar is not None:
                self.bar.n = step
                self.bar.set_postfix_str(shown)
            elif time.monotonic() - self.last_line >= LINE_EVERY_S:
                self.last_line = time.monotonic()
                self._print(f"step {step}/{self.total or '?'}: {shown}")

    def _print(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        log.info("%s", text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
