"""A run in several processes: explorers that follow the trainer's weights, and an evaluation process that follows its
checkpoints.

The trainer (mode=train) is the loop itself, with `loop.train_only` where the schedule is asynchronous. The processes
find each other by two places: the store of buffer.url, and the trainer's run directory, where `weights/` has the newest
versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from whet import checkpoint
from whet.buffer.queue import ExplorerQueue
from whet.buffer.stores import Store, open_store
from whet.config.checks_sync import content_of
from whet.explorers import Explorers
from whet.guard import stacks
from whet.loop import evaluation, explore
from whet.run import Run
from whet.shared import Shared
from whet.stages import grouping, open_stage, queue_name
from whet.sync.exchange import Receiver
from whet.sync.files import Files
from whet.sync.weights import hand_over
from whet.track.files import is_running
from whet.types import WhetError

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks for new weights and for the end."""
SAY_S = 30.0
"""Between two words on how far it is."""
REPORT_S = 60.0
"""Between two words on a wait for the trainer."""


async def run_beside(shared: Shared, home: Path) -> None:
    """A process beside the trainer, whose run directory is `home`."""
    try:
        await (explore_all if shared.loaded.config.mode == "explore" else bench_all)(shared, home)
    finally:
        shared.environments.close()
        if shared.engine is not None:
            await shared.engine.close()


async def explore_all(shared: Shared, home: Path) -> None:
    """Explore every stage that samples, for as long as its trainer trains."""
    for index, plan in enumerate(shared.plans):
        if plan.algorithm.kind == "online" and not shared.stop.requested:
            await explore_stage(shared, index, home)


async def explore_stage(shared: Shared, index: int, home: Path) -> None:
    """One stage: from the moment its trainer has begun it until it has finished it."""
    cfg, name = shared.loaded.stages[index], shared.loaded.names[index]
    store = open_store(cfg.buffer.url, queue=queue_name(cfg, name), order=cfg.buffer.order)
    run = open_stage(shared, index, explores=True)
    engine = run.engine
    assert engine is not None
    shared.directory.timeline.at = name, 0
    queue = ExplorerQueue(
        store,
        owner=cfg.buffer.explorer_name,
        groups_per_step=run.plan.own_tasks_per_step,
        group_size=run.plan.group_size,
        max_staleness=cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1,
        spare=cfg.rollout.spare_tasks,
        lease_s=cfg.buffer.lease_s,
        version=None if cfg.rollout.schedule == "async" else lambda: engine.version,
        **grouping(cfg, run.plan),
    )
    run.buffer = queue  # type: ignore[assignment]
    run.explorers = Explorers(queue, partial(queue.draw, at=run.tasks.at), partial(explore, run))  # type: ignore[arg-type]
    weights = Weights(run, home / "weights")
    try:
        if not await begun(run, store, weights):
            return
        store.release(queue.owner)  # what an earlier process of this name had
        run.explorers.start(left=0)
        async with lease(queue):
            await follow(run, store, weights)
    finally:
        await run.close()
        queue.close()
        store.release(queue.owner)
        store.close()


class Weights:
    """The trainer's newest weights, in the engine."""

    def __init__(self, run: Run, folder: Path) -> None:
        cfg = run.cfg.sync
        self.run, self.transport = run, Files(folder, timeout_s=cfg.timeout_s, keep=cfg.keep)
        adapters = content_of(run.cfg) == "adapters"
        # the engine's own: what is under adapters is here already
        module = run.policy.module if adapters else None
        self.receiver = Receiver(self.transport, name=run.cfg.buffer.explorer_name, module=module)

    def reached(self, version: int) -> bool:
        """The engine has this version or a newer one."""
        return self.receiver.version is not None and self.receiver.version >= version

    async def take(self) -> bool:
        """Take a newer version if there is one."""
        run, newest = self.run, self.transport.newest()
        assert run.engine is not None
        if newest is None or self.reached(newest):
            return False
        try:
            await self.receiver.load(run.engine, newest, finish=not run.cfg.rollout.partial_rollout)
        except WhetError as error:
            if self.transport.newest() == newest or run.engine.version != self.receiver.version:
                raise
            log.info("%s", error)  # the trainer was faster: the next look finds a newer one
            return False
        run.directory.timeline.flush()
        log.info("weights version %d", newest)
        return True


async def begun(run: Run, store: Store, weights: Weights) -> bool:
    """Wait until the trainer has begun this stage, and load its weights. False: the trainer has finished the stage, or
    a stop was requested.

    Raises WhetError if the trainer publishes nothing for sync.timeout_s: neither this stage nor new weights.
    """
    patience_s, since, seen = run.cfg.sync.timeout_s, time.monotonic(), weights.transport.newest()
    run.display.phase("wait for the trainer")
    while not run.stopping:
        run.watch.beat("waiting for the trainer")
        if store.noted("finished"):
            return False
        if (first := store.noted("began")) is not None:
            await weights.take()
            if weights.reached(first):
                return True
        if (newest := weights.transport.newest()) != seen:
            since, seen = time.monotonic(), newest
        if time.monotonic() - since > patience_s:
            raise WhetError(
                f"explorer {run.cfg.buffer.explorer_name!r} waited {patience_s:g} s for the trainer to begin stage "
                f"{run.name!r}: nothing new in {weights.transport.root}, "
                f"{'nothing' if first is None else f'but version {first} announced'} in buffer.url. Is "
                "`whet train FILE mode=train` running, with the same name, run_dir and buffer.url? "
                f"sync.timeout_s={patience_s:g} sets the limit"
            )
        await asyncio.sleep(LOOK_S)
    return False


async def follow(run: Run, store: Store, weights: Weights) -> None:
    """Load every new version, until the trainer has finished the stage or a stop is requested."""
    queue: ExplorerQueue = run.buffer  # type: ignore[assignment]
    said, before, idle = time.monotonic(), 0, Idle(run, weights.transport.root.parent)
    run.display.phase("explore")
    while not run.stopping and not store.noted("finished"):
        if queue.broken is not None:
            raise queue.broken
        await weights.take()
        run.watch.beat("exploring")
        idle.look((queue.count, weights.receiver.version), busy=bool(run.explorers.playing))
        if time.monotonic() - said > SAY_S:
            rate = (queue.count - before) / (time.monotonic() - said)
            said, before = time.monotonic(), queue.count
            run.display.message(
                f"{queue.count} groups, {rate:.3g}/s, weights version {weights.receiver.version}"
            )
        await asyncio.sleep(LOOK_S)
    run.display.message(f"explored {queue.count} groups of stage {run.name!r}")


class Idle:
    """An explorer's wait for room, which only the trainer makes: it is logged every minute, and has a limit.

    A trainer that is alive on this machine may take any time; one that is dead, or on another machine, has
    sync.timeout_s to be restarted.
    """

    def __init__(self, run: Run, home: Path) -> None:
        self.run, self.home = run, home
        self.seen: object = None
        self.since = self.said = time.monotonic()

    def look(self, seen: object, *, busy: bool) -> None:
        """seen: a value that changes as long as the trainer trains. Raises WhetError when the wait times out."""
        now = time.monotonic()
        if busy or seen != self.seen:
            self.seen, self.since, self.said = seen, now, now
            return
        lives, patience_s = is_running(self.home), self.run.cfg.sync.timeout_s
        who = {True: "it runs", False: "its process is dead", None: "it is on another machine"}[lives]
        what = (
            f"explorer {self.run.cfg.buffer.explorer_name!r} has waited {now - self.since:.0f} s for the trainer to "
            f"take rollouts of stage {self.run.name!r}, since weights version {self.run.engine.version}: {who}"  # type: ignore[union-attr]
        )
        if now - self.since > patience_s and not lives:
            raise WhetError(
                f"{what}. Restart the trainer, then this explorer; sync.timeout_s={patience_s:g} is exceeded"
            )
        if now - self.said >= REPORT_S:
            self.said = now
            log.warning("%s\n%s", what, stacks.everyone())


@asynccontextmanager
async def lease(queue: ExplorerQueue) -> AsyncIterator[None]:
    """Renew the explorer's lease a few times per lease period, as long as the block runs."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(queue.lease_s / 4)
            await asyncio.to_thread(queue.renew)

    def ended(keeping: asyncio.Task[None]) -> None:
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            queue.fail(error)

    keeping = asyncio.create_task(keep())
    keeping.add_done_callback(ended)
    try:
        yield
    finally:
        keeping.cancel()


# ---------------------------------------------------------------- bench


async def bench_all(shared: Shared, home: Path) -> None:
    """Evaluate the checkpoints of a run in their order: those that are there, then those that come, to the end."""
    patience_s, since = shared.loaded.config.sync.timeout_s, time.monotonic()
    done = set(_benched(shared.directory.path))
    run: Run | None = None
    while not shared.stop.requested:
        last = checkpoint.glance(home / "checkpoints")
        for path in [p for p in checkpoint.all_in(home / "checkpoints") if p.name not in done]:
            state = checkpoint.read_state(path)
            if run is None or run.index != state["stage"]:
                run = open_stage(shared, state["stage"], explores=True)
            await bench(run, path, step=state["step"], version=state["version"])
            done.add(path.name)
            _note(shared.directory.path, path.name)
            since = time.monotonic()
        if last["done"] and last["stage"] == len(shared.plans) - 1:
            return
        if time.monotonic() - since > patience_s:
            raise WhetError(
                f"no new checkpoint in {home / 'checkpoints'} for {patience_s:g} s (sync.timeout_s), and its run is "
                "not finished; check that the trainer is running"
            )
        shared.watch.beat("waiting for a checkpoint")
        shared.display.phase("wait for a checkpoint")
        await asyncio.sleep(LOOK_S)


async def bench(run: Run, path: Path, *, step: int, version: int) -> None:
    """Load one checkpoint's weights into the model and evaluate every held-out task."""
    run.policy.load(path / "policy")
    run.policy.version, run.step = version, step
    await hand_over(run.policy, run.engine)
    await evaluation(run)
    run.display.message(f"evaluated {path.name}")


def _benched(run_dir: Path) -> list[str]:
    file = run_dir / "benched.txt"
    return file.read_text().split() if file.exists() else []


def _note(run_dir: Path, name: str) -> None:
    with open(run_dir / "benched.txt", "a") as f:
        f.write(f"{name}\n")
