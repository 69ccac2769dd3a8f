"""A result as a finished run leaves it, for tests of what reads one."""

from __future__ import annotations

from typing import Any

from sparkring.training.worker.result import MODEL, TrainResult, WorkerResult


def rank_result(**changes: Any) -> WorkerResult:
    values: dict[str, Any] = {
        "engine": "torch-gloo", "world": 3, "threads_per_rank": 1, "finished": True, "steps": 10,
        "consumed_samples": 100, "skipped_steps": 0, "stopped_early": False, "best_step": 10, "best_value": 0.5,
        "train_s": 2.0, "rows_per_s": 50.0, "valid": {"loss": 0.5}, "measured": {}, "weights": "model",
        "exported_step": 10, "test": {"loss": 0.5},
    }  # fmt: skip
    return WorkerResult(**(values | changes))


def train_result(**changes: Any) -> TrainResult:
    values: dict[str, Any] = {
        "name": "again", "run": "/runs/again/1", "dataset": "/datasets/again", "fingerprint": "a" * 64,
        "config": {"name": "again", "dataset": "/datasets/again"}, "origins": {}, "config_digest": "d" * 64,
        "commit": "c0ffee", "train": rank_result(), "attempts": 1, "failed_attempts": [], "history": {},
        "per_step_s": {}, "once_s": {}, "predictions": [], "scores": {MODEL: {"loss": 0.5}},
        "timings": {"launch_s": 1.0}, "etl": {},
    }  # fmt: skip
    return TrainResult(**(values | changes))
