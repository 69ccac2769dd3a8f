"""Predict a layout's cost: memory per rank, bytes sent by axis, bubble share.

The model is run once on the meta device, where tensors have shapes and no storage (trace.py); everything else is the
formulas at the head of each strategy's file (memory.py, traffic.py). Training measures the same quantities
(training/parallel/measure.py), and one table shows both (table.py).

Bytes sent are those of one rank, averaged over the ranks, without the few bytes of norms and headers. Memory is that in
the optimizer's step, separately what a pass holds beyond it, and the peak of all of it together: passes are traced
(peak_memory/).
"""

from sparkring.training.planner.plan import CostPlan, make_plan
from sparkring.training.planner.table import format_rows, table_rows
from sparkring.training.planner.trace import Untraceable
from sparkring.training.planner.workload import Workload

__all__ = ["CostPlan", "Untraceable", "Workload", "format_rows", "make_plan", "table_rows"]
