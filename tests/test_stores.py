"""One contract for every store: bounded, ordered, nothing lost, nothing twice, whoever dies when."""

import asyncio
import json
import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forked import Started
from postgres import QUICK, server
from store_worker import group, uids_of
from whet.buffer import files, stores
from whet.buffer.groups import decode, encode, restored
from whet.buffer.queue import TrainerQueue
from whet.buffer.queue_state import QueueState
from whet.buffer.stores import Scored, Store
from whet.config.schema import BufferConfig, Config, RewardWorkersConfig
from whet.config.secrets import dump, learn
from whet.guard.ledger import Ledger
from whet.secrets import redact
from whet.types import ConfigError, Group, Message, Rollout, Task, Turn, WhetError

KINDS = ("sqlite", "files", "postgresql")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with server() as url:
        yield url


@pytest.fixture
def quick() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="whet-store-", dir=QUICK) as folder:
        yield Path(folder)


@pytest.fixture(params=KINDS)
def url(request, quick) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres")
    return {"sqlite": f"sqlite:///{quick}/s.db", "files": f"files:///{quick}/s"}[request.param]


@pytest.fixture
def queue(request) -> str:
    """Its own in every test, however many share a database."""
    return f"run/{request.node.name}"


OPEN: list[Store] = []


def open_store(*args, **rest) -> Store:
    """A store that is closed with the test."""
    OPEN.append(stores.open_store(*args, **rest))
    return OPEN[-1]


def close_all() -> None:
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


def places(store: Store) -> object:
    """Everything that a store knows of its queue, groups apart."""
    return store.look(QueueState.state)


class Clock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def reserve(store: Store, n: int, *, owner: str = "a", capacity: int = 100, size: int = 2) -> list[int]:
    return store.reserve(owner, n, capacity=capacity, rollouts=size, lease_s=60.0)


def fill(store: Store, n: int, *, version: int = 0) -> list[int]:
    uids = reserve(store, n)
    assert store.put([Scored(u, group(u, version=version)) for u in uids]) == [True] * n
    return uids


# ---------------------------------------------------------------- the contract


def test_what_is_put_is_taken_in_order_and_unchanged(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    assert reserve(store, 3) == [0, 1, 2]
    for uid in (2, 0, 1):
        store.put([Scored(uid, group(uid))])
    assert store.take(2, step=1) == [group(2), group(0)]
    assert store.take(2, step=2) == []
    fill(store, 1)
    assert store.take(2, step=2) == [group(1), group(3)]
    assert store.take(1, step=3) == []
    store.check()


@pytest.mark.parametrize(("order", "taken"), [("arrival", [2, 0]), ("newest", [1, 0]), ("task", [0, 1])])
def test_orders(order, taken, url, queue):
    store = open_store(url, queue=queue, order=order)
    reserve(store, 4)
    for uid in (2, 0, 1):
        store.put([Scored(uid, group(uid))])
    assert uids_of(store.take(2, step=1)) == taken


def test_in_the_order_of_tasks_a_late_one_is_waited_for(url, queue):
    store = open_store(url, queue=queue, order="task", clock=(clock := Clock()))
    reserve(store, 3)
    store.put([Scored(1, group(1)), Scored(2, group(2))])
    assert store.take(2, step=1) == []
    clock.now += 61  # its explorer is dead: somebody else will play it
    assert reserve(store, 1, owner="b") == [0]
    assert store.take(2, step=1) == []
    store.put([Scored(0, None, {"failed/timeout": 2})])
    assert uids_of(store.take(2, step=1)) == [1, 2]


def test_room_is_bounded_and_comes_back(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    assert reserve(store, 3, capacity=4) == [0, 1, 2]
    assert reserve(store, 3, owner="b", capacity=4) == [3]
    assert reserve(store, 3, owner="b", capacity=4) == []
    store.put([Scored(0, None, {"rejected/uniform": 2})])
    assert reserve(store, 3, capacity=4) == [4]
    store.put([Scored(u, group(u)) for u in (1, 2)])
    assert reserve(store, 3, capacity=4) == []
    store.take(2, step=1)
    assert reserve(store, 3, capacity=4) == []
    store.trained(1)
    assert reserve(store, 3, capacity=4) == [5, 6]
    store.check()


def test_groups_whose_update_was_skipped_are_booked_so_and_give_their_room_back(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    fill(store, 3)
    ledger = Ledger()
    trainer = TrainerQueue(store, ledger=ledger, groups_per_step=3, max_staleness=1, stopping=lambda: False)

    async def step() -> None:
        await trainer.trained(await trainer.take(1), skipped=[0, 2])

    asyncio.run(step())
    said = {"asked": 6, "trained": 2, "rejected/skipped_update": 4, "pending": 0}
    assert store.ledger() == said
    assert ledger.state()["total"] == {k: n for k, n in said.items() if n}
    assert reserve(store, 3, capacity=2) == [3, 4]
    store.done(1)
    store.check()


def test_a_second_answer_is_not_booked(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    fill(store, 2)
    assert store.put([Scored(0, group(0, version=5)), Scored(1, None, {"failed/reward": 2})]) == [
        False,
        False,
    ]
    assert store.take(2, step=1) == [group(0), group(1)]
    assert store.put([Scored(0, group(0))]) == [False]
    store.trained(1)
    store.done(1)
    assert store.put([Scored(0, group(0)), Scored(1, group(1))]) == [False, False]
    assert store.ledger() == {"asked": 4, "trained": 4, "pending": 0}
    assert store.take(1, step=2) == []
    assert reserve(store, 3, capacity=2) == [2, 3]


def test_many_are_put_at_once_with_some_that_came_to_nothing(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    reserve(store, 4)
    nothing = {"rejected/uniform": 2}
    answers = [
        Scored(0, None, nothing),
        Scored(3, group(3)),
        Scored(3, group(3, version=9)),
        Scored(1, None, nothing),
    ]
    assert store.put([*answers, Scored(2, group(2))]) == [True, True, False, True, True]
    assert store.take(2, step=1) == [group(3), group(2)]
    assert store.ledger() == {"asked": 8, "rejected/uniform": 4, "pending": 4}
    store.check()


def test_what_was_never_asked_for_or_does_not_add_up_is_refused_whole(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    reserve(store, 2)
    with pytest.raises(WhetError, match="task 2 was put but never reserved"):
        store.put([Scored(0, group(0)), Scored(2, group(2))])
    with pytest.raises(WhetError, match="2 rollouts were requested, 3 are accounted for"):
        store.put([Scored(0, group(0)), Scored(1, group(1), {"failed/reward": 1})])
    with pytest.raises(WhetError, match="the group of task 1 was put for task 0"):
        store.put([Scored(0, group(1))])
    assert (store.take(1, step=1), store.ledger()["pending"]) == ([], 4)
    store.check()


def test_what_is_taken_and_not_done_is_given_out_again(url, queue):
    first = open_store(url, queue=queue, order="arrival")
    fill(first, 8)
    before = {step: first.take(2, step=step) for step in (1, 2, 3)}
    for step in (1, 2):
        first.trained(step)
    first.done(1)
    first.close()

    again = open_store(url, queue=queue, order="arrival")
    with pytest.raises(WhetError, match="requests step 1, but a checkpoint of step 1"):
        again.take(2, step=1)
    assert again.take(2, step=3) == before[3]
    assert again.take(2, step=2) == before[2]
    again.trained(2)
    again.trained(3)
    again.done(3)
    assert uids_of(again.take(2, step=4)) == [6, 7]
    assert again.done(3) == 0
    assert again.ledger() == {"asked": 16, "trained": 12, "pending": 4}
    again.check()


def test_a_step_that_is_not_trained_cannot_be_done(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    fill(store, 2)
    store.take(2, step=1)
    with pytest.raises(WhetError, match="step 1 was taken but not trained"):
        store.done(1)
    assert len(store.take(2, step=1)) == 2


def test_tasks_of_a_dead_explorer_are_asked_again(url, queue):
    store = open_store(url, queue=queue, order="arrival", clock=(clock := Clock()))
    assert reserve(store, 2, owner="dead", capacity=2) == [0, 1]
    clock.now += 59
    assert store.renew("dead", lease_s=60.0) == 2
    clock.now += 59
    assert reserve(store, 2, owner="b", capacity=2) == []
    clock.now += 2
    assert reserve(store, 1, owner="b", capacity=2) == [0]
    assert store.renew("dead", lease_s=60.0) == 0
    assert store.put([Scored(0, group(0))]) == [True]  # it was not dead: its work is as good as another's
    assert store.put([Scored(0, group(0))]) == [False]
    assert store.put([Scored(1, group(1))]) == [True]  # before anybody asked again
    assert reserve(store, 2, owner="b", capacity=2) == []
    assert store.ledger() == {"asked": 4, "pending": 4}
    store.check()


def test_tasks_of_a_dead_explorer_are_asked_again_where_the_clock_was_set_back(url, queue):
    store = open_store(url, queue=queue, order="arrival", clock=(clock := Clock()))
    assert reserve(store, 2, owner="dead", capacity=2) == [0, 1]
    clock.now -= 59
    assert reserve(store, 2, owner="b", capacity=2) == [], "the clock of another machine may be behind"
    clock.now -= 3600
    assert reserve(store, 2, owner="b", capacity=2) == [0, 1]


def test_who_begins_anew_gives_its_tasks_back(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    reserve(store, 3, owner="a", capacity=3)
    store.put([Scored(1, group(1))])
    assert store.release("a") == 2
    assert reserve(store, 3, owner="a", capacity=3) == [0, 2]
    assert store.release("nobody") == 0
    assert store.ledger()["asked"] == 6


def test_what_is_too_old_is_booked_and_gives_its_room_back(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    for version in (0, 3, 1, 3):
        fill(store, 1, version=version)
    assert store.take(3, step=1, oldest=2) == []
    assert store.ledger()["rejected/stale"] == 4
    assert reserve(store, 2, capacity=3) == [4]
    assert store.take(2, step=1, oldest=3) == [group(1, version=3), group(3, version=3)]
    store.check()


def test_groups_without_sampled_tokens_are_never_too_old(url, queue):
    store = open_store(url, queue=queue, order="arrival")
    reserve(store, 1)
    read = group(0)
    read = replace(
        read,
        rollouts=tuple(replace(r, strands=(replace(r.strand, versions=[-1] * 4),)) for r in read.rollouts),
    )
    store.put([Scored(0, read)])
    assert store.take(1, step=1, oldest=9) == [read]


def test_notes_go_to_all(url, queue):
    one, two = (open_store(url, queue=queue, order="arrival") for _ in range(2))
    assert two.noted("version") is None
    one.note("version", {"number": 3, "digest": "x"})
    assert two.noted("version") == {"number": 3, "digest": "x"}


def test_queues_do_not_see_each_other(url, queue):
    one = open_store(url, queue=f"{queue}/1", order="arrival")
    two = open_store(url, queue=f"{queue}/2", order="newest")
    fill(one, 2)
    assert (two.take(1, step=1), reserve(two, 1)) == ([], [0])


# ---------------------------------------------------------------- the same for all, and right

COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(st.just("put"), st.integers(0, 9), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("take"), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3)),
        st.tuples(st.just("trained"), st.integers(1, 4)),
        st.tuples(st.just("done"), st.integers(1, 4)),
        st.tuples(st.just("release"), st.sampled_from("ab")),
        st.tuples(st.just("renew"), st.sampled_from("ab")),
        st.tuples(st.just("wait"), st.integers(-80, 40)),
    ),
    max_size=40,
)


class Naive:
    """What a store should do, said as plainly as can be: one dict, searched each time."""

    def __init__(self) -> None:
        self.all: dict[int, dict] = {}
        self.arrivals = self.settled = 0
        self.leases: dict[str, float] = {}
        self.booked = {"trained": 0, "left": 0}

    def of(self, **wanted) -> list[int]:
        return [u for u, p in self.all.items() if all(p[k] == v for k, v in wanted.items())]

    def reserve(self, owner, n, now):
        for other in [o for o, end in self.leases.items() if not now <= end <= now + 120 and o != owner]:
            self.release(other)
        out = sorted(self.of(state="asked", owner=None))[:n]
        held = sum(p["state"] in ("asked", "waiting", "taken") for p in self.all.values())
        while len(out) < n and held < 6:
            out.append(len(self.all))
            self.all[out[-1]] = {"state": "asked", "size": 2, "step": None}
            held += 1
        for u in out:
            self.all[u]["owner"] = owner
        if out:
            self.leases[owner] = now + 60
        return out

    def renew(self, owner, now):
        if owner in self.leases:
            self.leases[owner] = now + 60
        return len(self.of(state="asked", owner=owner))

    def release(self, owner):
        mine = self.of(state="asked", owner=owner)
        for u in mine:
            self.all[u]["owner"] = None
        self.leases.pop(owner, None)
        return len(mine)

    def put(self, uid, kept, version):
        if uid >= len(self.all):
            return "refused"
        place = self.all[uid]
        if place["state"] != "asked":
            return [False]
        self.booked["left"] += 2 - kept
        place |= {"state": "waiting" if kept else "closed", "size": kept, "version": version if kept else -1}
        place["rank"] = self.arrivals
        self.arrivals += bool(kept)
        return [True]

    def take(self, n, step, oldest):
        if step <= self.settled:
            return "refused"
        if not (mine := [u for u, p in self.all.items() if p["step"] == step]):
            for u in self.of(state="waiting"):
                if self.all[u]["version"] < oldest:
                    self.all[u]["state"] = "closed"
                    self.booked["left"] += self.all[u]["size"]
            waiting = sorted(self.of(state="waiting"), key=lambda u: self.all[u]["rank"])
            mine = waiting[:n] if len(waiting) >= n else []
        for u in mine:
            self.all[u]["step"] = step
            if self.all[u]["state"] == "waiting":
                self.all[u]["state"] = "taken"
        return sorted(mine, key=lambda u: self.all[u]["rank"])

    def trained(self, step):
        mine = self.of(state="taken", step=step)
        for u in mine:
            self.all[u]["state"] = "trained"
            self.booked["trained"] += self.all[u]["size"]
        return len(mine)

    def done(self, step):
        due = [u for u, p in self.all.items() if p["step"] is not None and self.settled < p["step"] <= step]
        if any(self.all[u]["state"] == "taken" for u in due):
            return "refused"
        for u in due:
            self.all[u]["state"] = "closed"
        self.settled = max(self.settled, step)
        return len(due)


def refusable(call: Callable[[], object]) -> object:
    try:
        return call()
    except WhetError:
        return "refused"


def play(store: Store, clock: Clock, command: tuple) -> object:
    op, *rest = command
    if op == "wait":
        clock.now += rest[0]
        return None
    if op == "reserve":
        return reserve(store, rest[1], owner=rest[0], capacity=6)
    if op == "put":
        uid, kept, version = rest
        scored = Scored(
            uid, group(uid, version=version, size=kept) if kept else None, {"rejected/x": 2 - kept}
        )
        return refusable(lambda: store.put([scored]))
    if op == "take":
        return refusable(lambda: uids_of(store.take(rest[0], step=rest[1], oldest=rest[2])))
    if op == "renew":
        return store.renew(rest[0], lease_s=60.0)
    return refusable(lambda: getattr(store, op)(*rest))


@given(COMMANDS)
def test_a_store_does_what_the_plain_one_does(commands):
    with tempfile.TemporaryDirectory(prefix="whet-store-", dir=QUICK) as folder:
        does_what_the_plain_one_does(commands, f"sqlite:///{folder}/s.db")
        close_all()


def does_what_the_plain_one_does(commands: list[tuple], url: str) -> None:
    clock, naive = Clock(), Naive()
    store = open_store(url, queue="q", order="arrival", clock=clock)
    for op, *rest in commands:
        found = play(store, clock, (op, *rest))
        now = (clock.now,) if op in ("reserve", "renew") else ()
        assert op == "wait" or found == getattr(naive, op)(*rest, *now), (op, rest)
        store.check()
        assert QueueState.from_state(json.loads(json.dumps(places(store)))).state() == places(store)
    ledger = store.ledger()
    assert ledger.get("trained", 0) == naive.booked["trained"]
    assert sum(n for a, n in ledger.items() if a.startswith("rejected/")) == naive.booked["left"]


LONG = [c for k in range(12) for c in (("reserve", "ab"[k % 2], 3), ("wait", 25), ("renew", "a"))]
LONG += [("put", uid, uid % 3, uid % 4) for uid in range(10)]
LONG = [
    c for step in range(1, 5) for c in (*LONG, ("take", 2, step, 1), ("trained", step), ("done", step - 1))
]


def test_two_processes_views_agree_through_snapshots(url, queue, monkeypatch):
    """The same commands, given by turns through two views of one store, do what they do through one."""
    clock, other = Clock(), Clock()
    alone = open_store(url, queue=f"{queue}/alone", order="arrival", clock=other)
    expected = [play(alone, other, command) for command in LONG]
    monkeypatch.setattr(stores, "SNAPSHOT_EVERY", 3)
    views = [open_store(url, queue=queue, order="arrival", clock=clock) for _ in range(2)]
    for i, command in enumerate(LONG):
        assert play(views[i * i % 3 % 2], clock, command) == expected[i], command
    assert places(views[0]) == places(views[1]) == places(alone)
    assert places(open_store(url, queue=queue, order="arrival")) == places(alone)


# ---------------------------------------------------------------- bytes

NUMBERS = st.floats(allow_nan=False, width=32)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 2**31 - 1)), max_size=5), NUMBERS, st.text())
def test_every_number_comes_back_to_the_bit(tokens, reward, text):
    task = Task(uid=2**50, source=text, prompt=(Message("user", text),), extra={"a": [1, None, text]})
    rollout = Rollout.one_strand(
        task=task,
        index=0,
        token_ids=[t for *_, t in tokens],
        mask=[1] * len(tokens),
        logprobs=[a for a, _, _ in tokens],
        sample_logprobs=[b for _, b, _ in tokens],
        versions=[t for *_, t in tokens],
        finish_reason="abort",
        text=text,
        reward=reward,
        answer=text,
        baseline=-reward,
        turns=(Turn(0, len(tokens), "stop", reward), Turn(len(tokens), len(tokens), "length")),
        error=None,
    )
    there = Group(task, (rollout, replace(rollout, index=1, reward=None, error=text)))
    assert decode(encode(there)) == there
    assert [r.strand.token_ids.flags.writeable for r in there.rollouts] == [False, False]


def test_a_group_of_a_checkpoint_of_0_1_is_read() -> None:
    task = Task(uid=3, source="a", prompt="1+1=", token_ids=(5, 6))
    tokens = {"token_ids": [5, 6, 7], "mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.25]}
    rest = {
        "sample_logprobs": [0.0, 0.0, -0.5],
        "versions": [-1, -1, 4],
        "finish_reason": "stop",
        "text": "2",
    }
    row = {"index": 0, **tokens, **rest, "reward": 1.0, "reward_parts": {"answer": 1.0}}
    there = Group(task, (Rollout.one_strand(task=task, **row),))
    told = {**asdict(task), "token_ids": [5, 6]}
    for old in ([{**row, "task": told}], {"task": told, "rollouts": [row]}):
        assert restored(json.loads(json.dumps(old))) == there


# ---------------------------------------------------------------- faults at every point


class Full(OSError):
    def __init__(self) -> None:
        super().__init__(28, "No space left on device")


def points_of(store: Store, monkeypatch, hit: Callable[[Callable[[], object]], None]) -> None:
    """Call `hit` before everything that the store asks of disk or database from now on; it may do half of it first."""
    log = store.log
    if isinstance(log, files.FilesLog):
        for name in ("write", "fsync", "replace", "unlink", "ftruncate", "open"):
            real = getattr(os, name)

            def faulty(*args, _real=real, _name=name, **rest):
                half = (
                    (lambda: _real(args[0], args[1][: len(args[1]) // 2]))
                    if _name == "write"
                    else lambda: None
                )
                hit(half)
                return _real(*args, **rest)

            monkeypatch.setattr(os, name, faulty)
        return
    connect = log.base.connect

    class Faulty:
        def __init__(self) -> None:
            self.db = connect()

        def execute(self, *args):
            hit(lambda: None)
            return self.db.execute(*args)

        def close(self) -> None:
            self.db.close()

    log.close()
    log.base = replace(log.base, connect=Faulty)


STEPS = 2


def life(store: Store, tell: Callable[[str], None]) -> None:
    """An explorer and a trainer of two steps in one, which goes on where the one before was stopped."""
    step = store.noted("checkpoint") or 0
    store.done(step)
    store.release("e")
    while step < STEPS:
        for uid in reserve(store, 2, owner="e", capacity=4):
            left = {"failed/reward": 1} if uid % 2 else {}
            store.put([Scored(uid, group(uid, size=1 if left else 2), left)])
        while step < STEPS and (taken := store.take(2, step=step + 1)):
            assert all(g == group(g.task.uid, size=1 if g.task.uid % 2 else 2) for g in taken)
            step += 1
            tell(f"{step} {uids_of(taken)}\n")
            store.trained(step)
            store.note("checkpoint", step)
            store.done(step)


def check_lives(store: Store, told: list[str]) -> None:
    """Over all lives: a step has always had the same groups, and no group has had two steps."""
    steps = dict(line.split(" ", 1) for line in told)
    assert sorted(set(told)) == [f"{step} {uids}" for step, uids in sorted(steps.items())]
    assert list(steps) == ["1", "2"]
    uids = [uid for text in steps.values() for uid in json.loads(text)]
    assert len(set(uids)) == len(uids) == 2 * STEPS
    store.check()
    ledger = store.ledger()
    assert ledger["trained"] == sum(1 if uid % 2 else 2 for uid in uids)
    assert ledger["asked"] == ledger["trained"] + ledger["failed/reward"] + ledger["pending"]


def test_a_full_disk_at_every_write_is_an_error_and_loses_nothing(url, queue, monkeypatch):
    monkeypatch.setattr(stores, "SNAPSHOT_EVERY", 4)
    monkeypatch.setattr(stores.time, "time", Clock())
    full = sqlite3.OperationalError("database or disk is full")
    if url.startswith("postgresql"):
        from psycopg.errors import DiskFull

        full = DiskFull("No space left on device")
    every = 3 if url.startswith("postgresql") else 1  # each takes a new connection, and they are not quick
    at, left = 0, -1
    while left < 0:
        told: list[str] = []
        store = open_store(url, queue=f"{queue}/{at}", order="arrival")
        left = at

        def hit(half: Callable[[], object]) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                half()
                raise Full() if url.startswith("files") else full

        with monkeypatch.context() as patch:
            points_of(store, patch, hit)
            try:
                life(store, told.append)
            except WhetError:
                life(store, told.append)
        check_lives(open_store(url, queue=f"{queue}/{at}", order="arrival"), told)
        close_all()
        at += every
    assert at > 30


def fill_up(store: Store) -> None:
    for _ in range(1000):
        fill(store, 1)


FOREVER = "with recursive c(x) as (select 1 union all select x + 1 from c)"
HOSTILE_SQL = {
    "data of another type": "update whet_groups set data = 'text'",
    "data that is a size": "update whet_groups set data = 90000000000",
    "no data": "update whet_groups set data = null",
    "no state": "update whet_queues set state = null, at = 99",
    "state of another shape": "update whet_queues set state = '[]', at = 99",
    "state without end": "update whet_queues set state = printf('%.*c', 200000, '['), at = 99",
    "newest is text": "update whet_queues set newest = 'x'",
    "newest is nothing": "update whet_queues set newest = null",
    "newest is too large": "update whet_queues set newest = 9223372036854775807",
    "at is nothing": "update whet_queues set at = null",
    "command is nothing": "update whet_log set command = null",
    "command is a number": "update whet_log set command = 5",
    "command is empty": "update whet_log set command = '{}'",
    "command is bytes": "update whet_log set command = x'ff00'",
    "command is unknown": """update whet_log set command = '{"op": "__init__"}'""",
    "trigger": f"create trigger t after update on whet_queues begin insert into whet_groups {FOREVER} "
    "select 'z', x, '' from c where x < 0; end",
    "view": "drop table whet_log; create view whet_log as "
    f"{FOREVER} select 'q' as queue, x as number, '{{}}' as command from c",
}


@pytest.mark.parametrize("how", HOSTILE_SQL)
def test_a_database_of_wrong_values_or_with_code_is_refused(how, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    fill(store := open_store(url, queue="q", order="arrival"), 2)
    store.close()
    db = sqlite3.connect(tmp_path / "s.db")
    db.executescript(HOSTILE_SQL[how])
    db.close()
    with pytest.raises(WhetError, match=r"s\.db(: cannot be read| is damaged| has a trigger, a view)"):
        open_store(url, queue="q", order="arrival").take(2, step=1)


def test_a_real_full_sqlite_says_so_and_goes_on(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/s.db", queue="q", order="arrival")
    db = store.log.db
    db.execute(f"pragma max_page_count = {db.execute('pragma page_count').fetchone()[0]}")
    with pytest.raises(WhetError, match="the disk is full; free space there"):
        fill_up(store)
    store.check()  # on a new connection, without the limit
    assert store.gather(1, delivery=1)
    store.release("a")
    fill(store, 2)
    assert len(store.gather(1, delivery=2)) == 2
    store.check()


def in_a_fork(act: Callable[[Callable[[str], None]], None]) -> tuple[int, list[str]]:
    """Run `act` in a child process: how it ended (a signal's number, negated, or the exit code), what it told."""
    read, write = os.pipe()
    tell = os.write
    pid = os.fork()
    if not pid:
        code = 1
        try:
            act(lambda text: tell(write, text.encode()))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.readlines()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def test_sigkill_at_every_write_loses_nothing(url, queue, monkeypatch):
    monkeypatch.setattr(stores, "SNAPSHOT_EVERY", 4)
    every, at, ended = 3, 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        left = at

        def hit(half: Callable[[], object]) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                half()
                os.kill(os.getpid(), signal.SIGKILL)

        def live(tell: Callable[[str], None], name: str = f"{queue}/{at}") -> None:
            store = open_store(url, queue=name, order="arrival")
            points_of(store, monkeypatch, hit)
            life(store, tell)

        ended, told = in_a_fork(live)
        store = open_store(url, queue=f"{queue}/{at}", order="arrival")
        life(store, told.append)
        check_lives(store, [line if line.endswith("\n") else line + "\n" for line in told])
        close_all()
        at += every
    assert (ended, at > 40) == (0, True)


def test_two_explorers_and_a_trainer_are_killed_again_and_again(url, queue, tmp_path):
    """Three processes, killed at some moment and started anew."""
    steps = 16
    worker = Path(__file__).with_name("store_worker.py").read_text()

    def start(kind: str) -> Started:
        return Started(kind, url, queue, str(steps), code=worker, said=tmp_path / kind)

    watch = open_store(url, queue=queue, order="arrival")
    running = {kind: start(kind) for kind in ("one", "two", "trainer")}
    try:
        for victim, at in (("trainer", 4), ("one", 8), ("trainer", 12)):
            progress(watch, running, at * 8)
            running[victim].kill()
            running[victim].wait()
            running[victim] = start(victim)
        for process in running.values():
            process.wait(60)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert {kind: p.returncode for kind, p in running.items()} == {"one": 0, "two": 0, "trainer": 0}
    taken: dict[str, str] = {}
    for line in running["trainer"].text().splitlines():
        step, uids = line.split(" ", 1)
        assert taken.setdefault(step, uids) == uids
    assert len(taken) == steps
    uids = [uid for text in taken.values() for uid in json.loads(text)]
    assert len(set(uids)) == len(uids) == 4 * steps
    watch.check()
    assert watch.ledger()["trained"] == 8 * steps


def progress(watch: Store, running: dict[str, Started], trained: int) -> None:
    """Wait until so many rollouts were trained on; nobody may end by itself meanwhile."""
    for _ in range(6000):
        if watch.ledger().get("trained", 0) >= trained:
            return
        assert all(p.poll() is None for p in running.values())
        time.sleep(0.005)
    raise AssertionError("nothing moved in 30 s")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "url",
    [
        "sqlite",
        "sqlite://x.db",
        "sqlite:///",
        "files://",
        "redis://x",
        "",
        "postgresql://",
        "memory",
        "files:/x",
    ],
)
def test_a_url_that_says_nothing(url):
    with pytest.raises(ConfigError, match="is not a store; give sqlite:///PATH"):
        open_store(url, queue="q", order="arrival")


def test_an_unknown_order():
    with pytest.raises(ConfigError, match="known: arrival, newest, task"):
        open_store("sqlite:///s.db", queue="q", order="lifo")


def test_passwords_are_not_in_errors():
    for url in ("mysql://me:geheim@host/db", "postgres://host/db?user=me&password=geheim"):
        with pytest.raises(ConfigError) as e:
            open_store(url, queue="q", order="arrival")
        assert "geheim" not in str(e.value)
        assert "***" in str(e.value)


def test_postgresql_that_is_not_there():
    with pytest.raises(
        WhetError, match=r"postgresql://me:\*\*\*@127.0.0.1:9/db: the server cannot be reached; start it"
    ):
        open_store("postgresql://me:geheim@127.0.0.1:9/db", queue="q", order="arrival")


def test_a_postgresql_database_that_is_not_there(postgres):
    with pytest.raises(
        WhetError, match=r"the user, database or table does not exist; create it, or correct buffer.url"
    ):
        open_store(postgres.replace("/postgres", "/nothing"), queue="q", order="arrival")


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_a_place_that_cannot_be_written(kind, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WhetError, match=r"give buffer.url (a|another) path"):
        open_store(f"{kind}:///{tmp_path}/file/x", queue="q", order="arrival")


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "s.db").write_text("something else" * 100)
    with pytest.raises(WhetError, match=r"is not an SQLite database; give buffer.url another path"):
        open_store(f"sqlite:///{tmp_path}/s.db", queue="q", order="arrival")


def test_a_damaged_database(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/s.db", queue="q", order="arrival")
    fill(store, 20)
    store.close()
    path = tmp_path / "s.db"
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(WhetError, match="is damaged; restart with an empty store"):
        open_store(f"sqlite:///{path}", queue="q", order="arrival").take(20, step=1)


def test_a_group_that_changed_is_not_trained_on(tmp_path):
    store = open_store(f"files:///{tmp_path}/s", queue="q", order="arrival")
    fill(store, 2)
    path = tmp_path / "s/q/groups/1.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(WhetError, match="the group of task 1 has changed since it was written"):
        store.take(2, step=1)
    path.unlink()
    with pytest.raises(WhetError, match="the group of task 1 is missing"):
        store.take(2, step=1)


@pytest.mark.parametrize("name", ["commands-1.jsonl", "snapshot-1.json", "current"])
def test_a_changed_file_is_found(name, tmp_path):
    fill(open_store(f"files:///{tmp_path}/s", queue="q", order="arrival"), 2)
    path = tmp_path / "s/q" / name
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(WhetError, match="is damaged: "):
        open_store(f"files:///{tmp_path}/s", queue="q", order="arrival")


def test_a_snapshot_that_cannot_be_opened_closes_no_file_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "SNAPSHOT_EVERY", 1)
    store = open_store(f"files:///{tmp_path}/s", queue="q", order="arrival")
    real, others = os.open, []

    def full(path, flags, *more, **how):
        if Path(path).name.startswith("commands-") and not flags & os.O_CREAT:
            others.append(real(os.devnull, os.O_RDONLY))  # of another thread
            raise OSError(24, "Too many open files")
        return real(path, flags, *more, **how)

    store.note("n", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(WhetError, match="Too many open files"):
            store.note("n", 1)  # the second command makes a snapshot
    os.close(others[0])  # it is still its own
    assert store.noted("n") is not None


def test_a_queue_name_stays_in_its_folder(tmp_path):
    open_store(f"files:///{tmp_path}/s", queue="../../x", order="arrival")
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["%2e%2e%2f%2e%2e%2fx"]


def test_two_orders_in_one_queue(url, queue):
    open_store(url, queue=queue, order="arrival")
    with pytest.raises(
        WhetError, match=r"was created with buffer.order=arrival, but this process has newest"
    ):
        open_store(url, queue=queue, order="newest")


def test_another_format(url, queue, monkeypatch):
    open_store(url, queue=queue, order="arrival")
    monkeypatch.setattr("whet.buffer.queue_state.FORMAT", 3)
    with pytest.raises(WhetError, match="has format 2, this whet reads 3"):
        open_store(url, queue=queue, order="arrival")


def test_a_store_that_was_emptied_in_use(tmp_path):
    store = open_store(f"files:///{tmp_path}/s", queue="q", order="arrival")
    fill(store, 2)
    for path in (tmp_path / "s/q").glob("c*"):
        path.unlink()
    with pytest.raises(WhetError, match="was emptied or replaced while it was in use"):
        store.ledger()


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_a_stopped_holder_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BUSY_S", 0.05)
    url = f"{kind}:///{tmp_path}/s"
    one, two = (open_store(url, queue="q", order="arrival") for _ in range(2))
    if kind == "sqlite":
        two.log.db.execute("pragma busy_timeout = 50")
    who = f"process {os.getpid()} on " if kind == "files" else "another process has held the lock for 60 s"
    with one.log.turn(), pytest.raises(WhetError, match=who):
        two.ledger()
    assert two.ledger()["pending"] == 0


def test_a_password_in_the_config_is_not_written_down():
    cfg = Config.model_construct(buffer=BufferConfig(url="postgresql://me:geheim@host/db"))
    assert dump(cfg)["buffer"]["url"] == "postgresql://me:***@host/db"
    log = Config.model_construct(
        guard=RewardWorkersConfig(), buffer=BufferConfig(url="postgresql://host/db?user=me&password=geheim")
    )
    learn(log.model_dump(mode="json"))
    assert "geheim" not in redact("no user me, password geheim"), "nor does it reach a log"
