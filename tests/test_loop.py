"""The control flow of the step: it ends, fills every step, books every rollout, and never trains on stale tokens.

Everything is real but the model: `ScriptedEngine` samples, a policy that only counts trains.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whet.algos.skipping import Skipping
from whet.batch import Batch, Loss
from whet.buffer.buffer import Buffer
from whet.checkpoint import copied
from whet.config.deadlines import Deadline
from whet.config.schema import Config
from whet.guard.ledger import Ledger
from whet.guard.watch import wait
from whet.loop import explore_step, synchronous
from whet.rewards.combine import RewardSet
from whet.rollout.engine import WeightUpdate
from whet.rollout.episode import play_groups
from whet.rollout.scripted import ScriptedEngine
from whet.types import Group, Metrics, Receipt, Rollout, Sampling, Task, WhetError

TASKS, SIZE = 8, 4


class Counting:
    """A policy without weights: it counts its updates and remembers the versions it was given."""

    def __init__(self) -> None:
        self.version = 0
        self.module: Any = "toy"
        self.trained: list[tuple[int, list[int]]] = []

    def forward(self, batch: Batch, want: str) -> Any:
        raise AssertionError("nothing here asks for a forward")

    def update(self, batch: Batch, loss: object) -> Metrics:
        self.trained.append((self.version, sorted(set(batch.version_N[batch.mask_N].tolist()))))
        return {"loss": 0.0}


class Stream:
    def __init__(self) -> None:
        self.drawn = 0

    def next(self, n: int) -> list[Task]:
        self.drawn += n
        return [
            Task(uid=uid, source="toy", prompt="", token_ids=(5, 6))
            for uid in range(self.drawn - n, self.drawn)
        ]


class Toy(SimpleNamespace):
    """What `loop.py` asks of a run."""

    sync_deadline, explored = Deadline(20.0, ""), 0
    rounds = None
    explorers = SimpleNamespace(pop_again=list)
    skipped = ()

    def note_skipped(self, *_: Any, **__: Any) -> None:
        pass

    def phase(self, name: str) -> Any:
        return nullcontext()

    exploring = phase

    def meanwhile(self, beside: Any) -> Any:
        assert beside is None
        return nullcontext()

    async def work(self, job: Any) -> Any:
        return job()

    async def give_up_stale(self) -> None: ...

    def judged(self, groups: list[Group]) -> None: ...

    async def wait(self, awaitable: Any, what: str, *, within: Deadline | None = None) -> Any:
        seconds = within.seconds if within else 20.0
        return await wait(awaitable, owner="the toy", what=what, timeout_s=seconds)

    async def come(self, groups: Any, what: str) -> Any:
        return await self.wait(groups, what)

    def watch_mismatch(self, numbers: Metrics) -> None: ...

    def after_step(self, batch: Batch, groups: list[Group]) -> Metrics:
        self.trained += [r for g in groups for r in g.rollouts]
        return {}


def rejecting(rng: random.Random, keep: float) -> Any:
    return lambda group: None if rng.random() < keep else "teaches nothing"


def toy(*, keep: float = 1.0, chunk: int = TASKS, max_staleness: int = 0, seed: int = 0) -> Toy:
    rng = random.Random(seed)

    async def reply(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(rng.random() * 0.001)
        return [7, 1]

    ledger, engine = Ledger(), ScriptedEngine(reply)
    algorithm = SimpleNamespace(
        kind="online", correct=lambda batch, version: (batch, {}), advantage=lambda batch, coef: batch,
        loss_of=lambda b, forward: lambda b, o: Loss(torch.zeros(b.tokens)),
        weights=lambda b, step: b.mask_N.float(), needs=frozenset(), resample=lambda batch, stream, groups: batch,
        parts=(),
    )  # fmt: skip
    play = partial(
        play_groups, engine, group_size=SIZE, sampling=Sampling(max_tokens=2), seed=0, purpose="train",
        decode=str, end_token_ids={1}, timeout_s=5.0,
    )  # fmt: skip
    run = Toy(
        cfg=Config(), plan=SimpleNamespace(tasks_per_step=chunk, critic=None, critic_warmup_steps=0), name="toy",
        tasks=Stream(), engine=engine, sampler=None, sync_due=True, ledger=ledger,
        policy=Counting(), reference=None, critic=None, algorithm=algorithm, play=play, recompute_old=False,
        interrupts=False, out=None, skipping=Skipping(),
        rewards=RewardSet({}, None), experts=None, kl_coef=0.0, step=0, trained=[], played=[],
        buffer=Buffer(
            groups_per_step=TASKS, group_size=SIZE, max_staleness=max_staleness,
            reject=rejecting(rng, keep), ledger=ledger,
        ),
    )  # fmt: skip
    run.buffer.put = scored_put(run.buffer)
    return run


def scored_put(buffer: Buffer) -> Any:
    """Rewards are no part of this test: every rollout gets one."""
    put = buffer.put

    async def scored(groups: list[Group], asked: int) -> None:
        def one(r: Rollout) -> Rollout:
            return r.scored(float(r.index), {})

        await put([Group(g.task, tuple(map(one, g.rollouts))) for g in groups], asked)

    return scored


async def steps(run: Toy, count: int) -> None:
    for _ in range(count):
        await synchronous(run)
        run.step += 1
        run.buffer.check()


@pytest.mark.parametrize(("keep", "chunk"), [(1.0, TASKS), (0.4, TASKS), (0.4, 1), (0.7, 3), (1.0, 1)])
def test_every_step_is_filled_and_everything_ends(keep: float, chunk: int) -> None:
    """With filtering and any chunk: no deadlock, exactly 30 full steps, and only tokens of the present version."""
    run = toy(keep=keep, chunk=chunk)
    run.cfg = Config.model_validate_json('{"algorithm": {"max_refills": 1000}}')
    asyncio.run(asyncio.wait_for(steps(run, 30), timeout=60))
    assert [seen for _, seen in run.policy.trained] == [[version] for version in range(30)]
    assert len(run.trained) == 30 * TASKS * SIZE
    assert run.engine.version == run.policy.version == 30
    uids = [r.task.uid for r in run.trained]
    assert len(set(zip(uids, (r.index for r in run.trained)))) == len(uids), "a rollout was trained on twice"
    if keep == 1.0:
        assert sorted(set(uids)) == list(range(30 * TASKS)), "a task was lost"


def test_a_step_that_cannot_be_filled_ends_with_the_cause() -> None:
    run = toy(keep=0.0)
    with pytest.raises(
        WhetError, match=r"could not be filled: of 88 tasks only 0 gave a group.*but 8 are needed"
    ):
        asyncio.run(asyncio.wait_for(steps(run, 1), timeout=60))


def test_room_is_the_staleness_bound() -> None:
    """With staleness k at most k+1 steps' worth is asked for before anything was trained."""

    async def overfill(run: Toy) -> int:
        explored = 0
        try:
            while True:
                await asyncio.wait_for(explore_step(run, run.plan.tasks_per_step), timeout=0.2)
                explored += 1
        except TimeoutError:
            return explored

    for staleness in (0, 1, 3):
        run = toy(max_staleness=staleness)
        assert asyncio.run(overfill(run)) == staleness + 1


def test_a_version_the_trainer_does_not_know_is_refused() -> None:
    async def stale() -> None:
        run = toy()
        await explore_step(run, run.plan.tasks_per_step)
        run.policy.version = 1
        await run.buffer.take(run.policy.version)

    with pytest.raises(WhetError, match=r"versions 0\.\.0.*version 1"):
        asyncio.run(stale())


def test_an_engine_that_does_not_take_the_version_stops_the_run() -> None:
    run = toy()

    async def deaf(update: WeightUpdate) -> Receipt:
        return Receipt("the engine", update.version)

    run.engine.update_weights = deaf
    with pytest.raises(WhetError, match="the engine confirms version 1 and is at version 0, the policy at 1"):
        asyncio.run(steps(run, 1))


def test_buffer_state_comes_back() -> None:
    async def half() -> Toy:
        run = toy(chunk=3)
        await explore_step(run, run.plan.tasks_per_step)
        return run

    run = asyncio.run(half())

    other = toy(chunk=3)
    other.buffer.restore(copied(run.buffer.state()))
    assert other.buffer.waiting == run.buffer.waiting
    assert other.buffer.held == 3
