"""Strategies: how one step is spread over ranks. `build_strategy` is the door; compose.py has the wrapping order."""

from conf.rank_info import RankInfo
from training.parallel.base import OptimizerFactory, StepInfo, Strategy, Task
from training.parallel.compose import build_strategy
from training.parallel.settings import ParallelSettings

__all__ = ["OptimizerFactory", "ParallelSettings", "RankInfo", "StepInfo", "Strategy", "Task", "build_strategy"]
