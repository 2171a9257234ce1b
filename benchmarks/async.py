"""Exploring and training at the same time: how close each schedule comes to the slower side, and what it costs.

    python benchmarks/async.py              all tables, about 11 minutes; writes benchmarks/async.json
    python benchmarks/async.py schedules    one of: schedules, straggler, overhead, ledger

The loop, the buffer and the explorers are whet's own; rollouts and training are simulated by sleeping, so what is
measured is the scheduling and not the CPU: rollouts take log-normal times on a bounded number of places, a step of
training a fixed one. The simulator of `whet plan --simulate` gets the same numbers and has to say the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_loop import SIZE, TASKS, toy
from whet.buffer.buffer import Buffer
from whet.guard.ledger import Ledger
from whet.loop import steps as loop_steps
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.rollout.scripted import ScriptedEngine
from whet.simulate import Costs, Mode, SimulatedSchedule, bound_s, simulate
from whet.types import Group, Request, Rollout, Sampling, Task

PLACES = 16
TRAIN_S = 0.25
STEPS = 40
RUNS = 3
"""Each with rollout times of its own: one run of long tails is off the mean of many by 4 % (a standard deviation)."""
SPREADS = (0.5, 1.0)
"""Sigma of log-normal rollout times; their mean is such that both sides need about the same time."""


def lengths(sigma: float, *, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    drawn = [rng.lognormvariate(0.0, sigma) for _ in range(4000)]
    mean_s = TRAIN_S * PLACES / (TASKS * SIZE)
    return [x * mean_s / (sum(drawn) / len(drawn)) for x in drawn]


class Places:
    """An engine that works on so many rollouts at once, each for a time that is drawn."""

    def __init__(self, times: list[float], seed: int) -> None:
        self.free, self.rng, self.times = asyncio.Semaphore(PLACES), random.Random(seed), times
        self.taken: list[float] = []
        """What the rollouts took: the simulator goes by these."""

    async def reply(self, token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        async with self.free:
            self.taken.append(self.rng.choice(self.times))
            await asyncio.sleep(self.taken[-1])
        return [7, 1]


def timed(
    mode: Mode, ahead: int, *, handler: Callable[..., Any], spare: int = 0, steps: int = STEPS
) -> list[float]:
    """Seconds of each step of the real loop."""
    run = toy(mode=mode, steps=steps, max_staleness=ahead, spare=spare, handler=handler, slots=PLACES)
    run.learner.update = lambda batch: time.sleep(TRAIN_S)

    async def drive() -> list[float]:
        marks = [time.perf_counter()]
        async for _ in loop_steps(run.stage, None, profiled=lambda number: nullcontext()):
            marks.append(time.perf_counter())
        await run.stage.close()
        return [end - start for start, end in itertools.pairwise(marks)]

    return asyncio.run(drive())


def schedules() -> list[dict[str, Any]]:
    """Every schedule at two spreads: measured, predicted, and against the bound of the slower side."""
    out: list[dict[str, Any]] = []
    ways: list[tuple[Mode, int]] = [("synchronous", 0), ("overlapped", 1)]
    ways += [("asynchronous", k) for k in (1, 2, 4)]
    for sigma in SPREADS:
        times = lengths(sigma)
        for mode, ahead in ways:
            schedule = SimulatedSchedule(
                mode=mode, groups_per_step=TASKS, group_size=SIZE, max_staleness=ahead, steps=STEPS
            )
            taken: list[float] = []
            seconds = 0.0
            for seed in range(RUNS):
                places = Places(times, seed)
                seconds += sum(timed(mode, ahead, handler=places.reply)) / STEPS / RUNS
                taken += places.taken
            costs = Costs(rollout_s=taken, train_s=TRAIN_S, slots=PLACES)
            predicted = sum(simulate(costs, schedule, seed=n).step_s for n in range(60)) / 60
            out.append(
                {
                    "sigma": sigma,
                    "schedule": f"{mode} {ahead}",
                    "s/step": round(seconds, 4),
                    "predicted": round(predicted, 4),
                    "off": f"{predicted / seconds - 1:+.1%}",
                    "of bound": f"{bound_s(costs, schedule) / seconds:.0%}",
                    "x in turn": round(next(r["s/step"] for r in out if r["sigma"] == sigma) / seconds, 2)
                    if mode != "synchronous"
                    else 1.0,
                }
            )
    return out


def straggler() -> list[dict[str, Any]]:
    """A rollout that never ends: the longest step against the median one; the median of several runs."""
    out = []
    ways: list[tuple[Mode, int, int]] = [("asynchronous", 2, 0), ("asynchronous", 0, 1)]
    for mode, ahead, spare in ways:
        runs = [_with_one_that_never_ends(mode, ahead, spare, seed) for seed in range(2 * RUNS - 1)]
        out.append(
            {
                "schedule": f"{mode} {ahead}" + (f" +{spare}" if spare else ""),
                "median s": round(median(map(median, runs)), 4),
                "longest s": round(median(map(max, runs)), 4),
                "ratio": round(median(max(times) / median(times) for times in runs), 3),
            }
        )
    return out


def _with_one_that_never_ends(mode: Mode, ahead: int, spare: int, seed: int) -> list[float]:
    """Seconds of each step of one run, but for those that begin and end it."""
    places, asked = Places(lengths(0.2), seed), itertools.count()

    async def reply(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        if next(asked) == 200:
            await asyncio.sleep(3600)
        return await places.reply(token_ids, sampling, version)

    return timed(mode, ahead, handler=reply, spare=spare, steps=20)[2:-1]


def overhead() -> list[dict[str, Any]]:
    """Seconds of scheduling for a rollout: the router alone, and the whole loop, with engines that answer at once."""
    out = []
    for replicas in (1, 8, 64, 512):
        count = 4096

        async def route(replicas: int = replicas, count: int = count) -> float:
            router = Router(Replica(str(n), ScriptedEngine(lambda *_: [7, 1])) for n in range(replicas))
            samplings = [Sampling(max_tokens=2, key=n) for n in range(count)]
            asked = [
                Request(id=str(n), session=str(n), prompt=(5, n % 64), sampling=sampling)
                for n, sampling in enumerate(samplings)
            ]
            start = time.perf_counter()
            await asyncio.gather(*map(router.generate, asked))
            seconds = time.perf_counter() - start
            await router.close()
            return seconds

        out.append({"replicas": replicas, "us a request": round(asyncio.run(route()) / count * 1e6, 1)})
    return out


def ledger() -> list[dict[str, Any]]:
    """The buffer's and ledger's cost of a rollout, early and late in a run of a million rollouts."""
    book = Ledger()
    buffer = Buffer(groups_per_step=64, group_size=8, max_staleness=0, reject=lambda g: None, ledger=book)
    task = Task(uid=0, source="s", prompt="")
    one = Rollout.one_strand(
        task=task, index=0, token_ids=[1, 2], mask=[0, 1], logprobs=[0.0, 0.0], sample_logprobs=[0.0, 0.0],
        versions=[-1, 0], finish_reason="stop", reward=1.0,
    )  # fmt: skip

    async def step(number: int) -> None:
        n = await buffer.room(64)
        tasks = [SimpleNamespace(uid=number * 64 + i) for i in range(n)]
        buffer.asked(tasks, 0)  # type: ignore[arg-type]
        await buffer.put([Group(t, (one,) * 8) for t in tasks], asked=n)  # type: ignore[arg-type]
        groups = await buffer.take(0)
        await buffer.trained(groups)
        buffer.leave()
        buffer.check()
        book.end_step()

    async def all_steps() -> list[float]:
        marks = []
        for number in range(1_000_000 // 512 + 1):
            start = time.perf_counter()
            await step(number)
            marks.append((time.perf_counter() - start) / 512)
        return marks

    marks = asyncio.run(all_steps())
    return [
        {"rollouts": name, "us a rollout": round(median(part) * 1e6, 2)}
        for name, part in (("the first 50,000", marks[2:98]), ("the last 50,000", marks[-98:]))
    ]


TABLES = {"schedules": schedules, "straggler": straggler, "overhead": overhead, "ledger": ledger}


def main(wanted: list[str]) -> None:
    found = {}
    for name in wanted or TABLES:
        found[name] = rows = TABLES[name]()
        print(f"\n{TABLES[name].__doc__}\n")
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    if not wanted:
        Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
