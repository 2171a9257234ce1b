"""What a group costs in each store between explorers and trainer, and whether 10^5 groups in it change that.

    python benchmarks/stores.py                        SQLite and a folder, empty and with 10^5 groups in them: minutes
    python benchmarks/stores.py 1000                   with so many groups instead: seconds
    python benchmarks/stores.py 100000 postgresql://USER@HOST/DATABASE    one store by its URL

A group is 8 rollouts of 300 tokens, put and taken 8 at a time; those that only fill the store are one rollout of 8
tokens. The last rows are the one queue of fresh and used groups (`buffer.replay.queue`): entering it and being drawn.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from whet.buffer.priority import priority
from whet.buffer.replay import Replay
from whet.buffer.stores import Scored, Store, open_store
from whet.types import Group, Rollout, Task

GROUPS = 512
"""Measured."""
AT_ONCE = 8
Row = dict[str, Any]


def group(uid: int, *, size: int = 8, tokens: int = 300) -> Group:
    rng = random.Random(uid)
    task = Task(uid=uid, source="bench", prompt="what is 2 + 2? " * 10, answer="4", token_ids=(1, 2))

    def rollout(index: int) -> Rollout:
        logprobs = [-rng.random() for _ in range(tokens)]
        return Rollout.one_strand(
            task=task,
            index=index,
            token_ids=[rng.randrange(150_000) for _ in range(tokens)],
            mask=[1] * tokens,
            logprobs=logprobs,
            sample_logprobs=logprobs,
            versions=[3] * tokens,
            finish_reason="stop",
            reward=1.0,
        )

    return Group(task, tuple(map(rollout, range(size))))


def put(store: Store, count: int, *, at_once: int = AT_ONCE, size: int = 8, tokens: int = 300) -> float:
    """Seconds in the store for so many groups; making them is not counted."""
    spent = 0.0
    for _ in range(count // at_once):
        uids = store.reserve("bench", at_once, capacity=10**9, rollouts=size, lease_s=3600)
        scored = [Scored(uid, group(uid, size=size, tokens=tokens)) for uid in uids]
        start = time.perf_counter()
        store.put(scored)
        spent += time.perf_counter() - start
    return spent


def take(store: Store, count: int) -> float:
    """Seconds for so many groups, trained and done with. The newest are taken first, so that they are whole ones."""
    start = time.perf_counter()
    for step in range(1, count // AT_ONCE + 1):
        assert len(store.take(AT_ONCE, step=step)) == AT_ONCE
        store.trained(step)
        store.done(step)
    return time.perf_counter() - start


def of_store(url: str, inside: int) -> Iterator[Row]:
    for held in (0, inside):
        store = open_store(url, queue=f"bench-{time.time_ns()}", order="newest")
        put(store, held, at_once=1000, size=1, tokens=8)
        in_ms, out_ms = (1e3 * act(store, GROUPS) / GROUPS for act in (put, take))
        store.check()
        store.close()
        yield {"store": url.partition("://")[0], "inside": held, "put ms": in_ms, "take ms": out_ms}


def of_queue(inside: int) -> Iterator[Row]:
    settings = {"decay": 2.0, "use_limit": None, "sigma": 1.0}
    name = "linear_decay_use_count_control_randomization"
    for held in (0, inside):
        queue = Replay(
            capacity=held + GROUPS,
            priority=priority(name, settings),
            cooldown_steps=1,
            max_staleness=None,
            seed=0,
        )
        queue.add([group(uid, size=1, tokens=8) for uid in range(held)])
        groups = [group(held + n) for n in range(GROUPS)]
        start = time.perf_counter()
        queue.add(groups)
        middle = time.perf_counter()
        for step in range(GROUPS // AT_ONCE):
            queue.draw(AT_ONCE, step=step, version=3)
        in_ms, out_ms = (1e3 * s / GROUPS for s in (middle - start, time.perf_counter() - middle))
        yield {"store": "one queue", "inside": held, "put ms": in_ms, "take ms": out_ms}


def main(inside: int = 100_000, *urls: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for url in urls or (f"sqlite:///{folder}/q.db", f"files:///{folder}/q"):
            for row in of_store(url, inside):
                print(
                    "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                )
    for row in of_queue(inside):
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main(*(int(arg) if arg.isdecimal() else arg for arg in sys.argv[1:]))  # type: ignore[arg-type]
