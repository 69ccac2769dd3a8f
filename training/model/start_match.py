"""What a model found in the file that `model.start` names. Without torch: results are read where none is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkring.conf.plain_text import count_of
from sparkring.conf.stored import CLOSED

SHOWN = 6  # names in a message


@dataclass(frozen=True)
class StartMatch:
    """Which tensors of a file a model begins with."""

    __pydantic_config__ = CLOSED

    matched: dict[str, str]  # first name in the model -> name in the file
    missing: list[str] = field(default_factory=list)  # of the model, not in the file: they have initial values
    unexpected: list[str] = field(default_factory=list)  # of the file, not of the model
    other_shape: dict[str, str] = field(default_factory=dict)  # name in the model -> both shapes; initial values

    @property
    def text(self) -> str:
        """In a line."""
        total = len(self.matched) + len(self.missing) + len(self.other_shape)
        shapes = [f"{name} {shapes}" for name, shapes in self.other_shape.items()]
        parts = {"of another shape": shapes, "not in the file": self.missing, "not of the model": self.unexpected}
        rest = [f"; {len(names)} {what} ({some_names(names)})" for what, names in parts.items() if names]
        return f"{len(self.matched)} of {count_of(total, 'tensor')} begin with its values" + "".join(rest)


def some_names(names: Sequence[str]) -> str:
    """List the first names, and the number of others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
