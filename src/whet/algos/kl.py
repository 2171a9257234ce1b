"""Per-token estimators of the KL divergence to the reference, and the controller of its weight.

All take d = log pi(token) - log ref(token) for a token sampled from pi
(Schulman 2020, http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from whet.algos.segments import need, old_logp_N, sampled_R
from whet.batch import Batch
from whet.tables import find

Estimator = Callable[[Tensor], Tensor]


def k1(d: Tensor) -> Tensor:
    """d. Unbiased, can be negative; as a loss its expected gradient is zero, so use it in the reward."""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2. Biased, but its gradient is that of the true KL."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Unbiased, never negative; without bounds: infinite for d below -88 in float32."""
    return torch.expm1(-d) + d


def low_var_kl(d: Tensor) -> Tensor:
    """k3 with d bounded to +-20 and the result to 10; flat beyond, so that no token gives an infinite gradient."""
    return k3(d.clamp(-20, 20)).clamp(max=10)


def absolute(d: Tensor) -> Tensor:
    """|d|"""
    return d.abs()


def straight_through(value: Estimator, d: Tensor) -> Tensor:
    """The value of one estimator with the gradient of k2, which is that of the KL."""
    through = k2(d)
    return value(d).detach() + (through - through.detach())


def corrected_k3(d: Tensor, log_ratio: Tensor) -> Tensor:
    """k3 * clip(pi / pi_old, 0, 2): the token was sampled from the policy before (Trinity-RFT)."""
    return k3(d) * log_ratio.clamp(-20, 20).exp().clamp(max=2)


def unbiased_k3(d: Tensor, log_ratio: Tensor) -> Tensor:
    """k3 * pi / pi_old: over tokens of pi_old its mean is the KL of pi, as is its gradient (DeepSeek-V3.2,
    arXiv:2512.02556 section 3.1). d is bounded to +-20 and the product to 10, as in Cosmos-RL 0.4.7."""
    return (k3(d.clamp(-20, 20)) * log_ratio.clamp(-20, 20).exp()).clamp(max=10)


_PLAIN: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl, "abs": absolute}

ESTIMATORS: dict[str, Estimator] = {
    **_PLAIN,
    **{f"{name}+": partial(straight_through, value) for name, value in _PLAIN.items()},
}
"""Functions of d alone."""

RATIO_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "corrected_k3": corrected_k3,
    "unbiased_k3": unbiased_k3,
}
"""Functions of d and log pi - log pi_old."""


def reference_kl(batch: Batch, logp_N: Tensor, estimator: str) -> Tensor:
    """[N] KL to the reference per sampled token, in nats; 0 elsewhere."""
    d_N = logp_N - need(batch.logp_ref_N, "batch.logp_ref_N")
    if estimator in RATIO_ESTIMATORS:
        k_N = RATIO_ESTIMATORS[estimator](d_N, logp_N - old_logp_N(batch))
    else:
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

    coef * (1 + clip(kl_now / target - 1, -0.2, 0.2) * rollouts / horizon), arXiv:1909.08593 section 2.2. A KL that is
    not a number, of a step whose update is skipped, moves nothing.
    """
    if math.isnan(kl_now):
        return coef
    error = min(max(kl_now / target - 1, -0.2), 0.2)
    return coef * (1 + error * rollouts / horizon)
