"""Between exploring and training: what was asked for, what waits, what may be trained on.

`room` is the staleness bound: tasks are asked for only while at most (max_staleness + 1) steps' worth of groups
is under way, waiting or in training. A rejected group gives its room back at once, so filtering can't starve a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from whet.guard.ledger import Ledger
from whet.track.metrics import reason_of
from whet.types import Group, Json, Rollout, WhetError

Reject = Callable[[Group], str | None]
"""Why a scored group teaches nothing, or None."""


Refine = Callable[[Group], tuple[Group, dict[str, int]]]
"""A scored group as it is trained on, and how many rollouts left it, by reason."""


def as_it_is(group: Group) -> tuple[Group, dict[str, int]]:
    """Every rollout stays."""
    return group, {}


class Buffer:
    """Groups in memory, first in first out."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        reject: Reject,
        ledger: Ledger,
        refine: Refine = as_it_is,
        copies: bool = False,
    ) -> None:
        self.groups_per_step, self.group_size, self.max_staleness = groups_per_step, group_size, max_staleness
        self.refine, self.reject, self.ledger = refine, reject, ledger
        self.copies = copies
        """Copies of other groups stand for dropped ones: a step may be short of them."""
        self.dropped = 0
        """Groups that copies will stand for."""
        self.waiting: list[Group] = []
        self.held = 0
        self.changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """There is a whole step's worth."""
        return bool(self.waiting) and len(self.waiting) + self.dropped >= self.groups_per_step

    async def room(self, at_most: int) -> int:
        """Wait for room, then take up to `at_most` places of groups; from here their rollouts are asked for."""
        capacity = (self.max_staleness + 1) * self.groups_per_step
        async with self.changed:
            await self.changed.wait_for(lambda: self.held < capacity)
            n = min(at_most, capacity - self.held)
            self.held += n
        self.ledger.asked(n * self.group_size)
        return n

    async def put(self, groups: list[Group], asked: int) -> None:
        """Keep what can be trained on; the rest is booked with its reason and gives its room back."""
        kept = []
        for group in groups:
            scored, left = self.refine(self._without_failed(group))
            for why, n in left.items():
                self.ledger.rejected(n, why)
            reason = self.reject(scored) if scored.rollouts else None
            if reason:
                self.ledger.rejected(len(scored.rollouts), reason)
            elif scored.rollouts:
                kept.append(scored)
        async with self.changed:
            self.waiting += kept
            self.dropped += asked - len(kept) if self.copies else 0
            self.held -= asked - len(kept)
            self.changed.notify_all()

    def _without_failed(self, group: Group) -> Group:
        good: list[Rollout] = []
        for rollout in group.rollouts:
            if rollout.error is not None:
                self.ledger.failed(1, reason_of(rollout.error))
            else:
                good.append(rollout)
        return replace(group, rollouts=tuple(good))

    async def take(self, version: int) -> list[Group]:
        """Wait for one step's worth. Raises WhetError on tokens of a version the trainer does not know."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ready)
            out, self.waiting = self.waiting[: self.groups_per_step], self.waiting[self.groups_per_step :]
            self.dropped = max(0, self.dropped - (self.groups_per_step - len(out)))
        for group in out:
            for rollout in group.rollouts:
                seen = set(rollout.versions) - {-1}
                if seen and not (version - self.max_staleness <= min(seen) and max(seen) <= version):
                    raise WhetError(
                        f"task {rollout.task.uid}: tokens of policy versions {min(seen)}..{max(seen)}, but the trainer "
                        f"is at version {version} and takes at most {self.max_staleness} older"
                    )
        return out

    async def trained(self, groups: list[Group]) -> None:
        """The step is done: its groups leave, the next tasks may start."""
        self.ledger.trained(sum(len(g.rollouts) for g in groups))
        async with self.changed:
            self.held -= len(groups)
            self.changed.notify_all()

    def check(self) -> None:
        """Every rollout asked for is accounted for: nothing is in flight, so what is pending waits here."""
        self.ledger.balance(held=sum(len(g.rollouts) for g in self.waiting))

    def state(self) -> Json:
        return {"waiting": [[r.to_json() for r in g.rollouts] for g in self.waiting], "dropped": self.dropped}

    def restore(self, state: Json) -> None:
        groups = [[Rollout.from_json(r) for r in rows] for rows in state["waiting"]]
        self.waiting = [Group(rows[0].task, tuple(rows)) for rows in groups]
        self.held, self.dropped = len(self.waiting), state["dropped"]
