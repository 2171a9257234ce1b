"""Ratios of the current policy to the policy before the step, for ratio losses.

Log-ratios are bounded, so that a token with probability 0 under one of the two leaves a loss of the ratio finite, with
its gradient; at the bound there is no gradient. A loss that multiplies log pi itself is infinite where log pi is, as is
a term -log pi: no bound is right there, and such an update is skipped. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algos.segments import need, old_logp_N, sampled_R
from whet.batch import Batch, Outputs

BOUND = 20.0
"""Of a token's log-ratio, as in verl, Cosmos-RL and Trinity: e^20 = 4.9e8."""


def sampled(batch: Batch, x_N: Tensor) -> Tensor:
    """[N] x where a token was sampled, 0 elsewhere."""
    return torch.where(batch.mask_N, x_N, x_N.new_zeros(()))


def log_ratio(batch: Batch, out: Outputs, *, bound: float = BOUND) -> Tensor:
    """[N] log pi - log pi_old, bounded; 0 where not sampled."""
    return log_ratio_to(old_logp_N(batch), batch, out, bound=bound)


def log_ratio_to(logp_N: Tensor, batch: Batch, out: Outputs, *, bound: float = BOUND) -> Tensor:
    """[N] log pi minus the given log-probs, bounded; 0 where not sampled."""
    return sampled(batch, need(out.logp_N, "outputs.logp_N") - logp_N).clamp(-bound, bound)


def ratio(batch: Batch, out: Outputs) -> Tensor:
    """[N] pi / pi_old; 1 where not sampled."""
    return log_ratio(batch, out).exp()


def clip(ratio_N: Tensor, low: float | None, high: float | None) -> Tensor:
    """[N] the ratio between 1 - low and 1 + high; None leaves that side open."""
    return ratio_N.clamp(
        -float("inf") if low is None else 1 - low, float("inf") if high is None else 1 + high
    )


def mean_R(batch: Batch, x_N: Tensor) -> Tensor:
    """[R] mean of x over the sampled tokens of each rollout; 0 where there is none."""
    return batch.sum_R(x_N) / sampled_R(batch).clamp(min=1)


def drift(batch: Batch, out: Outputs) -> dict[str, Tensor]:
    """How far the policy has moved from the one before this step: ratio, and KL(old || now) as k1 and k3."""
    log_N = log_ratio(batch, out).detach()
    ratio_N = log_N.exp()
    return {
        "ratio": ratio_N,
        "ratio_max": ratio_N,
        "approx_kl_k1_nats": -log_N,
        "approx_kl_k3_nats": torch.expm1(log_N) - log_N,
    }
