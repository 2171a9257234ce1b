"""Terms of the loss with their own mean, independent of the aggregation of the policy loss.

A minibatch's loss is sum(loss_N * weight_N), so such a term is divided by the weight that the sum will multiply it
with. Its denominator counts over the whole minibatch. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.algos.aggregate import pairs
from whet.algos.segments import last_sampled_R, need
from whet.batch import Batch


@dataclass(frozen=True)
class Totals:
    """Tokens of a minibatch that count in each mean; a rollout that counts twice has them twice."""

    own: float
    """Tokens that the policy sampled."""
    positive: float
    """Of them, those of rollouts with a reward above 0."""
    sampled: float
    """Tokens of all replies, with or without a weight."""

    @staticmethod
    def of(batch: Batch) -> Totals:
        times_N = _times(batch).double()
        sums = (float(times_N[own(batch)].sum()), float(times_N[positive(batch)].sum()))
        return Totals(*sums, float(batch.mask_N.sum()))


def own(batch: Batch) -> Tensor:
    """[N] bool: sampled by the policy; tokens of demonstrations among the rollouts are not."""
    return batch.mask_N if batch.expert_R is None else batch.mask_N & ~batch.expert_R[batch.rollout_N]


def positive(batch: Batch) -> Tensor:
    """[N] bool: of a rollout of the policy's with a reward above 0."""
    return own(batch) & (batch.reward_R > 0)[batch.rollout_N]


def mean_term(batch: Batch, x_N: Tensor, where_N: Tensor, *, total: float) -> Tensor:
    """[N] what makes sum(term_N * weight_N) over a minibatch the mean of x over its `total` tokens at where_N."""
    weight_N, times_N = need(batch.weight_N, "batch.weight_N"), _times(batch)
    counted_N = where_N & (times_N > 0)
    scale_N = torch.where(counted_N, times_N / torch.where(counted_N, weight_N, 1.0), 0.0)
    # the total is below 1 where copies of a rollout share minibatches
    return torch.where(counted_N, x_N, 0.0) * scale_N / (total or 1.0)


def pair_term(batch: Batch, x_N: Tensor, *, total: float) -> Tensor:
    """[N] what makes sum(term_N * weight_N) over a minibatch of pairs the mean of x over its `total` sampled tokens.

    The weight of a pair stands at the last token of its chosen reply, so the sum over both replies stands there.
    """
    chosen, rejected = pairs(batch)
    last_P, x_R = last_sampled_R(batch)[chosen], batch.sum_R(x_N)
    weight_P = need(batch.weight_N, "batch.weight_N")[last_P]
    counts_P = weight_P > 0  # else of a micro-batch that only keeps step with other ranks (`balance.deal`)
    term_P = torch.where(counts_P, x_R[chosen] + x_R[rejected], 0.0) / torch.where(counts_P, weight_P, 1.0)
    return torch.zeros_like(x_N).index_put((last_P,), term_P.to(x_N.dtype)) / max(total, 1.0)


def _times(batch: Batch) -> Tensor:
    """[N] how often a token counts; one without a weight (it was rejected) does not."""
    times_R = torch.ones_like(batch.reward_R) if batch.count_R is None else batch.count_R
    return torch.where(need(batch.weight_N, "batch.weight_N") > 0, times_R[batch.rollout_N], 0.0)
