"""An explorer or the trainer of tests/test_stores.py as a process: python store_worker.py KIND URL QUEUE STEPS."""

import sys
import time

from whet.buffer.stores import Scored, open_store
from whet.types import Group, Rollout, Task


def group(uid: int, *, version: int = 0, size: int = 2) -> Group:
    """Rollouts that differ by task, place and version."""
    task = Task(uid=uid, source="s", prompt=f"task {uid}", answer="4", token_ids=(1, 2))
    rollouts = tuple(
        Rollout.one_strand(
            task=task,
            index=i,
            token_ids=[1, 2, 3 + uid, 4],
            mask=[0, 0, 1, 1],
            logprobs=[0.0, 0.0, -0.1 * uid, -1 / 3],
            sample_logprobs=[0.0, 0.0, -0.5, -1 / 7],
            versions=[-1, -1, version + i, version + i],
            finish_reason="stop",
            reward=float(i),
            reward_parts={"a": 1 / 3},
        )
        for i in range(size)
    )
    return Group(task, rollouts)


def uids_of(groups: list[Group]) -> list[int]:
    return [g.task.uid for g in groups]


def train(url: str, queue: str, steps: int) -> None:
    """Every third step is a checkpoint."""
    store = open_store(url, queue=queue, order="arrival")
    step = store.noted("checkpoint") or 0
    store.done(step)
    while step < steps:
        if taken := store.take(4, step=step + 1):
            step += 1
            print(step, uids_of(taken), flush=True)
            store.trained(step)
            if step % 3 == 0 or step == steps:
                store.note("checkpoint", step)
                store.done(step)
        time.sleep(0.005)
    store.note("finished", True)
    store.close()


def explore(name: str, url: str, queue: str) -> None:
    store = open_store(url, queue=queue, order="arrival")
    store.release(name)
    while not store.noted("finished"):
        for uid in store.reserve(name, 3, capacity=12, rollouts=2, lease_s=30.0):
            store.put([Scored(uid, group(uid))])
        time.sleep(0.005)
    store.close()


if __name__ == "__main__":
    kind, url, queue, steps = sys.argv[1:]
    if kind == "trainer":
        train(url, queue, int(steps))
    else:
        explore(kind, url, queue)
