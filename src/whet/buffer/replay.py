"""Groups that may be trained on more than once, the most worthwhile first.

Two ways to use it:

- *a share of the step*: fresh groups are trained on first in, first out; those that were trained on are `keep`t, and a
  share of every step (`replayed`) is drawn from them;
- *one queue*: every fresh group is `add`ed and the whole step is drawn; fresh and used groups compete. So it is in
  Trinity-RFT.

A drawn group rests for `cooldown_steps` and then asks to come back. Trinity counts its cooldown in seconds; here it is
counted in training steps, so that a resumed run draws what the unbroken one drew. Chance is a pure function of (seed,
task, number of uses), so nothing else has to be saved than what `state` gives.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable

from whet import seeds
from whet.buffer.groups import from_json, to_json
from whet.buffer.priority import Entry
from whet.types import Group, Json, WhetError


def replayed(groups_per_step: int, share: float) -> int:
    """How many groups of a step come from replay, where it holds enough: the share, rounded down."""
    return math.floor(groups_per_step * share + 1e-9)  # 10 * 0.3 is 3


class Replay:
    """At most `capacity` groups that may be drawn, and those that rest after a draw."""

    def __init__(
        self,
        *,
        capacity: int,
        priority: Callable[[Entry, float], float | None],
        cooldown_steps: int | None,
        max_staleness: int | None,
        seed: int,
    ) -> None:
        """
        priority: see `priority.priority`.
        cooldown_steps: a group drawn at step s may be drawn again from step s + cooldown_steps (>= 1); None: never.
        max_staleness: groups of a version older than this many behind the trainer's leave; None: none does.
        """
        if capacity < 1 or (cooldown_steps is not None and cooldown_steps < 1):
            raise ValueError(f"capacity {capacity} and cooldown_steps {cooldown_steps} must be at least 1")
        self.capacity, self.cooldown_steps, self.max_staleness = capacity, cooldown_steps, max_staleness
        self._priority, self._seed = priority, seed
        self._queue: list[tuple[float, int]] = []
        """(priority, -serial), sorted: the last is drawn next, the older of two equals first."""
        self._entries: dict[int, Entry] = {}
        """serial: what is in the queue."""
        self._resting: dict[int, list[Entry]] = {}
        """Step from which they may come back: entries, in the order they were drawn."""
        self._versions: Counter[int] = Counter()
        """Versions of what is in the queue."""
        self._serial = 0
        self._unused: Counter[str] = Counter()

    def __len__(self) -> int:
        """Groups that could be drawn if no step passed and no version."""
        return len(self._queue)

    def add(self, groups: list[Group], *, version: int) -> None:
        """Fresh groups come in. Where it is full the lowest priority leaves, be it one of them."""
        for group in groups:
            self._enter(self._new(group, version, uses=0))

    def keep(self, groups: list[Group], *, version: int, step: int) -> None:
        """Groups that were trained on at `step` for the first time: they rest, as drawn ones do."""
        for group in groups:
            self._rest(self._new(group, version, uses=1), step)

    def ready(self, *, step: int, version: int) -> int:
        """How many groups `draw` could give at this step."""
        self._refresh(step, version)
        return len(self._queue)

    def draw(self, n: int, *, step: int, version: int) -> list[Group]:
        """The `n` groups of the highest priority, the older of two equals first; fewer if there are fewer.

        version: the trainer's, for `max_staleness`.
        """
        self._refresh(step, version)
        out = []
        for _ in range(min(n, len(self._queue))):
            entry = self._remove(len(self._queue) - 1)
            entry.uses += 1
            self._rest(entry, step)
            out.append(entry.group)
        return out

    def pop_unused(self) -> dict[str, int]:
        """Rollouts that left without having been trained on, by reason, since the last call: for the ledger."""
        out = dict(self._unused)
        self._unused.clear()
        return out

    def _new(self, group: Group, version: int, *, uses: int) -> Entry:
        self._serial += 1
        return Entry(group, version, uses, self._serial)

    def _refresh(self, step: int, version: int) -> None:
        """Who has rested enough asks to come back; who is too old leaves."""
        for due in sorted(s for s in self._resting if s <= step):
            for entry in self._resting.pop(due):
                self._enter(entry)
        if self.max_staleness is not None and any(v < version - self.max_staleness for v in self._versions):
            oldest = version - self.max_staleness
            for at in reversed(range(len(self._queue))):
                if self._entries[-self._queue[at][1]].version < oldest:
                    self._leave(self._remove(at), "stale")

    def _enter(self, entry: Entry) -> None:
        found = self._priority(entry, self._noise(entry))
        if found is None:
            self._leave(entry, "unwanted")
            return
        if not math.isfinite(found):
            raise WhetError(
                f"buffer.replay.priority gave {found!r} for task {entry.group.task.uid}; give a finite number, or "
                "None to leave the group out"
            )
        entry.priority = float(found)
        if len(self._queue) >= self.capacity:
            if entry.priority < self._queue[0][0]:
                self._leave(entry, "outranked")
                return
            self._evict()
        insort(self._queue, (entry.priority, -entry.serial))
        self._entries[entry.serial] = entry
        self._versions[entry.version] += 1

    def _evict(self) -> None:
        """The lowest priority leaves; of equals the oldest."""
        lowest = self._queue[0][0]
        self._leave(self._remove(bisect_right(self._queue, (lowest, 0)) - 1), "outranked")

    def _remove(self, at: int) -> Entry:
        entry = self._entries.pop(-self._queue.pop(at)[1])
        self._versions[entry.version] -= 1
        if not self._versions[entry.version]:
            del self._versions[entry.version]
        return entry

    def _rest(self, entry: Entry, step: int) -> None:
        if self.cooldown_steps is not None:
            self._resting.setdefault(step + self.cooldown_steps, []).append(entry)

    def _leave(self, entry: Entry, reason: str) -> None:
        if entry.uses == 0:
            self._unused[reason] += len(entry.group.rollouts)

    def _noise(self, entry: Entry) -> float:
        """Standard normal, by Box and Muller."""
        stream = seeds.key(self._seed, "replay", entry.group.task.uid, entry.uses)
        u, v = seeds.uniforms(stream, 0, 2)
        return math.sqrt(-2.0 * math.log1p(-u)) * math.cos(2.0 * math.pi * v)

    def state(self) -> Json:
        """Everything as JSON: for the checkpoint."""
        queued = [_entry_to_json(self._entries[-negative]) for _, negative in self._queue]
        resting = [[step, [_entry_to_json(e) for e in entries]] for step, entries in self._resting.items()]
        return {"serial": self._serial, "queued": queued, "resting": resting, "unused": dict(self._unused)}

    def restore(self, state: Json) -> None:
        """Go on from what `state` gave. If less fits now, the lowest priorities leave."""
        self._serial, self._unused = state["serial"], Counter(state["unused"])
        entries = [_entry_from_json(e) for e in state["queued"]]
        self._queue = [(e.priority, -e.serial) for e in entries]
        self._entries = {e.serial: e for e in entries}
        self._versions = Counter(e.version for e in entries)
        self._resting = {step: [_entry_from_json(e) for e in rest] for step, rest in state["resting"]}
        while len(self._queue) > self.capacity:
            self._evict()


def _entry_to_json(entry: Entry) -> Json:
    numbers = [entry.version, entry.uses, entry.serial, entry.priority]
    return {"numbers": numbers, "group": to_json(entry.group)}


def _entry_from_json(value: Json) -> Entry:
    version, uses, serial, priority = value["numbers"]
    return Entry(from_json(value["group"]), version, uses, serial, priority)
