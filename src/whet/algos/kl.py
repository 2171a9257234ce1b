"""Per-token estimators of the KL divergence to the reference, and the controller of its weight.

All take d = log pi(token) - log ref(token) for a token sampled from pi
(Schulman 2020, http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.algos.segments import need, old_logp_N, sampled_R
from whet.batch import Batch
from whet.tables import find


def k1(d: Tensor) -> Tensor:
    """d. Unbiased, can be negative; as a loss its expected gradient is zero, so use it in the reward."""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2. Biased, but its gradient is that of the true KL."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Unbiased, never negative; d is bounded to +-20, the result to 10, flat beyond."""
    x = (-d).clamp(-20, 20)
    return (torch.expm1(x) - x).clamp(max=10)


def absolute(d: Tensor) -> Tensor:
    """|d|"""
    return d.abs()


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def reference_kl(batch: Batch, logp_N: Tensor, estimator: str) -> Tensor:
    """[N] KL to the reference per sampled token, in nats; 0 elsewhere."""
    d_N = logp_N - need(batch.logp_ref_N, "batch.logp_ref_N")
    k_N = find(ESTIMATORS, estimator, what="KL estimator")(d_N)
    return torch.where(batch.mask_N, k_N, k_N.new_zeros(()))


def mean_kl(batch: Batch, estimator: str) -> float:
    """KL of the policy before this step to the reference, nats a token: mean over rollouts of their means."""
    k_R = batch.sum_R(reference_kl(batch, old_logp_N(batch), estimator).double())
    count_R = sampled_R(batch)
    rollouts = int((count_R > 0).sum())
    return float((k_R / count_R.clamp(min=1)).sum()) / max(rollouts, 1)


def adapt(coef: float, kl_now: float, *, target: float, horizon: int, rollouts: int) -> float:
    """The weight for the next step: raised when kl_now lies above the target, lowered below.

    coef * (1 + clip(kl_now / target - 1, -0.2, 0.2) * rollouts / horizon), arXiv:1909.08593 section 2.2.
    """
    error = min(max(kl_now / target - 1, -0.2), 0.2)
    return coef * (1 + error * rollouts / horizon)
