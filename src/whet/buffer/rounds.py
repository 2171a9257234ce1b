"""A synchronous schedule over several processes: the trainer requests tasks from separate explorers in rounds, each
with one version of the weights.

The trainer's loop is that of a single process, with its buffer; only the process that samples a task differs. A round
is open until all its groups have arrived, and new weights wait for that, so the step alone determines which weights
sample which task. Explorers share the tasks of a round; a group is the same whichever explorer samples it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial

from whet.buffer.stores import Store, until
from whet.types import Group, Json, Stopped, Task, WhetError

DELIVERED = "delivered"
"""The store's account of rollouts that the trainer has; what becomes of them is in the trainer's own."""
CONFIG = "config"
"""The note of the config that the rounds in the store belong to."""


class Rounds:
    """The trainer's end of a store. After a kill what was delivered since the checkpoint is delivered again."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.count = 0
        """Rounds that are delivered."""
        self.saved: int | None = None
        """`count` in the newest checkpoint; the one before it is surely on the disk."""

    async def play(
        self, tasks: Sequence[Task], version: int, *, stopping: Callable[[], bool] = lambda: False
    ) -> list[Group]:
        """The groups of consecutive tasks, scored, sampled with weights of this version. Raises Stopped once no caller
        waits for them any more (`stopping`): the same tasks may be requested again."""
        first, upto = tasks[0].uid, tasks[-1].uid + 1
        await asyncio.to_thread(self.store.begin_round, first, upto, version=version)
        groups = await until(partial(self._delivered, len(tasks), stopping))
        groups.sort(key=lambda group: group.task.uid)
        _check(groups, tasks, version)
        self.count += 1
        return groups

    def claim(self, fingerprint: Json) -> None:
        """Mark the store as this run's. WhetError if it belongs to a run with another config (its fingerprint)."""
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
        if self.store.noted(CONFIG) not in (None, digest):
            raise WhetError(
                "buffer.url has rounds of a run with another config, and their rollouts were sampled with it; give an "
                "empty store, or the config and run_dir of that run"
            )
        self.store.note(CONFIG, digest)

    def _delivered(self, n: int, stopping: Callable[[], bool]) -> list[Group] | None:
        if stopping():
            raise Stopped
        delivery = self.count + 1
        groups = self.store.gather(n, delivery=delivery)
        if groups is not None:
            self.store.end(delivery, [(group.task.uid, DELIVERED) for group in groups])
        return groups

    def state(self) -> Json:
        """For the checkpoint."""
        if self.saved is not None:
            self.store.done(self.saved)
        self.saved = self.count
        return {"count": self.count}

    def restore(self, state: Json) -> None:
        """Continue after those rounds."""
        self.count = self.saved = state["count"]
        self.store.done(self.count)


def _check(groups: Sequence[Group], tasks: Sequence[Task], version: int) -> None:
    """WhetError unless these are the tasks, played by these weights."""
    asked = f"tasks {tasks[0].uid} to {tasks[-1].uid} were requested with weights version {version}, but"
    played = {v for group in groups for rollout in group.rollouts for v in rollout.sampled_versions}
    if played - {version}:
        raise WhetError(
            f"{asked} buffer.url has groups of versions {sorted(played)}, which belong to another run; restart "
            "with an empty store"
        )
    found = [(group.task.uid, group.task.token_ids) for group in groups]
    if found != [(task.uid, task.token_ids) for task in tasks]:
        raise WhetError(
            f"{asked} the explorers sampled tasks {found[0][0]} to {found[-1][0]}, or tasks with other prompts: their "
            "data differs from the trainer's, or the data changed; give all processes the same data, and restart with "
            "an empty store"
        )
