"""What a person sees while ranks train: a bar on a terminal, one line every few seconds elsewhere; ranks' log lines."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

log = logging.getLogger("train")
LINE_EVERY_S = 5.0


class Progress:
    """Fed with the launcher's events. Call `close` at the end."""

    def __init__(self, interactive: bool | None = None) -> None:
        self.interactive = sys.stderr.isatty() if interactive is None else interactive
        self.total = 0
        self.bar: tqdm[Any] | None = None
        self.last_line = 0.0

    def on_event(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "log":
            for line in event["lines"]:
                self._say(f"[rank {event['rank']}] {line}")
        elif kind == "started":
            self._say(f"{event['world']} ranks started in {event['start_s']:.1f} s")
        elif kind == "event" and event["rank"] == 0:
            self._about(event["event"], event["data"])
        elif kind == "metrics" and event["rank"] == 0:
            self._metrics(event["step"], event["values"])

    def _about(self, what: str, data: dict[str, Any]) -> None:
        if what == "ring":
            self._say(f"ring of {data['world']} formed, engine {data['engine']}")
        elif what == "training":
            self.total = data["steps"]
            self._say(f"training from step {data['from_step']} to {self.total}")
            if self.interactive:
                self.bar = tqdm(total=self.total, initial=data["from_step"], unit="step", dynamic_ncols=True)
        elif what == "resumed":
            self._say(f"resumed from the checkpoint of step {data['step']}")
            for reason in data["skipped"]:
                self._say(f"checkpoint skipped: {reason}")
        elif what == "step_skipped":
            self._say(f"step {data['step']} skipped: gradients not finite, first on rank {data['rank']}")

    def _metrics(self, step: int, values: dict[str, float]) -> None:
        valid = {k.removeprefix("valid/"): v for k, v in values.items() if k.startswith("valid/")}
        if valid:
            self._say(f"step {step}: valid " + " ".join(f"{k} {v:.4f}" for k, v in valid.items()))
        elif "train/loss" in values:
            shown = f"loss {values['train/loss']:.4f} {values.get('perf/rows_per_s', 0.0):,.0f} rows/s"
            if self.bar is not None:
                self.bar.n = step
                self.bar.set_postfix_str(shown)
            elif time.monotonic() - self.last_line >= LINE_EVERY_S:
                self.last_line = time.monotonic()
                self._say(f"step {step}/{self.total or '?'}: {shown}")

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        log.info("%s", text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
