"""Sums and scans over the rollouts and groups of a packed batch, without a loop over tokens.

Shape letters: N tokens, R rollouts, M sampled tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.batch import Batch
from whet.types import WhetError


def need(x: Tensor | None, name: str) -> Tensor:
    """x itself; WhetError if that field was not filled in."""
    if x is None:
        raise WhetError(f"{name} is not set: the algorithm needs it, so the step must compute it first.")
    return x


def old_logp_N(batch: Batch) -> Tensor:
    """[N] log-probs of the policy before this step: the trainer's if it recomputed them, or the engine's."""
    return sampled_logp_N(batch) if batch.logp_old_N is None else batch.logp_old_N


def sampled_logp_N(batch: Batch) -> Tensor:
    """[N] the engine's log-probs. WhetError if it cannot tell them."""
    return need(batch.logp_sample_N, "batch.logp_sample_N")


def sampled_R(batch: Batch) -> Tensor:
    """[R] int64: sampled tokens of each rollout."""
    return batch.sum_R(torch.ones_like(batch.token_ids_N))


def counted_N(batch: Batch) -> Tensor:
    """[N] bool: sampled, with a weight in the loss, where weights are known: not rejected, of a rollout that counts."""
    return batch.mask_N if batch.weight_N is None else batch.mask_N & (batch.weight_N != 0)


def last_sampled_R(batch: Batch) -> Tensor:
    """[R] int64: index into N of each rollout's last sampled token; -1 where there is none."""
    index_N = torch.arange(batch.tokens, device=batch.rollout_N.device)
    index_N = torch.where(batch.mask_N, index_N, -1)
    return torch.full_like(batch.group_R, -1).scatter_reduce(0, batch.rollout_N, index_N, "amax")


def group_sum(x_R: Tensor, group_R: Tensor) -> Tensor:
    """[R] sum over the group that each rollout belongs to."""
    return torch.zeros_like(x_R).index_add(0, group_R, x_R)[group_R]


def group_max(x_R: Tensor, group_R: Tensor) -> Tensor:
    """[R] largest number of the group that each rollout belongs to."""
    return torch.full_like(x_R, -torch.inf).scatter_reduce(0, group_R, x_R, "amax")[group_R]


def strictly_below(x_R: Tensor, group_R: Tensor) -> Tensor:
    """[R] int64: how many numbers of its group are smaller."""
    level_R = torch.unique(x_R, return_inverse=True)[1]
    key_R = group_R * (len(x_R) + 1) + level_R
    sorted_R = key_R.sort().values
    return torch.searchsorted(sorted_R, key_R) - torch.searchsorted(sorted_R, key_R - level_R)


def turn_of_M(batch: Batch) -> Tensor:
    """[M] number, from 0, of the turn that each sampled token belongs to: a run of sampled tokens of one segment."""
    at_M = batch.mask_N.nonzero().flatten()
    segment_M = batch.segment_N[at_M]
    starts_M = torch.ones_like(at_M)
    starts_M[1:] = ((at_M[1:] != at_M[:-1] + 1) | (segment_M[1:] != segment_M[:-1])).long()
    return starts_M.cumsum(0) - 1


def discounted(x_M: Tensor, row_M: Tensor, factor: float) -> Tensor:
    """[M] y_t = x_t + factor * y_{t+1} within each row; equal rows stand together.

    By doubling: after k rounds y_t holds its first 2^k terms, so log2(longest row) rounds of whole-tensor
    operations do it, and only powers of factor <= 1 occur, never their inverses.
    """
    y_M, step = x_M, 1
    while step < len(x_M):
        same = row_M[:-step] == row_M[step:]
        if not same.any():
            break
        later = torch.where(same, y_M[step:], y_M.new_zeros(()))
        y_M = torch.cat([y_M[:-step] + factor**step * later, y_M[-step:]])
        step *= 2
    return y_M
