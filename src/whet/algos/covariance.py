"""Policy losses that treat the tokens with the largest covariance of advantage and log-prob separately.

Such tokens reduce the entropy (arXiv:2505.22617). The choice depends on the whole minibatch: means, k largest values,
random numbers. It is made once, before the minibatch is split, as a few numbers to compare every token of any part with
(`Picks`); so the split changes nothing. Tokens without a weight in the loss have no part in it. The random numbers are
functions of a rollout's tokens and of the position in it: no state, and the same in any order. Shape letters: N tokens,
R rollouts, M sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from whet import seeds
from whet.algos.clipped import clipped_surrogate
from whet.algos.ratios import drift, log_ratio, ratio, sampled
from whet.algos.segments import counted_N, need
from whet.batch import Batch, Loss, LossFn, Outputs

FAR = 1e4
"""Bound of a log-prob inside means and covariances: it keeps infinities out and changes none that occurs."""


@dataclass(frozen=True)
class Picks:
    """Tokens with covariance in (low, high) and luck <= `luck`, and, with `beyond`, all with covariance >= high."""

    adv_mean: float
    logp_mean: float
    low: float
    high: float
    luck: float
    beyond: bool

    def of(self, batch: Batch, logp_N: Tensor) -> Tensor:
        """[N] bool"""
        cov_N = covariance(batch, logp_N, adv_mean=self.adv_mean, logp_mean=self.logp_mean)
        picked_N = (cov_N > self.low) & (cov_N < self.high) & (luck_N(batch) <= self.luck)
        if self.beyond:
            picked_N = picked_N | (cov_N >= self.high)
        return picked_N & counted_N(batch)


def clip_cov(
    batch: Batch,
    out: Outputs,
    *,
    clip_low: float | None,
    clip_high: float | None,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Loss:
    """PPO's clip without dual clip; max(1, ratio * tokens) random tokens with lb < covariance < ub count 0.

    Tokens that the clip decides are not chosen; those chosen stay in the denominator. A batch that is given here is a
    whole minibatch (see `clip_cov_over`).
    """
    return clip_cov_over(
        batch,
        lambda: need(out.logp_N, "outputs.logp_N").detach(),
        clip_low=clip_low,
        clip_high=clip_high,
        clip_cov_ratio=clip_cov_ratio,
        clip_cov_lb=clip_cov_lb,
        clip_cov_ub=clip_cov_ub,
    )(batch, out)


def clip_cov_over(
    minibatch: Batch,
    logprobs: Callable[[], Tensor],
    *,
    clip_low: float | None,
    clip_high: float | None,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> LossFn:
    """The loss for parts of a minibatch; logprobs() gives those of all its tokens."""
    logp_N = logprobs()
    surrogate = partial(_surrogate, clip_low=clip_low, clip_high=clip_high)
    means = _means(minibatch, logp_N)
    everyone = Picks(*means, low=clip_cov_lb, high=clip_cov_ub, luck=1.0, beyond=False)
    free_N = surrogate(minibatch, Outputs(logp_N=logp_N))[1]["clip_frac"] == 0
    lucks_M = luck_N(minibatch)[everyone.of(minibatch, logp_N) & free_N].sort().values
    wanted = min(_share(minibatch, clip_cov_ratio), len(lucks_M))
    luck = float(lucks_M[wanted - 1]) if wanted else -1.0
    picks = Picks(*means, low=clip_cov_lb, high=clip_cov_ub, luck=luck, beyond=False)
    return partial(_clip_cov, picks, surrogate)


def _surrogate(
    batch: Batch, out: Outputs, *, clip_low: float | None, clip_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    adv_N = need(batch.adv_N, "batch.adv_N")
    return clipped_surrogate(ratio(batch, out), adv_N, clip_low=clip_low, clip_high=clip_high)


def _clip_cov(
    picks: Picks,
    surrogate: Callable[[Batch, Outputs], tuple[Tensor, dict[str, Tensor]]],
    batch: Batch,
    out: Outputs,
) -> Loss:
    loss_N, stats = surrogate(batch, out)
    picked_N = picks.of(batch, need(out.logp_N, "outputs.logp_N")) & (stats["clip_frac"] == 0)
    stats["cov_picked_frac"] = picked_N.to(loss_N.dtype)
    return Loss(sampled(batch, torch.where(picked_N, 0.0, loss_N)), stats | drift(batch, out))


def kl_cov(batch: Batch, out: Outputs, *, kl_cov_ratio: float, ppo_kl_coef: float) -> Loss:
    """-A r, plus ppo_kl_coef |log r| at the max(1, ratio * tokens) tokens with the largest covariance.

    A batch that is given here is a whole minibatch (see `kl_cov_over`).
    """
    logp_N = need(out.logp_N, "outputs.logp_N").detach()
    return kl_cov_over(batch, lambda: logp_N, kl_cov_ratio=kl_cov_ratio, ppo_kl_coef=ppo_kl_coef)(batch, out)


def kl_cov_over(
    minibatch: Batch, logprobs: Callable[[], Tensor], *, kl_cov_ratio: float, ppo_kl_coef: float
) -> LossFn:
    """The loss for parts of a minibatch; logprobs() gives those of all its tokens."""
    picks = largest(minibatch, logprobs(), count=_share(minibatch, kl_cov_ratio))
    return partial(_kl_cov, picks, ppo_kl_coef)


def _kl_cov(picks: Picks, ppo_kl_coef: float, batch: Batch, out: Outputs) -> Loss:
    log_N = log_ratio(batch, out)
    picked_N = picks.of(batch, need(out.logp_N, "outputs.logp_N").detach())
    loss_N = -need(batch.adv_N, "batch.adv_N") * log_N.exp()
    loss_N = loss_N + torch.where(picked_N, ppo_kl_coef * log_N.abs(), 0.0)
    stats = {"cov_picked_frac": picked_N.to(loss_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def largest(minibatch: Batch, logp_N: Tensor, *, count: int) -> Picks:
    """The `count` tokens with the largest covariance; among equal ones luck decides.

    The band around the last value reaches half way to the values next to it, so that rounding, which may differ
    between two passes over the same tokens, moves no token over its edge.
    """
    means = _means(minibatch, logp_N)
    cov_N = covariance(minibatch, logp_N, adv_mean=means[0], logp_mean=means[1])
    at_N = counted_N(minibatch)
    cov_M, luck_M = cov_N[at_N], luck_N(minibatch)[at_N]
    if len(cov_M) == 0:
        return Picks(*means, low=math.inf, high=math.inf, luck=-1.0, beyond=False)
    last = float(cov_M.sort(descending=True).values[min(count, len(cov_M)) - 1])
    above_M, below_M = cov_M[cov_M > last], cov_M[cov_M < last]
    lucks_M = luck_M[cov_M == last].sort().values
    return Picks(
        *means,
        low=(last + float(below_M.max())) / 2 if len(below_M) else -math.inf,
        high=(last + float(above_M.min())) / 2 if len(above_M) else math.inf,
        luck=float(lucks_M[min(count, len(cov_M)) - len(above_M) - 1]),
        beyond=True,
    )


def covariance(batch: Batch, logp_N: Tensor, *, adv_mean: float, logp_mean: float) -> Tensor:
    """[N] (A - mean A) (log pi - mean log pi), float64; 0 where that is not a number, as is the loss then."""
    adv_N = need(batch.adv_N, "batch.adv_N").double()
    return ((adv_N - adv_mean) * (_bounded(logp_N) - logp_mean)).nan_to_num(nan=0.0)


def _bounded(logp_N: Tensor) -> Tensor:
    return logp_N.detach().double().clamp(min=-FAR)


def luck_N(batch: Batch) -> Tensor:
    """[N] float64 in [0, 1): a number of the segment's tokens and the place in it; equal for every split and order."""
    place_N = batch.position_N
    word_N = (_uniform(batch.token_ids_N << 32 | place_N) * 2.0**53).long()
    name_S = torch.zeros_like(batch.length_S).index_add(0, batch.segment_N, word_N)  # int64 wraps around
    return _uniform(name_S[batch.segment_N] + place_N)


def _uniform(stream_N: Tensor) -> Tensor:
    """[N] float64 in [0, 1): the first number of each stream."""
    streams = stream_N.cpu().numpy().view(np.uint64)
    return torch.from_numpy(seeds.uniform_table(streams, 0, 1)[:, 0]).to(stream_N.device)


def _means(batch: Batch, logp_N: Tensor) -> tuple[float, float]:
    """Mean advantage and log-prob over the tokens that count; 0 where there are none."""
    at_N = counted_N(batch)
    count = max(int(at_N.sum()), 1)
    adv_M = need(batch.adv_N, "batch.adv_N")[at_N].double()
    return float(adv_M.sum()) / count, float(_bounded(logp_N)[at_N].sum()) / count


def _share(batch: Batch, ratio: float) -> int:
    """So many tokens are a share of the minibatch, at least one."""
    return max(1, int(ratio * int(counted_N(batch).sum())))
