"""What every part of a stage reads, and none changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from whet.algos.recipes import Algorithm
from whet.config.amounts import Amount, amounts
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.track.monitor import Monitor

BEAT_S = 1.0
"""Seconds between two looks at the stop flag while a stage rests."""


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

    async def rest(self, seconds: float, what: str) -> None:
        """Wait, while all that runs beside goes on. A stop ends it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0 and not self.stopping:
            await asyncio.sleep(min(left, BEAT_S))
            self.monitor.watch.beat(what)

    def due(self, done: int, every: Amount | Sequence[Amount]) -> bool:
        """Whether what is done every so many steps or epochs (0: never) is due when `done` steps are done."""
        return any(
            self._epochs_due(done, int(n))
            if unit == "epoch"
            else n > 0 and first <= done and (done - first) % n == 0
            for n, unit, first in amounts(every)
        )

    def _epochs_due(self, done: int, every: int) -> bool:
        """Whether the last of `done` steps completes another `every` passes over the rows."""
        rows = self.plan.rows
        if rows is None:
            return False
        before, now = (n * self.plan.sampled_tasks_per_step // (every * rows) for n in (done - 1, done))
        return now > before
