"""Who was asked for which task, what came of it, who trained on it: one state machine for every store.

A place is one task of the stage's stream, known by its `uid`. It is *asked* of an explorer, *waiting* once its scored
group was put, *taken* for a training step, *trained*, and closed when a checkpoint holds that step:

    reserve        put          take(step)      trained(step)      done(step)
    ------> asked ----> waiting ----------> taken ----------> trained ---------> (closed)
              ^  | lease over    | all rejected, or too old: closed at once
              +--+ asked again

Where a trainer draws its steps from a queue of its own (`Replay`), it `gather`s what waits, delivery by
delivery, and says of each place when it `end`s: trained, or left for a reason, since that delivery:

                      gather(n)      end(n)        done(n)
        ... waiting --------------> taken ------> trained ---------> (closed)

`uid`s are given out in order and a closed place leaves no trace: a uid below `next_uid` that is not open is closed.
So the second put of a task is known for what it is, and no list of finished tasks has to be kept.

All of it follows from the commands and the times within them, so processes that apply the same commands in the same
order agree. Nothing here reads a clock, a file or the network.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Literal

from whet.types import Json, WhetError

Order = Literal["arrival", "newest", "task"]
"""What is trained on first: what came first; what came last; the lowest uid, waiting for it if it is still asked."""

ORDERS: tuple[Order, ...] = ("arrival", "newest", "task")
FORMAT = 2
ROUND = "round"
"""The note of the round that is open: its first task, the one after its last, the version that plays it."""
NO_ROUND = (0, 0, None)
HELD = ("asked", "waiting", "taken")
"""States that keep a place from being asked for."""


@dataclass(slots=True)
class OpenTask:
    """One task that was asked for and is not closed."""

    state: Literal["asked", "waiting", "taken", "trained"]
    rollouts: int
    """Asked for; after the put, those that stayed."""
    owner: str | None = None
    """The explorer it is asked of. None: nobody (any more)."""
    version: int = -1
    """Oldest policy version among its sampled tokens; -1: nothing was sampled."""
    checksum: int = 0
    """CRC-32 of the group as it was written."""


@dataclass(slots=True)
class Put:
    """What a store has to know of a scored group."""

    uid: int
    kept: int
    """Rollouts that may be trained on."""
    left: dict[str, int]
    """Rollouts that may not, by ledger account: 'failed/reward', 'rejected/uniform' ..."""
    version: int
    checksum: int


class QueueState:
    """All places of one queue, and the account of their rollouts."""

    def __init__(self, order: Order) -> None:
        self.order: Order = order
        self.next_uid = 0
        self.arrived = 0
        self.settled = 0
        """The last step that a checkpoint holds."""
        self.held = 0
        self.open: dict[int, OpenTask] = {}
        self.returned: list[int] = []
        """Heap of uids whose explorer was given up; an entry that was put in the meantime is skipped."""
        self.leases: dict[str, float] = {}
        """Owner: when its lease ends, in seconds since 1970."""
        self.owned: dict[str, set[int]] = {}
        self.waiting: list[tuple[int, int]] = []
        """(rank, uid), sorted; the rank is the number of arrival, or the uid."""
        self.ages: Counter[int] = Counter()
        """Versions of what waits."""
        self.steps: dict[int, list[int]] = {}
        """Step: its uids, in the order they were taken."""
        self.deliveries: dict[int, tuple[float, list[int]]] = {}
        """Delivery: when it was by the trainer's clock, and what was gathered in it."""
        self.ended: dict[int, list[int]] = {}
        """Delivery: what of all that was gathered ended in it."""
        self.ledger: Counter[str] = Counter()
        self.notes: dict[str, Json] = {}
        self.edits = 0
        """Grows with every command that changed something."""
        self.closed: list[int] = []
        """uids closed since somebody last emptied this list: their groups may be deleted."""

    def apply(self, command: Json) -> Json:
        """Carry out one command. Raises WhetError, and has then changed nothing."""
        given = dict(command)
        return _COMMANDS[given.pop("op")](self, **given)

    # ------------------------------------------------------------ explorers

    def reserve(
        self,
        owner: str,
        at_most: int,
        *,
        capacity: int,
        rollouts: int,
        now: float,
        until: float,
        version: int | None = None,
    ) -> list[int]:
        """Places to play now: first those of explorers whose lease is over, then new ones while there is room. With a
        version: those of the round that asks it, of which every explorer has its share at most under way.

        A lease that ends later than twice its time from now is over, too: the clock has been set back since."""
        latest = until + (until - now)
        for other in [o for o, end in self.leases.items() if not now <= end <= latest and o != owner]:
            self.release(other)
        if version is not None:
            at_most, capacity = self._in_round(owner, at_most, version=version, until=until)
        again: list[int] = []
        while self.returned and len(again) < at_most:
            uid = heapq.heappop(self.returned)
            if uid in self.open and self.open[uid].state == "asked" and self.open[uid].owner is None:
                self.open[uid].owner = owner
                again.append(uid)
        n = max(0, min(at_most - len(again), capacity - self.held))
        new = list(range(self.next_uid, self.next_uid + n))
        if out := again + new:
            self.open |= {uid: OpenTask("asked", rollouts, owner) for uid in new}
            self.next_uid += n
            self.held += n
            self.ledger["asked"] += n * rollouts
            self.owned.setdefault(owner, set()).update(out)
            self.leases[owner] = until
            self.edits += 1
        return out

    def _in_round(self, owner: str, at_most: int, *, version: int, until: float) -> tuple[int, int]:
        """(most places for `owner` now, capacity) in the round that is open."""
        if owner not in self.leases:  # counts as one who shares
            self.leases[owner] = until
            self.edits += 1
        first, upto, wanted = self.notes.get(ROUND, NO_ROUND)
        if version != wanted:
            return 0, self.held
        share = -(-(upto - first) // len(self.leases))
        return max(0, min(at_most, share - len(self.owned.get(owner, ())))), self.held + upto - self.next_uid

    def begin_round(self, first: int, upto: int, *, version: int) -> None:
        """Tasks from `first` to below `upto` are for explorers that have this version of the weights. A round that was
        begun before, by a trainer that has gone back to a checkpoint since, stays as it is."""
        if upto > self.notes.get(ROUND, NO_ROUND)[1]:
            self.notes[ROUND] = [first, upto, version]
            self.next_uid = max(self.next_uid, first)  # the store may be newer than the run
            self.edits += 1

    def renew(self, owner: str, *, until: float) -> int:
        """The explorer lives. Returns how many places are its own: 0 tells it that it had been given up."""
        if owner in self.leases:
            self.leases[owner] = until
            self.edits += 1
        return len(self.owned.get(owner, ()))

    def release(self, owner: str) -> int:
        """The explorer is gone, or begins anew: its places are asked of others. Returns how many."""
        self.edits += owner in self.leases
        self.leases.pop(owner, None)
        uids = self.owned.pop(owner, set())
        for uid in sorted(uids):
            self.open[uid].owner = None
            heapq.heappush(self.returned, uid)
        return len(uids)

    def put(self, puts: list[Json]) -> list[bool]:
        """Scored groups come in. False where the place is filled or closed already: this is a second answer."""
        news = [Put(**p) for p in puts]
        for put in news:
            self._check_put(put)
        out = []
        for put in news:
            place = self.open.get(put.uid)
            out.append(place is not None and place.state == "asked")
            if place is not None and place.state == "asked":
                self._fill(place, put)
        return out

    def _check_put(self, put: Put) -> None:
        if not 0 <= put.uid < self.next_uid:
            raise WhetError(
                f"task {put.uid} was put but never reserved: reserve() returns the tasks to sample"
            )
        place = self.open.get(put.uid)
        total = put.kept + sum(put.left.values())
        if place is not None and place.state == "asked" and total != place.rollouts:
            raise WhetError(
                f"task {put.uid}: {place.rollouts} rollouts were requested, {total} are accounted for ({put.kept} "
                f"kept, {put.left} left). This is a bug."
            )

    def _fill(self, place: OpenTask, put: Put) -> None:
        if place.owner is not None:
            self.owned[place.owner].discard(put.uid)
        self.ledger.update(put.left)
        self.edits += 1
        place.state, place.owner, place.rollouts = "waiting", None, put.kept
        place.version, place.checksum = put.version, put.checksum
        if not put.kept:
            self._close(put.uid)
            return
        insort(self.waiting, (put.uid if self.order == "task" else self.arrived, put.uid))
        self.ages[put.version] += 1
        self.arrived += 1

    # ------------------------------------------------------------ the trainer

    def take(self, n: int, *, step: int, oldest: int) -> list[int]:
        """`n` places for a step, or [] while there are fewer. A step that was taken before gets the same again.

        What holds tokens of a version below `oldest` is closed and booked as 'rejected/stale'.
        """
        self._check_unsettled(step)
        if step in self.steps:
            return self.steps[step]
        self._drop_older(oldest)
        if len(self.waiting) < n:
            return []
        chosen = self.waiting[-n:][::-1] if self.order == "newest" else self.waiting[:n]
        if self.order == "task" and self._first_asked() < chosen[-1][1]:
            return []
        del self.waiting[slice(-n, None) if self.order == "newest" else slice(n)]
        self.steps[step] = self._hand_over([uid for _, uid in chosen])
        return self.steps[step]

    def gather(self, least: int, *, delivery: int, oldest: int, now: float) -> list[int] | None:
        """All that waits, or None while there is less than `least`. A delivery that was made before gets the same."""
        self._check_unsettled(delivery)
        if delivery in self.deliveries:
            return self.deliveries[delivery][1]
        self._drop_older(oldest)
        if len(self.waiting) < least:
            return None
        chosen, self.waiting = self.waiting, []
        self.deliveries[delivery] = now, self._hand_over([uid for _, uid in chosen])
        return self.deliveries[delivery][1]

    def _check_unsettled(self, step: int) -> None:
        if step <= self.settled:
            raise WhetError(
                f"the trainer requests step {step}, but a checkpoint of step {self.settled} exists and the store has "
                "deleted all earlier groups; resume from that checkpoint, or restart with an empty store"
            )

    def _hand_over(self, uids: list[int]) -> list[int]:
        for uid in uids:
            self.open[uid].state = "taken"
            self._forget_age(self.open[uid].version)
        self.edits += 1
        return uids

    def _first_asked(self) -> float:
        back = (u for u in self.returned if u in self.open and self.open[u].state == "asked")
        return min((*(min(uids) for uids in self.owned.values() if uids), *back), default=float("inf"))

    def _drop_older(self, oldest: int) -> None:
        if not any(0 <= version < oldest for version in self.ages):
            return
        old = {uid for _, uid in self.waiting if 0 <= self.open[uid].version < oldest}
        self.waiting = [(rank, uid) for rank, uid in self.waiting if uid not in old]
        for uid in sorted(old):
            self.ledger["rejected/stale"] += self.open[uid].rollouts
            self._forget_age(self.open[uid].version)
            self._close(uid)
        self.edits += 1

    def _forget_age(self, version: int) -> None:
        self.ages[version] -= 1
        if not self.ages[version]:
            del self.ages[version]

    def trained(self, step: int, *, skipped: Json = ()) -> int:
        """The step is done: its places give their room back. Their groups stay until `done`. Returns how many. skipped:
        uids of those from which nothing was learned."""
        uids = [uid for uid in self.steps.get(step, []) if self.open[uid].state == "taken"]
        for uid in uids:
            self.open[uid].state = "trained"
            self.ledger["rejected/skipped_update" if uid in skipped else "trained"] += self.open[uid].rollouts
        self.held -= len(uids)
        self.edits += bool(uids)
        return len(uids)

    def end(self, delivery: int, *, ends: Json) -> int:
        """Gathered places end: [uid, account of its rollouts] each, 'trained', 'delivered' or 'rejected/REASON'. Their
        groups stay until `done`. What has ended before stays as it was booked. Returns how many ended now."""
        now = [(u, account) for u, account in ends if u in self.open and self.open[u].state == "taken"]
        for uid, account in now:
            self.open[uid].state = "trained"
            self.ledger[account] += self.open[uid].rollouts
            self.ended.setdefault(delivery, []).append(uid)
        self.held -= len(now)
        self.edits += bool(now)
        return len(now)

    def done(self, step: int) -> int:
        """A checkpoint holds all steps up to this one: they never come back. Returns how many places closed."""
        due = [s for s in self.steps if s <= step]
        uids = [uid for s in due for uid in self.steps[s]]
        if early := [s for s in due if any(self.open[uid].state != "trained" for uid in self.steps[s])]:
            raise WhetError(
                f"step {early[0]} was taken but not trained, so it cannot be marked done. This is a bug."
            )
        for s in due:
            del self.steps[s]
        deliveries = [delivery for delivery in self.deliveries if delivery <= step]
        for delivery in deliveries:
            del self.deliveries[delivery]
        for delivery in [delivery for delivery in self.ended if delivery <= step]:
            uids += self.ended.pop(delivery)
        for uid in uids:
            del self.open[uid]
        self.closed += uids
        self.edits += bool(uids or deliveries) or step > self.settled
        self.settled = max(self.settled, step)
        return len(uids)

    def _close(self, uid: int) -> None:
        del self.open[uid]
        self.held -= 1
        self.closed.append(uid)

    # ------------------------------------------------------------ everybody

    def note(self, name: str, *, value: Json) -> None:
        """A word for the others, e.g. the published version and where its weights are."""
        self.edits += self.notes.get(name) != value
        self.notes[name] = value

    @property
    def pending(self) -> int:
        """Rollouts asked for and not yet accounted for, by the books."""
        return self.ledger["asked"] - sum(n for account, n in self.ledger.items() if account != "asked")

    def check(self) -> None:
        """WhetError unless the books agree with the places."""
        found = [p.rollouts for p in self.open.values() if p.state in HELD]
        if sum(found) != self.pending or len(found) != self.held:
            raise WhetError(
                f"rollouts do not add up: {dict(self.ledger)}; so {self.pending} are pending in {self.held} places, "
                f"but {sum(found)} in {len(found)} places were found. This is a bug."
            )

    def state(self) -> Json:
        """Everything, as JSON."""
        return {
            "format": FORMAT,
            "order": self.order,
            "next_uid": self.next_uid,
            "arrived": self.arrived,
            "settled": self.settled,
            "open": [[uid, *astuple(place)] for uid, place in self.open.items()],
            "leases": dict(self.leases),
            "waiting": [list(w) for w in self.waiting],
            "steps": [[step, list(uids)] for step, uids in self.steps.items()],
            "deliveries": [[delivery, now, list(uids)] for delivery, (now, uids) in self.deliveries.items()],
            "ended": [[delivery, list(uids)] for delivery, uids in self.ended.items()],
            "ledger": dict(self.ledger),
            "notes": dict(self.notes),
        }

    @staticmethod
    def from_state(state: Json) -> QueueState:
        """The places of `state`. Raises WhetError if another release of whet wrote them."""
        if state["format"] != FORMAT:
            raise WhetError(
                f"the store has format {state['format']}, this whet reads {FORMAT}: run all processes with one release"
            )
        out = QueueState(state["order"])
        out.next_uid, out.arrived, out.settled = state["next_uid"], state["arrived"], state["settled"]
        out.open = {uid: OpenTask(*rest) for uid, *rest in state["open"]}
        out.leases, out.notes = dict(state["leases"]), dict(state["notes"])
        out.waiting = [(rank, uid) for rank, uid in state["waiting"]]
        out.steps = {step: list(uids) for step, uids in state["steps"]}
        out.deliveries = {delivery: (now, list(uids)) for delivery, now, uids in state["deliveries"]}
        out.ended = {delivery: list(uids) for delivery, uids in state["ended"]}
        out.ledger = Counter(state["ledger"])
        out.owned = {owner: set() for owner in out.leases}
        for uid, place in out.open.items():
            out.held += place.state in HELD
            if place.state == "waiting":
                out.ages[place.version] += 1
            if place.state == "asked" and place.owner is None:
                out.returned.append(uid)
            elif place.state == "asked" and place.owner is not None:
                out.owned[place.owner].add(uid)
        heapq.heapify(out.returned)
        return out


_COMMANDS: dict[str, Callable[..., Json]] = {
    "reserve": QueueState.reserve,
    "renew": QueueState.renew,
    "release": QueueState.release,
    "put": QueueState.put,
    "take": QueueState.take,
    "gather": QueueState.gather,
    "end": QueueState.end,
    "trained": QueueState.trained,
    "done": QueueState.done,
    "begin_round": QueueState.begin_round,
    "note": QueueState.note,
}
