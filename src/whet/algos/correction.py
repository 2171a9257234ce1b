"""Off-policy correction of tokens sampled by an engine that computes differently, or by an older policy.

w = pi_old / pi_sampled: the trainer's probability of a token over the engine's, both before the step. Computed once
for the whole step, so no split changes it. The policy loss of a token is multiplied by `correction_N`; a weight of 0
means that the token was rejected. Tests of the policy that learns (`without_rejected`) are part of the loss.
Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from whet.algos.segments import need, sampled_logp_N, sampled_R
from whet.batch import Batch
from whet.config.recipes import compares
from whet.config.schema import CorrectionConfig, RejectConfig
from whet.types import Metrics

Weigh = Callable[[Batch, Tensor], tuple[Tensor, Tensor | None]]
"""(batch, log-ratios [N]) -> ([N] the weight of each token, [N] bool: was it outside the bounds? None: no bounds)."""


Reject = Callable[[Batch, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(batch, log-probs of the policy that learns [N], its loss [N]) -> see `without_rejected`."""


def correct(
    batch: Batch, version: int, *, cfg: CorrectionConfig, weigh: Weigh | None = None
) -> tuple[Batch, Metrics]:
    """The batch with `correction_N`, and what it did; `version`: of the policy that is about to be trained.

    Truncated (Ionides 2008; arXiv:1802.01561), masked (arXiv:2505.24298; IcePop arXiv:2510.18855), by age. Tokens that
    no policy sampled (version -1: demonstrations) keep the weight 1.
    """
    if not is_on(cfg):
        return batch, {}
    ours = replace(batch, mask_N=batch.mask_N & (batch.version_N >= 0))
    log_N = log_ratio(ours)
    weight_N, outside_N = weigh(ours, log_N) if weigh else (torch.ones_like(log_N), None)
    gap_N = (version - batch.version_N).clamp(min=0)
    keep_N = passes(ours, log_N, cfg.reject if cfg.reject_policy == "old" else ())
    if cfg.second_moment is not None:
        keep_N &= below_second_moment(ours, log_N, cfg.second_moment)
    weight_N = torch.where(keep_N, weight_N * cfg.staleness_decay**gap_N, 0.0)
    weight_N = torch.where(ours.mask_N, weight_N, 1.0)
    stats = _stats(weight_N[ours.mask_N], gap_M=gap_N[ours.mask_N])
    if stats and outside_N is not None:
        stats["correction/outside_frac"] = float(outside_N[ours.mask_N].double().mean())
    return replace(batch, correction_N=weight_N.to(sampled_logp_N(batch).dtype)), stats


def is_on(cfg: CorrectionConfig) -> bool:
    return compares(cfg) or cfg.staleness_decay != 1.0


def kept(batch: Batch) -> Batch:
    """The batch without its rejected tokens: they no longer count as sampled, in numerators and denominators."""
    if batch.correction_N is None:
        return batch
    return replace(batch, mask_N=batch.mask_N & (batch.correction_N != 0))


def log_ratio(batch: Batch) -> Tensor:
    """[N] log pi_old - log pi_sampled, float64, bounded to +-20; 0 where the policy sampled nothing."""
    d_N = need(batch.logp_old_N, "batch.logp_old_N").double() - sampled_logp_N(batch).double()
    return torch.where(batch.mask_N, d_N.clamp(-20, 20), 0.0)


def importance(
    batch: Batch,
    log_N: Tensor,
    *,
    over: str,
    low: float | None = None,
    high: float | None = None,
    outside: str = "truncate",
    normalize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A `Weigh`: the ratio of the token, of the rollout (sequence), or its geometric mean, in bounds."""
    raw_N = raw_weights(batch, log_N, over)
    weight_N = bounded(raw_N, low=low, high=high, outside=outside)
    outside_N = None if low is None and high is None else raw_N.clamp(low, high) != raw_N
    if normalize:
        weight_N = weight_N / mean_weight(batch, weight_N, over_rollouts=over != "token").clamp(min=1e-8)
    return weight_N, outside_N


WEIGHTS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    name: partial(importance, over=name) for name in ("token", "sequence", "geometric")
}


def raw_weights(batch: Batch, log_N: Tensor, over: str) -> Tensor:
    """[N] the importance weight of each token before any bound; a whole rollout's logarithm is bounded to +-20, too."""
    if over == "token":
        return log_N.exp()
    log_R = batch.sum_R(log_N)
    if over == "geometric":
        log_R = log_R / sampled_R(batch).clamp(min=1)
    return log_R.clamp(-20, 20).exp()[batch.rollout_N]


def bounded(weight_N: Tensor, *, low: float | None, high: float | None, outside: str) -> Tensor:
    """[N] weights outside [low, high] at the bound (truncate) or 0 (mask). The bounds themselves are inside."""
    if low is None and high is None:
        return weight_N
    held_N = weight_N.clamp(low, high)
    return held_N if outside == "truncate" else torch.where(held_N == weight_N, weight_N, 0.0)


def mean_weight(batch: Batch, weight_N: Tensor, *, over_rollouts: bool) -> Tensor:
    """The mean over sampled tokens; `over_rollouts`: the mean over rollouts of their means."""
    tokens_R = sampled_R(batch)
    if not over_rollouts:
        return batch.sum_R(weight_N).sum() / tokens_R.sum().clamp(min=1)
    mean_R = batch.sum_R(weight_N) / tokens_R.clamp(min=1)
    return mean_R.sum() / (tokens_R > 0).sum().clamp(min=1)


def passes(batch: Batch, log_N: Tensor, tests: tuple[RejectConfig, ...]) -> Tensor:
    """[N] bool: the tokens that pass every test."""
    keep_N = torch.ones_like(batch.mask_N)
    for test in tests:
        keep_N &= _passes(batch, log_N, test)
    return keep_N


def without_rejected(
    batch: Batch, logp_N: Tensor, loss_N: Tensor, *, tests: tuple[RejectConfig, ...], over_rollouts: bool
) -> tuple[Tensor, Tensor]:
    """([N] the loss, 0 at tokens that fail a test of the policy that learns, [N] 1 at these tokens).

    Tests of pi / pi_sampled as verl 0.8.0's bypass mode, in which weights keep their denominators. over_rollouts: a
    rollout's tokens have equal weights, which become the mean over its tokens that pass.
    """
    ours = replace(batch, mask_N=batch.mask_N & (batch.version_N >= 0))
    d_N = logp_N.detach().double() - sampled_logp_N(batch).double()
    keep_N = passes(ours, torch.where(ours.mask_N, d_N.clamp(-20, 20), 0.0), tests) | ~ours.mask_N
    kept_N = torch.where(keep_N, loss_N, 0.0)
    if over_rollouts:
        weight_N = need(batch.weight_N, "batch.weight_N").double()
        all_R, rest_R = batch.sum_R(weight_N), batch.sum_R(torch.where(keep_N, weight_N, 0.0))
        times_R = all_R / torch.where(rest_R > 0, rest_R, 1.0)
        kept_N = kept_N * times_R[batch.rollout_N].to(kept_N.dtype)
    return kept_N, (~keep_N).to(loss_N.dtype)


def below_second_moment(batch: Batch, log_N: Tensor, most: float) -> Tensor:
    """[N] bool: the sampled tokens without those of the largest (log w)^2, as few of these as make the mean of the
    others less than `most`; one token is left in any case. M2PO, arXiv:2510.01161, as AReaL 1.0, which looks at each
    micro-batch; here at the whole step. Tokens that tie with one that goes may stay, the later ones."""
    keep_N = torch.ones_like(batch.mask_N)
    square_M = log_N[batch.mask_N].square().nan_to_num(nan=torch.inf)
    if len(square_M) == 0:
        return keep_N
    sorted_M, order_M = square_M.sort(descending=True, stable=True)
    rest_M = sorted_M.flip(0).cumsum(0).flip(0) / torch.arange(len(sorted_M), 0, -1, device=sorted_M.device)
    below_M = (rest_M < most).nonzero().flatten()
    gone = int(below_M[0]) if len(below_M) else len(sorted_M) - 1
    kept_M = torch.ones_like(square_M, dtype=torch.bool).index_fill(0, order_M[:gone], False)
    return keep_N.masked_scatter(batch.mask_N, kept_M)


def _passes(batch: Batch, log_N: Tensor, test: RejectConfig) -> Tensor:
    """A ratio is compared by its logarithm: sums and means of it are those of a product and a geometric mean."""
    value_N, bounds = _statistic(log_N, test)
    if test.over in ("token", "max"):
        inside_N = _inside(value_N, *bounds)
        if test.over == "token":
            return inside_N
        return (batch.sum_R((~inside_N).double()) == 0)[batch.rollout_N]
    value_R = batch.sum_R(value_N)
    if test.over == "mean":
        value_R = value_R / sampled_R(batch).clamp(min=1)
    return _inside(value_R, *bounds)[batch.rollout_N]


def _statistic(log_N: Tensor, test: RejectConfig) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    low, high = (None if x is None else log_N.new_tensor(x) for x in (test.low, test.high))
    if test.statistic == "k2":
        return log_N.square() / 2, (low, high)
    if test.statistic == "k3":
        return torch.expm1(log_N) - log_N, (low, high)
    return log_N, (None if low is None else low.log(), None if high is None else high.log())


def _inside(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """Not a number is outside; the bounds are inside."""
    inside = ~x.isnan()
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return inside


def _stats(weight_M: Tensor, *, gap_M: Tensor) -> Metrics:
    """Over the tokens a policy sampled. The effective sample size is (sum w)^2 / sum w^2, as a share of the tokens."""
    if len(weight_M) == 0:
        return {}
    return {
        "correction/weight_mean": float(weight_M.mean()),
        "correction/weight_max": float(weight_M.max()),
        "correction/rejected_frac": float((weight_M == 0).double().mean()),
        "correction/ess_frac": _effective(weight_M),
        "correction/staleness_mean": float(gap_M.double().mean()),
    }


def _effective(weight_M: Tensor) -> float:
    """Of shares of the largest weight: bounds of weights may be so large that a square is beyond floating point."""
    if not weight_M.any():
        return 0.0
    share_M = weight_M / weight_M.max()
    return float(share_M.sum().square() / (share_M.square().sum() * len(share_M)))
