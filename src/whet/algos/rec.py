"""REC: REINFORCE read as an off-policy method, with clip, weight and regulariser as separate choices.

arXiv:2509.24203. Per token, unreduced. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algos.ratios import BOUND, drift, log_ratio, mean_R, sampled
from whet.algos.segments import need
from whet.batch import Batch, Loss, Outputs


def rec(
    batch: Batch,
    out: Outputs,
    *,
    clip_low: float,
    clip_high: float,
    rec_clip_mode: str,
    rec_ring_low: float,
    rec_ring_high: float,
    rec_weight: str,
    rec_temperature: float,
    rec_regularizer: str,
    rec_regularizer_coef: float,
) -> Loss:
    """-sg(w) A log pi where the ratio is in range, plus a regulariser at every token.

    w: `none` 1, `importance_sampling` the token's ratio, `gspo_importance_sampling` the rollout's (exp of the mean
    log-ratio), `advantage` exp(A / rec_temperature), at most e^20. Range: see `in_range`. Regulariser:
    `k2` coef (log r)^2, `forward-kl` -coef log pi.
    """
    adv_N, logp_N = need(batch.adv_N, "batch.adv_N"), need(out.logp_N, "outputs.logp_N")
    log_N = log_ratio(batch, out)
    ratio_N = log_N.detach().exp()
    whole_N = mean_R(batch, log_N.detach()).exp()[batch.rollout_N]
    inside_N = in_range(
        whole_N if rec_clip_mode == "gspo-one-side" else ratio_N,
        adv_N,
        mode=rec_clip_mode.removeprefix("gspo-"),
        clip=(1 - clip_low, 1 + clip_high),
        ring=(1 - rec_ring_low, 1 + rec_ring_high),
    )
    weight_N = {
        "none": torch.ones_like(adv_N),
        "importance_sampling": ratio_N,
        "gspo_importance_sampling": whole_N,
        "advantage": (adv_N / rec_temperature).clamp(max=BOUND).exp(),
    }[rec_weight]
    loss_N = torch.where(inside_N, -weight_N * adv_N * logp_N, 0.0)
    if rec_regularizer == "k2":
        loss_N = loss_N + rec_regularizer_coef * log_N.square()
    elif rec_regularizer == "forward-kl":
        loss_N = loss_N - rec_regularizer_coef * logp_N
    stats = {"clip_frac": (~inside_N).to(loss_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def in_range(
    ratio_N: Tensor, adv_N: Tensor, *, mode: str, clip: tuple[float, float], ring: tuple[float, float]
) -> Tensor:
    """[N] bool: may the token be learned from?

    none      always
    two-side  between the clip's bounds
    one-side  where A >= 0 up to the upper bound, where A <= 0 down to the lower one, as PPO
    ring      between the clip's bounds; or so far out that learning leads back: A >= 0 and below the ring's lower
              bound, A <= 0 and above its upper one
    """
    (low, high), (far_low, far_high) = clip, ring
    up_N, down_N = adv_N >= 0, adv_N <= 0
    if mode == "two-side":
        return (ratio_N >= low) & (ratio_N <= high)
    if mode == "one-side":
        return (up_N & (ratio_N <= high)) | (down_N & (ratio_N >= low))
    if mode == "ring":
        back_N = (up_N & (ratio_N <= far_low)) | (down_N & (ratio_N >= far_high))
        return ((ratio_N >= low) & (ratio_N <= high)) | back_N
    return torch.ones_like(up_N)
