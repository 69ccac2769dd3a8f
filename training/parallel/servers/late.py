"""Residuals of a codec that runs no more (training/parallel/residuals.py): added once, by whatever process is rank 0.

Rank 0 adds them to its gradients, and leaves a note at the first server before each push and after each step that has
some. The process that takes its place reads which residuals no step has yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sparkring.training.data.batch import Batch, BatchShare
from sparkring.training.parallel.residuals import Residuals
from sparkring.training.servers.client import Client

LATE = "late"  # name of the LateNote at the first server


@dataclass(frozen=True)
class LateNote:
    """What became of the residuals, for the process that replaces rank 0's.

    clock: of the push that follows. version: of the first server at its pull. part: (step, stream) with backup
    workers. waiting: names of the residuals that no step before it has. added: those of them that it has.
    """

    clock: int
    version: int
    part: tuple[int, int] | None
    waiting: list[str]
    added: list[str]


class LateNotes:
    """Rank 0's notes; other ranks have no late residuals, and leave none."""

    def __init__(self, client: Client, residuals: Residuals) -> None:
        self._client, self._residuals = client, residuals

    def begin(self, clock: int) -> None:
        """Record what is to be added, before the first step."""
        if self._residuals.late:
            self._leave(clock, 0, None, [])

    def before_push(self, clock: int, version: int, batch: Batch | None, finite: bool) -> None:
        """Record the late residuals that the next push contains.

        Args:
            clock: step of the push.
            version: version of the first server at its pull.
            batch: batch of the gradient.
            finite: whether the gradient is finite, else no step has it.
        """
        if self._residuals.late:
            self._leave(clock, version, batch, self._residuals.added if finite else [])

    def commit(self, clock: int, batch: Batch | None) -> None:
        """Drop the residuals that the step just made has."""
        if self._residuals.added:
            self._residuals.commit()
            self._leave(clock, 0, batch, [])

    def take_over(self, clock: int, version: int) -> None:
        """Drop the residuals that the pushes of the dead process have. `version`: of the first server."""
        if not self._residuals.late:
            return
        note = LateNote(**json.loads(self._client.kept(LATE)))
        late = {name: self._residuals.late[name] for name in note.waiting if name in self._residuals.late}
        self._residuals.late, self._residuals.added = late, [name for name in note.added if name in late]
        made = note.clock < clock and version > note.version  # a skipped step leaves the version
        if made and (note.part is None or BatchShare(*note.part) in self._client.counted()):
            self.commit(clock, None)

    def _leave(self, clock: int, version: int, batch: Batch | None, added: Sequence[str]) -> None:
        part = None if batch is None or batch.part is None else (batch.part.clock, batch.part.stream)
        note = LateNote(clock, version, part, sorted(self._residuals.late), list(added))
        self._client.keep(LATE, json.dumps(asdict(note)).encode())
