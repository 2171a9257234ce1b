"""Losses per token, unreduced: what a token counts stands in `batch.weight_N` (see `aggregate`).

A loss is a function of a batch and the model's outputs for it; further keyword arguments are settings of
`config.Algorithm`, by name. It is 0 where nothing was sampled. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from whet.algos.aggregate import pairs
from whet.algos.kl import reference_kl
from whet.algos.segments import last_sampled_R, need, old_logp_N
from whet.batch import Batch, Loss, LossFn, Outputs


def ppo(batch: Batch, out: Outputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old; for A < 0 at most -dual_clip A.

    arXiv:1707.06347 eq. 7; clip-higher arXiv:2503.14476 eq. 10; dual clip arXiv:1912.09729.
    """
    adv_N, ratio_N = need(batch.adv_N, "batch.adv_N"), _ratio(batch, out)
    free_N = -adv_N * ratio_N
    clipped_N = -adv_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(free_N, clipped_N)
    stats = {"clip_frac": clipped_N > free_N}
    if dual_clip is not None:
        cap_N = -dual_clip * adv_N
        stats["clip_frac_lower"] = (adv_N < 0) & (loss_N > cap_N)
        loss_N = torch.where(adv_N < 0, torch.minimum(loss_N, cap_N), loss_N)
    return Loss(
        _sampled(batch, loss_N), {k: v.to(loss_N.dtype) for k, v in stats.items()} | _drift(batch, out)
    )


def reinforce(batch: Batch, out: Outputs) -> Loss:
    """-A log pi (Williams 1992, doi:10.1007/BF00992696). Unbiased only on rollouts of the present policy."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N")
    return Loss(_sampled(batch, loss_N), _drift(batch, out))


def sft(batch: Batch, out: Outputs) -> Loss:
    """-log pi: cross entropy of the given reply."""
    loss_N = _sampled(batch, -need(out.logp_N, "outputs.logp_N"))
    return Loss(loss_N, {"nll_nats": loss_N.detach()})


def dpo(batch: Batch, out: Outputs, *, beta: float, label_smoothing: float) -> Loss:
    """-(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z), z = log pi/ref (chosen) - log pi/ref (rejected).

    arXiv:2305.18290 eq. 7; with label smoothing e it is conservative DPO (Mitchell 2023). Of a group's two
    rollouts the one with the higher reward is the chosen one; the loss stands at its last sampled token.
    """
    chosen, rejected = pairs(batch)
    logp_N = need(out.logp_N, "outputs.logp_N")
    implied_R = beta * batch.sum_R(logp_N - need(batch.logp_ref_N, "batch.logp_ref_N"))
    margin = implied_R[chosen] - implied_R[rejected]
    pair = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    loss_N = torch.zeros_like(logp_N).index_put((last_sampled_R(batch)[chosen],), pair)

    def both(x: Tensor) -> Tensor:
        """[R] a pair's number at both its rollouts, so that the mean over rollouts is the mean over pairs."""
        return x.detach().to(logp_N.dtype).repeat_interleave(2)

    stats = {"accuracy": margin > 0, "margin": margin}
    stats |= {"chosen_reward": implied_R[chosen], "rejected_reward": implied_R[rejected]}
    return Loss(loss_N, {name: both(x) for name, x in stats.items()})


def value_loss(batch: Batch, out: Outputs, *, clip: float | None) -> Loss:
    """1/2 max((v - R)^2, (clip(v, V - c, V + c) - R)^2), V the value before; without c 1/2 (v - R)^2."""
    value_N = need(out.value_N, "outputs.value_N")
    return_N = need(batch.return_N, "batch.return_N")
    error_N = (value_N - return_N).square()
    stats = {"value": value_N.detach()}
    if clip is not None:
        old_N = need(batch.value_N, "batch.value_N")
        clipped_N = (value_N.clamp(old_N - clip, old_N + clip) - return_N).square()
        stats["value_clip_frac"] = (clipped_N > error_N).to(value_N.dtype)
        error_N = torch.maximum(error_N, clipped_N)
    return Loss(_sampled(batch, error_N / 2), stats)


def regularized(loss: LossFn, *, kl_coef: float, estimator: str, entropy_coef: float) -> LossFn:
    """loss + kl_coef * (KL to the reference) - entropy_coef * entropy, at every token."""

    def whole(batch: Batch, out: Outputs) -> Loss:
        base = loss(batch, out)
        loss_N, stats = base.loss_N, dict(base.stats)
        if kl_coef > 0:
            kl_N = reference_kl(batch, need(out.logp_N, "outputs.logp_N"), estimator)
            loss_N, stats["kl_ref_nats"] = loss_N + kl_coef * kl_N, kl_N.detach()
        if entropy_coef != 0:
            loss_N = loss_N - entropy_coef * _sampled(batch, need(out.entropy_N, "outputs.entropy_N"))
        if out.entropy_N is not None:
            stats["entropy_nats"] = out.entropy_N.detach()
        return Loss(loss_N, stats)

    return whole


LOSSES: dict[str, Callable[..., Loss]] = {"ppo": ppo, "reinforce": reinforce, "sft": sft, "dpo": dpo}


def _sampled(batch: Batch, x_N: Tensor) -> Tensor:
    return torch.where(batch.mask_N, x_N, x_N.new_zeros(()))


def _log_ratio(batch: Batch, out: Outputs) -> Tensor:
    """[N] log pi - log pi_old, bounded to +-20 so that its exponential stays finite; 0 where not sampled."""
    return _sampled(batch, need(out.logp_N, "outputs.logp_N") - old_logp_N(batch)).clamp(-20, 20)


def _ratio(batch: Batch, out: Outputs) -> Tensor:
    return _log_ratio(batch, out).exp()


def _drift(batch: Batch, out: Outputs) -> dict[str, Tensor]:
    """How far the policy has moved from the one before this step: ratio, and KL(old || now) as k1 and k3."""
    log_N = _log_ratio(batch, out).detach()
    ratio_N = log_N.exp()
    return {
        "ratio": ratio_N,
        "ratio_max": ratio_N,
        "approx_kl_k1_nats": -log_N,
        "approx_kl_k3_nats": torch.expm1(log_N) - log_N,
    }
