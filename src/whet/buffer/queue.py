"""The buffer of a run with separate explorer and trainer processes: both ends of one `Store`.

`TrainerQueue` and `ExplorerQueue` provide the methods of `Buffer` that the loop and the explorers call; the store holds
the waiting groups, the reservations and the account of all rollouts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from whet.buffer.buffer import Refine, Reject, as_it_is, sorted_out
from whet.buffer.replay import Replay
from whet.buffer.stores import Scored, Store, until
from whet.guard.ledger import SKIPPED, Ledger
from whet.types import Group, Json, Stopped, Task, WhetError


class TrainerQueue:
    """The trainer's end. Groups of a step that was trained and lost with a kill come again, in the same order.

    With `replay` fresh and used groups wait in one queue here, from which steps are drawn. What waits in the store is
    gathered into it, delivery by delivery. The queue is in the checkpoints; deliveries after the last one come again.
    """

    def __init__(
        self,
        store: Store,
        *,
        groups_per_step: int,
        max_staleness: int,
        ledger: Ledger,
        stopping: Callable[[], bool] = lambda: False,
        replay: Replay | None = None,
    ) -> None:
        """stopping: no caller waits for groups any more. replay: the one queue of fresh and used groups."""
        self.store, self.ledger, self.stopping, self.replay = store, ledger, stopping, replay
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.step = 0
        """The last one that was taken; with one queue the last delivery."""
        self.now = 0.0
        """When the last delivery was: a delivery that comes again is made at the time it had."""
        if replay is not None:
            replay.clock = lambda: self.now
        self.steps = 0
        """Steps drawn from the one queue."""
        self.fresh: set[int] = set()
        """uids that were gathered and have not ended."""
        self.reused = 0
        """Groups of the last step that were trained on before."""
        self.saved: int | None = None
        """The step of the newest checkpoint; the one before it is surely on the disk."""
        self.left: list[Group] = []

    async def take(self, version: int) -> list[Group]:
        """Wait for one step's worth; groups too old for this version are booked in the store. Raises Stopped."""
        oldest = max(0, version - self.max_staleness)
        if self.replay is not None:
            return await self._draw(self.replay, oldest, version)
        groups = await until(partial(self._take, oldest))
        self.step += 1
        self._check(groups, version)
        return groups

    def _check(self, groups: list[Group], version: int) -> None:
        for group in groups:
            newest = max((v for r in group.rollouts for v in r.sampled_versions), default=-1)
            if newest > version:
                raise WhetError(
                    f"task {group.task.uid}: tokens of policy version {newest}, but the trainer is at version "
                    f"{version}: the explorers follow another run's weights, or the trainer went back to an older "
                    "checkpoint than the store expects; restart with an empty store"
                )

    async def _draw(self, replay: Replay, oldest: int, version: int) -> list[Group]:
        """A step of the one queue: what waits in the store by now comes into it first."""
        n = self.groups_per_step
        while True:
            groups = await until(partial(self._next, replay, oldest, version))
            self._check(groups, version)
            self.fresh |= {group.task.uid for group in groups}
            replay.add(groups)
            if not replay.lacking(n):
                break
        drawn = replay.draw(n, step=self.steps, version=version)
        self.steps += 1
        self.reused = sum(group.task.uid not in self.fresh for group in drawn)
        return drawn

    def _next(self, replay: Replay, oldest: int, version: int) -> list[Group] | None:
        """What the store has for the next delivery, or None while that is too little."""
        if self.stopping():
            raise Stopped
        delivery = self.step + 1
        before = self.store.delivery_time(delivery)
        self.now = time.time() if before is None else before
        replay.refresh(step=self.steps, version=version)
        self._book_left(replay, delivery)
        least = replay.lacking(self.groups_per_step)
        groups = self.store.gather(least, delivery=delivery, now=self.now, oldest=oldest)
        self.step = self.step if groups is None else delivery
        return groups

    def _book_left(self, replay: Replay, delivery: int) -> None:
        """What left the queue untrained is booked in the store, and gives its room back."""
        if left := replay.pop_left():
            self._end(delivery, [(group.task.uid, f"rejected/{reason}") for reason, group in left])

    def _end(self, delivery: int, ends: list[tuple[int, str]]) -> None:
        self.store.end(delivery, ends)
        self.fresh -= {uid for uid, _ in ends}

    def _take(self, oldest: int) -> list[Group] | None:
        if self.stopping():
            raise Stopped
        return self.store.take(self.groups_per_step, step=self.step + 1, oldest=oldest) or None

    async def trained(self, groups: list[Group], *, skipped: Collection[int] = ()) -> None:
        """The step is done: its room is free. skipped: task uids of groups whose updates were skipped."""
        if self.replay is None:
            await asyncio.to_thread(self.store.trained, self.step, skipped)
            self.left = groups
        else:
            self.left = [group for group in groups if group.task.uid in self.fresh]
            self._book_left(self.replay, self.step)
            uids = [group.task.uid for group in self.left]
            ends = [(uid, f"rejected/{SKIPPED}" if uid in skipped else "trained") for uid in uids]
            await asyncio.to_thread(self._end, self.step, ends)
        self.ledger.settle(await asyncio.to_thread(self.store.ledger))

    def leave(self) -> list[Group]:
        """What was trained on; what was rejected is written down by its explorer."""
        out, self.left = sorted(self.left, key=lambda g: g.task.uid), []
        return out

    def check(self) -> None:
        """Every rollout requested of any explorer is accounted for."""
        self.store.check()

    def state(self) -> Json:
        """The step, and the one queue; all else is in the store, which outlives the process."""
        if self.saved is not None:
            self.store.done(self.saved)
        self.saved = self.step
        if self.replay is None:
            return {"step": self.step}
        return {"step": self.step, "steps": self.steps, "now": self.now, "replay": self.replay.state()}

    def restore(self, state: Json, version: int = 0) -> list[Task]:
        """Continue after that step. No rollout was in flight here."""
        self.step = self.saved = state["step"]
        if self.replay is not None:
            self.steps = state["steps"]
            self.now = state.get("now", time.time())  # older checkpoints lack it
            self.replay.restore(state["replay"])
            self.fresh = {group.task.uid for group in self.replay.fresh}
        self.store.done(self.step)
        return []


class ExplorerQueue:
    """An explorer's end: its tasks are reserved for a time, and are given to others if the explorer does not renew them
    in that time."""

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
        version: Callable[[], int] | None = None,
    ) -> None:
        """version: of the weights, where tasks are asked in rounds. Then groups are handed over as they were played,
        and the trainer sorts them out."""
        self.store, self.owner, self.lease_s = store, owner, lease_s
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.capacity = (max_staleness + 1) * groups_per_step + spare
        self.reject, self.refine = reject, refine
        self.version = version
        self.closed = False
        self.turn = threading.Lock()
        self.reserved: list[int] = []
        """Tasks that there was room for at the last `room`."""
        self.wanted: int | None = None
        self.broken: BaseException | None = None
        self.count = 0
        """Groups that were put."""

    async def room(self, at_most: int) -> int:
        """Wait for room in the store, over all explorers."""
        self.reserved = await until(partial(self._reserve, at_most))
        return len(self.reserved)

    def _reserve(self, at_most: int) -> list[int] | None:
        with self.turn:
            if self.closed:
                return None
            reserved = self.store.reserve(
                self.owner,
                at_most,
                capacity=self.capacity,
                rollouts=self.group_size,
                lease_s=self.lease_s,
                version=self.version() if self.version else None,
            )
        return reserved or None

    def close(self) -> None:
        """Reserve nothing from now on, not even for a thread whose result is no longer awaited."""
        with self.turn:
            self.closed = True

    def draw(self, n: int, at: Callable[[int], Task]) -> list[Task]:
        """The tasks reserved last. at: the task of a number."""
        assert n == len(self.reserved)
        return [at(uid) for uid in self.reserved]

    async def put(self, groups: list[Group], asked: int) -> None:
        """Hand over what became of tasks; the rest is booked there with its reason."""
        scored = []
        for group in groups:
            kept, left = (
                (group, {}) if self.version else sorted_out(group, refine=self.refine, reject=self.reject)
            )
            scored.append(Scored(group.task.uid, kept, left))
        await asyncio.to_thread(self.store.put, scored)
        self.count += len(groups)

    def fail(self, error: BaseException) -> None:
        """No further groups will arrive."""
        self.broken = self.broken or error

    def renew(self, restarts: int = 0) -> None:
        """This explorer lives. restarts: so many of its episodes began anew so far, which a trainer's wait for groups
        then does, too. Raises the error of what explores."""
        if self.broken is not None:
            raise self.broken
        self.store.renew(self.owner, lease_s=self.lease_s)
        if restarts:
            self.store.note(f"restarts of {self.owner}", restarts)
