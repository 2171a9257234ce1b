"""How token losses become one number: the loss of a minibatch is sum(loss_N * weight_N).

Every denominator counts over the whole minibatch, before it is split into micro-batches or over ranks, so no
split changes the gradient. A rollout without a sampled token counts in no denominator.
Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from whet.algos.segments import group_sum, last_sampled_R, sampled_R
from whet.batch import Batch
from whet.config.sections.algorithm import Aggregation
from whet.tables import not_known
from whet.types import ConfigError, DataError

AGGREGATIONS = (*get_args(Aggregation), "pair-mean")


def weights(batch: Batch, mode: str, *, norm_tokens: int, block: int | None = None) -> Tensor:
    """[N] what one token's loss counts, 0 where not sampled. One over (n: tokens sampled in the rollout):

    token-mean               tokens of the minibatch
    token-sum                1                             (the gradient grows with the batch)
    token-sum-norm           norm_tokens                   (verl's and Trinity's seq-mean-token-sum-norm)
    seq-mean-token-sum       rollouts
    seq-mean-token-mean      rollouts * n
    seq-mean-token-sum-norm  rollouts * norm_tokens        (Dr. GRPO, arXiv:2503.20783)
    prompt-mean              groups * tokens of the group  (DAPO's eq. 8 as written, arXiv:2503.14476)
    pair-mean                pairs, at the last sampled token of the chosen rollout alone (DPO)

    block: token-mean is a mean over blocks of so many consecutive rollouts, of each block's mean over tokens; its last
    block may have fewer. One over: blocks * tokens of the block. A block without sampled tokens has the mean 0 and is
    counted, as a micro-batch is by those who take means of micro-batches.

    A rollout that counts c times (`batch.count_R`) counts c times in numerators and denominators, as c copies would.
    """
    if mode == "pair-mean":
        return _pair_weights(batch)
    times_R = torch.ones_like(batch.reward_R) if batch.count_R is None else batch.count_R
    over_R = _denominator(batch, mode, times_R=times_R.double(), norm_tokens=norm_tokens, block=block)
    weight_R = torch.where(times_R > 0, times_R / over_R, 0.0)
    return torch.where(batch.mask_N, weight_R[batch.rollout_N], 0.0).to(batch.reward_R.dtype)


def _denominator(batch: Batch, mode: str, *, times_R: Tensor, norm_tokens: int, block: int | None) -> Tensor:
    """[R] what the losses of a rollout's tokens are divided by, float64."""
    tokens_R = sampled_R(batch).double()
    rollouts = (times_R * (tokens_R > 0)).sum()
    if mode == "token-mean" and block:
        block_R = torch.arange(len(tokens_R), device=tokens_R.device) // block
        return (int(block_R[-1]) + 1) * group_sum(times_R * tokens_R, block_R)
    if mode == "token-mean":
        return (times_R * tokens_R).sum().expand_as(tokens_R)
    if mode == "token-sum":
        return torch.ones_like(tokens_R)
    if mode == "token-sum-norm":
        return torch.full_like(tokens_R, norm_tokens)
    if mode == "seq-mean-token-sum":
        return rollouts.expand_as(tokens_R)
    if mode == "seq-mean-token-mean":
        return rollouts * tokens_R
    if mode == "seq-mean-token-sum-norm":
        return (rollouts * norm_tokens).expand_as(tokens_R)
    if mode == "prompt-mean":
        of_group_R = group_sum(times_R * tokens_R, batch.group_R)
        return len(torch.unique(batch.group_R[of_group_R > 0])) * of_group_R
    raise ConfigError(f"aggregation {not_known(mode, AGGREGATIONS)}")


def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """[pairs] numbers of the chosen and of the rejected rollouts: two that follow each other in a group, the chosen one
    with the higher reward, or the first of equal ones. DataError for a rollout without another."""
    first, second = batch.group_R[0::2], batch.group_R[1::2]
    if len(first) != len(second) or not torch.equal(first, second):
        raise DataError(
            "a loss on pairs needs groups of two rollouts, or of several pairs: the chosen and the rejected reply."
        )
    if (sampled_R(batch) == 0).any():
        raise DataError("a loss on pairs needs replies of at least one token, but a pair has an empty reply.")
    even = torch.arange(0, batch.rollouts, 2, device=batch.reward_R.device)
    second_wins = (batch.reward_R[1::2] > batch.reward_R[0::2]).long()
    return even + second_wins, even + 1 - second_wins


def _pair_weights(batch: Batch) -> Tensor:
    chosen, _ = pairs(batch)
    weight_N = batch.reward_R.new_zeros(batch.tokens)
    weight_N[last_sampled_R(batch)[chosen]] = 1 / max(len(chosen), 1)
    return weight_N
