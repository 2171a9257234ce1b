"""One queue of fresh and used groups: steps drawn by priority, in the trainer's process and over a store."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import whet
from store_worker import group, uids_of
from test_loop import SIZE, TASKS, Toy, toy
from test_overlap import ROLLOUT, slow_one
from test_staleness import run as small_run
from whet.buffer.buffer import Buffer
from whet.buffer.priority import ReplayEntry, priority
from whet.buffer.queue import TrainerQueue
from whet.buffer.replay import Replay
from whet.buffer.stores import Scored, Store, open_store
from whet.checkpoint import copied
from whet.config.chosen import chosen
from whet.config.functions import PRIORITIES
from whet.config.schema import Config
from whet.explorer import replay_of
from whet.guard.ledger import Ledger
from whet.track.show import summary
from whet.types import Stopped

CONTROLLED = "linear_decay_use_count_control_randomization"


def make(
    name: str = "linear_decay",
    *,
    capacity: int = 100,
    cooldown_steps: int | None = 1,
    cooldown_s: float | None = None,
    fresh_staleness: int = 0,
    max_staleness: int | None = None,
    **settings: Any,
) -> Replay:
    ranked = chosen({"name": name, **settings}, PRIORITIES, "")
    return Replay(
        capacity=capacity,
        priority=priority(ranked.name, ranked.settings),
        cooldown_steps=cooldown_steps,
        cooldown_s=cooldown_s,
        max_staleness=max_staleness,
        fresh_staleness=fresh_staleness,
        seed=3,
    )


# ---------------------------------------------------------------- in one process


def queued(replay: Replay, *, steps: int, **options: Any) -> Toy:
    """A free run whose steps come from this queue; `run.learner.reused` are the used groups of each step."""
    run = toy(mode="asynchronous", steps=steps, max_staleness=replay.fresh_staleness, **options)
    run.buffer.replay, run.buffer.share, run.learner.reused = replay, None, []
    run.learner.update = lambda batch: run.learner.reused.append(run.buffer.reused)
    return run


def test_steps_are_drawn_before_fresh_groups_are_there() -> None:
    """All but the first step's rollouts take long: the trainer goes on with used groups, but at the fourth step it
    waits, lest what is under way be too old: the tokens of version 0 may be trained on up to version 3."""
    run = queued(
        make(fresh_staleness=3), steps=4, handler=slow_one(set(range(TASKS * SIZE, 10**4)), seconds=0.4)
    )
    run.go()
    assert run.learner.reused == [0, TASKS, TASKS, 0]
    assert [versions for _, versions in run.learner.seen] == [[0], [0], [0], [0]]
    total = run.ledger.state()["total"]
    assert total["trained"] == 2 * TASKS * SIZE, "used groups are booked once"
    assert run.ledger.pending == 0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_delays_the_bounds_hold_and_the_books_balance(seed: int) -> None:
    rng = random.Random(seed)
    ahead, keep, oldest = rng.choice([0, 1, 3, 6]), rng.choice([1.0, 0.5]), rng.choice([4, None])
    by_time = (
        {"cooldown_steps": None, "cooldown_s": 0.002} if seed % 2 else {"cooldown_steps": rng.choice([1, 2])}
    )

    async def reply(token_ids: list[int], sampling: Any, version: int) -> list[int]:
        await asyncio.sleep(rng.lognormvariate(-6.0, 1.5))
        return [7, 1]

    replay = make(CONTROLLED, capacity=20, fresh_staleness=ahead, max_staleness=oldest, sigma=2.0, **by_time)
    run = queued(replay, steps=20, keep=keep, handler=reply, seed=seed, max_refills=1000)
    run.go()
    assert len(run.learner.rollouts) == 20 * TASKS * SIZE
    bound = max(ahead, 99 if oldest is None else oldest)
    assert all(version - bound <= min(seen) <= max(seen) <= version for version, seen in run.learner.seen)
    distinct = {(r.task.uid, r.index) for r in run.learner.rollouts}
    uses = [sum((r.task.uid, r.index) == one for r in run.learner.rollouts) for one in list(distinct)[:40]]
    assert max(uses) <= 3
    assert run.ledger.state()["total"]["trained"] == len(distinct), "every rollout once"
    assert run.ledger.pending == 0
    assert run.buffer.held == 0


def test_a_queue_goes_on_from_its_state() -> None:
    """Same groups, same draws; what was under way is asked again."""

    async def life(cut: int | None) -> list[list[int]]:
        drawn, buffer = [], new()
        for step in range(8):
            await buffer.room(2)
            buffer.asked([group(2 * step + n).task for n in range(2)], step)
            await buffer.put([group(2 * step + n, version=step) for n in range(2)], asked=2)
            buffer.begin(step + 1)
            groups = await buffer.take(step + 1)
            drawn.append(uids_of(groups))
            await buffer.trained(groups)
            buffer.check()
            if step == cut:
                state, ledger = copied(buffer.state()), buffer.ledger.state()
                buffer = new()
                assert buffer.restore(state, step + 1) == []
                buffer.ledger = Ledger.from_state(ledger)
        return drawn

    def new() -> Any:
        return Buffer(
            groups_per_step=2, group_size=2, max_staleness=2, reject=lambda g: None, ledger=Ledger(),
            replay=make(CONTROLLED, sigma=4.0, capacity=6, fresh_staleness=2),
        )  # fmt: skip

    whole = asyncio.run(life(None))
    assert any(uid < 2 * step for step, uids in enumerate(whole) for uid in uids), "some were used before"
    assert [asyncio.run(life(cut)) for cut in (0, 3, 6)] == [whole] * 3


# ---------------------------------------------------------------- over a store


class Explorer:
    """Puts groups into a store whenever it is asked to."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, n: int, *, version: int) -> list[int]:
        uids = self.store.reserve("x", n, capacity=12, rollouts=2, lease_s=60.0)
        self.store.put([Scored(uid, group(uid, version=version - 1)) for uid in uids])
        return uids


def trainer(store: Store, *, stopping: Any = lambda: False, **settings: Any) -> TrainerQueue:
    replay = make(**{"name": CONTROLLED, "sigma": 4.0, "capacity": 8, "fresh_staleness": 3} | settings)
    return TrainerQueue(
        store, groups_per_step=2, max_staleness=3, ledger=Ledger(), stopping=stopping, replay=replay
    )


async def step(queue: TrainerQueue, version: int) -> list[int]:
    groups = await queue.take(version)
    assert len({*uids_of(groups)}) == len(groups) == 2
    await queue.trained(groups)
    queue.check()
    return uids_of(groups)


@pytest.mark.parametrize(
    "settings", [{}, {"cooldown_steps": None, "cooldown_s": 0.02}], ids=["steps", "seconds"]
)
@pytest.mark.parametrize("url", ["sqlite:///{}/q.db", "files:///{}/q"])
def test_a_killed_trainer_draws_what_it_drew(tmp_path: Path, url: str, settings: dict[str, Any]) -> None:
    """After each checkpoint some steps are lost; the next trainer makes them again, whatever was put meanwhile."""
    store = open_store(url.format(tmp_path), queue="q", order="arrival")
    explorer, rng = Explorer(store), random.Random(1)
    queue, drawn, done, saved = trainer(store, **settings), [], 0, (0, copied(trainer(store).state()))
    for _ in range(5):
        for version in range(done, done + 4):
            explorer.put(rng.choice([0, 1, 3]) if version else 3, version=version)
            drawn[version:] = [asyncio.run(asyncio.wait_for(step(queue, version), 20))]
            if version == done + 1:
                saved = version + 1, copied(queue.state())
        lost = drawn[saved[0] :]
        queue = trainer(store, **settings)
        queue.restore(saved[1])
        explorer.put(2, version=saved[0])
        again = [asyncio.run(asyncio.wait_for(step(queue, saved[0] + n), 20)) for n in range(len(lost))]
        assert again == lost
        done += 4
        queue.state()
    ledger = store.ledger()
    seen = {uid for uids in drawn for uid in uids}
    assert len(seen) < 2 * len(drawn), "some were drawn again"
    assert ledger["trained"] == 2 * len(seen)
    assert ledger["asked"] == sum(n for account, n in ledger.items() if account != "asked")
    queue.state()
    assert store.look(lambda places: set(places.deliveries)) == set(), "what a checkpoint holds is let go of"
    store.close()


def test_what_leaves_the_queue_is_booked_in_the_store(tmp_path: Path) -> None:
    """Three groups of version 0 wait and two are drawn; the third is too old for a trainer at version 4."""
    store = open_store(f"sqlite:///{tmp_path}/q.db", queue="q", order="arrival")
    queue, explorer = trainer(store, name="linear_decay"), Explorer(store)
    explorer.put(3, version=1)
    assert asyncio.run(step(queue, 1)) == [0, 1]
    assert queue.reused == 0
    assert store.ledger()["pending"] == 2, "what waits in the trainer's queue keeps its room"
    explorer.put(2, version=5)
    assert asyncio.run(step(queue, 5)) == [3, 4]
    assert store.ledger() == {"asked": 10, "trained": 8, "rejected/stale": 2, "pending": 0}
    assert asyncio.run(step(queue, 5)) == [3, 4], "4 - 2 against 0 - 2"
    assert queue.reused == 2
    assert queue.leave() == []
    store.close()


def test_a_trainer_that_waits_for_fresh_groups_can_be_stopped(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/q.db", queue="q", order="arrival")
    asked = iter(range(10**6))
    with pytest.raises(Stopped):
        asyncio.run(step(trainer(store, stopping=lambda: next(asked) > 2), 0))
    store.close()


# ---------------------------------------------------------------- whole runs

FREE = ROLLOUT | {"max_staleness": 4, "schedule": "async"}


def newest_last(entry: ReplayEntry) -> float:
    """Used groups first: whole steps of them."""
    return float(entry.uses)


def test_a_run_with_one_queue(tmp_path: Path) -> None:
    result = small_run(
        tmp_path,
        rollout=FREE,
        buffer={"replay": {"queue": True, "max_staleness": 6, "priority": "test_one_queue:newest_last"}},
    )
    lines = [line for line in result.metrics if "train/loss" in line]
    assert len(lines) == 6
    assert lines[-1]["ledger/pending_rollouts"] == 0
    assert lines[0]["train/replayed_groups"] == 0
    used = [int(line["train/replayed_groups"]) for line in lines]
    assert max(used) == 2, "a step of used ones alone"
    console = Console(record=True, width=100)
    console.print(summary(result.run_dir))
    assert re.search(
        rf"in all +a step +most in a step\nmain +{sum(used)} +{sum(used) / 6:.2f} +2", console.export_text()
    )
    assert sum(line.get("ledger/trained_rollouts", 0) for line in lines) == sum(
        4 * (2 - line["train/replayed_groups"]) for line in lines
    )


@pytest.mark.parametrize(
    ("rollout", "replay", "said"),
    [
        (
            {"max_staleness": 0, "schedule": "deterministic"},
            {},
            r"buffer\.replay\.queue: with rollout\.schedule=deterministic",
        ),
        ({}, {"capacity": 1}, r"buffer\.replay\.capacity: 1 groups are fewer"),
        ({}, {"share": 0.5}, r"buffer\.replay\.share: .*queue=true"),
        ({}, {"cooldown": "1 min"}, r"buffer\.replay\.cooldown: got .1 min., expected .* such as '30 s'"),
    ],
)
def test_bad_input(tmp_path: Path, rollout: Any, replay: Any, said: str) -> None:
    with pytest.raises(whet.ConfigError, match=said):
        small_run(tmp_path, rollout=FREE | rollout, buffer={"replay": {"queue": True} | replay})


@pytest.mark.parametrize(
    ("cooldown", "steps", "seconds"),
    [(2, 2, None), ("1.5 s", None, 1.5), ("1e-05 s", None, 1e-5), (None, None, None)],
)
def test_a_cooldown_is_steps_or_seconds(cooldown: Any, steps: int | None, seconds: float | None) -> None:
    cfg = Config.model_validate({"buffer": {"replay": {"queue": True, "cooldown": cooldown}}})
    plan: Any = SimpleNamespace(name="rl", algorithm=SimpleNamespace(kind="online"))
    made = replay_of(cfg, plan)
    assert made is not None
    assert (made.cooldown_steps, made.cooldown_s) == (steps, seconds)
    assert made.clock is time.monotonic, "the time of day may be set back by hours"


def test_a_share_of_groups_that_never_come_back(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match=r"buffer\.replay\.cooldown: null: no group is drawn"):
        small_run(tmp_path, rollout=ROLLOUT, buffer={"replay": {"share": 0.5, "cooldown": None}})
