"""Distillation as a loss: the divergence from a teacher at the policy's own tokens, with its own gradient.

`advantages.distill` learns from the same teacher by the policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whet.algos.kl import ESTIMATORS
from whet.algos.segments import need
from whet.batch import Batch, Loss, Outputs

OF_ENGINE = ("full", "forward_topk")
"""Divergences over many tokens at each place, which the engine adds to the loss: it alone has both output layers."""


@dataclass(frozen=True)
class TopK:
    """What is read of a teacher: its K likeliest tokens at each place."""

    k: int
    floor: float | None = None
    """Log-probs of both models count as at least this. None: as they are."""
    most: float | None = None
    """A token's divergence counts as at most this, without gradient above. None: no limit."""


def gkd(
    batch: Batch,
    out: Outputs,
    *,
    divergence: str,
    top_k: int,
    min_logprob: float | None,
    max_divergence: float | None,
) -> Loss:
    """k(d) at every token, d = log pi - log teacher, at most max_divergence; its gradient is that of k, not the policy
    gradient (arXiv:2306.13649). 0 for divergences `OF_ENGINE`, which read top_k and min_logprob.
    """
    logp_N = need(out.logp_N, "outputs.logp_N")
    if divergence in OF_ENGINE:
        return Loss(torch.zeros_like(logp_N))
    kl_N = ESTIMATORS[divergence](logp_N - need(batch.logp_ref_N, "batch.logp_ref_N"))
    if max_divergence is not None:
        kl_N = kl_N.clamp(-max_divergence, max_divergence)
    kl_N = torch.where(batch.mask_N, kl_N, kl_N.new_zeros(()))
    return Loss(kl_N, {"kl_loss_nats": kl_N.detach()})
