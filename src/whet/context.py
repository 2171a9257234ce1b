"""What every part of a stage reads, and none changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from whet.algos.recipes import Algorithm
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.track.monitor import Monitor


class StopFlag(Protocol):
    """Set from outside (Ctrl-C) to end the run after the current step."""

    requested: bool


@dataclass(frozen=True)
class Context:
    """One stage, before anything of it is opened."""

    cfg: Config
    plan: Plan
    name: str
    index: int
    """Number of the stage in the run."""
    algorithm: Algorithm
    monitor: Monitor
    stop: StopFlag

    @property
    def stopping(self) -> bool:
        return self.stop.requested

    def due(self, done: int, every: int, *, epochs: int = 0) -> bool:
        """Whether what is done every so many steps or epochs (0: never) is due when `done` steps are done."""
        return (every > 0 and done % every == 0) or self._epochs_due(done, epochs)

    def _epochs_due(self, done: int, every: int) -> bool:
        """Whether the last of `done` steps completes another `every` passes over the rows (0: never)."""
        rows = self.plan.rows
        if every == 0 or rows is None:
            return False
        before, now = (n * self.plan.own_tasks_per_step // (every * rows) for n in (done - 1, done))
        return now > before
