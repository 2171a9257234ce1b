"""M2PO: the ratio without a clip, and without the tokens that make its second moment large (arXiv:2510.01161).

Tokens are left out of a trust region: those whose update would carry on what has moved them already. Which ones
depends on the whole minibatch. It is decided once, before the minibatch is split, as a few numbers to compare every
token of any part with (`Cut`), as in `covariance`. Shape letters: N tokens, M of the trust region.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from whet.algos.covariance import luck_N
from whet.algos.ratios import drift, log_ratio_to, sampled
from whet.algos.segments import counted_N, need, sampled_logp_N
from whet.batch import Batch, Loss, LossFn, Outputs


@dataclass(frozen=True)
class Cut:
    """Tokens of the trust region with (log r)^2 of `high` or more, and of those above `low` the ones whose luck is
    above `luck`."""

    low: float
    high: float
    luck: float

    def of(self, batch: Batch, logp_N: Tensor) -> Tensor:
        """[N] bool"""
        log_N = _log_ratio(batch, logp_N)
        square_N = log_N.square()
        cut_N = (square_N >= self.high) | ((square_N > self.low) & (luck_N(batch) > self.luck))
        return cut_N & trust_region(batch, log_N)


NOTHING = Cut(low=math.inf, high=math.inf, luck=1.0)


def m2po(batch: Batch, out: Outputs, *, m2_threshold: float) -> Loss:
    """-A r, r = pi / engine; 0 at the tokens of the trust region with the largest (log r)^2, as few as make the mean of
    its others m2_threshold at most. They stay in the denominator.

    A batch that is given here is a whole minibatch (see `m2po_over`).
    """
    logp_N = need(out.logp_N, "outputs.logp_N").detach()
    return m2po_over(batch, lambda: logp_N, m2_threshold=m2_threshold)(batch, out)


def m2po_over(minibatch: Batch, logprobs: Callable[[], Tensor], *, m2_threshold: float) -> LossFn:
    """The loss for parts of a minibatch; logprobs() gives those of all its tokens."""
    return partial(_m2po, largest(minibatch, logprobs(), most=m2_threshold))


def _m2po(cut: Cut, batch: Batch, out: Outputs) -> Loss:
    logp_N = need(out.logp_N, "outputs.logp_N")
    cut_N = cut.of(batch, logp_N.detach())
    ratio_N = log_ratio_to(sampled_logp_N(batch), batch, out).exp()
    loss_N = torch.where(cut_N, 0.0, -need(batch.adv_N, "batch.adv_N") * ratio_N)
    return Loss(sampled(batch, loss_N), {"masked_frac": cut_N.to(loss_N.dtype)} | drift(batch, out))


def trust_region(batch: Batch, log_N: Tensor) -> Tensor:
    """[N] bool: the tokens that PPO's clip could decide: likelier than when they were sampled, and to become likelier
    still (A > 0), or the other way round. Those without a weight in the loss are none of them."""
    adv_N = need(batch.adv_N, "batch.adv_N")
    on_N = ((adv_N > 0) & (log_N > 0)) | ((adv_N < 0) & (log_N < 0))
    return counted_N(batch) & on_N


def largest(minibatch: Batch, logp_N: Tensor, *, most: float) -> Cut:
    """The tokens of the trust region with the largest (log r)^2, so that the mean of the others is `most` or less;
    among equal ones luck decides.

    The band around the first value that goes reaches half way to the values next to it, so that rounding, which may
    differ between two passes over the same tokens, moves no token over its edge.
    """
    log_N = _log_ratio(minibatch, logp_N)
    at_N = trust_region(minibatch, log_N)
    square_M = log_N[at_N].square()
    sorted_M = square_M.sort().values
    mean_M = sorted_M.cumsum(0) / torch.arange(1, len(sorted_M) + 1, device=sorted_M.device)
    stay = int((mean_M <= most).sum())
    if stay == len(sorted_M):
        return NOTHING
    first = float(sorted_M[stay])
    below_M, above_M = square_M[square_M < first], square_M[square_M > first]
    lucks_M = luck_N(minibatch)[at_N][square_M == first].sort().values
    equal_that_stay = stay - len(below_M)
    return Cut(
        low=(first + (float(below_M.max()) if len(below_M) else 0.0)) / 2,
        high=(first + float(above_M.min())) / 2 if len(above_M) else math.inf,
        luck=float(lucks_M[equal_that_stay - 1]) if equal_that_stay else -1.0,
    )


def _log_ratio(batch: Batch, logp_N: Tensor) -> Tensor:
    """[N] float64 log pi - log of the engine's, bounded."""
    return log_ratio_to(sampled_logp_N(batch), batch, Outputs(logp_N=logp_N)).double()
