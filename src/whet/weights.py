"""The part of a stage that gives the policy's weights to the engines that sample from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.config import deadlines
from whet.config.schema import Config
from whet.config.simulated import simulated
from whet.context import Context
from whet.explorer import Explorer
from whet.job import Models
from whet.placement import engine_of
from whet.rollout.engine import RolloutEngine
from whet.sync.exchange import Publisher, publisher_of, shared
from whet.sync.files import Files
from whet.sync.weights import publish, sync
from whet.training.engine import TrainEngine
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.ranks import Ranks
from whet.training.torch import TorchEngine
from whet.types import Json, Metrics

log = logging.getLogger(__name__)


@dataclass
class Weights:
    """Of one stage: when the engines get a version, and how."""

    context: Context
    policy: TrainEngine
    engine: RolloutEngine | None
    sampler: TrainEngine | None
    """The copy of the policy that the engine samples from between syncs. None: from the policy itself."""
    out: Publisher | None = None
    """Where explorers in separate processes get the weights from."""
    explored_at_sync: int = 0
    """`Explorer.explored` at the last weight sync."""

    async def begin(self, *, resumed: bool) -> int:
        """The first sync of the stage. Returns the version that is sampled from."""
        await self._place("gpu", "the servers to wake up")  # a stage before may have ended early
        if resumed and self.sampler is not None:  # it stands at the last sync, the policy has moved on
            sampled, first = self.sampler, sync(self.sampler, self.engine, out=self.out)
        else:
            sampled, first = self.policy, sync(self.policy, self.engine, through=self.sampler, out=self.out)
        within = deadlines.sync(self.context.cfg)
        await self.context.monitor.wait(first, "the first weight sync", within=within)
        return sampled.version

    def check(self) -> None:
        """Before an optimizer step: explorers in separate processes that took other weights than were sent end the
        run."""
        if self.out is not None:
            self.out.look()

    async def sleep(self) -> None:
        """Before a step is computed: servers that share the accelerator give its memory back (rollout.server.sleep)."""
        await self._place("cpu", "the servers to sleep")

    async def _place(self, device: Literal["gpu", "cpu"], what: str) -> None:
        if self.context.cfg.rollout.server.sleep and self.engine is not None:
            within = deadlines.sync(self.context.cfg)
            await self.context.monitor.wait(self.engine.place(device), what, within=within)

    async def publish(self, step: int, explorer: Explorer) -> Metrics:
        """One more version of the policy. From here engine.version == policy.version, save with
        rollout.sync_interval > 1. Returns what was measured to prove it."""
        with explorer.in_flight.door.held():
            await explorer.barrier(step, self.policy.version + 1)
            due = self.due(step, lambda: explorer.explored)
            if due and not self.interrupts:
                await explorer.rollouts_over()
            measured = await self._publish(due=due)
        if due:
            self.explored_at_sync = explorer.explored
        return measured

    async def _publish(self, *, due: bool) -> Metrics:
        if due or self.context.algorithm.kind == "online":
            await self._place("gpu", "the servers to wake up")
        how = simulated(self.context.cfg.train)
        if how is not None and how.sync_s and due:
            if self.engine is not None:
                await self.engine.pause(not self.interrupts)
            await self.context.rest(how.sync_s, "a simulated weight sync")
        publishing = publish(
            self.policy,
            self.engine,
            through=self.sampler,
            due=due,
            finish=not self.interrupts,
            out=self.out,
        )
        within = deadlines.sync(self.context.cfg)
        return await self.context.monitor.wait(publishing, "the weight sync", within=within)

    def due(self, step: int, explored: Callable[[], int]) -> bool:
        """Whether the step after `step` steps ends in a weight sync: every so many steps where the stage samples,
        at the end, and before an evaluation."""
        context, cfg, done = self.context, self.context.cfg, step + 1
        evaluated = context.due(done, cfg.eval.interval)
        if done == context.plan.steps or evaluated:
            return True
        if context.algorithm.kind != "online":  # nothing else samples
            return False
        if cfg.sync.driven_by == "explorer" and context.plan.mode in ("asynchronous", "train"):
            groups = cfg.rollout.sync_interval * context.plan.own_tasks_per_step
            return explored() - self.explored_at_sync >= groups
        return context.due(done, cfg.rollout.sync_interval)

    @property
    def interrupts(self) -> bool:
        """A weight sync does not wait for rollouts in flight: they continue with the new weights."""
        return self.context.plan.mode == "asynchronous" and self.context.cfg.rollout.partial_rollout

    # -- saved and resumed

    def state(self) -> dict[str, Json]:
        sampled = self.sampler or self.policy
        return {"sampler_version": sampled.version, "explored_at_sync": self.explored_at_sync}

    def restore(self, state: Json) -> None:
        self.explored_at_sync = state.get("explored_at_sync", 0)
        if self.sampler is not None:
            self.sampler.version = state["sampler_version"]


def open_weights(
    context: Context, models: Models, policy: TrainEngine, run_dir: Path, *, ranks: Mapping[str, Ranks]
) -> Weights:
    """Where explorers are separate processes, they get the weights from run_dir/weights."""
    elsewhere = context.cfg.mode == "train" and context.algorithm.kind == "online"
    out = open_publisher(context.cfg, run_dir, policy) if elsewhere else None
    if out is not None and policy.machine is not None:
        who = "a rank" if out.there else "this process, because the ranks do not reach the run directory,"
        log.info("stage %s: the ranks are on another machine; %s writes their weights", context.name, who)
    sampler: TrainEngine | None = None
    apart = models.sampler if context.plan.samples_apart and context.plan.generates else None
    if apart == "here":
        sampler = TorchEngine(models.policy.copied().model, models.ops, cut=MicroBatchPolicy())
    elif apart == "on_ranks":
        sampler = engine_of(
            models, context.cfg, "sampler", models.policy.copied(), ranks=ranks, cut=MicroBatchPolicy()
        )
        sampler.beat = policy.beat
    return Weights(context, policy, models.engine, sampler, out)


def open_publisher(cfg: Config, run_dir: Path, policy: TrainEngine) -> Publisher:
    """Where explorers in separate processes get the policy's weights from."""
    files = Files(run_dir.resolve() / "weights", timeout_s=cfg.sync.timeout_s, keep=cfg.sync.keep)
    files.tidy()
    there = policy.machine is not None and shared(policy, files.root)
    return publisher_of(cfg, files, receipts=files.receipts, there=there)
