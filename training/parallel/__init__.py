"""Spread one step over ranks. Enter by `build_strategy` (compose.py)."""

from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.strategy import OptimizerFactory, StepInfo, Strategy

__all__ = ["OptimizerFactory", "StepInfo", "Strategy", "build_strategy"]
