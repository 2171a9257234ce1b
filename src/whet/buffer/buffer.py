"""The buffer between exploring and training: requested tasks, waiting groups, and the groups that may be trained on.

`room` is the staleness bound: tasks are requested only while at most (max_staleness + 1) steps' worth of groups is in
flight, waiting or in training. A rejected group frees its room at once, so filtering can't starve a step.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from whet.buffer.groups import encode, restored
from whet.buffer.replay import Replay, replayed
from whet.guard.ledger import SKIPPED, Ledger
from whet.track.metrics import reason_of
from whet.types import Group, Json, Rollout, Task, WhetError

Reject = Callable[[Group], str | None]
"""Why a scored group teaches nothing, or None."""


Refine = Callable[[Group], tuple[Group, dict[str, int]]]
"""A scored group as it is trained on, and how many rollouts left it, by reason. A pure function."""

STALE = "stale"
"""Reason booked for groups that are older than max_staleness allows, or would be once they are finished."""
SURPLUS = "surplus"
"""Reason booked for groups that were sampled beyond what a step trains on (algorithm.oversample)."""


def as_it_is(group: Group) -> tuple[Group, dict[str, int]]:
    """Every rollout stays."""
    return group, {}


@dataclass(frozen=True)
class InFlightTask:
    """A task whose rollouts are in flight."""

    task: Task
    version: int
    """Of the policy, when they were asked for: the oldest that they can have."""


class Buffer:
    """Groups in memory: the oldest version first, then in the order in which they came; or drawn by priority."""

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
        spare: int = 0,
        replay: Replay | None = None,
        share: float | None = None,
    ) -> None:
        """spare: groups requested beyond what the steps need, so that no step waits for the last one. replay, share:
        the part of a step's groups that were trained on before, where there are so many; without a share fresh and used
        groups wait in one queue, from which the whole step is drawn."""
        self.groups_per_step, self.group_size, self.max_staleness = groups_per_step, group_size, max_staleness
        self.refine, self.reject, self.ledger = refine, reject, ledger
        self.spare = spare
        self.replay, self.share = replay, share
        self.again: list[Group] = []
        """Groups of the coming step that were trained on before, where they are a share of it."""
        self.reused = 0
        """Groups of the last step that were trained on before."""
        self.steps = 0
        """Steps taken so far."""
        self.copies = copies
        """Copies of other groups stand for dropped ones: a step may be short of them."""
        self.dropped = Counter[int]()
        """Groups that copies will stand for, by the task uid of the group that waits before them: they are of its step.
        Where none waits, there is nothing to copy."""
        self.waiting: list[Group] = []
        self.under_way: dict[int, InFlightTask] = {}
        """By task uid."""
        self.played: dict[int, Group] = {}
        """Groups that wait or are in training, by task uid, with the rollouts that `refine` left out."""
        self.left: list[Group] = []
        """Groups that were trained on or booked otherwise since the last `leave`."""
        self.unused = 0
        """Groups since the last `take` that could not be trained on."""
        self.held = 0
        self.behind = 0
        """Steps trained since the weights that sample were given: what is asked now is older by as many."""
        self.wanted: int | None = None
        """Most groups that are of use to the steps left. None: no such bound."""
        self.broken: BaseException | None = None
        """Why nothing comes any more."""
        self.changes = 0
        """Groups came or went so many times."""
        self.changed = asyncio.Condition()

    @property
    def queue(self) -> Replay | None:
        """Where groups wait, if fresh and used ones wait together."""
        return self.replay if self.share is None else None

    @property
    def fresh(self) -> list[Group]:
        """Groups that wait and nobody trained on."""
        return self.waiting if self.queue is None else self.queue.fresh

    @property
    def there(self) -> int:
        """Groups that wait, those counted that copies stand for."""
        return len(self.waiting) + self.dropped.total()

    @property
    def whole(self) -> bool:
        """`state` has all there is: nothing was booked or drawn for the coming step."""
        return not (self.left or self.again)

    @property
    def fresh_per_step(self) -> int:
        """Groups that the coming step needs beside those it trains on again."""
        return self.groups_per_step - len(self.again)

    @property
    def pending(self) -> Collection[int]:
        """Uids of the tasks that are in flight, wait or are in training."""
        return self.under_way.keys() | self.played.keys()

    @property
    def ready(self) -> bool:
        """There is a whole step's worth."""
        if self.queue is not None:
            return self.queue.lacking(self.groups_per_step) == 0
        return self.there >= self.fresh_per_step

    def begin(self, version: int) -> None:
        """Draw what the coming step trains on again; call it before the step's groups are waited for, and again when
        a time has passed."""
        if self.queue is not None:
            self.queue.refresh(step=self.steps, version=version)
            self._book_left()
        elif self.replay is not None and self.share is not None and not self.again:
            n = replayed(self.groups_per_step, self.share)
            self.again = self.replay.draw(n, step=self.steps, version=version)

    def _book_left(self) -> None:
        """What left the queue untrained is booked, and gives its room back."""
        assert self.queue is not None
        if left := self.queue.pop_left():
            for reason, group in left:
                self.ledger.rejected(len(group.rollouts), reason)
            self.left += [self.played.pop(group.task.uid) for _, group in left]
            self.held -= len(left)
            self.telling = asyncio.ensure_future(self._tell())

    @property
    def capacity(self) -> int:
        """Most groups that are under way, waiting or in training at once."""
        bound = (self.max_staleness + 1 - self.behind) * self.groups_per_step
        return (bound if self.wanted is None else min(bound, self.wanted)) + self.spare

    async def room(self, at_most: int) -> int:
        """Wait for room, then take up to `at_most` places of groups; from here their rollouts count as requested."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.held < self.capacity)
            n = min(at_most, self.capacity - self.held)
            self.held += n
        self.ledger.asked(n * self.group_size)
        return n

    def asked(self, tasks: Iterable[Task], version: int) -> None:
        """The tasks for which there was room, and the policy version that they are requested of."""
        self.under_way |= {task.uid: InFlightTask(task, version) for task in tasks}

    async def put(self, groups: Sequence[Group], asked: int) -> None:
        """Keep the groups that can be trained on; the others are booked with their reason and free their room."""
        kept = []
        for group in groups:
            self.under_way.pop(group.task.uid, None)
            scored, left = sorted_out(group, refine=self.refine, reject=self.reject)
            for account, n in left.items():
                self.ledger.book(account, n)
            if scored is None:
                self.left.append(group)
            else:
                self.played[group.task.uid] = group
                kept.append(scored)
        if self.queue is not None:
            self.queue.add(kept)
            self._book_left()
        else:
            self.waiting += kept
        if self.copies and self.waiting:
            self.dropped[self.waiting[-1].task.uid] += asked - len(kept)
        self.unused += asked - len(kept)
        self.held -= asked - len(kept)
        await self._tell()

    async def _tell(self) -> None:
        """Wake who waits, after the change: a save may come between the two, and sees either all of it or nothing."""
        self.changes += 1
        async with self.changed:
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No further groups will arrive: whoever waits for groups gets this error."""
        if self.broken is None:
            self.broken = error
            self.telling = asyncio.ensure_future(self._tell())

    async def news(self, since: int) -> None:
        """Wait until there were more `changes` than that, or a group has rested for its time. Raises the error of what
        explores."""
        rest_s = self.queue.rest_s if self.queue is not None else None
        with suppress(TimeoutError):
            async with asyncio.timeout(rest_s), self.changed:
                await self.changed.wait_for(lambda: self.changes > since)
        if self.broken is not None:
            raise self.broken

    async def give_up_stale(self, version: int) -> list[int]:
        """Book and drop groups that are too old for a trainer at `version`, and those that would be once they are
        finished. Returns the task uids of the latter: their rollouts are no longer needed."""
        old = {g.task.uid: len(g.rollouts) for g in self.waiting if _oldest(g) + self.max_staleness < version}
        late = [u for u, asked in self.under_way.items() if asked.version + self.max_staleness < version]
        self.waiting = [g for g in self.waiting if g.task.uid not in old]
        self.left += [self.played.pop(uid) for uid in old]
        for uid in old:
            del self.dropped[uid]
        for uid in late:
            del self.under_way[uid]
        if old or late:
            self.ledger.rejected(sum(old.values()) + len(late) * self.group_size, STALE)
        self.held -= len(old) + len(late)
        if self.queue is not None:
            self.queue.give_up(version)
            self._book_left()
        await self._tell()
        return late

    async def give_up(self, groups: Sequence[Group], reason: str) -> None:
        """Groups that were taken for a step which does not train on them leave, and give their room back."""
        self.ledger.rejected(sum(len(g.rollouts) for g in groups), reason)
        self.left += [self.played.pop(g.task.uid) for g in groups]
        self.held -= len(groups)
        await self._tell()

    async def take(self, version: int) -> list[Group]:
        """Wait for one step's worth. Raises WhetError on tokens of a version that the trainer does not know, or that is
        too old."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ready)
            n = self.fresh_per_step
            if self.queue is not None:
                out = self.queue.draw(n, step=self.steps, version=version)
                self._book_left()
            else:
                if self.there > n:
                    self.waiting.sort(key=_oldest)  # they are the next to become too old
                left, out = self.there - n, []
                while self.there > left and self.waiting:
                    out.append(group := self.waiting.pop(0))
                    del self.dropped[group.task.uid]
            self.unused = 0
        fresh = [group for group in out if group.task.uid in self.played]
        for group in fresh:
            for rollout in group.rollouts:
                self._check(rollout, version)
        again, self.again = self.again, []
        self.reused = len(out) - len(fresh) + len(again)
        self.steps += 1
        return out + again

    def _check(self, rollout: Rollout, version: int) -> None:
        seen = rollout.sampled_versions
        if seen and not (version - self.max_staleness <= min(seen) and max(seen) <= version):
            raise WhetError(
                f"task {rollout.task.uid}: tokens of policy versions {min(seen)}..{max(seen)}, but the trainer "
                f"is at version {version} and accepts a staleness of at most {self.max_staleness}"
            )

    async def trained(self, groups: list[Group], *, skipped: Collection[int] = ()) -> None:
        """The step is done: its groups leave, the next tasks may start. skipped: task uids of groups whose updates were
        skipped, so that nothing was learned from them."""
        fresh = [g for g in groups if g.task.uid in self.played]
        self.ledger.trained(sum(len(g.rollouts) for g in fresh if g.task.uid not in skipped))
        if lost := sum(len(g.rollouts) for g in fresh if g.task.uid in skipped):
            self.ledger.rejected(lost, SKIPPED)
        self.left += [self.played.pop(g.task.uid) for g in fresh]
        self.held -= len(fresh)
        if self.wanted is not None:  # one step fewer is left, also while the stage evaluates before the next
            self.wanted -= self.groups_per_step
        if self.replay is not None and self.queue is None:
            self.replay.keep(fresh, step=self.steps - 1)
        await self._tell()

    def leave(self) -> list[Group]:
        """As they were played, in the order of their tasks: the groups that were trained on or booked otherwise."""
        out, self.left = sorted(self.left, key=lambda g: g.task.uid), []
        return out

    def check(self) -> None:
        """Every requested rollout is accounted for: pending ones are in flight or wait here."""
        waiting = sum(len(g.rollouts) for g in self.fresh)
        self.ledger.balance(held=waiting + len(self.under_way) * self.group_size)

    def state(self) -> Json:
        return {
            "waiting": [encode(self.played[g.task.uid]) for g in self.fresh],
            "dropped": [self.dropped[g.task.uid] for g in self.fresh],
            "steps": self.steps,
            "replay": self.replay.state() if self.replay is not None else None,
            "under_way": [asked.task.to_json() for asked in self.under_way.values()],
            "left": [encode(group) for group in self.left],
        }

    def restore(self, state: Json, version: int = 0) -> list[Task]:
        """Continue from `state`; returns the tasks that were in flight then, to be requested again of `version`."""
        played = [restored(group) for group in state["waiting"]]
        self.played = {g.task.uid: g for g in played}
        if self.queue is None:
            self.waiting = [self.refine(without_failed(g))[0] for g in played]
        again = [Task.from_json(task) for task in state["under_way"]]
        self.asked(again, version)
        self.held = len(played) + len(again)
        if isinstance(dropped := state["dropped"], list):  # older checkpoints have a number for all together
            self.dropped = Counter({g.task.uid: n for g, n in zip(played, dropped)})
        self.steps = state["steps"]
        self.left = [restored(group) for group in state.get("left", ())]  # older checkpoints lack them
        if self.replay is not None and state["replay"] is not None:  # else there was none before a branch
            self.replay.restore(state["replay"])
        return again


def _oldest(group: Group) -> float:
    """The oldest version that a token of the group was sampled with; infinite if none was sampled."""
    return min((v for r in group.rollouts for v in r.sampled_versions), default=math.inf)


def sorted_out(group: Group, *, refine: Refine, reject: Reject) -> tuple[Group | None, dict[str, int]]:
    """A scored group as it is trained on, or None; and, by ledger account, its rollouts that are not."""
    left = Counter(f"failed/{reason_of(r.error)}" for r in group.rollouts if r.error is not None)
    scored, gone = refine(without_failed(group))
    left.update({f"rejected/{why}": n for why, n in gone.items()})
    reason = reject(scored) if scored.rollouts else None
    if reason:
        left[f"rejected/{reason}"] += len(scored.rollouts)
    return (None if reason or not scored.rollouts else scored), dict(left)


def without_failed(group: Group) -> Group:
    """The group without the rollouts that have an error."""
    return replace(group, rollouts=tuple(r for r in group.rollouts if r.error is None))
