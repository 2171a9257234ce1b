"""The live parts of one stage of a run, and its records."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import torch

from whet import checkpoint
from whet.algos.critic import Scale
from whet.algos.recipes import Algorithm
from whet.algos.skipping import Skipping, shares
from whet.batch import Batch, computed
from whet.buffer.buffer import Buffer
from whet.buffer.queue import ExplorerQueue, TrainerQueue
from whet.buffer.rounds import Rounds
from whet.buffer.stores import Store
from whet.config import deadlines
from whet.config.deadlines import Deadline
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.data.experts import Experts
from whet.data.tasks import TaskStream
from whet.evaluate import Ask, Play, shown
from whet.explorers import Explorers
from whet.guard.ledger import Ledger
from whet.guard.watch import Watch, wait
from whet.rewards.combine import RewardSet, check_failures
from whet.rollout.engine import RolloutEngine
from whet.secrets import redact_tree
from whet.storage.uploads import Uploads
from whet.sync.exchange import Publisher
from whet.track.batches import to_table
from whet.track.display import Display
from whet.track.files import reading
from whet.track.history import other_rows
from whet.track.record import RunDirectory
from whet.track.timeline import EXPLORING, STEPS, WAITS, Together
from whet.track.trackers import ShowsText, Tracker
from whet.training.passes import untaught
from whet.training.profile import Profiler
from whet.training.ranks import Ranks
from whet.training.throughput import Meter
from whet.training.torch import TorchEngine
from whet.types import Group, Json, Metrics, Task, WhetError

log = logging.getLogger(__name__)

T = TypeVar("T")

clock = time.perf_counter
"""The clock for phases; a benchmark on shared cores sets time.process_time here."""

OUTSIDE = ("evaluate", "save", "export")
"""Phases that are not part of a step's own seconds."""


class StopFlag(Protocol):
    """Set from outside (Ctrl-C) to end the run after the current step."""

    requested: bool


@dataclass
class Run:
    """One stage, alive. `loop.py` reads it top to bottom; nothing here decides what a step is."""

    cfg: Config
    plan: Plan
    name: str
    index: int
    """Number of the stage in the run."""

    tasks: TaskStream
    eval_tasks: list[Task]
    eval_given: list[Group]
    """Given replies of held-out tasks, if the stage trains on given replies: their loss is measured."""
    play: Play
    play_greedy: Play
    """One greedy reply per task, for advantages that compare with it."""
    ask: Ask
    """Plays held-out tasks."""
    read: Callable[[list[Task]], list[Group]]
    """Demonstrations or preference pairs as groups of rollouts."""
    experts: Experts | None
    """Demonstrations among the policy's own rollouts of every step; None: there are none."""
    rewards: RewardSet
    buffer: Buffer
    ledger: Ledger

    algorithm: Algorithm
    skipping: Skipping
    policy: TorchEngine
    reference: TorchEngine | None
    critic: TorchEngine | None
    engine: RolloutEngine | None
    """None: nothing is ever sampled."""
    sampler: TorchEngine | None
    """The copy of the policy that the engine samples from between syncs. None: from the policy itself."""
    ranks: Mapping[str, Ranks]
    """The processes that train, by the model that they are named after: the policy's and, where they have others, the
    critic's and the reference's. Without the policy's it is trained in this process."""
    exact: bool
    """The self-test found that sampled log-probs equal the trainer's bit for bit."""

    env_timings: Callable[[], Metrics]
    profiler: Profiler
    write_export: Callable[[Path], None]
    """Write the policy as a Hugging Face folder."""
    saver: checkpoint.Saver
    uploads: Uploads
    directory: RunDirectory
    trackers: Sequence[Tracker]
    display: Display
    stop: StopFlag
    watch: Watch
    fingerprint: Json
    """The part of the config that a checkpoint stores."""

    explorers: Explorers = field(init=False)
    """They sample on their own if rollout.schedule=async."""
    out: Publisher | None = None
    """Where explorers in separate processes get the weights from."""
    rounds: Rounds | None = None
    """Samples tasks if explorers are separate processes and rollout.schedule=deterministic."""
    moving: bool = False
    """The weights have changed in the current step but are not a published version yet."""
    explored_at_sync: int = 0
    """`explored` at the last weight sync."""
    step: int = 0
    resumed: bool = False
    """The run was resumed from a checkpoint."""
    kl_coef: float = 0.0
    value_scale: Scale = field(default_factory=Scale)
    """Units in which the critic predicts returns; one scale for a whole step."""
    skipped: Sequence[int] = ()
    """Numbers of the current step's groups whose updates were skipped."""
    trained: pa.Table | None = None
    """The batch of the current step, if it is to be recorded."""
    played: list[Group] = field(default_factory=list)
    """All groups of the current step, trained on or not, until they are recorded."""
    advantages: dict[tuple[int, int], float] = field(default_factory=dict)
    """Mean advantage of each trained rollout, by (task uid, index)."""
    scored: tuple[int, float | None] = (-1, None)
    """The last step that was evaluated, and its number of checkpoint.keep_best."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase since the last step was recorded."""
    beside: dict[str, float] = field(default_factory=dict)
    """The same for explorers while the trainer trained."""
    together: Together = field(default_factory=Together)
    """Concurrent work of several explorers, timed once."""
    judging: list[Group] = field(default_factory=list)
    """Groups that came one by one and whose failures are not yet counted."""
    hands: ThreadPoolExecutor | None = None
    """Where the trainer works while the event loop samples."""
    meter: Meter | None = None
    """None: the device's speed is not known."""
    flops: float = 0.0
    """Operations of the current step's update, if they are measured."""
    since: float = field(default_factory=lambda: clock())
    """When that was."""

    # -- asked by the loop

    @property
    def stores(self) -> list[Store]:
        """Where explorers in separate processes put groups."""
        return [end.store for end in (self.buffer, self.rounds) if isinstance(end, TrainerQueue | Rounds)]

    @property
    def stopping(self) -> bool:
        return self.stop.requested

    @property
    def same_policy(self) -> bool:
        """Tokens are sampled from the distribution that is trained: its weights, at its temperature."""
        trained, sampled = self.cfg.train.temperature, self.cfg.rollout.sampling.temperature
        return not self.samples_older and trained in (None, sampled)

    @property
    def samples_older(self) -> bool:
        """Rollouts may come from other weights than those before the current step: older ones, or cast."""
        in_turn = self.plan.mode == "synchronous" and self.sampler is None
        cast = self.out is not None and self.out.dtype is not None
        return not in_turn or cast or self.buffer.replay is not None

    @property
    def recompute_old(self) -> bool:
        """The ratio's denominator comes from the trainer: the engine's log-probs are not exactly its own."""
        return self.algorithm.needs_old(self.exact and self.same_policy)

    @property
    def sync_due(self) -> bool:
        """Whether the current step ends in a weight sync: every so many steps, at the end, and before an evaluation."""
        done = self.step + 1
        judged = self._due(self.cfg.eval.interval, epochs=self.cfg.eval.interval_epochs, after=1)
        if done == self.plan.steps or judged:
            return True
        if self.cfg.sync.driven_by == "explorer" and self.plan.mode in ("asynchronous", "train"):
            groups = self.cfg.rollout.sync_interval * self.buffer.groups_per_step
            return self.explored - self.explored_at_sync >= groups
        return self._due(self.cfg.rollout.sync_interval, after=1)

    @property
    def explored(self) -> int:
        """Number of groups that were requested from all explorers so far."""
        counts = (
            self.buffer.store.ledger()
            if isinstance(self.buffer, TrainerQueue)
            else self.ledger.state()["total"]
        )
        return counts.get("asked", 0) // self.plan.group_size

    @property
    def sync_deadline(self) -> Deadline:
        """Longest time of a weight sync."""
        return deadlines.sync(self.cfg)

    @property
    def interrupts(self) -> bool:
        """A weight sync does not wait for rollouts in flight: they continue with the new weights."""
        return self.plan.mode == "asynchronous" and self.cfg.rollout.partial_rollout

    @property
    def group_deadline(self) -> Deadline:
        """Deadline for a task to become a group; after it, something hangs."""
        times = 2 if "baseline" in self.algorithm.needs else 1
        judges = len(self.rewards.weights)
        return deadlines.group(self.cfg, judges=judges, times=times, leased=bool(self.stores))

    @property
    def eval_due(self) -> bool:
        cfg = self.cfg.eval
        return (cfg.at_end and self.ends) or self._due(cfg.interval, epochs=cfg.interval_epochs)

    @property
    def checkpoint_due(self) -> bool:
        due = self._due(self.cfg.checkpoint.interval, epochs=self.cfg.checkpoint.interval_epochs)
        best = self.saver.is_best(self.score, at=(self.index, self.step))
        return self.stopping or self.ends or due or best

    @property
    def score(self) -> float | None:
        """The score that selects the best checkpoints, if the current step was evaluated."""
        step, score = self.scored
        return score if step == self.step else None

    @property
    def export_due(self) -> bool:
        """The last step's is the stage's own, which `run_stage` writes."""
        cfg = self.cfg.checkpoint
        return self._due(cfg.export_interval) and not (self.ends and cfg.export)

    @property
    def ends(self) -> bool:
        """Whether this was the last step."""
        return self.step == self.plan.steps

    @property
    def trainers(self) -> int:
        """Processes that train, this one among them where the policy learns here."""
        return sum(ranks.dims.world for ranks in self.ranks.values()) + ("policy" not in self.ranks)

    def _epochs_due(self, every: int, *, after: int = 0) -> bool:
        """Whether the step `after` steps from now completes another `every` passes over the rows (0: never)."""
        rows = self.plan.rows
        if every == 0 or rows is None:
            return False
        drawn = ((self.step + after - n) * self.plan.own_tasks_per_step for n in (1, 0))
        before, now = (tasks // (every * rows) for tasks in drawn)
        return now > before

    def _due(self, every: int, *, epochs: int = 0, after: int = 0) -> bool:
        """Whether what is done every so many steps or epochs (0: never) is due, `after` steps from now."""
        return (every > 0 and (self.step + after) % every == 0) or self._epochs_due(epochs, after=after)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step and show its name."""
        self.display.phase(name)
        self.watch.beat(name)
        timeline = self.directory.timeline
        timeline.at = self.name, self.step + (name not in OUTSIDE)
        start = clock()
        try:
            with timeline.span(name, STEPS), self.profiler.range(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + clock() - start

    def exploring(self, name: str) -> AbstractContextManager[None]:
        """A part of exploring: a phase of the step, or, where the trainer trains meanwhile, beside its phases."""
        if self.plan.mode == "synchronous":
            return self.phase(name)
        self.watch.beat(name)
        return self.together.span(name, self._explored)

    def _explored(self, name: str, start_ns: int) -> None:
        timeline = self.directory.timeline
        seconds = timeline.since(start_ns, name, EXPLORING)
        self.beside[name] = self.beside.get(name, 0.0) + seconds

    @asynccontextmanager
    async def meanwhile(self, beside: Coroutine[Any, Any, None] | None) -> AsyncIterator[None]:
        """What is explored while the block runs; both are done when it ends, or the first error ends it."""
        if beside is None:
            yield
            return
        exploring, self.moving = asyncio.ensure_future(beside), True
        try:
            yield
            await exploring
        finally:
            exploring.cancel()
            self.moving = False

    async def work(self, job: Callable[[], T]) -> T:
        """The result of what computes for long: here, or in a thread where rollouts are sampled meanwhile."""
        if self.plan.mode == "synchronous":
            return job()
        if self.hands is None:
            self.hands = ThreadPoolExecutor(1, thread_name_prefix="whet-trainer")
        return await asyncio.get_running_loop().run_in_executor(self.hands, job)

    async def close(self) -> None:
        """End background work."""
        await self.explorers.close()
        if self.hands is not None:
            self.hands.shutdown()

    async def come(self, groups: Awaitable[T], what: str) -> T:
        """Wait for groups, however many they are: none may take longer than the longest."""
        seen: list[object] = []

        def progress() -> object:
            if (now := [store.progress() for store in self.stores]) != seen:
                seen[:] = now
                self.watch.beat(what)
            return now

        return await self.wait(groups, what, within=self.group_deadline, progress=progress)

    def may_stop(self) -> bool:
        """A stop was requested, and the current state may be saved; otherwise the step is finished first."""
        return self.stopping and not self.moving and self.buffer.whole

    def tell(self, name: str, version: int) -> None:
        """Leave a note for explorers in separate processes."""
        for store in self.stores:
            store.note(name, version)

    def judged(self, groups: list[Group]) -> None:
        """Scored groups: too many failures end the run. Where groups come one by one, they are judged by the step;
        those of a round by the trainer."""
        if isinstance(self.buffer, ExplorerQueue) and self.buffer.version is not None:
            return
        if self.plan.mode == "asynchronous":
            self.judging += groups
            if len(self.judging) < self.buffer.groups_per_step:
                return
            groups, self.judging = self.judging, []
        check_failures(groups, self.rewards)

    async def give_up_stale(self) -> None:
        """Before a new version: explorers end what could not be trained on in time, at the last step all there is."""
        if self.plan.mode == "asynchronous" and self.step + 1 == self.plan.steps:
            await self.explorers.close()
            await self.buffer.give_up_stale(sys.maxsize)
        elif self.plan.mode == "asynchronous":
            await self.explorers.give_up(self.policy.version + 1)

    async def wait(
        self,
        awaitable: Awaitable[T],
        what: str,
        *,
        within: Deadline | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> T:
        """Wait with an owner and a deadline (rollout.timeout_s): a stall is logged with stacks, then ends the run.
        progress: as `guard.watch.wait` has it."""
        owner = f"stage {self.name!r}, step {self.step + 1}"
        self.directory.timeline.at = self.name, self.step + 1
        within = within or deadlines.rollout(self.cfg)
        with self.directory.timeline.span(what, WAITS):
            limits: dict[str, Any] = {"timeout_s": within.seconds, "limit": within.keys}
            return await wait(awaitable, owner=owner, what=what, progress=progress, **limits)

    def reset_reference(self) -> None:
        """Every so many steps or epochs copy the policy to the reference; the optimizer may be reset."""
        cfg = self.cfg.reference
        due = self._due(cfg.reset_interval, epochs=cfg.reset_interval_epochs)
        if self.reference is not None and due:
            self.reference.copy_from(self.policy)
            if cfg.reset_optimizer:
                self.policy.forget()

    def watch_mismatch(self, numbers: Metrics) -> None:
        """Compare the log-probs of engine and trainer. With log-prob parity there is no difference."""
        share = numbers.get("train/mismatch_frac", 0.0)
        if self.exact and self.same_policy and not self.policy.drops and share > 0:
            message = (
                f"step {self.step + 1}: {share:.2%} of the sampled log-probs differ from the trainer's, by at most "
                f"{numbers['train/mismatch_max_nats']:.2e} nats, although the self-test reported 'exact'"
            )
            if self.cfg.machine.logprob_parity == "on":
                raise WhetError(f"{message}; machine.logprob_parity=on does not allow this: use auto")
            log.warning("%s; the run continues as 'close'", message)
            self.exact = False
            self.display.exactness("close")

    def note_skipped(self, batch: Batch, parts: Sequence[torch.Tensor], steps: Sequence[Metrics]) -> None:
        """Find the groups of which nothing was learned; see `untaught`."""
        self.skipped, told = untaught(batch, parts, steps)
        if told:
            log.warning("step %d: %s", self.step + 1, told)

    def after_step(self, batch: Batch, groups: list[Group]) -> Metrics:
        """Numbers of the whole batch; the KL controller moves."""
        assert batch.adv_N is not None
        behind_M = (self.policy.version - 1 - batch.version_N)[batch.mask_N & (batch.version_N >= 0)]
        out: Metrics = {"train/version": float(self.policy.version)}
        if self.samples_older and len(behind_M):
            out["train/staleness_mean"] = float(behind_M.double().mean())
        if self.buffer.replay is not None:
            out["train/replayed_groups"] = float(self.buffer.reused)
        out |= shares(batch)
        seen = computed(batch)
        if seen.logp_ref_N is not None and seen.logp_old_N is not None:
            gap = (seen.logp_old_N - seen.logp_ref_N)[seen.mask_N]
            out["train/kl_reference_nats"] = float(gap.double().mean())
        if self.algorithm.kl_coef:
            out["train/kl_coef"] = self.kl_coef
            self.kl_coef = self.algorithm.next_kl_coef(batch, self.kl_coef)
        if (decay := self.cfg.critic.normalize_decay) is not None and batch.return_N is not None:
            out |= {"critic/scale_mean": self.value_scale.mean, "critic/scale_std": self.value_scale.std}
            self.value_scale = self.value_scale.seen(batch.return_N, batch.mask_N, decay=decay)
        due = self._due(self.cfg.track.batches_interval, after=1)
        self.trained = to_table(batch, groups) if due else None
        if self.meter is not None:
            self.flops = self.meter.flops(batch, policy_learns=self.step >= self.plan.critic_warmup_steps)
        if self.algorithm.mu is not None:
            out["train/mu"] = self.algorithm.mu(self.step + 1)
        length_R = batch.sum_R(torch.ones_like(batch.adv_N)).clamp(min=1)
        names = [(r.task.uid, r.index) for g in groups for r in g.rollouts]
        self.advantages = dict(zip(names, (batch.sum_R(batch.adv_N) / length_R).tolist()))
        return out

    # -- written down

    def record_step(self, metrics: Metrics) -> None:
        """One line of numbers, and every rollout that was played if they are due."""
        rollouts = [r for g in self.played for r in g.rollouts]
        if self.trained is not None:
            self.directory.write_batch(self.name, self.step, self.trained)
        if self._due(self.cfg.track.rollouts_interval) and self.algorithm.kind == "online":
            advantages = [self.advantages.get((r.task.uid, r.index)) for r in rollouts]
            self.directory.write_rollouts(self.name, self.step, rollouts, advantages=advantages)
        self.buffer.check()
        metrics |= self.ledger.end_step()
        timings = self._timings(int(metrics.get("rollout/tokens_sum", 0)))
        self._log(metrics, timings)
        self.display.step(metrics, timings)
        self.directory.timeline.flush()
        self.played = []

    def record_eval(self, metrics: Metrics, groups: Sequence[Group]) -> None:
        """Held-out metrics at the current step, with every sampled reply; some are shown."""
        if (best := self.cfg.checkpoint.keep_best) is not None:
            if best.metric not in metrics:
                raise WhetError(
                    f"checkpoint.keep_best.metric={best.metric}: the evaluation has only {', '.join(metrics)}"
                )
            self.scored = self.step, metrics[best.metric]
        if groups:
            replies = [r for g in groups for r in g.rollouts]
            self.directory.write_eval(self.name, self.step, replies, numbers=metrics)
        if self.cfg.eval.log_samples:
            rows = shown(groups, count=self.cfg.eval.log_samples, seed=self.cfg.seed)
            self.directory.write_samples(self.name, self.step, rows)
            for tracker in self.trackers:
                if isinstance(tracker, ShowsText):
                    tracker.show(self.name, self.step, rows)
        seconds = {"time/evaluate_s": self.seconds["evaluate"]}
        self._log(metrics, seconds)
        self.display.evaluated(self.step, metrics)

    def _log(self, metrics: Metrics, timings: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(self.name, self.step, metrics=metrics, timings=timings)

    def _timings(self, tokens: int) -> Metrics:
        """Seconds of the step, whole and by phase; `other` is what no phase claims."""
        seconds, self.seconds = self.seconds, {}
        beside, self.beside = self.beside, {}
        before, self.since = self.since, clock()
        step = self.since - before - sum(seconds.pop(name, 0.0) for name in OUTSIDE)
        out = {f"time/{name}_s": s for name, s in (seconds | beside).items()}
        out |= {"time/other_s": step - sum(seconds.values()), "time/step_s": step}
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
        out["memory/peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        for ranks in self.ranks.values():
            whose = f"{ranks.whose}_" if ranks.whose else ""
            for rank, peaks in enumerate(ranks.ask("peaks")):
                out |= {f"memory/{whose}rank_{rank}_{name}": value for name, value in peaks.items()}
        if self.ranks:
            out["speed/tokens_per_rank_s"] = tokens / step / self.trainers
        out |= {"speed/tokens_per_s": tokens / step} | self.env_timings()
        if self.meter is not None and seconds.get("update"):
            out["speed/mfu"] = self.flops / seconds["update"] / self.meter.peak
            out["speed/tokens_per_device_s"] = tokens / step / self.meter.devices
        if generating := (seconds | beside).get("generate"):
            out["speed/generated_tokens_per_s"] = tokens / generating
        return out

    # -- saved and resumed

    def engines(self) -> dict[str, TorchEngine]:
        """The engines of a checkpoint. A reference that was loaded from a folder is read from there again."""
        cfg = self.cfg.reference
        own = cfg.path is None or cfg.reset_interval > 0 or cfg.reset_interval_epochs > 0
        held = {"policy": self.policy, "critic": self.critic, "sampler": self.sampler}
        held["reference"] = self.reference if own else None
        return {name: engine for name, engine in held.items() if engine is not None}

    def save(self) -> None:
        """Save the whole run. Records are synced to disk first."""
        self.directory.sync()
        self.saver.wait()  # what is kept for the checkpoint before the last may go once the last is on the disk
        self.saver.save(self.engines(), self.state())

    def export(self, *, final: bool = False) -> None:
        """The policy as a Hugging Face folder: `export/STAGE` at the end of the stage, else with the step's number."""
        name = self.name if final else f"{self.name}-step-{self.step:06d}"
        with self.phase("export"):
            self.write_export(self.directory.path / "export" / name)
        self.uploads.export(self.directory.path / "export" / name)

    def state(self) -> Json:
        return {
            "stage": self.index,
            "stage_name": self.name,
            "step": self.step,
            "done": self.step >= self.plan.steps,
            "version": self.policy.version,
            "sampler_version": self.sampler.version if self.sampler else self.policy.version,
            "score": self.score,
            "kl_coef": self.kl_coef,
            "value_scale": asdict(self.value_scale),
            "exact": self.exact,
            "explored_at_sync": self.explored_at_sync,
            "tasks": self.tasks.state(),
            "experts": self.experts.stream.state() if self.experts else None,
            "buffer": self.buffer.state(),
            "rounds": self.rounds.state() if self.rounds else None,
            "ledger": self.ledger.state(),
            "config": redact_tree(self.fingerprint),
            "record": self.directory.held(),
        }

    def restore(self, path: Path, state: Json, *, changed: bool = False) -> None:
        """Resume from `state`; CheckpointError if it lacks a part. changed: a changed config may add fresh parts."""
        engines = self.engines()
        copied = self.sampler is not None and changed and not (path / "sampler").is_dir()
        if copied:
            engines.pop("sampler")
        checkpoint.load(path, engines, wanted=self.cfg.checkpoint.load_contents)
        if copied and self.sampler is not None:
            self.sampler.copy_from(self.policy)
        with reading(path / checkpoint.STATE):
            self._restore(state, changed=changed)

    def _restore(self, state: Json, *, changed: bool) -> None:
        self.step, self.kl_coef = state["step"], state["kl_coef"]
        self.resumed, self.scored = True, (state["step"], state.get("score"))
        self.value_scale = Scale(**state["value_scale"])
        self.exact = self.exact and state["exact"]
        self.explored_at_sync = state.get("explored_at_sync", 0)
        self.policy.version = state["version"]
        if self.sampler is not None:
            self.sampler.version = state["sampler_version"]
        rows = self.tasks.restore(state["tasks"], changed=changed)
        if self.experts is not None and (state["experts"] or not changed):
            rows += self.experts.stream.restore(state["experts"], changed=changed)
        other_rows(self.directory, rows, self.name, self.step)
        if self.rounds is not None:
            self.rounds.restore(state["rounds"])
        self.explorers.again = self.buffer.restore(state["buffer"], state["sampler_version"])
        self.ledger = self.buffer.ledger = Ledger.from_state(state["ledger"])
