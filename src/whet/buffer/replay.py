"""Groups that may be trained on more than once, the most worthwhile first.

Two ways to use it:

- *a share of the step*: fresh groups are trained on first in, first out; those that were trained on are `keep`t, and a
  share of every step (`replayed`) is drawn from them;
- *one queue*: every fresh group is `add`ed and the whole step is drawn; fresh and used groups compete. So it is in
  Trinity-RFT. `lacking` says what has to come before a step may be drawn: training on used groups alone does not run
  away from those who explore.

A drawn group rests and then asks to come back. Counted in training steps (`cooldown_steps`), a resumed run draws what
the unbroken one drew; counted in seconds as in Trinity (`cooldown_s`), it depends on the clock: a resumed run goes on
with the seconds that were left, by a clock that nobody sets. Chance is a pure
function of (seed, task, number of uses), so nothing else has to be saved than what `state` gives.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable

from whet import seeds
from whet.buffer.groups import encode, oldest_version, restored
from whet.buffer.priority import ReplayEntry
from whet.types import Group, Json


def replayed(groups_per_step: int, share: float) -> int:
    """How many groups of a step come from replay, where it holds enough: the share, rounded down."""
    return math.floor(groups_per_step * share + 1e-9)  # 10 * 0.3 is 3


class Replay:
    """At most `capacity` groups that may be drawn, and those that rest after a draw."""

    def __init__(
        self,
        *,
        capacity: int,
        priority: Callable[[ReplayEntry, float], float | None],
        cooldown_steps: int | None,
        cooldown_s: float | None = None,
        max_staleness: int | None,
        fresh_staleness: int = 0,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        priority: see `priority.priority`.
        cooldown_steps: a group drawn at step s may be drawn again from step s + cooldown_steps (>= 1); None: never.
        cooldown_s: the same in seconds of `clock`, in place of cooldown_steps; from the next step at the earliest.
        max_staleness: used groups of a version older than this many behind the trainer's leave; None: none does.
        fresh_staleness: the same of groups that nobody trained on yet (one queue).
        """
        if capacity < 1 or (cooldown_steps is not None and cooldown_steps < 1):
            raise ValueError(f"capacity {capacity} and cooldown_steps {cooldown_steps} must be at least 1")
        self.capacity, self.cooldown_steps, self.cooldown_s = capacity, cooldown_steps, cooldown_s
        self.max_staleness, self.fresh_staleness = max_staleness, fresh_staleness
        self._priority, self._seed, self.clock = priority, seed, clock
        self._queue: list[tuple[float, int]] = []
        """(priority, -serial), sorted: the last is drawn next, the older of two equals first."""
        self._entries: dict[int, ReplayEntry] = {}
        """serial: what is in the queue."""
        self._fresh: dict[int, ReplayEntry] = {}
        """Those of them that nobody trained on yet."""
        self._resting: dict[float, list[ReplayEntry]] = {}
        """Step (or second) from which they may come back: entries, in the order they were drawn."""
        self._versions: Counter[tuple[bool, int]] = Counter()
        """(fresh, version) of what is in the queue."""
        self._serial = 0
        self._came = 0
        """Fresh groups since a step's worth of them had come."""
        self._draws = 0
        """Steps drawn since then."""
        self._left: list[tuple[str, Group]] = []

    def __len__(self) -> int:
        """Groups that could be drawn if no step passed and no version."""
        return len(self._queue)

    @property
    def fresh(self) -> list[Group]:
        """Groups in the queue that nobody trained on yet, in the order they came."""
        return [entry.group for entry in self._fresh.values()]

    @property
    def rest_s(self) -> float | None:
        """Seconds until the next group asks to come back; None: they are not what decides."""
        if self.cooldown_s is None or not self._resting:
            return None
        return max(0.0, min(self._resting) - self.clock())

    def add(self, groups: list[Group]) -> None:
        """Fresh groups come in. Where it is full the lowest priority leaves, be it one of them."""
        self._came += len(groups)
        for group in groups:
            self._enter(self._new(group, uses=0))

    def keep(self, groups: list[Group], *, step: int) -> None:
        """Groups that were trained on at `step` for the first time: they rest, as drawn ones do."""
        for group in groups:
            self._rest(self._new(group, uses=1), step)

    def lacking(self, n: int) -> int:
        """How many fresh groups have to come, as it is now, before a step of `n` may be drawn.

        There must be `n`. And in any `fresh_staleness` steps on end (one at least) `n` fresh ones come: with fewer,
        all that is under way would be too old when it is there. Where `n` fresh ones wait, none has to come.
        """
        waits = self._draws >= self.fresh_staleness - 1
        return max(0, n - len(self._queue), min(n - self._came, n - len(self._fresh)) if waits else 0)

    def draw(self, n: int, *, step: int, version: int) -> list[Group]:
        """The `n` groups of the highest priority, the older of two equals first; fewer if there are fewer.

        version: the trainer's, for `max_staleness`.
        """
        self.refresh(step=step, version=version)
        self._draws, self._came = (0, 0) if self._came >= n else (self._draws + 1, self._came)
        out = []
        for _ in range(min(n, len(self._queue))):
            entry = self._remove(len(self._queue) - 1)
            entry.uses += 1
            self._rest(entry, step)
            out.append(entry.group)
        return out

    def pop_left(self) -> list[tuple[str, Group]]:
        """(reason, group) of those that left without having been trained on since the last call: for the ledger."""
        out, self._left = self._left, []
        return out

    def refresh(self, *, step: int, version: int) -> None:
        """Who is too old for a trainer at `version` leaves; who has rested enough asks to come back."""
        self.give_up(version)
        now = step if self.cooldown_s is None else self.clock()
        for due in sorted(s for s in self._resting if s <= now):
            for entry in self._resting.pop(due):
                if not self._too_old(False, entry.version, version):
                    self._enter(entry)

    def give_up(self, version: int) -> None:
        """Who is too old for a trainer at `version` leaves."""
        if any(self._too_old(fresh, of, version) for fresh, of in self._versions):
            for at in reversed(range(len(self._queue))):
                entry = self._entries[-self._queue[at][1]]
                if self._too_old(entry.uses == 0, entry.version, version):
                    self._leave(self._remove(at), "stale")

    def _too_old(self, fresh: bool, of: int, version: int) -> bool:
        if fresh:
            return 0 <= of < version - self.fresh_staleness  # -1: nothing of it was sampled
        return self.max_staleness is not None and of < version - self.max_staleness

    def _new(self, group: Group, *, uses: int) -> ReplayEntry:
        self._serial += 1
        return ReplayEntry(group, oldest_version(group), uses, self._serial)

    def _enter(self, entry: ReplayEntry) -> None:
        found = self._priority(entry, self.noise(entry))
        if found is None:
            self._leave(entry, "unwanted")
            return
        entry.priority = found
        if len(self._queue) >= self.capacity:
            if entry.priority < self._queue[0][0]:
                self._leave(entry, "outranked")
                return
            self._evict()
        insort(self._queue, (entry.priority, -entry.serial))
        self._hold(entry)

    def _hold(self, entry: ReplayEntry) -> None:
        self._entries[entry.serial] = entry
        self._versions[entry.uses == 0, entry.version] += 1
        if entry.uses == 0:
            self._fresh[entry.serial] = entry

    def _evict(self) -> None:
        """The lowest priority leaves; of equals the oldest."""
        lowest = self._queue[0][0]
        self._leave(self._remove(bisect_right(self._queue, (lowest, 0)) - 1), "outranked")

    def _remove(self, at: int) -> ReplayEntry:
        entry = self._entries.pop(-self._queue.pop(at)[1])
        kind = self._fresh.pop(entry.serial, None) is not None, entry.version
        self._versions[kind] -= 1
        if not self._versions[kind]:
            del self._versions[kind]
        return entry

    def _rest(self, entry: ReplayEntry, step: int) -> None:
        if self.cooldown_s is not None:
            self._resting.setdefault(self.clock() + self.cooldown_s, []).append(entry)
        elif self.cooldown_steps is not None:
            self._resting.setdefault(step + self.cooldown_steps, []).append(entry)

    def _leave(self, entry: ReplayEntry, reason: str) -> None:
        if entry.uses == 0:
            self._left.append((reason, entry.group))

    def noise(self, entry: ReplayEntry) -> float:
        """Standard normal, by Box and Muller."""
        stream = seeds.key(self._seed, "replay", entry.group.task.uid, entry.uses)
        u, v = seeds.uniforms(stream, 0, 2)
        return math.sqrt(-2.0 * math.log1p(-u)) * math.cos(2.0 * math.pi * v)

    def state(self) -> Json:
        """Everything as JSON, groups as bytes, but what `pop_left` has to tell: for the checkpoint."""
        queued = [_entry_to_json(self._entries[-negative]) for _, negative in self._queue]
        resting = [[due, [_entry_to_json(e) for e in entries]] for due, entries in self._resting.items()]
        numbers: Json = {"serial": self._serial, "came": self._came, "draws": self._draws}
        if self.cooldown_s is not None:
            numbers["clock"] = self.clock()
        return numbers | {"queued": queued, "resting": resting}

    def restore(self, state: Json) -> None:
        """Go on from what `state` gave. If less fits now, the lowest priorities leave."""
        self._serial, self._came, self._draws = state["serial"], state["came"], state["draws"]
        entries = [_entry_from_json(e) for e in state["queued"]]
        self._queue = [(e.priority, -e.serial) for e in entries]
        self._entries, self._fresh, self._versions, self._left = {}, {}, Counter(), []
        for entry in sorted(entries, key=lambda e: e.serial):
            self._hold(entry)
        # another process has another clock; in older checkpoints it is the time of day
        passed = 0 if self.cooldown_s is None else self.clock() - state.get("clock", time.time())
        self._resting = {due + passed: [_entry_from_json(e) for e in rest] for due, rest in state["resting"]}
        while len(self._queue) > self.capacity:
            self._evict()


def _entry_to_json(entry: ReplayEntry) -> Json:
    numbers = [entry.version, entry.uses, entry.serial, entry.priority]
    return {"numbers": numbers, "group": encode(entry.group)}


def _entry_from_json(value: Json) -> ReplayEntry:
    version, uses, serial, priority = value["numbers"]
    return ReplayEntry(restored(value["group"]), version, uses, serial, priority)
