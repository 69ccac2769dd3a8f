"""What the driver knows of one process of the running attempt, and the failure that its end is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkring.conf.errors import first_line
from sparkring.training.launch.failure import Cause, Failure
from sparkring.training.launch.messages import ChildEnded, ChildError
from sparkring.training.launch.topology import Child


@dataclass
class ChildState:
    """What ranks and servers have in common."""

    child: Child
    agent: str
    host: str
    error: ChildError | None = None
    step: int | None = None  # last one reported; servers report none
    phase: str = ""

    def failed(self, cause: Cause, words: str, **details: Any) -> Failure:
        """Make the failure of this process. `details`: further fields of Failure."""
        return Failure(self.child, self.host, cause, words, step=self.step, phase=self.phase, **details)

    def raised(self, ended: ChildEnded, cause: Cause) -> Failure | None:
        """Make the failure of a process whose entry has raised an exception; None where it has not."""
        error = self.error
        if error is None:
            return None
        return self.failed(
            cause,
            f"raised {error.error_type}: {first_line(error.message) if error.message else ''}".rstrip(": "),
            error_type=error.error_type,
            message=error.message,
            traceback=error.traceback,
            last_lines=ended.last_lines,
            is_value_error=error.is_value_error,
        )
