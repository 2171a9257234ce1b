"""Training that takes its time and learns nothing (train.engine=simulated): what is measured is all the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from whet.algos.skipping import Skipping
from whet.batch import Batch, pack
from whet.config.simulated import StepLengths
from whet.context import Context
from whet.guard.printed import CONSOLE
from whet.job import Models
from whet.learner import SIMULATED, Learned, Learner, watch
from whet.trained_models import cut_of
from whet.training.torch import TorchEngine
from whet.types import Group, Json, Metrics

log = logging.getLogger(__name__)


@dataclass
class SimulatedLearner(Learner):
    """Takes the groups of each step as a learner does, and waits. The policy's weights stay; its version moves on."""

    how: StepLengths = field(default_factory=StepLengths)
    simulated: bool = True

    async def prepare(self, step: int, groups: list[Group]) -> tuple[Batch, Metrics]:
        """No model computes anything."""
        return pack(groups), Metrics()

    async def learn(self, step: int, batch: Batch, groups: list[Group]) -> Learned:
        with self.context.monitor.phase("update"):
            await self.context.rest(self.how.step_s, "a simulated training step")
        return Learned(batch=batch, groups=groups, metrics=self.sampled_by(batch), skipped=(), flops=0.0)

    def state(self) -> dict[str, Json]:
        return {**super().state(), SIMULATED: True}


def open_simulated(
    context: Context, models: Models, how: StepLengths, *, exact: bool, reused: Callable[[], int] | None
) -> SimulatedLearner:
    """The policy alone, without gradients. reused: as a learner has it."""
    policy = TorchEngine(models.model.requires_grad_(False), models.ops, cut=cut_of(context, models))
    log.warning(
        "stage %s: train.engine=simulated: a training step waits for %g s, and nothing is learned",
        context.name,
        how.step_s,
        extra={CONSOLE: True},
    )
    learner = SimulatedLearner(
        context, policy, references=(), critic=None, skipping=Skipping(), exact=exact, reused=reused, how=how
    )
    watch(learner)
    return learner
