"""Exploring while training: who samples with which weights, what waits for whom, and what becomes of late rollouts.

The flow runs on `ScriptedEngine` and a policy that only counts; the rest are whole small runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial as partial_of
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow.parquet as pq
import pytest

import whet
from codecs_numbers import Numbers
from forked import Started
from jumping import go
from test_loop import SIZE, TASKS, toy
from test_staleness import run as small_run
from whet.checkpoint import copied
from whet.envs.env import EnvStep, World
from whet.learner import Learned
from whet.loop import steps as loop_steps
from whet.simulate import Costs, SimulatedSchedule, bound_s
from whet.types import Message, Sampling, Task, WhetError


def slow_one(slow: set[int], *, seconds: float = 60.0) -> Any:
    """Replies at once, but the n-th requests in `slow` take long. (Requests are counted from 0.)"""
    asked = iter(range(10**9))

    async def reply(token_ids: list[int], sampling: Any, version: int) -> list[int]:
        await asyncio.sleep(seconds if next(asked) in slow else 0.0)
        return [7, 1]

    return reply


# ---------------------------------------------------------------- a fixed schedule


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("keep", [1.0, 0.4])
def test_weights_follow_from_the_step_alone(ahead: int, keep: float) -> None:
    run = toy(mode="overlapped", steps=12, max_staleness=ahead, keep=keep, max_refills=1000)
    run.go()
    assert run.learner.seen == [(step, [max(0, step - ahead)]) for step in range(12)]
    assert run.ledger.pending == 0, "more was asked than the steps need"
    uids = [(r.task.uid, r.index) for r in run.learner.rollouts]
    assert len(uids) == len(set(uids)) == 12 * TASKS * SIZE
    if keep == 1.0:
        assert [uid for uid, _ in uids] == sorted(uid for uid, _ in uids), "trained in the order of the tasks"


def test_exploring_really_goes_on_while_a_step_is_trained() -> None:
    """The second step's rollouts end only while the first is trained, which ends only after they have."""
    training, sampled = threading.Event(), threading.Event()
    asked = iter(range(10**9))

    async def reply(token_ids: list[int], sampling: Any, version: int) -> list[int]:
        number = next(asked)
        while number >= TASKS * SIZE and not training.is_set():
            await asyncio.sleep(0.001)
        if number == 2 * TASKS * SIZE - 1:
            sampled.set()
        return [7, 1]

    run = toy(mode="overlapped", steps=2, max_staleness=1, handler=reply)

    def waits(batch: Any) -> None:
        training.set()
        assert sampled.wait(10), "nothing was sampled meanwhile"

    run.learner.update = waits
    run.go()


def test_an_error_of_the_explorers_ends_the_step() -> None:
    run = toy(mode="overlapped", steps=9, max_staleness=1)
    put, calls = run.buffer.put, iter(range(100))

    async def broken(groups: Any, asked: int) -> None:
        if next(calls) == 2:
            raise WhetError("rewards fail")
        await put(groups, asked)

    run.buffer.put = broken  # type: ignore[method-assign]
    with pytest.raises(WhetError, match="rewards fail"):
        run.go()
    assert run.learner.version == 1


def test_an_error_of_the_learner_ends_what_is_sampled_beside_it() -> None:
    run = toy(mode="overlapped", steps=9, max_staleness=1, handler=slow_one({TASKS * SIZE}))

    def broken(batch: Any) -> None:
        raise WhetError("the update fails")

    run.learner.update = broken
    with pytest.raises(WhetError, match="the update fails"):
        run.go(within=20)


# ---------------------------------------------------------------- a free schedule


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_delays_nothing_is_lost_or_stale(seed: int) -> None:
    rng = random.Random(seed)
    ahead, spare, keep = rng.choice([0, 1, 3]), rng.choice([0, 2]), rng.choice([1.0, 0.5])

    async def reply(token_ids: list[int], sampling: Any, version: int) -> list[int]:
        await asyncio.sleep(rng.lognormvariate(-7.0, 1.5))
        return [7, 1]

    run = toy(
        mode="asynchronous", steps=25, max_staleness=ahead, spare=spare, keep=keep, handler=reply, seed=seed,
        max_refills=1000,
    )  # fmt: skip
    run.go()
    assert len(run.learner.rollouts) == 25 * TASKS * SIZE
    uids = Counter((r.task.uid, r.index) for r in run.learner.rollouts)
    assert max(uids.values()) == 1, "a rollout was trained on twice"
    for version, seen in run.learner.seen:
        assert version - ahead <= min(seen) <= max(seen) <= version
    assert run.ledger.pending == 0, "what is left at the end is booked"


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_four_versions_ahead_the_loop_loses_little_of_what_the_slower_side_allows(sigma: float) -> None:
    """Log-normal times of rollouts on 16 slots; sampling and training need the same, the hardest case to overlap. The
    clock jumps, so nothing but the schedule is measured."""
    train_s, slots, steps = 0.25, 16, 40
    rng = random.Random(0)
    drawn = [rng.lognormvariate(0.0, sigma) for _ in range(4000)]
    times = [x * train_s * slots / (TASKS * SIZE) * len(drawn) / sum(drawn) for x in drawn]
    taken: list[float] = []

    async def seconds(seed: int) -> float:
        free, rng, loop = asyncio.Semaphore(slots), random.Random(seed), asyncio.get_running_loop()

        async def reply(token_ids: list[int], sampling: Any, version: int) -> list[int]:
            async with free:
                taken.append(rng.choice(times))
                await asyncio.sleep(taken[-1])
            return [7, 1]

        async def learn(step: int, batch: Any, groups: list[Any]) -> Learned:
            await asyncio.sleep(train_s)
            return Learned(batch, groups, {}, (), 0.0)

        run = toy(mode="asynchronous", steps=steps, max_staleness=4, handler=reply, slots=slots)
        run.learner.learn = learn
        begun = loop.time()
        await run.run()
        return loop.time() - begun

    whole_s = sum(go(seconds(seed)) for seed in range(3)) / 3
    schedule = SimulatedSchedule(
        mode="asynchronous", groups_per_step=TASKS, group_size=SIZE, max_staleness=4, steps=steps
    )
    bound = bound_s(Costs(rollout_s=taken, train_s=train_s, slots=slots), schedule)
    assert 0.95 <= bound * steps / whole_s <= 1


def test_a_rollout_that_never_ends_delays_no_step() -> None:
    """Its group is given up after max_staleness versions, its room comes back, and its request is cancelled."""
    run = toy(mode="asynchronous", steps=10, max_staleness=2, handler=slow_one({5}))
    run.go(within=30)
    assert len(run.learner.rollouts) == 10 * TASKS * SIZE
    assert 1 not in {r.task.uid for r in run.learner.rollouts}, "task 1 asked the request that never ends"
    assert run.ledger.state()["total"]["rejected/stale"] == SIZE
    assert run.ledger.pending == 0


@pytest.mark.parametrize(("ahead", "every"), [(0, 4), (1, 3), (2, 4)])
def test_between_two_syncs_nothing_is_sampled_that_would_be_too_old(ahead: int, every: int) -> None:
    """Of weights that were given at version v, (ahead + every) steps' worth is asked: what comes later of them is
    older than the bound when its turn comes. verl 0.9.1 counts the rollouts of a sync in the same way."""
    run = toy(mode="asynchronous", steps=6 * every, max_staleness=ahead, sync_interval=every)
    given: Counter[int] = Counter()
    asked = run.buffer.asked

    def counted(tasks: Any, version: int) -> None:
        given[version] += len(tasks)
        asked(tasks, version)

    run.buffer.asked = counted  # type: ignore[method-assign]
    run.go()
    assert run.ledger.state()["total"].get("rejected/stale", 0) == 0
    assert set(given) <= set(range(0, 6 * every, every))
    assert given[0] == (ahead + every) * TASKS
    assert max(given.values()) == given[0]
    assert {version - min(seen) for version, seen in run.learner.seen} <= set(range(ahead + every))


def test_spare_tasks_let_an_on_policy_step_go_on() -> None:
    run = toy(mode="asynchronous", steps=4, max_staleness=0, spare=1, handler=slow_one({5, 60, 100}))
    run.go(within=30)
    assert [seen for _, seen in run.learner.seen] == [[0], [1], [2], [3]], "still on-policy"


@pytest.mark.parametrize("slots", [1, 6, 8])
def test_no_task_is_requested_before_there_is_a_slot_for_it(slots: int) -> None:
    """What waits for a slot would only get older. A rollout that is over gives its slot back at once."""
    sampled, most = 0, 0

    async def reply(token_ids: list[int], sampling: Any, version: int) -> list[int]:
        nonlocal sampled, most
        sampled += 1
        most = max(most, sampled)
        await asyncio.sleep(random.random() * 0.004)
        sampled -= 1
        return [7, 1]

    run = toy(mode="asynchronous", steps=6, max_staleness=4, handler=reply, slots=slots)
    run.go()
    assert len(run.learner.rollouts) == 6 * TASKS * SIZE
    assert slots <= most < slots + SIZE, "all slots are used, and less than a group waits"
    assert run.ledger.pending == 0


def test_a_group_that_is_given_up_frees_its_slots() -> None:
    run = toy(mode="asynchronous", steps=6, max_staleness=1, handler=slow_one({1, 9}), slots=2 * SIZE)
    run.go(within=30)
    assert len(run.learner.rollouts) == 6 * TASKS * SIZE
    assert not run.explorer.slots.open


@pytest.mark.parametrize("partial", [False, True])
def test_episodes_end_before_a_sync_unless_they_may_go_on_after_it(partial: bool) -> None:
    """Those of task 1 have two turns. Between them they wait for a sync: then the engine has nothing to finish. The
    sync waits for them, or they get what they wait for."""
    run = toy(mode="asynchronous", steps=4, max_staleness=3, partial_rollout=partial)
    synced: list[bool] = []

    class TwoTurns:
        def __init__(self, task: Task, world: World) -> None:
            self.turns = 1 if task.uid == 1 else 0

        async def first(self) -> list[Message]:
            return []

        async def step(self, reply: Message) -> EnvStep:
            if self.turns:
                self.turns -= 1
                end = time.monotonic() + (20.0 if partial else 1.0)
                while run.engine.version == 0 and time.monotonic() < end:
                    await asyncio.sleep(0.01)
                synced.append(run.engine.version > 0)
                return EnvStep([Message("user", "7")], done=False)
            return EnvStep(done=True)

    play, sampling = cast(Any, run.explorer.play), Sampling(max_tokens=4)
    run.explorer.play = partial_of(play, make_env=TwoTurns, codec=Numbers(), sampling=sampling)
    run.go()
    assert synced == [partial] * SIZE
    trained = [r for r in run.learner.rollouts if r.task.uid == 1]
    assert [(len(r.turns), len(r.sampled_versions)) for r in trained] == [(2, 1 + partial)] * SIZE


def test_interrupted_rollouts_go_on_under_the_new_weights() -> None:
    """ScriptedEngine keeps requests in flight over a sync: nobody is asked twice, nobody is lost."""
    run = toy(mode="asynchronous", steps=6, max_staleness=3, handler=slow_one({3, 40}, seconds=0.2))
    run.go()
    assert len(run.learner.rollouts) == 6 * TASKS * SIZE


def test_an_error_of_a_free_explorer_reaches_the_trainer() -> None:
    run = toy(mode="asynchronous", steps=5, max_staleness=1)

    async def broken(groups: Any, asked: int) -> None:
        raise WhetError("the disk is full")

    run.buffer.put = broken  # type: ignore[method-assign]
    with pytest.raises(WhetError, match="the disk is full"):
        run.go()


@pytest.mark.parametrize("lost", ["", "restarts", "alone"])
def test_a_wait_for_groups_begins_anew_with_episodes_whose_host_was_lost(lost: str) -> None:
    """Each group takes 100 s, and a wait for one 80 s: rollout.timeout_s=20 and a minute. After 50 s a host is lost, so
    the episodes began anew with all of their time, or one that waited for a host of its own has begun there; without
    that nothing explains the 100 s."""
    run = toy(mode="asynchronous", steps=1)
    play, begun = run.explorer.play, [0]

    async def slow(tasks: Any) -> Any:
        await asyncio.sleep(50.0)
        begun[0] += 1
        await asyncio.sleep(50.0)
        return await play(tasks)

    run.explorer.play = slow
    if lost:
        setattr(run.explorer, lost, lambda: begun[0])

    async def story() -> int:
        try:
            return len(await run.explorer.collect(0, 0))
        finally:
            await run.explorer.close()

    if lost:
        assert go(story()) == TASKS
    else:
        with pytest.raises(WhetError, match="waited 80 s for a group of rollouts and timed out"):
            go(story())


def test_a_free_step_that_cannot_be_filled_says_so() -> None:
    with pytest.raises(WhetError, match=r"could not be filled: of \d+ tasks only 0 gave a group"):
        toy(mode="asynchronous", steps=5, max_staleness=1, keep=0.0).go()


def test_what_was_under_way_is_asked_again_after_a_resume() -> None:
    run = toy(mode="asynchronous", steps=8, max_staleness=2, handler=slow_one({1}))
    saved: dict[str, Any] = {}

    async def half() -> None:
        async for _ in loop_steps(run.stage, None, profiled=lambda number: nullcontext()):
            if run.stage.context.monitor.step == 2:
                break
        saved.update(buffer=copied(run.buffer.state()), ledger=run.ledger.state(), drawn=run.stream.drawn)
        await run.stage.close()

    asyncio.run(half())
    assert 0 in [task["uid"] for task in saved["buffer"]["under_way"]]
    after = toy(mode="asynchronous", steps=8, max_staleness=2)
    after.explorer.in_flight.again = after.buffer.restore(saved["buffer"], 2)
    after.buffer.ledger = type(after.ledger).from_state(saved["ledger"])
    after.stream.drawn, after.learner.version, after.engine.version = saved["drawn"], 2, 2
    after.go(done=2)
    both = (*run.learner.rollouts, *after.learner.rollouts)
    assert {r.task.uid for r in both} == set(range(8 * TASKS)), "a task was lost"
    assert after.ledger.state()["total"]["asked"] == 8 * TASKS * SIZE, "and none was counted twice"
    assert after.ledger.pending == 0


# ---------------------------------------------------------------- whole runs

ROLLOUT: dict[str, Any] = {"group_size": 4, "sampling": {"max_tokens": 6}}


def versions(result: Any, steps: int = 6) -> list[set[int]]:
    """Policy versions that the tokens trained on in each step came from."""
    out = []
    for step in range(1, steps + 1):
        table = pq.read_table(result.run_dir / "rollouts" / f"main-step-{step:06d}.parquet")
        rows = zip(table["versions"].to_pylist(), table["advantage"].to_pylist())
        out.append({v for row, advantage in rows if advantage is not None for v in row if v >= 0})
    return out


def test_a_run_ahead_of_itself(tmp_path: Path) -> None:
    result = small_run(tmp_path / "a", rollout=ROLLOUT | {"max_staleness": 2})
    assert versions(result) == [{0}, {0}, {0}, {1}, {2}, {3}]
    lines = [line for line in result.metrics if "train/loss" in line]
    assert [line["train/staleness_mean"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert lines[-1]["ledger/pending_rollouts"] == 0
    again = small_run(tmp_path / "b", rollout=ROLLOUT | {"max_staleness": 2})
    assert again.metrics == result.metrics, "the same run twice, bit for bit"
    exported = [(r.run_dir / "export/main/model.safetensors").read_bytes() for r in (result, again)]
    assert exported[0] == exported[1]


def test_ahead_and_synced_less_often(tmp_path: Path) -> None:
    result = small_run(tmp_path, rollout=ROLLOUT | {"max_staleness": 1, "sync_interval": 2})
    assert versions(result) == [{0}, {0}, {0}, {2}, {2}, {4}]


def test_a_free_run_that_is_synced_less_often_throws_nothing_away(tmp_path: Path) -> None:
    """Of each version that is given, 1 + 3 steps' worth: 3 trained before the next is given, and one after."""
    rollout = ROLLOUT | {"max_staleness": 1, "sync_interval": 3, "schedule": "async"}
    lines = [line for line in small_run(tmp_path, rollout=rollout).metrics if "train/loss" in line]
    assert sum(line.get("ledger/requested_rollouts", 0) for line in lines) == 6 * 8
    assert all("ledger/rejected/stale_rollouts" not in line for line in lines)
    assert [line["train/staleness_mean"] for line in lines] == [0, 1, 2, 3, 1, 2]


def test_a_free_run_learns_and_balances(tmp_path: Path) -> None:
    result = small_run(
        tmp_path,
        rollout=ROLLOUT | {"max_staleness": 2, "schedule": "async", "spare_tasks": 2, "retries": 1},
        eval={"interval": 3, "at_start": True, "at_end": True},
    )
    lines = [line for line in result.metrics if "train/loss" in line]
    assert len(lines) == 6
    assert all(line["train/staleness_mean"] <= 2 for line in lines)
    assert lines[-1]["ledger/pending_rollouts"] == 0
    assert result.accuracy is not None


FREE_RUN = """
import sys, whet
from test_staleness import ROWS, share_of_a
whet.train(
    run_dir=sys.argv[1],
    model={"scratch": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}},
    tokenizer={"build": "chars"},
    data={"train": [{"rows": ROWS}]},
    rollout={"group_size": 4, "sampling": {"max_tokens": 6}, "max_staleness": 2, "schedule": "async"},
    train={"steps": 40, "tasks_per_step": 2, "optimizer": {"lr": 1e-3}},
    machine={"threads": 1},
    checkpoint={"interval": 3},
    track={"trackers": ["jsonl"]},
    rewards={"a": share_of_a},
)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_free_run_killed_at_random_goes_on_and_balances(tmp_path: Path, kills: int) -> None:
    """Which groups a step takes depends on time, so the resumed run is another; but no task is lost or booked twice."""
    run_dir, said = tmp_path / "run", tmp_path / "said"
    rng = random.Random(7)
    children: set[psutil.Process] = set()
    for kill in range(kills + 1):
        process = Started(str(run_dir), code=FREE_RUN, said=said)
        if kill < kills:
            lines = run_dir / "metrics.jsonl"
            before = lines.stat().st_size if lines.exists() else 0
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                if lines.exists() and lines.stat().st_size > before + rng.randrange(500, 9000):
                    break
                time.sleep(0.02)
            children.update(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait(30)
        else:
            assert process.wait(120) == 0, process.text()[-3000:]
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found if "train/loss" in line] == list(range(1, 41))
    assert found[-1]["ledger/pending_rollouts"] == 0
    assert children, "rewards run in processes of their own"
    assert psutil.wait_procs(children, timeout=10)[1] == [], "a process was left behind"


def test_settings_that_do_nothing_are_refused(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    for given, said in (
        ({"partial_rollout": False}, r"rollout\.partial"),
        ({"spare_tasks": 2}, r"rollout\.spare_tasks"),
    ):
        with pytest.raises(whet.ConfigError, match=said):
            small_run(tmp_path, rollout=ROLLOUT | given)


# ---------------------------------------------------------------- training on groups again


def test_a_share_of_every_step_is_trained_on_again(tmp_path: Path) -> None:
    """From the second step on half of the groups are those of the step before; they are neither asked nor booked anew,
    and their old log-probs are computed, not taken from the engine."""
    result = small_run(tmp_path, rollout=ROLLOUT, buffer={"replay": {"share": 0.5}})
    lines = [line for line in result.metrics if "train/loss" in line]
    assert [line["ledger/trained_rollouts"] for line in lines] == [8, 4, 4, 4, 4, 4]
    assert [line["ledger/requested_rollouts"] for line in lines] == [8, 4, 4, 4, 4, 4]
    assert lines[-1]["ledger/pending_rollouts"] == 0
    assert [line["train/staleness_mean"] > 0 for line in lines] == [False, True, True, True, True, True]
    again = small_run(tmp_path / "again", rollout=ROLLOUT, buffer={"replay": {"share": 0.5}})
    assert again.metrics == result.metrics


def test_replay_needs_to_know_the_step_before(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match=r"buffer\.replay\.share: the groups to replay"):
        small_run(tmp_path, rollout=ROLLOUT | {"max_staleness": 1}, buffer={"replay": {"share": 0.5}})


def test_a_free_run_may_replay(tmp_path: Path) -> None:
    result = small_run(
        tmp_path,
        rollout=ROLLOUT | {"max_staleness": 2, "schedule": "async"},
        buffer={"replay": {"share": 0.5}},
    )
    lines = [line for line in result.metrics if "train/loss" in line]
    assert len(lines) == 6
    assert lines[-1]["ledger/pending_rollouts"] == 0
