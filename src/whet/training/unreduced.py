"""The loss of a batch without an update: for evaluations and records."""

from __future__ import annotations

from whet.batch import Batch, Loss, LossFn, Outputs
from whet.training.engine import TrainEngine


def evaluated(
    policy: TrainEngine, batch: Batch, loss: LossFn, *, entropy: bool = False
) -> tuple[Outputs, Loss]:
    """The loss of a batch by the policy as it is now, unreduced and without a gradient. entropy: the loss reads it."""
    entropy_N = policy.forward(batch, "entropy") if entropy else None
    out = Outputs(logp_N=policy.forward(batch, "logprobs"), entropy_N=entropy_N)
    return out, loss(batch, out)
