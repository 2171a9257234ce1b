"""Scored groups on their way from explorers to a trainer, in processes and on machines of their own.

Every process opens the same store. An explorer reserves tasks, plays them, puts the groups; the trainer takes a step's
worth, trains, and says `done` once a checkpoint holds the step. Any of them may be killed at any moment:

- an explorer's tasks are asked again when its lease is over, or at once when one of its name calls `release`;
- a group that is put twice is booked once;
- a step that was taken and is not done is given to the next trainer again, the same groups in the same order;
- `asked = trained + rejected + failed + pending` holds in the store, over all processes (`check`).

How: `QueueState` (queue_state.py) is one state machine; a `Log` keeps its commands in one order and the groups beside
them. Each process applies the commands it has not seen, then its own. A command and its groups are written whole or not
at all.

    url                                    where                              for
    sqlite:///PATH                         one SQLite file, WAL               processes of one machine
    files:///PATH                          a folder, under an flock           machines that share a file system
    postgresql://USER@HOST:PORT/DATABASE   three tables, named whet_*         machines with a network

Three slashes before a path from the working directory, four before one from the root. Machines must agree on the time
to within a small part of the lease; a clock that is set back later costs no more than a lease.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from whet.buffer.groups import checked, encode, oldest_version
from whet.buffer.logs import Log, Transaction
from whet.buffer.queue_state import ORDERS, Order, Put, QueueState
from whet.config.secrets import masked_url
from whet.track.files import reading
from whet.types import ConfigError, Group, Json, WhetError

T = TypeVar("T")

Data = Sequence[tuple[int, bytes | None]]
"""uids and groups, as bytes."""

POLL_S = 0.05
"""Seconds between two looks into a store that has too little."""

SNAPSHOT_EVERY = 2000
"""Commands, at least, between two snapshots; more if many places are open, so that its cost per command is flat."""


@dataclass(frozen=True)
class Scored:
    """What became of one reserved task."""

    uid: int
    group: Group | None
    """The rollouts that may be trained on; None if none may."""
    left: dict[str, int] = field(default_factory=dict)
    """The others, by ledger account: 'failed/timeout', 'rejected/uniform' ..."""


class Store:
    """One queue of one stage. Calls return at once (a wait is `until`); threads may share it, a fork may not.

    After an error an explorer does not know what it has reserved: it restarts with `release`. All other calls may
    simply be repeated.
    """

    def __init__(self, log: Log, *, order: Order, clock: Callable[[], float] = time.time) -> None:
        self.log, self._clock = log, clock
        self._lock = threading.Lock()
        self._places: QueueState | None = None
        self._seen, self._since_snapshot = 0, 0
        self._order: Order = order
        with self._lock:
            self._run(lambda places, turn: None)

    # ------------------------------------------------------------ explorers

    def reserve(
        self,
        owner: str,
        at_most: int,
        *,
        capacity: int,
        rollouts: int,
        lease_s: float,
        version: int | None = None,
    ) -> list[int]:
        """uids of up to `at_most` tasks that `owner` shall now play, `rollouts` each; [] while there is no room.

        capacity: places that may be asked, waiting or in training, over all explorers: the staleness bound.
        lease_s: without `renew` for so long, the tasks are asked of others.
        version: of the owner's weights, where tasks are asked in rounds: in place of `capacity`.
        """
        now = self._clock()
        size = {"capacity": capacity, "rollouts": rollouts}
        if version is not None:
            size["version"] = version
        return list(
            self._do(
                "reserve", {"owner": owner, "at_most": at_most, **size, "now": now, "until": now + lease_s}
            )
        )

    def renew(self, owner: str, *, lease_s: float) -> int:
        """`owner` lives. Returns how many tasks are still its own; call it a few times per lease."""
        return int(self._do("renew", {"owner": owner, "until": self._clock() + lease_s}))

    def release(self, owner: str) -> int:
        """Give the tasks of `owner` to others: it ended, is known to be dead, or restarts under its name."""
        return int(self._do("release", {"owner": owner}))

    def put(self, scored: list[Scored]) -> list[bool]:
        """Hand over what became of tasks, all of them or none. False: somebody answered that one before."""
        data = [
            (s.uid, encode(s.group) if s.group is not None and s.group.rollouts else None) for s in scored
        ]
        puts = [asdict(_put(s, group)) for s, (_, group) in zip(scored, data)]
        return list(self._do("put", {"puts": puts}, data))

    # ------------------------------------------------------------ the trainer

    def begin_round(self, first: int, upto: int, *, version: int) -> None:
        """Tasks with these uids (`upto` is not among them) are for explorers that have this version of the weights."""
        self._do("begin_round", {"first": first, "upto": upto, "version": version})

    def take(self, n: int, *, step: int, oldest: int = 0) -> list[Group]:
        """The `n` groups of a step, or [] while there are fewer; asked again for a step: the same groups again.

        oldest: groups with tokens of an older version than this are not trained on, but booked as 'rejected/stale'.
        """

        return self._groups({"op": "take", "n": n, "step": step, "oldest": oldest}) or []

    def gather(self, least: int, *, delivery: int, now: float = 0.0, oldest: int = 0) -> list[Group] | None:
        """All groups that wait, or None while there are fewer than `least`; asked again for a delivery: the same again.
        They are the trainer's from then on: it keeps them in its checkpoints, and says of each when it `end`s.

        now: by the trainer's clock; kept, so that the delivery can be made again as it was."""
        return self._groups(
            {"op": "gather", "least": least, "delivery": delivery, "now": now, "oldest": oldest}
        )

    def delivery_time(self, delivery: int) -> float | None:
        """`now` of a delivery that was gathered before; None: it was not."""
        return self.look(
            lambda places: places.deliveries[delivery][0] if delivery in places.deliveries else None
        )

    def end(self, delivery: int, ends: Sequence[tuple[int, str]]) -> int:
        """Gathered tasks by uid that ended, 'trained', 'delivered' or 'rejected/REASON': their room is
        free."""
        return int(self._do("end", {"delivery": delivery, "ends": [list(end) for end in ends]}))

    def _groups(self, command: Json) -> list[Group] | None:
        def act(places: QueueState, turn: Transaction) -> list[tuple[int, int, bytes | None]] | None:
            uids = self._write(places, turn, command)
            if uids is None:
                return None
            return [(u, places.open[u].checksum, data) for u, data in zip(uids, turn.fetch(uids))]

        with self._lock:
            found = self._run(act)
        if found is None:
            return None
        return [checked(data, uid=uid, checksum=crc, where=self.log.where) for uid, crc, data in found]

    def trained(self, step: int, skipped: Collection[int] = ()) -> int:
        """The step's update is made: its room is free. Its groups are kept until `done`. skipped: uids of groups whose
        updates were skipped."""
        return int(self._do("trained", {"step": step, **({"skipped": list(skipped)} if skipped else {})}))

    def done(self, step: int) -> int:
        """A checkpoint that will be kept holds everything up to this step. Call it at a resume, too."""
        return int(self._do("done", {"step": step}))

    # ------------------------------------------------------------ everybody

    def note(self, name: str, value: Json) -> None:
        """Leave a word for the other processes: 'version', 'finished' ..."""
        self._do("note", {"name": name, "value": value})

    def noted(self, name: str) -> Json:
        """The last word of that name, or None."""
        return self.look(lambda places: places.notes.get(name))

    def ledger(self) -> dict[str, int]:
        """Rollouts by account, over all processes, and how many are pending."""
        return self.look(lambda places: {**places.ledger, "pending": places.pending})

    def progress(self) -> object:
        """What changes whenever explorers have brought something, asked for more, or left a word."""
        return self.look(
            lambda places: (
                len(places.waiting),
                dict(places.ledger),
                {owner: sorted(uids) for owner, uids in places.owned.items()},
                dict(places.notes),
            )
        )

    def check(self) -> None:
        """WhetError unless every requested rollout is accounted for."""
        self.look(QueueState.check)

    def close(self) -> None:
        """Let go of files and connections. The queue stays."""
        with self._lock:
            self.log.close()

    # ------------------------------------------------------------ how

    def _do(self, op: str, given: Json, data: Data = ()) -> Json:
        with self._lock:
            return self._run(lambda places, turn: self._write(places, turn, {"op": op, **given}, data))

    def look(self, read: Callable[[QueueState], T]) -> T:
        """What `read` finds in the queue as it is now."""
        with self._lock:
            return self._run(lambda places, turn: read(places))

    def _run(self, act: Callable[[QueueState, Transaction], T]) -> T:
        """One turn. If it fails, what this process knows is forgotten and read again: the log is the truth."""
        try:
            with self.log.turn() as turn:
                return act(self._caught_up(turn), turn)
        except BaseException:
            self._places, self._seen = None, 0
            raise

    def _reading(self) -> AbstractContextManager[None]:
        return reading(
            self.log.where, error=WhetError, advice="restart with an empty store from the last checkpoint"
        )

    def _caught_up(self, turn: Transaction) -> QueueState:
        if turn.newest < self._seen:
            raise WhetError(
                f"{self.log.where} was emptied or replaced while it was in use; restart the run's processes"
            )
        with self._reading():
            news = turn.news(self._seen)
            if news.snapshot is not None:
                self._places, self._since_snapshot = self._same_order(QueueState.from_state(news.snapshot)), 0
        if self._places is None:
            self._places = QueueState(self._order)
            turn.snapshot(self._places.state())
        with self._reading():
            for command in news.commands:
                self._places.apply(command)
        self._places.closed.clear()
        self._seen = turn.newest
        self._since_snapshot += len(news.commands)
        return self._places

    def _write(self, places: QueueState, turn: Transaction, command: Json, data: Data = ()) -> Json:
        """Apply a command and keep it. One that changed nothing leaves no trace. `data` is of the puts, in order."""
        before = places.edits
        out = places.apply(command)
        if places.edits == before:
            return out
        for (uid, group), ours in zip(data, out if data else ()):
            if ours and group is not None:
                turn.keep(uid, group)
        turn.append(command)
        turn.drop(places.closed)
        places.closed.clear()
        self._since_snapshot += 1
        if self._since_snapshot > max(SNAPSHOT_EVERY, 2 * len(places.open)):
            turn.snapshot(places.state())
            self._since_snapshot = 0
        self._seen = turn.newest
        return out

    def _same_order(self, places: QueueState) -> QueueState:
        if places.order != self._order:
            raise WhetError(
                f"{self.log.where} was created with buffer.order={places.order}, but this process has {self._order}; "
                "set the same order for all processes of a run"
            )
        return places


def _put(scored: Scored, data: bytes | None) -> Put:
    kept = len(scored.group.rollouts) if scored.group is not None else 0
    if scored.group is not None and scored.group.task.uid != scored.uid:
        raise WhetError(
            f"the group of task {scored.group.task.uid} was put for task {scored.uid}. This is a bug."
        )
    return Put(
        uid=scored.uid,
        kept=kept,
        left=scored.left,
        version=oldest_version(scored.group) if scored.group is not None else -1,
        checksum=zlib.crc32(data) if data is not None else 0,
    )


def open_store(url: str, *, queue: str, order: Order, clock: Callable[[], float] = time.time) -> Store:
    """The store at a URL (see the head of this module).

    queue: names the run and the stage; queues of one store do not see each other.
    Raises ConfigError for a URL that says nothing, WhetError for a store that can't be reached or used.
    """
    if order not in ORDERS:
        raise ConfigError(f"buffer.order={order!r} is not known; known: {', '.join(ORDERS)}")
    return Store(_log(url, queue), order=order, clock=clock)


def _log(url: str, queue: str) -> Log:
    kind, _, rest = url.partition("://")
    path = Path(rest[1:])
    if kind == "sqlite" and rest.startswith("/") and path.name:
        from whet.buffer.sql import sqlite_log

        return sqlite_log(path, queue=queue)
    if kind == "files" and rest.startswith("/") and path.name:
        from whet.buffer.files import FilesLog

        return FilesLog(path, queue=queue)
    if kind == "postgresql" and rest:
        from whet.buffer.postgres import postgres_log

        return postgres_log(url, queue=queue)
    raise ConfigError(
        f"buffer.url={masked_url(url)!r} is not a store; give sqlite:///PATH, files:///PATH or "
        "postgresql://USER@HOST:PORT/DATABASE (four slashes before a path from the root)"
    )


async def until(call: Callable[[], T | None]) -> T:
    """The first answer of `call` that is not None. It is called in a thread, every POLL_S seconds."""
    while (answer := await asyncio.to_thread(call)) is None:
        await asyncio.sleep(POLL_S)
    return answer
