"""The buffer of a run whose explorers and trainer are processes of their own: both ends of one `Store`.

`TrainerQueue` and `ExplorerQueue` answer to what the loop and the explorers ask of a `Buffer`; what waits, who was
asked and the account of all rollouts are the store's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from whet.buffer.buffer import Refine, Reject, as_it_is, sorted_out
from whet.buffer.stores import Scored, Store, until
from whet.guard.ledger import Ledger
from whet.types import Group, Json, Stopped, Task, WhetError


class TrainerQueue:
    """The trainer's end. Groups of a step that was trained and lost with a kill come again, in the same order."""

    def __init__(
        self,
        store: Store,
        *,
        groups_per_step: int,
        max_staleness: int,
        ledger: Ledger,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """stopping: nobody waits for groups any more."""
        self.store, self.ledger, self.stopping = store, ledger, stopping
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.step = 0
        """The last one that was taken."""
        self.saved: int | None = None
        """The step of the newest checkpoint; the one before it is surely on the disk."""
        self.left: list[Group] = []

    async def take(self, version: int) -> list[Group]:
        """Wait for one step's worth; what is too old for this version is booked in the store. Raises Stopped."""
        oldest = max(0, version - self.max_staleness)
        groups = await until(partial(self._take, oldest))
        self.step += 1
        for group in groups:
            newest = max((v for r in group.rollouts for v in r.versions), default=-1)
            if newest > version:
                raise WhetError(
                    f"task {group.task.uid}: tokens of policy version {newest}, but the trainer is at version "
                    f"{version}: the explorers follow another run's weights, or the trainer went back to an older "
                    "checkpoint than the store knows of; start anew with an empty store"
                )
        return groups

    def _take(self, oldest: int) -> list[Group]:
        if self.stopping():
            raise Stopped
        return self.store.take(self.groups_per_step, step=self.step + 1, oldest=oldest)

    async def trained(self, groups: list[Group]) -> None:
        """The step is done: its room is free."""
        await asyncio.to_thread(self.store.trained, self.step)
        self.left = groups
        self.ledger.settle(await asyncio.to_thread(self.store.ledger))

    def leave(self) -> list[Group]:
        """What was trained on; what was rejected is written down by its explorer."""
        out, self.left = sorted(self.left, key=lambda g: g.task.uid), []
        return out

    def check(self) -> None:
        """Every rollout asked of any explorer is accounted for."""
        self.store.check()

    def state(self) -> Json:
        """The step; all else is in the store, which outlives the process."""
        if self.saved is not None:
            self.store.done(self.saved)
        self.saved = self.step
        return {"step": self.step}

    def restore(self, state: Json, version: int = 0) -> list[Task]:
        """Go on after that step. Nothing was under way here."""
        self.step = self.saved = state["step"]
        self.store.done(self.step)
        return []


class ExplorerQueue:
    """An explorer's end: its tasks are reserved for a time, and asked of others if it is not heard of for so long."""

    def __init__(
        self,
        store: Store,
        *,
        owner: str,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        spare: int,
        lease_s: float,
        reject: Reject,
        refine: Refine = as_it_is,
    ) -> None:
        self.store, self.owner, self.lease_s = store, owner, lease_s
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.capacity = (max_staleness + 1) * groups_per_step + spare
        self.reject, self.refine = reject, refine
        self.reserved: list[int] = []
        """Tasks that there was room for at the last `room`."""
        self.wanted: int | None = None
        self.broken: BaseException | None = None
        self.count = 0
        """Groups that were put."""

    async def room(self, at_most: int) -> int:
        """Wait for room in the store, over all explorers."""
        reserve = partial(
            self.store.reserve,
            self.owner,
            at_most,
            capacity=self.capacity,
            rollouts=self.group_size,
            lease_s=self.lease_s,
        )
        self.reserved = await until(reserve)
        return len(self.reserved)

    def draw(self, n: int, at: Callable[[int], Task]) -> list[Task]:
        """The tasks reserved last. at: the task of a number."""
        assert n == len(self.reserved)
        return [at(uid) for uid in self.reserved]

    async def put(self, groups: list[Group], asked: int) -> None:
        """Hand over what became of tasks; the rest is booked there with its reason."""
        scored = []
        for group in groups:
            kept, left = sorted_out(group, refine=self.refine, reject=self.reject)
            scored.append(Scored(group.task.uid, kept, left))
        await asyncio.to_thread(self.store.put, scored)
        self.count += len(groups)

    def fail(self, error: BaseException) -> None:
        """Nothing comes any more."""
        self.broken = self.broken or error

    def renew(self) -> None:
        """This explorer lives. Raises the error of what explores."""
        if self.broken is not None:
            raise self.broken
        self.store.renew(self.owner, lease_s=self.lease_s)
