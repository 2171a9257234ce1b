"""A run in several processes: explorers that follow the trainer's weights, and an evaluation process that follows its
checkpoints.

The trainer (mode=train) is the loop itself, with `explorer.elsewhere` where the schedule is asynchronous. The processes
find each other by two places: the store of buffer.url, and the trainer's run directory, where `weights/` has the newest
versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from whet import checkpoint
from whet.buffer.buffer import Buffer
from whet.buffer.queue import ExplorerQueue
from whet.buffer.stores import Store, open_store
from whet.config.derived import content_of
from whet.config.faults import of_stage
from whet.config.resuming import other_code
from whet.context import Context
from whet.early_stopping import early_stopping_of
from whet.explorer import Explorer, InFlight, explorer_into, grouping, queue_name
from whet.guard import stacks
from whet.job import Job
from whet.learner import untrained
from whet.recorder import Recorder, open_recorder
from whet.rollout.engine import RolloutEngine
from whet.stages import begin, begin_evaluation, tell
from whet.storage.manifests import place_of
from whet.sync.exchange import Receiver
from whet.sync.files import Files
from whet.sync.weights import hand_over
from whet.track.files import is_running
from whet.track.monitor import Monitor
from whet.training.engine import TrainEngine
from whet.types import CheckpointError, ConfigError, Json, WhetError

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks for new weights and for the end."""
SAY_S = 30.0
"""Between two words on how far it is."""
REPORT_S = 60.0
"""Between two words on a wait for the trainer."""


async def run_beside(job: Job, home: Path) -> None:
    """A process beside the trainer, whose run directory is `home`."""
    try:
        await (explore_all if job.loaded.config.mode == "explore" else evaluate_all)(job, home)
    finally:
        await job.close()


async def explore_all(job: Job, home: Path) -> None:
    """Explore every stage that samples, for as long as its trainer trains."""
    for index, plan in enumerate(job.plans):
        if plan.algorithm.kind == "online" and not job.records.stop.requested:
            with of_stage(job.loaded.names, index):
                await explore_stage(job, index, home)


async def explore_stage(job: Job, index: int, home: Path) -> None:
    """One stage: from the moment its trainer has begun it until it has finished it."""
    cfg, name = job.loaded.stages[index], job.loaded.names[index]
    engine, model = job.models.engine, job.models.model.requires_grad_(False)
    assert engine is not None
    stale = cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1  # a rollout that is older is dropped
    store = open_store(cfg.buffer.url, queue=queue_name(cfg, name), order=cfg.buffer.order)
    begun = job.begun.pop(index, None) or await begin(job, index)
    tell(begun, job.tokenizer)
    context = begun.context
    job.records.directory.timeline.at = name, 0
    queue = ExplorerQueue(
        store,
        owner=cfg.buffer.explorer_name,
        groups_per_step=context.plan.own_tasks_per_step,
        group_size=context.plan.group_size,
        max_staleness=stale,
        spare=cfg.rollout.spare_tasks,
        lease_s=cfg.buffer.lease_s,
        version=None if cfg.rollout.schedule == "async" else lambda: engine.version,
        **grouping(cfg, context.plan),
    )
    # it answers to all that sampling asks of a Buffer
    explorer = explorer_into(context, job.models, begun.tasks, job.rewards[index], cast(Buffer, queue))
    explorer.checks_failures = queue.version is None  # groups of a round are the trainer's to sort out
    draw = partial(queue.draw, at=begun.tasks.at)
    explorer.in_flight = InFlight(explorer.buffer, draw, explorer.explore, explorer.slots)
    adapters = content_of(cfg) == "adapters"  # the engine's own: what is under adapters is here already
    weights = Followed(context, engine, home / "weights", module=model if adapters else None)

    def at(version: int) -> None:
        job.models.environments.at(index, version)
        job.models.environments.drop(index, version - stale)

    try:
        if not await begun_by_trainer(weights, store):
            return
        check_as_trainer(queue, job.loaded.code)
        store.release(queue.owner)  # what an earlier process of this name had
        at(engine.version)
        explorer.in_flight.start(left=0)
        async with lease(queue, lambda: explorer.restarts() + explorer.alone()):
            await follow(explorer, queue, weights, code=job.loaded.code, at=at)
    finally:
        await explorer.close()
        queue.close()
        store.release(queue.owner)
        store.close()


class Followed:
    """The trainer's newest weights, in this process's engine. module: what is under adapters, if only these travel."""

    def __init__(
        self, context: Context, engine: RolloutEngine, folder: Path, *, module: nn.Module | None
    ) -> None:
        cfg = context.cfg.sync
        self.context, self.engine = context, engine
        self.transport = Files(folder, timeout_s=cfg.timeout_s, keep=cfg.keep)
        self.receiver = Receiver(
            self.transport,
            name=context.cfg.buffer.explorer_name,
            module=module,
            confirm=self.transport.confirm,
        )
        self.seen: object = None
        """What `Files.written` said of the version that is here, when its digest was last compared."""

    def reached(self, version: int) -> bool:
        """The engine has this version or a newer one."""
        return self.receiver.version is not None and self.receiver.version >= version

    def _is_another(self, version: int) -> bool:
        """Whether the version that is here was written again with other weights: the trainer has resumed from an older
        checkpoint with another config (`--change`)."""
        held = self.receiver.held
        if version != self.receiver.version or held is None:
            return False
        try:
            if (written := self.transport.written(version)) == self.seen:
                return False
            another = self.transport.digest(version) != held.digest
        except (WhetError, OSError):  # it was removed meanwhile: the next look finds what has come
            return False
        if not another:
            self.seen = written
        return another

    def newer(self) -> int | None:
        """The newest version, if it is not here."""
        newest = self.transport.newest()
        if newest is None or (self.reached(newest) and not self._is_another(newest)):
            return None
        return newest

    async def take(self) -> bool:
        """Take a newer version if there is one, or this one again if the trainer has other weights for it now."""
        newest, finish = self.newer(), not self.context.cfg.rollout.partial_rollout
        if newest is None:
            return False
        try:
            await self.receiver.load(self.engine, newest, finish=finish, again=True)
        except WhetError as error:
            if self.transport.newest() == newest or self.engine.version != self.receiver.version:
                raise
            log.info("%s", error)  # the trainer was faster: the next look finds a newer one
            return False
        self.context.monitor.timeline.flush()
        log.info("weights version %d", newest)
        return True


async def begun_by_trainer(weights: Followed, store: Store) -> bool:
    """Wait until the trainer has begun this stage, and load its weights. False: the trainer has finished the stage, or
    a stop was requested.

    Raises WhetError if the trainer publishes nothing for sync.timeout_s: neither this stage nor new weights.
    """
    context = weights.context
    patience_s, since, seen = context.cfg.sync.timeout_s, time.monotonic(), weights.transport.newest()
    context.monitor.display.phase("wait for the trainer")
    while not context.stopping:
        context.monitor.watch.beat("waiting for the trainer")
        first, finished = store.noted("began"), store.noted("finished")  # after how many steps
        early = store.noted("stopped_early")  # with other settings the trainer is yet to go on
        same = early in (None, early_stopping_of(context.cfg))
        if same and finished is not None and finished >= context.plan.steps:
            return False
        if first is not None and finished is None:  # else the trainer is yet to go on with more steps
            await weights.take()
            if weights.reached(first):
                return True
        if (newest := weights.transport.newest()) != seen:
            since, seen = time.monotonic(), newest
        if time.monotonic() - since > patience_s:
            raise WhetError(
                f"explorer {context.cfg.buffer.explorer_name!r} waited {patience_s:g} s for the trainer to begin "
                f"stage {context.name!r}: nothing new in {weights.transport.root}, "
                f"{announced(first, finished)} in buffer.url. Is "
                "`whet train FILE mode=train` running, with the same name, run_dir and buffer.url? "
                f"sync.timeout_s={patience_s:g} sets the limit"
            )
        await asyncio.sleep(LOOK_S)
    return False


def announced(first: Json, finished: Json) -> str:
    """What the trainer has left in the store, in words."""
    if finished is not None:
        return f"and train.steps={finished}, all trained, announced"
    return "nothing" if first is None else f"but version {first} announced"


def check_as_trainer(queue: ExplorerQueue, code: Mapping[str, str]) -> None:
    """WhetError if an explorer has another lease or other code than its trainer. By a shorter lease the leases of the
    other explorers would end too late to be true, and their tasks would be played again."""
    theirs = queue.store.noted("lease_s")
    if theirs not in (None, queue.lease_s):
        raise WhetError(
            f"explorer {queue.owner!r} has buffer.lease_s={queue.lease_s:g}, the trainer {theirs:g}; give all "
            "processes of a run the same"
        )
    check_code(queue.owner, code, queue.store.noted("code"))


def check_code(name: str, own: Mapping[str, str], trainers: Mapping[str, str] | None) -> None:
    """WhetError if an explorer of this name has other code of the user's than its trainer: digests by file."""
    if differing := other_code(trainers or {}, own):
        files = ", ".join(str(change.at[0]) for change in differing)
        raise WhetError(
            f"explorer {name!r} has different code from the trainer: {files}. One run would mix rollouts of both. Give "
            "both processes the same files, and restart this explorer; a trainer reads its files when it starts"
        )


async def follow(
    explorer: Explorer,
    queue: ExplorerQueue,
    weights: Followed,
    *,
    code: Mapping[str, str],
    at: Callable[[int], object],
) -> None:
    """Load every new version, until the trainer has finished the stage or a stop is requested.

    code: digests of the user's code in this process, see `check_as_trainer`; that is asked at every version, since a
    trainer may have been restarted with another config or code. at: called with every version from which is sampled
    now.
    """
    context, monitor = explorer.context, explorer.context.monitor
    reported, before, idle = time.monotonic(), 0, Idle(weights)
    monitor.display.phase("explore")
    while not context.stopping and not queue.store.noted("finished"):
        if queue.broken is not None:
            raise queue.broken
        if weights.newer() is not None and await take_between(explorer, weights):
            check_as_trainer(queue, code)
            at(weights.engine.version)
        monitor.watch.beat("exploring")
        idle.look((queue.count, weights.receiver.version), busy=bool(explorer.in_flight.playing))
        if time.monotonic() - reported > SAY_S:
            rate = (queue.count - before) / (time.monotonic() - reported)
            reported, before = time.monotonic(), queue.count
            version = weights.receiver.version
            monitor.display.message(
                f"{queue.count} groups, {rate:.3g}/s, weights version {version}{_extra(monitor)}"
            )
        await asyncio.sleep(LOOK_S)
    told = _extra(monitor)
    if lost := explorer.restarts():
        told += f"; {lost} episodes began anew, as the hosts of their environments were lost"
    monitor.display.message(f"explored {queue.count} groups of stage {context.name!r}{told}")


def _extra(monitor: Monitor) -> str:
    """What a message adds on tokens that the trainer has no account of: a killed explorer has said the last number."""
    return f"; {tokens} sampled tokens are in none of them" if (tokens := monitor.extra_tokens) else ""


async def take_between(explorer: Explorer, weights: Followed) -> bool:
    """`Followed.take` while rollouts are sampled: they end before it where they may not go on with other weights."""
    with explorer.in_flight.door.held():
        if not explorer.context.cfg.rollout.partial_rollout:
            await explorer.rollouts_over()
        return await weights.take()


class Idle:
    """An explorer's wait for room, which only the trainer makes: it is logged every minute, and has a limit.

    A trainer that is alive on this machine may take any time; one that is dead, or on another machine, has
    sync.timeout_s to be restarted.
    """

    def __init__(self, weights: Followed) -> None:
        self.weights, self.home = weights, weights.transport.root.parent
        self.seen: object = None
        self.since = self.reported = time.monotonic()

    def look(self, seen: object, *, busy: bool) -> None:
        """seen: a value that changes as long as the trainer trains. Raises WhetError when the wait times out."""
        now, context = time.monotonic(), self.weights.context
        if busy or seen != self.seen:
            self.seen, self.since, self.reported = seen, now, now
            return
        lives, patience_s = is_running(self.home), context.cfg.sync.timeout_s
        who = {True: "it runs", False: "its process is dead", None: "it is on another machine"}[lives]
        what = (
            f"explorer {context.cfg.buffer.explorer_name!r} has waited {now - self.since:.0f} s for the trainer to "
            f"take rollouts of stage {context.name!r}, since weights version {self.weights.engine.version}: {who}"
        )
        if now - self.since > patience_s and not lives:
            raise WhetError(
                f"{what}. Restart the trainer, then this explorer; sync.timeout_s={patience_s:g} is exceeded"
            )
        if now - self.reported >= REPORT_S:
            self.reported = now
            stacks.report(what)


@asynccontextmanager
async def lease(queue: ExplorerQueue, restarts: Callable[[], int]) -> AsyncIterator[None]:
    """Renew the explorer's lease a few times per lease period, as long as the block runs. restarts: see
    `Explorer.restarts`."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(queue.lease_s / 4)
            await asyncio.to_thread(queue.renew, restarts())

    def ended(keeping: asyncio.Task[None]) -> None:
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            queue.fail(error)

    keeping = asyncio.create_task(keep())
    keeping.add_done_callback(ended)
    try:
        yield
    finally:
        keeping.cancel()


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Evaluation:
    """One stage, of which nothing is opened but its policy and its records."""

    context: Context
    policy: TrainEngine
    recorder: Recorder
    engine: RolloutEngine | None

    def load(self, path: Path, state: Json) -> None:
        """One checkpoint's weights into the model."""
        self.policy.load(path / "policy")
        self.policy.version, self.context.monitor.step = state["version"], state["step"]

    async def of(self, path: Path, state: Json) -> None:
        """Evaluate every held-out task by the checkpoint that was loaded."""
        await self.present(state["step"])
        self.recorder.display.message(f"evaluated {path.name}")

    async def present(self, step: int) -> None:
        """Evaluate the model as it is, as that of a step."""
        await hand_over(self.policy, self.engine)
        await self.recorder.evaluate(step)


def open_evaluation(job: Job, index: int) -> Evaluation:
    """Of one stage."""
    with of_stage(job.loaded.names, index):
        begun, held_out = job.begun.pop(index, None) or begin_evaluation(job, index)
    cfg = begun.cfg
    train = cfg.train.model_copy(update={"early_stopping": None})  # it is for the trainer's own evaluations
    context = replace(begun, cfg=cfg.model_copy(update={"train": train}))
    learner = untrained(context, job.models)
    recorder = open_recorder(context, job, learner, held_out)
    if recorder.held_out.loss is not None and context.algorithm.needs_reference:
        lacks = (
            f"stage {context.name!r} ({cfg.algorithm.name}): the loss on held-out replies needs the reference model, "
            "which is not loaded to evaluate checkpoints"
        )
        if not context.plan.judges:
            raise ConfigError(
                f"{lacks}; the run's own evaluations have it (metrics.jsonl). To score replies that the checkpoints "
                "sample, give rewards: --reward math"
            )
        log.warning("%s; it is left out", lacks)
        recorder.held_out = replace(recorder.held_out, loss=None)
    return Evaluation(context, learner.policy, recorder, job.models.engine)


async def evaluate_all(job: Job, home: Path) -> None:
    """Evaluate the checkpoints of a run in their order: those that are there, then those that come, to the end."""
    patience_s, since = job.loaded.config.sync.timeout_s, time.monotonic()
    directory, display = job.records.directory, job.records.display
    done = set(_evaluated(directory.path))
    newest = max(filter(None, map(place_of, done)), default=(0, -1))
    directory.truncate_to(*newest)  # what a killed process recorded of a later checkpoint is made again
    evaluation: Evaluation | None = None
    while not job.records.stop.requested:
        last = checkpoint.glance(home / "checkpoints")
        for path in [p for p in checkpoint.all_in(home / "checkpoints") if p.name not in done]:
            if job.records.stop.requested:
                return
            try:
                state = checkpoint.read_state(path)
                if evaluation is None or evaluation.context.index != state["stage"]:
                    evaluation = open_evaluation(job, state["stage"])
                evaluation.load(path, state)
            except (CheckpointError, OSError):
                if path.is_dir():
                    raise
                log.warning(
                    "%s was deleted before it was evaluated; checkpoint.keep says how many stay", path
                )
                continue
            job.models.environments.at(state["stage"], state["step"])
            await evaluation.of(path, state)
            job.models.environments.drop(state["stage"], state["step"] + 1)
            done.add(path.name)
            _note(directory.path, path.name)
            since = time.monotonic()
        if last["done"] and last["stage"] == len(job.plans) - 1:
            return
        if time.monotonic() - since > patience_s:
            raise WhetError(
                f"no new checkpoint in {home / 'checkpoints'} for {patience_s:g} s (sync.timeout_s), and its run is "
                "not finished; check that the trainer is running"
            )
        job.records.watch.beat("waiting for a checkpoint")
        display.phase("wait for a checkpoint")
        await asyncio.sleep(LOOK_S)


def _evaluated(run_dir: Path) -> list[str]:
    file = run_dir / "benched.txt"
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def _note(run_dir: Path, name: str) -> None:
    with open(run_dir / "benched.txt", "a", encoding="utf-8") as f:
        f.write(f"{name}\n")
