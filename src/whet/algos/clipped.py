"""Policy losses that bound, gate or mask a token's ratio r = pi / pi_old.

Per token, unreduced; keyword arguments are settings of `config.Algorithm`, by name. A is the token's advantage,
sg(x) is x without gradient. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whet.algos.ratios import BOUND, clip, drift, log_ratio, log_ratio_to, mean_R, ratio, sampled
from whet.algos.segments import need, old_logp_N, sampled_logp_N
from whet.batch import Batch, Loss, Outputs


def ppo(
    batch: Batch,
    out: Outputs,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
    sequence_mask_delta: float | None = None,
    sequence_mask_anchor: Literal["old", "sampled"] = "old",
    fallback_to_policy_gradient: bool = False,
) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old; for A < 0 at most -dual_clip A.

    arXiv:1707.06347 eq. 7; clip-higher arXiv:2503.14476 eq. 10; dual clip arXiv:1912.09729. A token with A < 0
    counts 0 in a rollout whose mean log pi_old/pi is above sequence_mask_delta; with sequence_mask_anchor=sampled it is
    log pi_engine/pi, which sees the engine's rounding, too (DeepSeek-V3.2, arXiv:2512.02556 section 3.1). With
    fallback_to_policy_gradient r = pi / sg(pi): 1, with the gradient of log pi.
    """
    adv_N = need(batch.adv_N, "batch.adv_N")
    log_N = log_ratio(batch, out)
    if fallback_to_policy_gradient:
        log_N = log_ratio_to(need(out.logp_N, "outputs.logp_N").detach(), batch, out)
    loss_N, stats = clipped_surrogate(log_N.exp(), adv_N, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        cap_N = -dual_clip * adv_N
        stats["clip_frac_lower"] = ((adv_N < 0) & (loss_N > cap_N)).to(loss_N.dtype)
        loss_N = torch.where(adv_N < 0, torch.minimum(loss_N, cap_N), loss_N)
    if sequence_mask_delta is not None:
        from_N = sampled_logp_N(batch) if sequence_mask_anchor == "sampled" else old_logp_N(batch)
        far_R = mean_R(batch, -log_ratio_to(from_N, batch, out).detach()) > sequence_mask_delta
        masked_N = (adv_N < 0) & far_R[batch.rollout_N]
        stats["sequence_mask_frac"] = masked_N.to(loss_N.dtype)
        loss_N = torch.where(masked_N, 0.0, loss_N)
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def clipped_surrogate(
    ratio_N: Tensor, adv_N: Tensor, *, clip_low: float | None, clip_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] max(-A r, -A clip(r)), and where the clip decides."""
    free_N, clipped_N = -adv_N * ratio_N, -adv_N * clip(ratio_N, clip_low, clip_high)
    return torch.maximum(free_N, clipped_N), {"clip_frac": (clipped_N > free_N).to(ratio_N.dtype)}


def aipo(batch: Batch, out: Outputs, *, aipo_rho: float) -> Loss:
    """-min(r, aipo_rho) A: the ratio is capped from above only, for either sign of A (arXiv:2505.24034)."""
    ratio_N = ratio(batch, out)
    loss_N = -need(batch.adv_N, "batch.adv_N") * ratio_N.clamp(max=aipo_rho)
    stats = {"clip_frac": (ratio_N > aipo_rho).to(loss_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def importance_sampling(batch: Batch, out: Outputs) -> Loss:
    """-A r: unbiased for rollouts of the policy before the step, unbounded in variance."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * ratio(batch, out)
    return Loss(sampled(batch, loss_N), drift(batch, out))


def cispo(
    batch: Batch,
    out: Outputs,
    *,
    clip_low: float | None,
    clip_high: float | None,
    cispo_mask: bool,
    mask_low: float | None = None,
    mask_high: float | None = None,
) -> Loss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: the weight is clipped, the gradient of no token is lost.

    arXiv:2506.13585 section 3.1. With cispo_mask tokens that PPO would clip count 0 (its eq. 7): r above 1 + mask_high
    with A > 0, r below 1 - mask_low with A < 0. A bound that is not given is the clip's, as in Trinity until 0.5;
    Trinity 0.6 has both.
    """
    adv_N, ratio_N = need(batch.adv_N, "batch.adv_N"), ratio(batch, out).detach()
    weight_N = clip(ratio_N, clip_low, clip_high)
    stats = {"clip_frac": (weight_N != ratio_N).to(weight_N.dtype)}
    if cispo_mask:
        inside_N = clip(
            ratio_N,
            clip_low if mask_low is None else mask_low,
            clip_high if mask_high is None else mask_high,
        )
        masked_N = ((ratio_N > inside_N) & (adv_N > 0)) | ((ratio_N < inside_N) & (adv_N < 0))
        stats["masked_frac"] = masked_N.to(weight_N.dtype)
        weight_N = torch.where(masked_N, 0.0, weight_N)
    loss_N = -weight_N * adv_N * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def sapo(batch: Batch, out: Outputs, *, tau_pos: float, tau_neg: float, sapo_detach: bool) -> Loss:
    """-A g, g = 4 / tau * sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg (arXiv:2511.20347).

    A soft gate in place of the clip: dg/dr = 4 s (1 - s) is 1 at r = 1 and falls off to both sides. With sapo_detach
    -A sg(g) log pi, which weighs a token by the gate itself (2 / tau at r = 1).
    """
    adv_N = need(batch.adv_N, "batch.adv_N")
    tau_N = torch.where(adv_N > 0, tau_pos, tau_neg).to(adv_N.dtype)
    gate_N = torch.sigmoid(tau_N * (ratio(batch, out) - 1)) * 4 / tau_N
    stats = {"gate": gate_N.detach()} | drift(batch, out)
    if sapo_detach:
        gate_N = gate_N.detach() * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, -adv_N * gate_N), stats)


def softmax_ppo(batch: Batch, out: Outputs, *, ratio_epsilon: float) -> Loss:
    """-A log r where 1 / (1 + e) <= r <= 1 + e, else 0 (softmax PPO, arXiv:2108.05828; Trinity's `sppo`)."""
    log_N = log_ratio(batch, out)
    ratio_N = log_N.detach().exp()
    outside_N = (ratio_N < 1 / (1 + ratio_epsilon)) | (ratio_N > 1 + ratio_epsilon)
    loss_N = torch.where(outside_N, 0.0, -need(batch.adv_N, "batch.adv_N") * log_N)
    stats = {"clip_frac": outside_N.to(loss_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def rollout_is(batch: Batch, out: Outputs, *, clip_low: float | None, clip_high: float | None) -> Loss:
    """-sg(w) A log pi, w = pi / pi_engine where 1 - low < w < 1 + high, else 0.

    The engine's own log-probs are the anchor, so none are recomputed.
    """
    ratio_N = log_ratio_to(sampled_logp_N(batch), batch, out).detach().exp()
    outside_N = torch.zeros_like(batch.mask_N)
    if clip_low is not None:
        outside_N |= ratio_N <= 1 - clip_low
    if clip_high is not None:
        outside_N |= ratio_N >= 1 + clip_high
    weight_N = torch.where(outside_N, 0.0, ratio_N)
    loss_N = -weight_N * need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N")
    stats = {"masked_frac": outside_N.to(loss_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def dppo(
    batch: Batch,
    out: Outputs,
    *,
    dppo_divergence: str,
    dppo_delta_low: float,
    dppo_delta_high: float,
    dppo_anchor: str = "sampled",
    dppo_max_ratio: float = 20.0,
) -> Loss:
    """-A r, r = pi / pi_engine, but 0 where the step away from the engine's policy is already too far.

    With dppo_anchor=old the policy before the step stands in for the engine's. A ratio above dppo_max_ratio weighs
    log pi by that bound, so the gradient is kept (arXiv:2602.04879 section 5.4: 20). Too far: divergence > delta_high
    where A > 0 and p > p_engine, or > delta_low where A < 0 and p < p_engine. The divergence looks at the sampled token
    against all others: binary_tv |p - p_engine|, binary_kl KL(p_engine || p) of the two Bernoulli distributions.
    """
    adv_N = need(batch.adv_N, "batch.adv_N")
    logp_N = need(out.logp_N, "outputs.logp_N")
    behaviour_N = sampled_logp_N(batch) if dppo_anchor == "sampled" else old_logp_N(batch)
    with torch.no_grad():
        rise_N = logp_N.exp() - behaviour_N.exp()
        far_N = bernoulli_kl(behaviour_N, logp_N) if dppo_divergence == "binary_kl" else rise_N.abs()
        up_N = (adv_N > 0) & (rise_N > 0) & (far_N > dppo_delta_high)
        down_N = (adv_N < 0) & (rise_N < 0) & (far_N > dppo_delta_low)
    ratio_N = log_ratio_to(behaviour_N, batch, out).exp()
    ratio_N = ratio_N * (dppo_max_ratio / ratio_N.detach()).clamp(max=1)
    loss_N = torch.where(up_N | down_N, 0.0, -adv_N * ratio_N)
    stats = {"masked_frac": (up_N | down_N).to(loss_N.dtype), "divergence": far_N}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def bernoulli_kl(logp_N: Tensor, logq_N: Tensor) -> Tensor:
    """[N] p log(p/q) + (1 - p) log((1 - p)/(1 - q)) of two log-probs; at most BOUND, where q forbids what p allows."""
    p_N, q_N = logp_N.exp(), logq_N.exp()
    not_p_N, not_q_N = (-torch.expm1(x_N.clamp(max=0)) for x_N in (logp_N, logq_N))
    kl_N = torch.xlogy(p_N, p_N) - torch.xlogy(p_N, q_N)
    return (kl_N + torch.xlogy(not_p_N, not_p_N) - torch.xlogy(not_p_N, not_q_N)).clamp(max=BOUND)
