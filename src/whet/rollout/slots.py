"""How many rollouts may be in flight where tasks are sampled one by one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection

from whet.config.engines import engines_of
from whet.config.schema import Config
from whet.rollout.engine import RolloutEngine
from whet.rollout.gate import News
from whet.rollout.router import Router
from whet.types import Task


def slots_of(engine: RolloutEngine | None, cfg: Config) -> int | None:
    """Rollouts that the engines sample at once; `whet scale` changes how many engines there are. An episode that waits
    for its environment takes no slot: no bound."""
    if cfg.rollout.env:
        return None
    if isinstance(engine, Router) and cfg.rollout.replicas:
        return cfg.rollout.max_num_seqs * max(1, len(engine.replicas))
    return cfg.rollout.max_num_seqs * engines_of(cfg)


class Slots:
    """How many rollouts the engine samples at once, and how many of the tasks in flight are not over.

    A task that waits for a slot gets older with every version, and may be too old when it is finished. So no task is
    requested before there is a slot for its first rollout. count: returns how many there are now; None: no bound.
    """

    def __init__(self, count: Callable[[], int | None], group_size: int) -> None:
        self.count, self.group_size = count, group_size
        self.open: Counter[int] = Counter()
        """Rollouts that are not over, by task uid."""
        self.freed = News()

    async def free(self) -> int:
        """Wait for a slot. Returns the number of groups to be requested: enough to fill all slots."""
        await self.freed.until(lambda: self._groups() > 0)
        return self._groups()

    async def over(self, uids: Collection[int]) -> None:
        """Wait until every rollout of these tasks is over."""
        await self.freed.until(lambda: not any(self.open[uid] for uid in uids))

    def _groups(self) -> int:
        if (count := self.count()) is None:
            return sys.maxsize
        return max(0, -(-(count - self.open.total()) // self.group_size))

    def taken(self, task: Task) -> None:
        """A task is requested."""
        self.open[task.uid] = self.group_size

    def ended(self, task: Task) -> None:
        """A rollout of it is over."""
        if task.uid in self.open:
            self.open[task.uid] -= 1
            self.freed.tell()

    def left(self, uid: int) -> None:
        """The task is over, finished or given up."""
        del self.open[uid]
        self.freed.tell()
