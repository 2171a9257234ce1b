"""The optimal token baseline: at every position of a reply the group's mean return, weighted by the accumulated
variance of each rollout so far (`optimal_token_baseline` of verl 0.9.1).

Shape letters: N tokens, R rollouts, M sampled tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algos.baselines import Advantage
from whet.algos.segments import discounted, group_sum, need, old_logp_N, sampled_R
from whet.batch import Batch


def optimal_token_baseline(batch: Batch, *, reward_N: Tensor, handle_zero_tail: bool = True) -> Advantage:
    """R_t - B_t, R_t the rewards from t on, B_t = sum_G(R_t W_t) / sum_G(W_t) over the rollouts with a token at t.

    W_t is the sum up to t of w = 1 - 2 p + sum_v p_v^2 (times the squared off-policy weight, where there is one).
    t is the place in the response, the environment's tokens counted; in a later segment of a rollout the place after
    the prompt of the first one, below 0 where its history is shorter. In a group of one B is 0. handle_zero_tail: B is
    0, too, at a place that one rollout of the group alone has, where R would be its own baseline.
    """
    place_M = (batch.position_N - batch.prompt_S[batch.first_R][batch.rollout_N])[batch.mask_N]
    return _against(batch, reward_N, place_M=place_M, zero_tail=handle_zero_tail), None


def tir_optimal_token_baseline(batch: Batch, *, reward_N: Tensor, handle_zero_tail: bool = True) -> Advantage:
    """The same for replies of several turns: t counts sampled tokens only."""
    count_R = sampled_R(batch)
    row_M = batch.rollout_N[batch.mask_N]
    place_M = torch.arange(len(row_M), device=row_M.device) - (count_R.cumsum(0) - count_R)[row_M]
    return _against(batch, reward_N, place_M=place_M, zero_tail=handle_zero_tail), None


def _against(batch: Batch, reward_N: Tensor, *, place_M: Tensor, zero_tail: bool) -> Tensor:
    """[N] returns less their baseline. `place_M`: which tokens of a group stand side by side."""
    at_M = batch.mask_N.nonzero().flatten()
    row_M = batch.rollout_N[at_M]
    return_M = discounted(reward_N[at_M].double(), row_M, 1.0)
    cost_M = _cost(batch, at_M, row_M=row_M)
    cell_M = batch.group_R[row_M] * (2 * int(batch.length_S.max()) + 1) + place_M
    weighted_M, total_M = (_cell_sum(x_M, cell_M) for x_M in (return_M * cost_M, cost_M))
    met_M = group_sum((sampled_R(batch) > 0).long(), batch.group_R)[row_M] > 1
    if zero_tail:
        met_M &= _cell_sum(torch.ones_like(cost_M), cell_M) > 1
    adv_M = return_M - torch.where(met_M, weighted_M / (total_M + 1e-8), 0.0)
    return torch.zeros_like(reward_N).index_put((at_M,), adv_M.to(reward_N.dtype))


def _cost(batch: Batch, at_M: Tensor, *, row_M: Tensor) -> Tensor:
    """[M] W_t: the expected squared norm of the score's gradient on the logits, summed along the rollout."""
    p_M = old_logp_N(batch)[at_M].double().exp()
    w_M = 1 - 2 * p_M + need(batch.collision_N, "batch.collision_N")[at_M].double()
    if batch.correction_N is not None:
        w_M = w_M * batch.correction_N[at_M].double().square()
    return discounted(w_M.flip(0), row_M.flip(0), 1.0).flip(0)


def _cell_sum(x_M: Tensor, cell_M: Tensor) -> Tensor:
    """[M] sum over the tokens of the same cell."""
    cells, index_M = torch.unique(cell_M, return_inverse=True)
    return x_M.new_zeros(len(cells)).index_add(0, index_M, x_M)[index_M]
