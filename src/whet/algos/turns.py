"""Advantages of turns: the policy's tokens between two answers of the environment.

Shape letters: N tokens, R rollouts, M sampled tokens, K turns.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from whet.algos.baselines import Advantage, grpo
from whet.algos.bootstrap import with_last
from whet.algos.segments import discounted, group_sum, need, turn_of_M
from whet.batch import Batch


def step_wise_grpo(
    batch: Batch,
    *,
    reward_N: Tensor,
    std_epsilon: float,
    divide_by_turns: bool,
    std_ddof: int = 1,
    std_scope: Literal["group", "batch"] = "group",
) -> Advantage:
    """GRPO's advantage of the whole episode, given to each of its turns; optionally divided by their number.

    Trinity `step_wise_grpo`. In a group of one A = S / (1 + eps).
    """
    adv_N, _ = grpo(
        batch,
        reward_N=reward_N,
        normalize_std=True,
        std_epsilon=std_epsilon,
        std_ddof=std_ddof,
        std_scope=std_scope,
    )
    if divide_by_turns:
        row_K = _first_of_turn(batch, batch.rollout_N)
        turns_R = torch.bincount(row_K, minlength=batch.rollouts).clamp(min=1)
        adv_N = adv_N / turns_R[batch.rollout_N]
    return adv_N, None


def turn_level_gae(
    batch: Batch, *, reward_N: Tensor, gamma: float, lam: float, bootstrap_truncated: bool = False
) -> Advantage:
    """GAE with turns as actions: A_k = delta_k + gamma lam A_{k+1}, delta_k = r_k + gamma V_{k+1} - V_k.

    arXiv:2512.17008 section 4. r_k is the sum of a turn's rewards, V_k the value at its first sampled token: of what
    the policy has read when it begins to answer; after the last turn V is 0, or the critic's where a limit ended the
    rollout (bootstrap_truncated). All tokens of a turn have its advantage, and its return A + V, so that the critic
    learns at each of them what the turn and all later ones bring (VAGEN trains it at the first token alone).
    """
    value_N = need(batch.value_N, "batch.value_N").to(reward_N.dtype)
    at_M, turn_M = batch.mask_N.nonzero().flatten(), turn_of_M(batch)
    row_K, value_K = _first_of_turn(batch, batch.rollout_N), _first_of_turn(batch, value_N)
    next_K = torch.zeros_like(value_K)
    next_K[:-1] = torch.where(row_K[:-1] == row_K[1:], value_K[1:], 0.0)
    if bootstrap_truncated:
        next_K = with_last(next_K, row_K, batch)
    reward_K = torch.zeros_like(value_K).index_add(0, turn_M, reward_N[at_M])
    adv_K = discounted(reward_K + gamma * next_K - value_K, row_K, gamma * lam)
    zero_N = torch.zeros_like(reward_N)
    return zero_N.index_put((at_M,), adv_K[turn_M]), zero_N.index_put((at_M,), (adv_K + value_K)[turn_M])


def gigpo(
    batch: Batch,
    *,
    reward_N: Tensor,
    normalize_std: bool,
    std_epsilon: float,
    gamma: float,
    turn_weight: float,
) -> Advantage:
    """Episode advantage + turn_weight * turn advantage, arXiv:2505.10978; std has n - 1 below.

    The episode's is GRPO's. A turn's return is its own reward and the later turns', discounted
    by gamma a turn; it is compared with the turns of the same task that answered the same tokens: those since the
    turn before, for a first turn the prompt. A turn that no other can be compared with has 0.
    """
    episode_N, _ = grpo(batch, reward_N=reward_N, normalize_std=normalize_std, std_epsilon=std_epsilon)
    at_M, turn_M = batch.mask_N.nonzero().flatten(), turn_of_M(batch)
    row_K = _first_of_turn(batch, batch.rollout_N)
    reward_K = torch.zeros(len(row_K), dtype=torch.float64, device=row_K.device)
    return_K = discounted(reward_K.index_add(0, turn_M, reward_N[at_M].double()), row_K, gamma)
    turn_K = _standardized(return_K, _anchors(batch), epsilon=std_epsilon if normalize_std else None)
    turn_N = torch.zeros_like(reward_N).index_put((at_M,), turn_K[turn_M].to(reward_N.dtype))
    return episode_N + turn_weight * turn_N, None


def _first_of_turn(batch: Batch, x_N: Tensor) -> Tensor:
    """[K] x at the first token of every turn."""
    first_N = batch.mask_N.clone()
    first_N[1:] &= ~(batch.mask_N[:-1] & (batch.segment_N[:-1] == batch.segment_N[1:]))
    return x_N[first_N]


def _anchors(batch: Batch) -> Tensor:
    """[K] number of the anchor that each turn answers: its task and the tokens since the turn before.

    A segment that goes on where the one before it in the rollout ended its last turn has that turn before it; any other
    segment begins anew, with its whole history. Compared token by token; the loop is over turns.
    """
    start_K = _first_of_turn(batch, torch.arange(batch.tokens, device=batch.segment_N.device))
    at_M, turn_M = batch.mask_N.nonzero().flatten(), turn_of_M(batch)
    end_K = torch.zeros_like(start_K).scatter_reduce(0, turn_M, at_M + 1, "amax")
    segment_K, row_K = batch.segment_N[start_K], batch.rollout_N[start_K]
    first_K = batch.start_S[segment_K]
    tokens = batch.token_ids_N.cpu().numpy()
    known: dict[tuple[int, bytes], int] = {}
    numbers: list[int] = []
    before = (-1, 0, 0)  # rollout, first token of the segment and end of the turn before
    columns = (batch.group_R[row_K], row_K, first_K, start_K, end_K)
    for group, row, first, start, end in zip(*(x.tolist() for x in columns)):
        begin = first
        if row == before[0]:
            history = tokens[before[1] : before[2]]
            goes_on = first == before[1] or np.array_equal(tokens[first:start][: len(history)], history)
            begin = first + len(history) if goes_on else first
        numbers.append(known.setdefault((group, tokens[begin:start].tobytes()), len(known)))
        before = (row, first, end)
    return torch.tensor(numbers, dtype=torch.long, device=row_K.device)


def _standardized(x_K: Tensor, group_K: Tensor, *, epsilon: float | None) -> Tensor:
    """[K] x less its group's mean, over its group's deviation (n - 1 below) + epsilon; None: not divided."""
    count_K = group_sum(torch.ones_like(x_K), group_K)
    centred_K = torch.where(count_K > 1, x_K - group_sum(x_K, group_K) / count_K, 0.0)
    if epsilon is None:
        return centred_K
    var_K = group_sum(centred_K.square(), group_K) / (count_K - 1).clamp(min=1)
    return centred_K / (var_K.sqrt() + epsilon)
