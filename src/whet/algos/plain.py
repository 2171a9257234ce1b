"""Policy losses of the form -weight * log pi, without a trust region.

Per token, unreduced. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from whet.algos.correction import bounded, mean_weight, raw_weights
from whet.algos.ratios import drift, log_ratio, log_ratio_to, ratio, sampled
from whet.algos.segments import counted_N, need, sampled_logp_N
from whet.batch import Batch, Loss, LossFn, Outputs


def reinforce(batch: Batch, out: Outputs) -> Loss:
    """-A log pi (Williams 1992, doi:10.1007/BF00992696). Unbiased only on rollouts of the current policy."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, loss_N), drift(batch, out))


def reinforce_is(
    batch: Batch,
    out: Outputs,
    *,
    weight_over: str,
    weight_low: float | None,
    weight_high: float | None,
    weight_outside: str,
    weight_normalize: bool = False,
) -> Loss:
    """-sg(w) A log pi, w = pi / pi_engine of the token, or the product of it over the rollout (sequence), in bounds.

    REINFORCE in verl 0.8.0's bypass mode: the weight is that of the policy that learns, not of the one before the
    step, and takes the place of a clip. weight_over=none: w = 1. Weights outside [weight_low, weight_high] are set to
    the bound (truncate) or to 0 (mask). weight_normalize: over the mean weight of the minibatch; a batch that is given
    here is a whole one (see `reinforce_is_over`).
    """
    logp_N = need(out.logp_N, "outputs.logp_N").detach()
    return reinforce_is_over(
        batch,
        lambda: logp_N,
        weight_over=weight_over,
        weight_low=weight_low,
        weight_high=weight_high,
        weight_outside=weight_outside,
        weight_normalize=weight_normalize,
    )(batch, out)


def reinforce_is_over(
    minibatch: Batch,
    logprobs: Callable[[], Tensor],
    *,
    weight_over: str,
    weight_low: float | None,
    weight_high: float | None,
    weight_outside: str,
    weight_normalize: bool,
) -> LossFn:
    """The loss for parts of a minibatch; logprobs() gives those of all its tokens, which the mean weight is made of."""
    if weight_over == "none":
        return reinforce
    weigh = partial(_weights, over=weight_over, low=weight_low, high=weight_high, outside=weight_outside)
    if not weight_normalize:
        return partial(_reinforce_is, weigh, 1.0)
    weight_N, _ = weigh(minibatch, logprobs())
    counted = replace(minibatch, mask_N=counted_N(minibatch))
    mean = mean_weight(counted, weight_N.double(), over_rollouts=weight_over != "token")
    return partial(_reinforce_is, weigh, max(float(mean), 1e-8))


def _weights(
    batch: Batch, logp_N: Tensor, *, over: str, low: float | None, high: float | None, outside: str
) -> tuple[Tensor, Tensor]:
    """([N] weights in their bounds, before these)."""
    raw_N = raw_weights(batch, log_ratio_to(sampled_logp_N(batch), batch, Outputs(logp_N=logp_N)), over)
    return bounded(raw_N, low=low, high=high, outside=outside), raw_N


def _reinforce_is(
    weigh: Callable[[Batch, Tensor], tuple[Tensor, Tensor]], mean: float, batch: Batch, out: Outputs
) -> Loss:
    logp_N = need(out.logp_N, "outputs.logp_N")
    weight_N, raw_N = weigh(batch, logp_N.detach())
    weight_N, outside_N = weight_N / mean, weight_N != raw_N
    loss_N = -weight_N * need(batch.adv_N, "batch.adv_N") * logp_N
    stats = {"importance_weight": weight_N, "clip_frac": outside_N.to(weight_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def dro(batch: Batch, out: Outputs, *, dro_beta: float) -> Loss:
    """-A log pi + dro_beta / 2 (log r)^2: the square takes the place of a clip (arXiv:2405.19107 eq. 4 with the value
    in the advantage; `dro` of verl 0.9.0)."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N")
    loss_N = loss_N + dro_beta / 2 * log_ratio(batch, out).square()
    return Loss(sampled(batch, loss_N), drift(batch, out))


def opmd(batch: Batch, out: Outputs, *, tau: float) -> Loss:
    """-A log pi / (1 + tau): a step of online policy mirror descent (arXiv:2505.17826)."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N") / (1 + tau)
    return Loss(sampled(batch, loss_N), drift(batch, out))


def topr(batch: Batch, out: Outputs, *, topr_threshold: float) -> Loss:
    """-sg(a) A log pi, a = min(r, 1) where A <= threshold, else 1 (tapered off-policy REINFORCE, arXiv:2503.14286).

    The paper's A is the reward itself; its ratio is that of the rollout, here as in Trinity that of the token.
    """
    adv_N = need(batch.adv_N, "batch.adv_N")
    taper_N = torch.where(adv_N <= topr_threshold, ratio(batch, out).detach().clamp(max=1), 1.0)
    loss_N = -taper_N * adv_N * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, loss_N), {"taper": taper_N} | drift(batch, out))


def cross_entropy(batch: Batch, out: Outputs) -> Loss:
    """-log pi of the policy's own rollouts, with any advantage: with the best of a group it is RAFT."""
    loss_N = sampled(batch, -need(out.logp_N, "outputs.logp_N"))
    return Loss(loss_N, {"nll_nats": loss_N.detach()} | drift(batch, out))
