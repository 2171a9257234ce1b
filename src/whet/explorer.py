"""The part of a stage that makes groups: tasks -> rollouts -> rewards -> buffer.

It keeps sampling in flight by itself. How far sampling may be ahead of training is one short function for each mode
(`SCHEDULES`); the buffer's room is the staleness bound.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from whet import seeds
from whet.algos.groups import Choose, chooser, refine, rejection, with_baseline
from whet.buffer.buffer import SURPLUS, Buffer
from whet.buffer.groups import encode, restored
from whet.buffer.priority import priority
from whet.buffer.queue import TrainerQueue
from whet.buffer.replay import Replay
from whet.buffer.rounds import Rounds
from whet.buffer.stores import Store, open_store
from whet.config import deadlines
from whet.config.amounts import amounts
from whet.config.groups import pairs_tasks
from whet.config.plan import Plan
from whet.config.recipes import choices
from whet.config.resuming import played_by
from whet.config.schema import Config
from whet.context import Context, StopFlag
from whet.data.replies import Read, reader
from whet.data.tasks import TaskStream
from whet.evaluation import Play
from whet.guard.ledger import Ledger
from whet.job import Models, decoder_of
from whet.rewards.combine import RewardSet, check_failures, score
from whet.rollout.engine import RolloutEngine
from whet.rollout.episode import play_groups, sampling_by_source, to_sampling
from whet.rollout.gate import Door
from whet.rollout.limits import limits_of
from whet.rollout.pace import Pace
from whet.rollout.slots import Slots, slots_of
from whet.types import Group, Json, Metrics, Sampling, Task, WhetError

T = TypeVar("T")


@dataclass
class Explorer:
    """Of one stage. engine None: nothing is ever sampled, groups are read (`read`)."""

    context: Context
    engine: RolloutEngine | None
    tasks: TaskStream
    play: Play
    play_greedy: Play
    """One greedy reply per task, for advantages that compare with it."""
    read: Read
    """Demonstrations or preference pairs as groups of rollouts."""
    rewards: RewardSet
    buffer: Buffer
    rounds: Rounds | None = None
    """Samples tasks if explorers are separate processes and rollout.schedule=deterministic."""
    slots: Slots = field(default_factory=lambda: Slots(lambda: None, 1))
    """Of the engine, where tasks are sampled one by one."""
    choose: Choose | None = None
    """The groups of a step that are trained on, and the others, where more are sampled."""
    keeping: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around the sampling of a step that is trained at once: `NativeEngine.keeping`, where the update reuses it."""
    restarts: Callable[[], int] = lambda: 0
    """Episodes that began anew so far, since their environments' host was lost. A wait for groups does so, too."""
    alone: Callable[[], int] = lambda: 0
    """Of these, those that have begun in a host of their own. They queue: with each, a wait for groups begins anew."""
    checks_failures: bool = True
    """Too many unscored rollouts end the run here; not where the trainer of another process sorts them out."""
    in_flight: InFlight = field(init=False)
    """Tasks that are sampled one by one if rollout.schedule=async."""
    ahead: asyncio.Task[None] | None = None
    """Sampling for later steps, while a step is trained: ends before the weights change."""
    unchecked: list[Group] = field(default_factory=list)
    """Groups whose failures are not yet counted: fewer than a step's."""

    def __post_init__(self) -> None:
        self.in_flight = InFlight(self.buffer, self.draw, self.explore, self.slots)

    # -- asked by the loop

    async def collect(self, step: int, version: int) -> list[Group]:
        """The groups of the step after `step` steps, for a policy at `version`; from here on later steps are sampled
        beside, as far as the mode allows."""
        self._follow(version)
        with self.keeping():
            ahead = await SCHEDULES[self.context.plan.mode](self, step, version)
        groups = await self.wait_for_groups(self.buffer.take(version), "a step's worth of rollouts")
        if self.choose is not None:
            groups, others = self.choose(groups)
            await self.buffer.give_up(others, SURPLUS)
        if ahead:
            self.ahead = asyncio.create_task(self.fill(ahead, step, version), name="whet-explorer")
        return groups

    async def barrier(self, step: int, version: int) -> None:
        """Before the policy becomes `version`: nothing is sampled across the change that must not be. What could not be
        trained on in time is dropped; with the last step, all there is."""
        if self.ahead is not None:
            await self.ahead
            self.ahead = None
        if self.context.plan.mode != "asynchronous":
            return
        if step + 1 == self.context.plan.steps:
            await self.in_flight.close()
            await self.buffer.give_up_stale(sys.maxsize)
        else:
            await self.in_flight.give_up(version)

    def _follow(self, version: int) -> None:
        """There is room for what a trainer at `version` can still train on once its turn comes: less with each step
        between two syncs. Where explorers cause the syncs, room that waited for one would wait forever."""
        follows = self.context.plan.mode == "asynchronous" and self.context.cfg.sync.driven_by == "trainer"
        if follows and self.engine is not None:
            self.buffer.behind = version - self.engine.version

    async def trained(self, groups: list[Group], skipped: Collection[int], version: int) -> list[Group]:
        """The step is done and the policy is at `version`: its room is free, and the next tasks may start. Returns all
        groups that have left, trained on or not. skipped: task uids of groups whose updates were skipped."""
        self._follow(version)
        await self.buffer.trained(groups, skipped=skipped)
        left = self.buffer.leave()
        if self.tasks.learns:
            self.tasks.update(left, self.buffer.pending)
        return left

    def balance(self) -> Metrics:
        """The accounts of the step. Raises WhetError where a rollout is not accounted for."""
        self.buffer.check()
        return self.ledger.end_step()

    async def close(self) -> None:
        """End all sampling; tasks in flight stay so in the buffer's state."""
        if self.ahead is not None:
            self.ahead.cancel()
            await asyncio.gather(self.ahead, return_exceptions=True)
        await self.in_flight.close()

    async def rollouts_over(self) -> None:
        """Wait until the rollouts in flight are over, with all their turns, of which an engine would finish one. Their
        rewards need not be there. With the door held, else others begin."""
        if self.in_flight.begun:
            await self.wait_for_groups(self.slots.over(self.in_flight.begun), "the rollouts in flight")

    # -- sampling

    async def fill(self, steps: int, step: int, version: int) -> None:
        """Explore until exactly so many steps' worth of groups wait."""
        plan, cfg = self.context.plan, self.context.cfg.algorithm
        ask = self.explore_some if self.context.algorithm.kind == "online" else self.read_some
        self.buffer.begin(version)
        if under_way := self.in_flight.pop_again():
            await self.explore(under_way)
        per_step = self.buffer.groups_per_step
        goal = (steps - 1) * per_step + self.buffer.fresh_per_step
        asked = 0
        while self.buffer.there < goal:
            if asked >= (1 + cfg.max_refills) * steps * per_step:
                raise self.unfilled(step, asked)
            asked += await ask(min(max(plan.tasks_per_step, per_step), goal - self.buffer.there))

    async def explore_some(self, at_most: int) -> int:
        """Sample rollouts for as many tasks as the buffer has room for. Returns the number of tasks."""
        n = await self._room(at_most)
        await self.explore(self.draw(n))
        return n

    async def read_some(self, at_most: int) -> int:
        """Demonstrations and preference pairs: the rollouts are in the data, nothing is sampled."""
        n = await self._room(at_most)
        with self.context.monitor.phase("read"):
            groups = self.read(self.tasks.next(n))
        await self.buffer.put(groups, asked=n)
        return n

    async def _room(self, at_most: int) -> int:
        """Waits here: this is the staleness bound."""
        within = deadlines.rollout(self.context.cfg)
        return await self.context.monitor.wait(self.buffer.room(at_most=at_most), "room", within=within)

    def draw(self, n: int) -> list[Task]:
        """The next tasks; the buffer counts them as in flight from now on."""
        assert self.engine is not None
        tasks = self.tasks.next(n)
        self.buffer.asked(tasks, self.engine.version)
        return tasks

    async def explore(self, tasks: list[Task]) -> None:
        """A group of rollouts of each task, scored, into the buffer."""
        groups = await (
            self.played(tasks) if self.rounds is None else self.played_elsewhere(self.rounds, tasks)
        )
        await self.buffer.put(groups, asked=len(tasks))  # keeps what can be trained on, books the rest

    async def played(self, tasks: list[Task]) -> list[Group]:
        """A group of rollouts of each task, scored."""
        groups = await self._scored(self.play, tasks)
        if "baseline" not in self.context.algorithm.needs:
            return groups
        with self.context.monitor.unless_given_up(groups):
            greedy = await self._scored(self.play_greedy, tasks)
        self.context.monitor.sampled_beside(sum(g.tokens for g in greedy))
        rules = self.context.cfg.algorithm.groups
        return [with_baseline(group, one.rollouts[0], rules) for group, one in zip(groups, greedy)]

    async def _scored(self, play: Play, tasks: list[Task]) -> list[Group]:
        with self._phase("generate"):
            groups = await play(tasks)  # token-exact; each rollout has its deadline
        with self.context.monitor.unless_given_up(groups), self._phase("reward"):
            groups = await score(groups, self.rewards)  # each call has its deadline
        self.check_reward_failures(groups)
        return groups

    async def played_elsewhere(self, rounds: Rounds, tasks: list[Task]) -> list[Group]:
        """The same, by explorers in separate processes, which follow the trainer's weights."""
        assert self.engine is not None
        asked = rounds.play(tasks, self.engine.version, stopping=self.may_stop)
        what = f"the explorers' groups of weights version {self.engine.version}"
        groups = await self.wait_for_groups(asked, what)
        self.check_reward_failures(groups)
        return groups

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """A phase of the step, or, where the trainer trains meanwhile, beside its phases."""
        monitor = self.context.monitor
        return monitor.phase(name) if self.context.plan.mode == "synchronous" else monitor.phase_beside(name)

    def check_reward_failures(self, groups: list[Group]) -> None:
        """Too many unscored rollouts end the run. A step's worth of groups is counted at a time, also where groups come
        one by one, or few to fill a step: of one group alone, every rollout may be unscored."""
        if not self.checks_failures:
            return
        self.unchecked += groups
        if len(self.unchecked) >= self.buffer.groups_per_step:
            groups, self.unchecked = self.unchecked, []
            check_failures(groups, self.rewards, of="this step")

    # -- waits

    async def wait_for_groups(self, groups: Awaitable[T], what: str) -> T:
        """Wait for groups, however many they are: none may take longer than the longest."""
        monitor = self.context.monitor
        seen: list[object] = []

        def progress() -> object:
            if (now := [self.restarts(), self.alone(), *(store.progress() for store in self.stores)]) != seen:
                seen[:] = now
                monitor.watch.beat(what)
            return now

        return await monitor.wait(groups, what, within=self.group_deadline, progress=progress)

    @property
    def group_deadline(self) -> deadlines.Deadline:
        """Deadline for a task to become a group; after it, something hangs."""
        times = 2 if "baseline" in self.context.algorithm.needs else 1
        judges = len(self.rewards.weights)
        return deadlines.group(self.context.cfg, judges=judges, times=times, leased=bool(self.stores))

    def may_stop(self) -> bool:
        """A stop was requested, and the current state may be saved; otherwise the step is finished first: while a step
        is trained the weights are no published version."""
        return self.context.stopping and self.ahead is None and self.buffer.whole

    def unfilled(self, step: int, asked: int) -> WhetError:
        """The error for too many groups without effect on the gradient."""
        there, needed = len(self.buffer.waiting), self.buffer.groups_per_step
        return self.ledger.unfilled(step + 1, asked=asked, there=there, needed=needed)

    # -- explorers in separate processes

    @property
    def stores(self) -> list[Store]:
        """Where explorers in separate processes put groups."""
        return [end.store for end in (self.buffer, self.rounds) if isinstance(end, TrainerQueue | Rounds)]

    def tell(self, name: str, value: Json) -> None:
        """Leave a note for explorers in separate processes."""
        for store in self.stores:
            store.note(name, value)

    # -- counted, saved and resumed

    @property
    def ledger(self) -> Ledger:
        return self.buffer.ledger

    @property
    def explored(self) -> int:
        """Number of groups that were requested from all explorers so far."""
        queue = self.buffer if isinstance(self.buffer, TrainerQueue) else None
        counts = queue.store.ledger() if queue else self.ledger.state()["total"]
        return counts.get("asked", 0) // self.context.plan.group_size

    def state(self) -> dict[str, Json]:
        return {
            "tasks": self.tasks.state(),
            "buffer": self.buffer.state(),
            "rounds": self.rounds.state() if self.rounds else None,
            "ledger": self.ledger.state(),
            "unchecked": [encode(group) for group in self.unchecked],
        }

    def restore(self, state: Json, *, changed: bool) -> list[tuple[str, str, str]]:
        """Resume from `state`. Returns the data that the tasks come from where it has changed, as `TaskStream.restore`
        does."""
        rows = self.tasks.restore(state["tasks"], changed=changed)
        if self.rounds is not None:
            self.rounds.restore(state["rounds"])
        self.in_flight.again = self.buffer.restore(state["buffer"], state["sampler_version"])
        self.buffer.ledger = Ledger.from_state(state["ledger"])
        self.unchecked = [restored(g) for g in state.get("unchecked", ())]  # older checkpoints lack them
        return rows


class InFlight:
    """One asyncio task for each task that is sampled, so that no rollout waits for another's end.

    draw: returns so many new tasks, which are in flight from then on. explore: samples and scores tasks and puts them
    into the buffer. An error of any ends all: the buffer raises it to its waiting caller.
    """

    def __init__(
        self,
        buffer: Buffer,
        draw: Callable[[int], list[Task]],
        explore: Callable[[list[Task]], Coroutine[Any, Any, None]],
        slots: Slots,
    ) -> None:
        self.buffer, self.draw, self.explore, self.slots = buffer, draw, explore, slots
        self.again: list[Task] = []
        """Under way when the checkpoint was written: asked before anything else. Their room is taken already."""
        self.playing: dict[int, asyncio.Task[None]] = {}
        """By task uid."""
        self.door = Door()
        """Held: no task begins, and what is requested meanwhile is sampled by the weights that come."""
        self.begun: set[int] = set()
        """Uids of those in `playing` that have come through it."""
        self.asking: asyncio.Task[None] | None = None

    def start(self, left: int) -> None:
        """Continue to request tasks, for `left` steps at most."""
        self.buffer.wanted = left * self.buffer.groups_per_step
        if self.asking is None:
            self._play(self.pop_again())
            self.asking = asyncio.create_task(self._ask(), name="whet-explorers")
            self.asking.add_done_callback(self._ended)

    def pop_again(self) -> list[Task]:
        """What was under way when the checkpoint was written, once."""
        again, self.again = self.again, []
        return again

    async def give_up(self, version: int) -> None:
        """End what would be too old for a trainer at `version`."""
        for uid in await self.buffer.give_up_stale(version):
            if (playing := self.playing.get(uid)) is not None:  # else it failed: the buffer raises its error
                playing.cancel()

    async def close(self) -> None:
        """Stop requesting and sampling."""
        running = [t for t in (self.asking, *self.playing.values()) if t is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.asking = None

    async def _ask(self) -> None:
        while True:
            at_most = min(await self.slots.free(), self.buffer.groups_per_step)
            self._play(self.draw(await self.buffer.room(at_most=at_most)))

    def _play(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.slots.taken(task)
            playing = self.playing[task.uid] = asyncio.create_task(self._begin(task))
            playing.add_done_callback(partial(self._played, task.uid))

    async def _begin(self, task: Task) -> None:
        await self.door.wait()
        self.begun.add(task.uid)
        try:
            await self.explore([task])
        finally:
            self.begun.discard(task.uid)

    def _played(self, uid: int, playing: asyncio.Task[None]) -> None:
        self.playing.pop(uid, None)
        self.slots.left(uid)
        self._ended(playing)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.buffer.fail(error)


# ---------------------------------------------------------------- schedules
# Each waits until a step's worth of groups is there, or sees to it that it comes, and returns how many steps' worth are
# to be sampled while that step is trained.


async def synchronous(explorer: Explorer, step: int, version: int) -> int:
    """On-policy: explore until a step is full, then train."""
    await explorer.fill(1, step, version)
    return 0


async def overlapped(explorer: Explorer, step: int, version: int) -> int:
    """The rollouts of later steps are sampled while a step is trained. The weights that sample a task follow from the
    step alone, not from timing: the run is the same on every machine, and after every resume."""
    ahead, left = explorer.context.cfg.rollout.max_staleness, explorer.context.plan.steps - step
    await explorer.fill(min(ahead, left), step, version)
    return min(ahead, left - 1)


async def asynchronous(explorer: Explorer, step: int, version: int) -> int:
    """Explorers sample whenever there is room, and a step takes the groups that are finished first: no step waits for
    the last rollout."""
    buffer, cfg = explorer.buffer, explorer.context.cfg.algorithm
    if buffer.broken is not None:  # groups may wait nevertheless
        raise buffer.broken
    explorer.in_flight.start(left=explorer.context.plan.steps - step)
    buffer.begin(version)
    while not buffer.ready:
        news = buffer.news(buffer.changes)
        await explorer.wait_for_groups(news, "a group of rollouts")
        if buffer.unused > cfg.max_refills * buffer.groups_per_step:
            raise explorer.unfilled(step, buffer.unused + buffer.there)
        buffer.begin(version)
    return 0


async def elsewhere(explorer: Explorer, step: int, version: int) -> int:
    """Explorers are separate processes and put groups into the store whenever there is room; see `disaggregated`."""
    return 0


SCHEDULES: dict[str, Callable[[Explorer, int, int], Awaitable[int]]] = {
    "synchronous": synchronous,
    "overlapped": overlapped,
    "asynchronous": asynchronous,
    "train": elsewhere,
}


# ---------------------------------------------------------------- opened from the config


def open_explorer(
    context: Context, models: Models, tasks: TaskStream, rewards: RewardSet, *, fingerprint: Json
) -> Explorer:
    """fingerprint: the part of the config that the groups of explorers in other processes must share."""
    cfg, plan = context.cfg, context.plan
    explorer = explorer_into(context, models, tasks, rewards, open_buffer(cfg, plan, context.stop))
    if cfg.mode == "train" and context.algorithm.kind == "online" and plan.mode != "train":
        store = open_store(cfg.buffer.url, queue=queue_name(cfg, context.name), order=cfg.buffer.order)
        explorer.rounds = Rounds(store)
        explorer.rounds.claim(played_by(fingerprint))
    return explorer


def explorer_into(
    context: Context, models: Models, tasks: TaskStream, rewards: RewardSet, buffer: Buffer
) -> Explorer:
    """An explorer that puts its groups into this buffer."""
    cfg, purpose = context.cfg, f"train/{context.name}"
    sampling, by_source = to_sampling(cfg.rollout.sampling), sampling_by_source(cfg.rollout)
    slots = Slots(partial(slots_of, models.engine, cfg), context.plan.group_size)
    playing = partial(player, models, cfg, rewards, extra=context.monitor.sampled_beside)
    return Explorer(
        context=context,
        engine=models.engine,
        tasks=tasks,
        play=playing(
            sampling,
            by_source=by_source,
            size=cfg.rollout.group_size,
            purpose=purpose,
            pace=Pace(cfg.rollout.timeout_s, cfg.rollout.timeout_factor),
            ended=slots.ended,
        ),
        play_greedy=playing(
            replace(sampling, temperature=0.0),
            by_source={name: replace(own, temperature=0.0) for name, own in by_source.items()},
            size=1,
            purpose=f"{purpose}/greedy",
        ),
        read=reader(cfg, context.algorithm.kind, models.tokenizer, ends=models.ends),
        rewards=rewards,
        buffer=buffer,
        slots=slots,
        restarts=lambda: models.environments.restarts,
        alone=lambda: models.environments.alone.entered,
        choose=chooser(
            context.plan.algorithm,
            context.plan.own_tasks_per_step,
            lambda task: by_source.get(task.source, sampling).max_tokens,
        ),
    )


def player(
    models: Models,
    cfg: Config,
    rewards: RewardSet | None,
    sampling: Sampling,
    *,
    size: int,
    purpose: str,
    **more: Any,
) -> Play:
    """Plays tasks: groups of `size` rollouts, with random numbers for this purpose. rewards: for environments that ask
    for scores. more: by_source, pace, ended, extra, as `play_groups` has them."""
    ends = models.ends
    return partial(
        play_groups,
        models.engine,  # type: ignore[arg-type]  # None: nothing is ever sampled, nor played
        group_size=size,
        sampling=sampling,
        seed=cfg.seed,
        purpose=purpose,
        decode=decoder_of(models.tokenizer),
        end_token_ids=ends,
        vocab=models.model.get_output_embeddings().out_features,
        timeout_s=cfg.rollout.timeout_s,
        retries=cfg.rollout.retries,
        limits=limits_of(cfg),
        **more,
        **models.environments.arguments(cfg, models.tokenizer, ends, rewards, repeated=purpose == "eval"),
    )


def open_buffer(cfg: Config, plan: Plan, stop: StopFlag) -> Buffer:
    """Where groups wait for the trainer: in memory, or in the store of explorers in separate processes."""
    max_staleness = cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1
    if plan.mode == "train":
        queue = TrainerQueue(
            open_store(cfg.buffer.url, queue=queue_name(cfg, plan.name), order=cfg.buffer.order),
            groups_per_step=plan.own_tasks_per_step,
            max_staleness=max_staleness,
            ledger=Ledger(),
            stopping=lambda: stop.requested,
            replay=replay_of(cfg, plan),
        )
        # it answers to everything that is asked of a Buffer where groups come from elsewhere
        return cast(Buffer, queue)
    return Buffer(
        groups_per_step=plan.sampled_tasks_per_step,
        group_size=plan.group_size,
        max_staleness=max_staleness,
        spare=cfg.rollout.spare_tasks if plan.mode == "asynchronous" else 0,
        **grouping(cfg, plan),
        replay=replay_of(cfg, plan),
        share=None if cfg.buffer.replay.queue else cfg.buffer.replay.share,
        copies=plan.algorithm.refill == "copy",
        ledger=Ledger(),
    )


def replay_of(cfg: Config, plan: Plan) -> Replay | None:
    """Groups that are trained on again, if a share of a step is replayed, or fresh and used groups share one queue."""
    wanted = cfg.buffer.replay
    if not (wanted.share or wanted.queue) or plan.algorithm.kind != "online":
        return None
    ranked = choices(cfg)["buffer.replay.priority"]
    cooldown = {unit: number for number, unit, _ in amounts(wanted.cooldown or ())}
    return Replay(
        capacity=wanted.capacity,
        priority=priority(ranked.name, ranked.settings),
        cooldown_steps=int(cooldown["step"]) if "step" in cooldown else None,
        cooldown_s=cooldown.get("s"),
        max_staleness=wanted.max_staleness,
        fresh_staleness=cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1,
        seed=seeds.key(cfg.seed, "replay", plan.name),
    )


def grouping(cfg: Config, plan: Plan) -> dict[str, Any]:
    """How a buffer turns scored groups into training groups."""
    weights = {name: reward.weight for name, reward in cfg.rewards.items()}
    return {
        "refine": partial(refine, cfg=plan.algorithm.groups),
        "reject": partial(
            rejection, algorithm=plan.algorithm, weights=weights, alone=pairs_tasks(cfg, plan.algorithm)
        ),
    }


def queue_name(cfg: Config, stage: str) -> str:
    """What the groups of a stage are found by in a store that several runs may use."""
    return f"{cfg.name}/{stage}"
