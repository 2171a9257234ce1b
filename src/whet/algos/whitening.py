"""Whitening and bounds of a batch's advantages, and the tokens that have one."""

from __future__ import annotations

import torch
from torch import Tensor


def whiten(x_N: Tensor, mask_N: Tensor, *, ddof: int = 1) -> Tensor:
    """(x - mean) / std over the sampled tokens of the batch; 0 elsewhere.

    ddof 1: std = sqrt(var + 1e-8), var with n - 1 (verl, TRL); ddof 0: sqrt(max(var, 1e-8)), var with n (SkyRL).
    """
    x_M = x_N[mask_N].double()
    if len(x_M) == 0:
        return x_N
    centred_M = x_M - x_M.mean()
    var = centred_M.square().sum() / max(len(x_M) - ddof, 1)
    std = (var + 1e-8).sqrt() if ddof else var.clamp(min=1e-8).sqrt()
    return torch.zeros_like(x_N).masked_scatter(mask_N, (centred_M / std).to(x_N.dtype))


def of_top_entropy(adv_N: Tensor, entropy_N: Tensor, mask_N: Tensor, *, quantile: float) -> Tensor:
    """The advantages of a share of the batch's n sampled tokens, those with the highest entropy; 0 elsewhere.

    arXiv:2506.01939. int(quantile (n - 1)) + 1 tokens, as TRL 1.16, and all that tie with the last of them.
    """
    entropy_M = entropy_N[mask_N]
    if len(entropy_M) == 0:
        return adv_N
    least = entropy_M.sort(descending=True).values[int(quantile * (len(entropy_M) - 1))]
    return torch.where(entropy_N >= least, adv_N, 0.0)


def without_entropy_losers(
    adv_N: Tensor, discriminant_N: Tensor, mask_N: Tensor, *, centred: bool, mu: float, max_frac: float | None
) -> Tensor:
    """The advantages, 0 where they are negative and the entropy would fall most (arXiv:2602.03392, as Trinity-RFT 0.6):
    v > mu std(v), v = mean(S) - S over the sampled tokens (Clip_B), or -S where S is centred at each place (Clip_V),
    std with n. With max_frac at most int(max_frac n) tokens, and at least 1: those with the largest v.
    """
    adv_M, v_M = adv_N[mask_N], -discriminant_N[mask_N].double()
    if len(v_M) == 0:
        return adv_N
    mean = v_M.mean()
    std = (v_M - mean).square().mean().sqrt()
    v_M = v_M if centred else v_M - mean
    out_M = (adv_M < 0) & (v_M > mu * std) & (std >= 1e-12)
    if max_frac is not None:
        most = max(int(max_frac * len(v_M)), 1)
        first = torch.where(out_M, v_M, -torch.inf).sort(descending=True, stable=True).indices[:most]
        out_M &= torch.zeros_like(out_M).index_fill(0, first, True)
    return adv_N.masked_scatter(mask_N, torch.where(out_M, 0.0, adv_M))


def bounded(x_N: Tensor, low: float | None, high: float | None) -> Tensor:
    """x, no lower than `low` and no higher than `high`; None is no bound."""
    return x_N if low is None and high is None else x_N.clamp(low, high)
