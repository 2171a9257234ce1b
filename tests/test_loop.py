"""The control flow of the step: it ends, fills every step, books every rollout, and never trains on stale tokens.

Everything is real but the model: `ScriptedEngine` samples, a learner that only counts trains, nothing is recorded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from whet.batch import Batch, pack
from whet.buffer.buffer import Buffer
from whet.checkpoint import copied
from whet.config.schema import Config
from whet.context import Context
from whet.explorer import Explorer
from whet.guard.ledger import Ledger
from whet.learner import Learned
from whet.loop import steps as loop_steps
from whet.rewards.combine import RewardSet
from whet.rollout.engine import WeightUpdate
from whet.rollout.episode import play_groups
from whet.rollout.scripted import ScriptedEngine
from whet.rollout.slots import Slots
from whet.stage import Stage
from whet.track.monitor import Monitor
from whet.track.timeline import Timeline
from whet.types import Group, Metrics, Receipt, Rollout, Sampling, Task, WhetError
from whet.weights import Weights

TASKS, SIZE = 8, 4

Reply = Callable[[list[int], Sampling, int], Awaitable[list[int]]]


class Counting:
    """A learner without weights: it counts its updates and remembers the versions that it was given."""

    def __init__(self) -> None:
        self.version = 0
        self.module: Any = "toy"
        self.apart = False
        self.seen: list[tuple[int, list[int]]] = []
        """(version, versions of the tokens) of each step."""
        self.rollouts: list[Rollout] = []
        self.update: Callable[[Batch], None] = lambda batch: None

    async def prepare(self, step: int, groups: list[Group]) -> tuple[Batch, Metrics]:
        return pack(groups), {}

    async def learn(self, step: int, batch: Batch, groups: list[Group]) -> Learned:
        await asyncio.to_thread(self.update, batch)
        self.seen.append((self.version, sorted(set(batch.version_N[batch.mask_N].tolist()))))
        self.rollouts += [r for g in groups for r in g.rollouts]
        return Learned(batch, groups, {}, (), 0.0)

    def reset_reference(self, done: int) -> None: ...

    def engines(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class Silent:
    """A recorder that writes nothing, and what shows nothing."""

    stopped_early = False

    def record(self, done: int, played: list[Group], learned: Learned, accounts: Metrics) -> Metrics:
        return accounts

    def phase(self, name: str) -> None: ...

    def phase_over(self, doing: object) -> None: ...

    def evaluation_due(self, done: int) -> bool:
        return False

    export_due = checkpoint_due = evaluation_due


class Stream:
    def __init__(self) -> None:
        self.drawn = 0

    learns = False

    def next(self, n: int) -> list[Task]:
        self.drawn += n
        return [
            Task(uid=uid, source="toy", prompt="", token_ids=(5, 6))
            for uid in range(self.drawn - n, self.drawn)
        ]


class Toy:
    """A stage of doubles, and what a test looks at."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.explorer, self.buffer = stage.explorer, stage.explorer.buffer
        self.learner: Any = stage.learner
        self.engine: Any = stage.explorer.engine
        self.stream: Any = stage.explorer.tasks

    @property
    def ledger(self) -> Ledger:
        return self.explorer.ledger

    async def run(self, count: int | None = None, *, done: int | None = None) -> None:
        """`count` more steps, or all that are left."""
        first = done or 0
        try:
            async for _ in loop_steps(self.stage, done, profiled=lambda number: nullcontext()):
                self.buffer.check()
                if count is not None and self.stage.context.monitor.step == first + count:
                    return
        finally:
            await self.stage.close()

    def go(self, count: int | None = None, *, done: int | None = None, within: float = 60) -> None:
        asyncio.run(asyncio.wait_for(self.run(count, done=done), timeout=within))


def rejecting(rng: random.Random, keep: float) -> Any:
    return lambda group: None if rng.random() < keep else "teaches nothing"


def toy(
    *, steps: int = 30, mode: str = "synchronous", keep: float = 1.0, chunk: int = TASKS, max_staleness: int = 0,
    seed: int = 0, spare: int = 0, max_refills: int | None = None, handler: Reply | None = None,
    slots: int | None = None, sync_interval: int = 1, partial_rollout: bool = True,
) -> Toy:  # fmt: skip
    rng = random.Random(seed)

    async def reply(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(rng.random() * 0.001)
        return [7, 1]

    tree: dict[str, Any] = {"rollout": {"max_staleness": max_staleness, "timeout_s": 20.0, "retries": 0}}
    tree["rollout"] |= {"sync_interval": sync_interval, "partial_rollout": partial_rollout}
    if max_refills is not None:
        tree["algorithm"] = {"max_refills": max_refills}
    cfg = Config.model_validate(tree)
    cfg = cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"at_start": False, "interval": 0})})
    display: Any = Silent()
    watch: Any = SimpleNamespace(beat=lambda what: None, last=lambda: ("", 0.0))
    monitor = Monitor("toy", display, watch, Timeline(Path("never written")))
    plan: Any = SimpleNamespace(
        mode=mode, steps=steps, tasks_per_step=chunk, own_tasks_per_step=TASKS, group_size=SIZE, rows=None
    )
    algorithm: Any = SimpleNamespace(kind="online", needs=frozenset())
    context = Context(cfg, plan, "toy", 0, algorithm, monitor, SimpleNamespace(requested=False))
    ledger, engine = Ledger(), ScriptedEngine(handler or reply)
    play = partial(
        play_groups, engine, group_size=SIZE, sampling=Sampling(max_tokens=2), seed=0, purpose="train",
        decode=str, end_token_ids={1}, timeout_s=120.0, ended=(bound := Slots(lambda: slots, SIZE)).ended,
    )  # fmt: skip
    buffer = Buffer(
        groups_per_step=TASKS, group_size=SIZE, max_staleness=max_staleness + sync_interval - 1,
        reject=rejecting(rng, keep), ledger=ledger, spare=spare,
    )  # fmt: skip
    buffer.put = scored_put(buffer)  # type: ignore[method-assign]
    stream: Any = Stream()
    explorer = Explorer(
        context, engine, stream, play, play, read=lambda tasks: [], rewards=RewardSet({}, None), buffer=buffer,
        slots=bound,
    )  # fmt: skip
    learner: Any = Counting()
    recorder: Any = Silent()
    return Toy(Stage(context, explorer, learner, Weights(context, learner, engine, None), recorder))


def scored_put(buffer: Buffer) -> Any:
    """Rewards are no part of this test: every rollout gets one."""
    put = buffer.put

    async def scored(groups: list[Group], asked: int) -> None:
        def one(r: Rollout) -> Rollout:
            return r.scored(float(r.index), {})

        await put([Group(g.task, tuple(map(one, g.rollouts))) for g in groups], asked)

    return scored


@pytest.mark.parametrize(("keep", "chunk"), [(1.0, TASKS), (0.4, TASKS), (0.4, 1), (0.7, 3), (1.0, 1)])
def test_every_step_is_filled_and_everything_ends(keep: float, chunk: int) -> None:
    """With filtering and any chunk: no deadlock, exactly 30 full steps, and only tokens of the present version."""
    run = toy(keep=keep, chunk=chunk, max_refills=1000)
    run.go()
    assert run.learner.seen == [(version, [version]) for version in range(30)]
    assert len(run.learner.rollouts) == 30 * TASKS * SIZE
    assert run.engine.version == run.learner.version == 30
    uids = [r.task.uid for r in run.learner.rollouts]
    assert len(set(zip(uids, (r.index for r in run.learner.rollouts)))) == len(uids), "trained on twice"
    if keep == 1.0:
        assert sorted(set(uids)) == list(range(30 * TASKS)), "a task was lost"


def test_a_step_that_cannot_be_filled_ends_with_the_cause() -> None:
    with pytest.raises(
        WhetError, match=r"could not be filled: of 88 tasks only 0 gave a group.*but 8 are needed"
    ):
        toy(keep=0.0).go()


def test_room_is_the_staleness_bound() -> None:
    """With staleness k at most k+1 steps' worth is asked for before anything was trained."""

    async def overfill(run: Toy, steps: int) -> None:
        for _ in range(steps):
            await asyncio.wait_for(run.explorer.explore_some(TASKS), timeout=60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.explorer.explore_some(TASKS), timeout=0.2)

    for staleness in (0, 1, 3):
        asyncio.run(overfill(toy(max_staleness=staleness), staleness + 1))


def test_a_version_the_trainer_does_not_know_is_refused() -> None:
    async def stale() -> None:
        run = toy()
        await run.explorer.explore_some(TASKS)
        await run.explorer.collect(0, version=1)

    with pytest.raises(WhetError, match=r"versions 0\.\.0.*version 1"):
        asyncio.run(stale())


def test_an_engine_that_does_not_take_the_version_stops_the_run() -> None:
    run = toy()

    async def deaf(update: WeightUpdate) -> Receipt:
        return Receipt("the engine", update.version)

    run.engine.update_weights = deaf
    with pytest.raises(WhetError, match="the engine confirms version 1 and is at version 0, the policy at 1"):
        run.go(1)


def test_buffer_state_comes_back() -> None:
    async def half() -> Toy:
        run = toy(chunk=3)
        await run.explorer.explore_some(3)
        return run

    run = asyncio.run(half())

    other = toy(chunk=3)
    other.buffer.restore(copied(run.buffer.state()))
    assert other.buffer.waiting == run.buffer.waiting
    assert other.buffer.held == 3


def test_groups_that_were_booked_since_the_last_step_are_in_the_state() -> None:
    """An asynchronous stage samples on while it evaluates, between the end of a step and its checkpoint."""

    async def booked() -> Toy:
        run = toy(mode="asynchronous", keep=0.0)
        await run.explorer.explore_some(3)
        return run

    run, other = asyncio.run(booked()), toy(mode="asynchronous")
    other.buffer.restore(copied(run.buffer.state()))
    assert other.buffer.leave() == run.buffer.leave()
    assert len(run.buffer.leave()) == 0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_error_of_a_task_beside_a_step_that_is_trained_ends_the_run_with_its_words(
    max_staleness: int,
) -> None:
    """Whether the task would be given up for its age at the end of the step, or the next step's groups are there."""
    first = (max_staleness + 1) * TASKS
    run = toy(mode="asynchronous", steps=4, max_staleness=max_staleness, spare=1)
    put, learn, training = run.buffer.put, run.learner.learn, asyncio.Event()

    async def failing(groups: list[Group], asked: int) -> None:
        if groups[0].task.uid == first:
            await training.wait()
            raise WhetError("this task cannot be put")
        await put(groups, asked)

    async def beside(*given: Any) -> Learned:
        training.set()
        async with run.buffer.changed:
            await run.buffer.changed.wait_for(
                lambda: run.buffer.broken is not None and len(run.buffer.waiting) >= first - TASKS
            )
        return cast(Learned, await learn(*given))

    run.buffer.put, run.learner.learn = failing, beside  # type: ignore[method-assign]
    with pytest.raises(WhetError, match="this task cannot be put"):
        run.go()
    assert len(run.learner.seen) == 1


def test_unscored_rollouts_are_counted_over_a_step_s_worth_of_groups() -> None:
    """A step that lacks one group samples one more: what becomes of that one alone is no share of a step's rollouts."""

    async def unscored(failing: Collection[int], sizes: list[int]) -> None:
        run = toy()
        run.explorer.rewards = RewardSet({}, None, max_failure_rate=0.2)
        uids = iter(range(100))
        for size in sizes:
            tasks = [Task(uid=next(uids), source="toy", prompt="", token_ids=(5, 6)) for _ in range(size)]
            groups = [
                Group(g.task, tuple(replace(r, error="reward: no") for r in g.rollouts))
                if g.task.uid in failing
                else g
                for g in await run.explorer.play(tasks)
            ]
            run.explorer.check_reward_failures(groups)

    asyncio.run(unscored({TASKS}, [TASKS, 1, 1, TASKS - 2, 1]))
    with pytest.raises(WhetError, match="8 of 32 rollouts of this step are unscored"):
        asyncio.run(unscored({TASKS, TASKS + 1}, [TASKS, 1, 1, TASKS - 2]))
    with pytest.raises(WhetError, match="8 of 32 rollouts of this step are unscored"):
        asyncio.run(unscored({3, 4}, [TASKS]))


def test_while_a_stage_evaluates_no_task_is_asked_for_that_no_step_is_left_for() -> None:
    run = toy(mode="asynchronous", steps=2, max_staleness=1)

    async def evaluated(done: int) -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    recorder: Any = run.stage.recorder
    recorder.evaluation_due, recorder.evaluate = lambda done: True, evaluated
    run.go()
    assert run.stream.drawn == 2 * TASKS
