"""Replay against a plain oracle, numbers by hand, and the law of resuming."""

import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_worker import group, uids_of
from whet.buffer.priority import ReplayEntry, priority
from whet.buffer.replay import Replay, replayed
from whet.checkpoint import copied
from whet.config.chosen import chosen
from whet.config.functions import PRIORITIES
from whet.types import ConfigError, WhetError

CONTROLLED = "linear_decay_use_count_control_randomization"


def make(
    name="linear_decay",
    *,
    capacity=100,
    cooldown_steps=None,
    cooldown_s=None,
    max_staleness=None,
    fresh_staleness=100,
    seed=1,
    clock=None,
    **settings,
) -> Replay:
    ranked = chosen({"name": name, **settings}, PRIORITIES, "")
    return Replay(
        cooldown_s=cooldown_s,
        fresh_staleness=fresh_staleness,
        clock=clock,
        capacity=capacity,
        priority=priority(ranked.name, ranked.settings),
        cooldown_steps=cooldown_steps,
        max_staleness=max_staleness,
        seed=seed,
    )


def add(replay: Replay, uids: list[int], *, version: int) -> None:
    replay.add([group(u, version=version) for u in uids])


def left(replay: Replay) -> list[tuple[str, int]]:
    return [(reason, g.task.uid) for reason, g in replay.pop_left()]


def draw(replay: Replay, n: int, *, step: int, version: int = 0) -> list[int]:
    return uids_of(replay.draw(n, step=step, version=version))


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("name", "version", "uses", "wanted"),
    [
        ("linear_decay", 7, 0, 7.0),
        ("linear_decay", 7, 5, -3.0),
        (CONTROLLED, 7, 2, 7 - 2 * 2 + 0.5 * -1.5),
        (CONTROLLED, 7, 3, None),
        (CONTROLLED, 7, 4, None),
    ],
)
def test_formulas(name, version, uses, wanted):
    made = chosen({"name": name, "sigma": 0.5}, PRIORITIES, "")
    ranked = priority(made.name, made.settings)
    assert ranked(ReplayEntry(group(0), version, uses, 1), -1.5) == wanted


def test_without_a_limit_a_group_always_comes_back():
    ranked = priority(CONTROLLED, {"decay": 1.0, "use_limit": None, "sigma": 0.0})
    assert ranked(ReplayEntry(group(0), 7, 50, 1), 0.0) == -43.0


def test_the_newest_first_and_of_equals_the_oldest():
    replay = make()
    for uid, version in enumerate((1, 3, 3, 2)):
        add(replay, [uid], version=version)
    assert draw(replay, 3, step=1) == [1, 2, 3]
    assert draw(replay, 3, step=2) == [0]
    assert draw(replay, 3, step=9) == []


def test_a_drawn_group_rests_and_comes_back_with_a_lower_priority():
    replay = make(cooldown_steps=2)
    add(replay, [0], version=5)
    assert draw(replay, 1, step=1) == [0]
    assert draw(replay, 1, step=2) == []
    add(replay, [1], version=4)
    assert draw(replay, 2, step=3) == [1, 0]  # 4 against 5 - 2
    assert draw(replay, 2, step=4) == []
    assert draw(replay, 2, step=5) == [1, 0]  # 2 against 1


def test_a_share_of_the_step_comes_from_groups_that_were_trained_on():
    replay = make(cooldown_steps=1)
    replay.keep([group(0), group(1)], step=1)
    assert draw(replay, 1, step=1) == []
    assert draw(replay, 1, step=2) == [0]
    assert [replayed(n, share) for n, share in ((8, 0.25), (10, 0.3), (3, 0.5), (4, 0.0), (4, 1.0))] == [
        2,
        3,
        1,
        0,
        4,
    ]


def test_where_it_is_full_the_lowest_leaves_and_of_equals_the_oldest():
    replay = make(capacity=3)
    add(replay, [0, 1], version=2)
    add(replay, [2], version=5)
    add(replay, [3], version=1)  # below the lowest: stays outside
    add(replay, [4], version=2)  # equal to the lowest: the older one leaves
    assert draw(replay, 9, step=1) == [2, 1, 4]
    assert left(replay) == [("outranked", 3), ("outranked", 0)]
    assert left(replay) == []


def test_a_use_limit_ends_it():
    replay = make(CONTROLLED, cooldown_steps=1, use_limit=2)
    add(replay, [0], version=0)
    assert [draw(replay, 1, step=s) for s in (1, 2, 3, 4)] == [[0], [0], [], []]
    assert left(replay) == []  # it was trained on


def test_what_is_too_old_leaves():
    """Fresh groups beyond their bound are told; used ones beyond theirs were trained on."""
    replay = make(max_staleness=3, fresh_staleness=2, cooldown_steps=1)
    add(replay, [0], version=3)
    add(replay, [1], version=5)
    replay.refresh(step=1, version=5)
    assert len(replay) == 2
    assert draw(replay, 2, step=1, version=6) == [1]
    assert left(replay) == [("stale", 0)]
    assert draw(replay, 2, step=2, version=8) == [1]
    assert draw(replay, 2, step=3, version=9) == []
    assert left(replay) == []


def test_noise_is_standard_normal_and_of_the_task_and_use_alone():
    replay, other = make(seed=7), make(seed=8)
    noises = [replay.noise(ReplayEntry(group(uid), 0, uses, 1)) for uid in range(400) for uses in range(5)]
    assert abs(statistics.fmean(noises)) < 4 / len(noises) ** 0.5
    assert abs(statistics.pstdev(noises) - 1) < 4 / (2 * len(noises)) ** 0.5
    assert len(set(noises)) == len(noises)
    assert (
        replay.noise(ReplayEntry(group(3), 9, 2, 5))
        == noises[3 * 5 + 2]
        != other.noise(ReplayEntry(group(3), 9, 2, 5))
    )


# ---------------------------------------------------------------- yours


def most_rewarded(entry: ReplayEntry, decay: float, noise: float) -> float | None:
    total = sum(r.reward or 0.0 for r in entry.group.rollouts)
    return None if entry.group.task.uid == 13 else total + 0 * noise * decay


def asks_too_much(entry: ReplayEntry, temperature: float) -> float:
    return temperature


def not_a_number(entry: ReplayEntry) -> float:
    return float("nan")


def a_text(entry: ReplayEntry) -> float:
    return "high"  # type: ignore[return-value]


def fails(entry: ReplayEntry) -> float:
    return 1 / 0


def test_a_priority_of_yours():
    replay = make("test_replay:most_rewarded", decay=2.0)
    replay.add([group(0, size=1), group(1, size=3), group(13, size=3), group(2, size=2)])
    assert draw(replay, 9, step=1) == [1, 2, 0]
    assert left(replay) == [("unwanted", 13)]


def test_wrong_priorities():
    with pytest.raises(ConfigError, match="'linear_decai' is not known; did you mean 'linear_decay'"):
        make("linear_decai")
    with pytest.raises(ConfigError, match=r"priority\.temperature: .* needs a value"):
        make("test_replay:asks_too_much")
    with pytest.raises(ConfigError, match=r"priority\.decay: .* has no such setting; it has: temperature"):
        make("test_replay:asks_too_much", decay=1.0)
    with pytest.raises(WhetError, match="returned nan for task 3; return a finite number or None"):
        add(make("test_replay:not_a_number"), [3], version=0)
    with pytest.raises(WhetError, match="'test_replay:a_text' returned 'high' for task 3; return a finite"):
        add(make("test_replay:a_text"), [3], version=0)
    with pytest.raises(WhetError, match=r"failed for task 3: ZeroDivisionError: .* \(test_replay.py:\d+\)"):
        add(make("test_replay:fails"), [3], version=0)


# ---------------------------------------------------------------- laws

COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("keep"), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("draw"), st.integers(0, 4), st.integers(0, 2)),
    ),
    max_size=25,
)
SETTINGS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(PRIORITIES)),
        "capacity": st.integers(1, 6),
        "cooldown_steps": st.none() | st.integers(1, 3),
        "cooldown_s": st.none() | st.sampled_from([0.0, 1.5, 2.5]),
        "max_staleness": st.none() | st.integers(0, 4),
        "fresh_staleness": st.integers(0, 4),
        "sigma": st.sampled_from([0.0, 1.5]),
        "use_limit": st.none() | st.integers(1, 3),
    }
)


class Naive:
    """The rules, one list, searched each time."""

    def __init__(self, settings) -> None:
        self.settings = settings
        made = chosen({k: settings[k] for k in ("name", "sigma", "use_limit")}, PRIORITIES, "")
        self.rank = priority(made.name, made.settings)
        self.noise = make().noise
        self.here: list[ReplayEntry] = []
        self.rest: list[tuple[float, int, ReplayEntry]] = []
        self.serial = self.draws = self.came = self.draws_since = 0
        self.lost: list[tuple[str, int]] = []
        self.time = 0.0

    def new(self, uid: int, version: int, uses: int) -> ReplayEntry:
        self.serial += 1
        return ReplayEntry(group(uid, version=version), version, uses, self.serial)

    def lose(self, entry: ReplayEntry, reason: str) -> None:
        if entry.uses == 0:
            self.lost.append((reason, entry.group.task.uid))

    def enter(self, entry: ReplayEntry) -> None:
        found = self.rank(entry, self.noise(entry))
        if found is None:
            self.lose(entry, "unwanted")
            return
        entry.priority = found
        if len(self.here) == self.settings["capacity"]:
            lowest = min(self.here, key=lambda e: (e.priority, e.serial))
            if entry.priority < lowest.priority:
                self.lose(entry, "outranked")
                return
            self.here.remove(lowest)
            self.lose(lowest, "outranked")
        self.here.append(entry)

    def sleep(self, entry: ReplayEntry, step: int) -> None:
        seconds, steps = self.settings["cooldown_s"], self.settings["cooldown_steps"]
        self.draws += 1
        if seconds is not None:
            self.rest.append((self.time + seconds, self.draws, entry))
        elif steps is not None:
            self.rest.append((step + steps, self.draws, entry))

    def old(self, entry: ReplayEntry, version: int) -> bool:
        limit = self.settings["max_staleness" if entry.uses else "fresh_staleness"]
        return limit is not None and version - entry.version > limit

    def lacking(self, n: int) -> int:
        fresh = sum(e.uses == 0 for e in self.here)
        enough = n - len(self.here)
        if self.draws_since < max(1, self.settings["fresh_staleness"]) - 1:
            return max(0, enough)
        return max(0, enough, min(n - self.came, n - fresh))

    def draw(self, n: int, step: int, version: int) -> list[int]:
        now = step if self.settings["cooldown_s"] is None else self.time
        for entry in sorted(self.here, key=lambda e: (-e.priority, e.serial)):
            if self.old(entry, version):
                self.here.remove(entry)
                self.lose(entry, "stale")
        for _, _, entry in sorted((r for r in self.rest if r[0] <= now), key=lambda r: r[:2]):
            if not self.old(entry, version):
                self.enter(entry)
        self.rest = [r for r in self.rest if r[0] > now]
        self.draws_since += 1
        if self.came >= n:
            self.came = self.draws_since = 0
        out = sorted(self.here, key=lambda e: (-e.priority, e.serial))[:n]
        for entry in out:
            self.here.remove(entry)
            entry.uses += 1
            self.sleep(entry, step)
        return [e.group.task.uid for e in out]


def test_a_resumed_run_goes_on_with_the_seconds_that_were_left():
    """The clock of the next process began somewhere else; the time of day may have been set meanwhile."""
    now = 5000.0
    replay = make(cooldown_steps=None, cooldown_s=10.0, clock=lambda: now)
    add(replay, [1], version=0)
    assert draw(replay, 1, step=1) == [1]
    now += 4.0
    state = copied(replay.state())
    now = 3.0
    replay = make(cooldown_steps=None, cooldown_s=10.0, clock=lambda: now)
    replay.restore(state)
    assert replay.rest_s == pytest.approx(6.0)
    now += 5.9
    assert draw(replay, 1, step=2) == []
    now += 0.2
    assert draw(replay, 1, step=3) == [1]


def test_an_older_checkpoint_has_the_time_of_day():
    replay = make(cooldown_steps=None, cooldown_s=10.0, clock=time.time)
    add(replay, [1], version=0)
    draw(replay, 1, step=1)
    state = replay.state()
    del state["clock"]
    replay = make(cooldown_steps=None, cooldown_s=10.0, clock=time.monotonic)
    replay.restore(state)
    assert 5.0 < replay.rest_s <= 10.1


@given(SETTINGS, COMMANDS)
def test_replay_does_what_the_plain_one_does_and_resumes_anywhere(settings, commands):
    """After every command a replay made anew from the state, through JSON, takes over."""
    naive = Naive(settings)
    replay = make(**settings, clock=lambda: naive.time)
    step = version = uid = 0
    for op, n, more in commands:
        if op == "draw":
            step, version, naive.time = step + 1, version + more, naive.time + 1.0
            assert draw(replay, n, step=step, version=version) == naive.draw(n, step, version)
        elif op == "add":
            add(replay, list(range(uid, uid + n)), version=version)
            naive.came += n
            for u in range(uid, uid + n):
                naive.enter(naive.new(u, version, 0))
        else:
            replay.keep([group(u, version=version) for u in range(uid, uid + n)], step=step)
            for u in range(uid, uid + n):
                naive.sleep(naive.new(u, version, 1), step)
        uid += n
        assert len(replay) == len(naive.here) <= settings["capacity"]
        assert uids_of(replay.fresh) == sorted(e.group.task.uid for e in naive.here if e.uses == 0)
        assert [replay.lacking(k) for k in (1, 3)] == [naive.lacking(k) for k in (1, 3)]
        assert left(replay) == naive.lost
        naive.lost = []
        state = copied(replay.state())
        replay = make(**settings, clock=lambda: naive.time)
        replay.restore(state)
        assert copied(replay.state()) == state


def test_a_smaller_capacity_at_a_resume_keeps_the_best():
    replay, smaller = make(capacity=4), make(capacity=2)
    for uid in range(4):
        add(replay, [uid], version=uid)
    smaller.restore(replay.state())
    assert draw(smaller, 9, step=1) == [3, 2]
    assert left(smaller) == [("outranked", 0), ("outranked", 1)]
