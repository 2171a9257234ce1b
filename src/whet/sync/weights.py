"""Transfers weights from a trained policy to the engine that samples from it."""

from __future__ import annotations

from typing import Any, Protocol

from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.rollout.router import Router
from whet.sync.exchange import Policy, Publisher
from whet.types import Metrics, WhetError


class Sampler(Policy, Protocol):
    """A copy of the policy to sample from, while the policy itself is trained on."""

    def copy_from(self, other: Any) -> None: ...


async def publish(
    policy: Policy,
    engine: RolloutEngine | None,
    *,
    through: Sampler | None = None,
    due: bool = True,
    finish: bool = True,
    out: Publisher | None = None,
) -> Metrics:
    """Publish one more version of the policy; if a sync is due, `engine.version == policy.version` when this returns.
    Returns what was measured to prove it.

    Trainer and engine share the module in memory, so nothing is moved, or share the sampler's (`through`), which is
    then made equal to the policy. Rollouts in flight finish first, or (`finish` false) continue with the new weights.
    out: where separate explorer processes get the weights from.
    """
    policy.version += 1
    if not due:
        return {}
    return await sync(policy, engine, through=through, finish=finish, out=out)


async def sync(
    policy: Policy,
    engine: RolloutEngine | None,
    *,
    through: Sampler | None = None,
    finish: bool = True,
    out: Publisher | None = None,
) -> Metrics:
    """Give the engine the policy's current weights and version. Returns what was measured to prove it."""
    if out is not None:
        out.publish(policy)
    if engine is not None:
        await engine.pause(finish)  # before the sampler's weights change under it
    if through is not None:
        through.copy_from(policy)
        through.version = policy.version
    return await hand_over(through or policy, engine)


async def hand_over(source: Policy, engine: RolloutEngine | None) -> Metrics:
    """Let the engine sample from these weights, under their version. Replicas get them from the processes that have
    them; an engine in this process, from the module here. Returns what was measured (`Receipt.measured`)."""
    if engine is None:
        return {}
    if source.apart and isinstance(engine, Router) and engine.takes_source:
        update = WeightUpdate(version=source.version, source=source)
    else:
        update = WeightUpdate(version=source.version, module=source.module)
    receipt = await engine.update_weights(update)
    if receipt.error:
        raise WhetError(
            f"weights version {source.version} was not loaded by {receipt.receiver}: {receipt.error}"
        )
    if (receipt.version, engine.version) != (source.version, source.version):
        raise WhetError(
            f"after the weight sync {receipt.receiver} confirms version {receipt.version} and is at version "
            f"{engine.version}, the policy at {source.version}; its rollouts would use stale weights, so the run stops"
        )
    return receipt.measured
