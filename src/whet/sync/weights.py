"""From a trained policy to the engine that samples from it."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from whet.rollout.engine import RolloutEngine, WeightSource
from whet.types import WhetError


class Policy(Protocol):
    version: int

    @property
    def module(self) -> nn.Module: ...


async def publish(policy: Policy, engine: RolloutEngine | None) -> None:
    """One more version of the policy; from the return on `engine.version == policy.version`.

    Trainer and engine share the module in memory, so nothing is moved; rollouts in flight finish first.
    """
    policy.version += 1
    await sync(policy, engine)


async def sync(policy: Policy, engine: RolloutEngine | None) -> None:
    """Give the engine the policy's present weights and version."""
    if engine is None:
        return
    await engine.pause(finish=True)
    await engine.load_weights(WeightSource(module=policy.module), policy.version)
    if engine.version != policy.version:
        raise WhetError(
            f"after the weight sync the engine is at version {engine.version}, the policy at {policy.version}; "
            "rollouts would come from stale weights, so the run stops"
        )
