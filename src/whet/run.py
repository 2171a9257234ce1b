"""The live parts of one stage of a run, and what is written down of it."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from whet import checkpoint
from whet.algos.recipes import Algorithm
from whet.batch import Batch
from whet.buffer.buffer import Buffer
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.data.tasks import TaskStream
from whet.evaluate import Play
from whet.guard.ledger import Ledger
from whet.guard.watch import Watch, wait
from whet.rewards.combine import RewardSet
from whet.rollout.engine import RolloutEngine
from whet.track.display import Display
from whet.track.record import RunDirectory
from whet.track.trackers import Tracker
from whet.training.torch import TorchEngine
from whet.types import Group, Json, Metrics, Task, WhetError

log = logging.getLogger(__name__)

T = TypeVar("T")

clock = time.perf_counter
"""What phases are timed with; a benchmark on shared cores puts time.process_time here."""

OUTSIDE = ("evaluate", "save", "export")
"""Phases that are no part of a step's own seconds."""


class StopFlag(Protocol):
    """Set from outside (Ctrl-C) to end the run after the step at hand."""

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
    play: Play
    play_eval: Play
    read: Callable[[list[Task]], list[Group]]
    """Demonstrations or preference pairs as groups of rollouts."""
    rewards: RewardSet
    buffer: Buffer
    ledger: Ledger

    algorithm: Algorithm
    policy: TorchEngine
    reference: TorchEngine | None
    critic: TorchEngine | None
    engine: RolloutEngine | None
    """None: nothing is ever sampled."""
    exact: bool
    """The self-test has shown that sampled log-probs equal the trainer's bit for bit."""

    directory: RunDirectory
    trackers: Sequence[Tracker]
    display: Display
    stop: StopFlag
    watch: Watch
    fingerprint: Json
    """What a checkpoint must agree with: the resolved config."""

    step: int = 0
    kl_coef: float = 0.0
    played: list[Group] = field(default_factory=list)
    """All groups of the step at hand, trained on or not, until it is written down."""
    advantages: dict[tuple[int, int], float] = field(default_factory=dict)
    """Mean advantage of each rollout that was trained on, by (task uid, index)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase since the last step was written down."""
    since: float = field(default_factory=lambda: clock())
    """When that was."""

    # -- asked by the loop

    @property
    def stopping(self) -> bool:
        return self.stop.requested

    @property
    def recompute_old(self) -> bool:
        """The ratio's denominator comes from the trainer: the engine's log-probs are not exactly its own."""
        return self.algorithm.needs_old(self.exact)

    @property
    def eval_due(self) -> bool:
        cfg = self.cfg.eval
        last = self.step == self.plan.steps
        return (cfg.at_end and last) or (cfg.every > 0 and self.step % cfg.every == 0)

    @property
    def checkpoint_due(self) -> bool:
        every = self.cfg.checkpoint.every
        return self.stopping or self.step == self.plan.steps or (every > 0 and self.step % every == 0)

    @property
    def eval_at_once(self) -> int:
        """Tasks evaluated together: as many rollouts as the engine decodes at once."""
        return max(1, self.cfg.rollout.max_batch // self.cfg.eval.samples)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step and show what is going on."""
        self.display.phase(name)
        self.watch.beat(name)
        start = clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + clock() - start

    async def wait(self, awaitable: Awaitable[T], what: str) -> T:
        """Wait with an owner and a deadline: a stall is logged with stacks, then ends the run."""
        owner = f"stage {self.name!r}, step {self.step + 1}"
        return await wait(awaitable, owner=owner, what=what, timeout_s=self.cfg.rollout.timeout_s)

    def reset_reference(self) -> None:
        """Every reference.reset_every steps the reference becomes the policy of now."""
        every = self.cfg.reference.reset_every
        if self.reference is not None and every and self.step % every == 0:
            self.reference.copy_from(self.policy)

    def watch_mismatch(self, numbers: Metrics) -> None:
        """Compare what the engine said of its tokens with what the trainer says. Exact mode promises no difference."""
        share = numbers.get("train/mismatch_share", 0.0)
        if self.exact and share > 0:
            message = (
                f"step {self.step + 1}: {share:.2%} of the sampled log-probs differ from the trainer's, by at most "
                f"{numbers['train/mismatch_max_nats']:.2e} nats, though the self-test said 'exact'"
            )
            if self.cfg.machine.exact == "on":
                raise WhetError(message + "; machine.exact=on forbids that")
            log.warning("%s; the run goes on as 'close'", message)
            self.exact = False
            self.display.exactness("close")

    def after_step(self, batch: Batch, groups: list[Group]) -> Metrics:
        """Numbers of the whole batch; the KL controller moves."""
        assert batch.adv_N is not None
        out: Metrics = {"train/version": float(self.policy.version)}
        if batch.logp_ref_N is not None and batch.logp_old_N is not None:
            gap = (batch.logp_old_N - batch.logp_ref_N)[batch.mask_N]
            out["train/kl_reference_nats"] = float(gap.double().mean())
        if self.algorithm.kl_coef:
            out["train/kl_coef"] = self.kl_coef
            self.kl_coef = self.algorithm.next_kl_coef(batch, self.kl_coef)
        length_R = batch.sum_R(torch.ones_like(batch.adv_N)).clamp(min=1)
        names = [(r.task.uid, r.index) for g in groups for r in g.rollouts]
        self.advantages = dict(zip(names, (batch.sum_R(batch.adv_N) / length_R).tolist()))
        return out

    # -- written down

    def record_step(self, metrics: Metrics) -> None:
        """One line of numbers, and every rollout that was played if they are due."""
        every = self.cfg.track.rollouts_every
        rollouts = [r for g in self.played for r in g.rollouts]
        if every and self.step % every == 0 and self.algorithm.kind == "online":
            advantages = [self.advantages.get((r.task.uid, r.index)) for r in rollouts]
            self.directory.write_rollouts(self.name, self.step, rollouts, advantages=advantages)
        self.buffer.check()
        metrics |= self.ledger.end_step()
        timings = self._timings(int(metrics["rollout/tokens_sum"]))
        self._log(metrics, timings)
        self.display.step(metrics, timings)
        self.played = []

    def record_eval(self, metrics: Metrics, groups: Sequence[Group]) -> None:
        """Held-out accuracy at the present step, with every reply."""
        self.directory.write_eval(self.name, self.step, [r for g in groups for r in g.rollouts])
        seconds = {"time/evaluate_s": self.seconds["evaluate"]}
        self._log(metrics, seconds)
        self.display.evaluated(self.step, metrics)

    def _log(self, metrics: Metrics, timings: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(self.name, self.step, metrics=metrics, timings=timings)

    def _timings(self, tokens: int) -> Metrics:
        """Seconds of the step, whole and by phase; `rest` is what no phase claims."""
        seconds, self.seconds = self.seconds, {}
        now = clock()
        step = now - self.since - sum(seconds.pop(name, 0.0) for name in OUTSIDE)
        self.since = now
        out = {f"time/{name}_s": s for name, s in seconds.items()}
        out |= {"time/rest_s": step - sum(seconds.values()), "time/step_s": step}
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
        out["memory/peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        out["speed/tokens_per_s"] = tokens / step
        if "generate" in seconds:
            out["speed/generated_tokens_per_s"] = tokens / seconds["generate"]
        return out

    # -- saved and resumed

    def engines(self) -> dict[str, TorchEngine]:
        """What a checkpoint holds. A reference that came from a folder is read from there again."""
        out = {"policy": self.policy}
        if self.critic is not None:
            out["critic"] = self.critic
        own = self.cfg.reference.path is None or self.cfg.reference.reset_every > 0
        if self.reference is not None and own:
            out["reference"] = self.reference
        return out

    def save(self) -> Path:
        """The whole run to disk. What was written down so far is brought there first."""
        self.directory.sync()
        root = self.directory.path / "checkpoints"
        return checkpoint.save(root, self.engines(), self.state(), keep=self.cfg.checkpoint.keep)

    def state(self) -> Json:
        return {
            "stage": self.index,
            "stage_name": self.name,
            "step": self.step,
            "done": self.step >= self.plan.steps,
            "version": self.policy.version,
            "kl_coef": self.kl_coef,
            "exact": self.exact,
            "tasks": self.tasks.state(),
            "buffer": self.buffer.state(),
            "ledger": self.ledger.state(),
            "config": self.fingerprint,
        }

    def restore(self, path: Path, state: Json) -> None:
        """Go on where `state` was saved."""
        checkpoint.load(path, self.engines())
        self.step, self.kl_coef = state["step"], state["kl_coef"]
        self.exact = self.exact and state["exact"]
        self.policy.version = state["version"]
        self.tasks.restore(state["tasks"])
        self.buffer.restore(state["buffer"])
        self.ledger = self.buffer.ledger = Ledger.from_state(state["ledger"])
