"""How much better each sampled token was than expected.

An advantage is a function of a batch and the rewards of its tokens; it returns `adv_N` and, where there is
something for a critic to learn, `return_N`. Further keyword arguments are settings of `config.Algorithm`.
A rollout without a sampled token took no action: it counts nowhere.
Shape letters: N tokens, R rollouts, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.algos.kl import reference_kl
from whet.algos.segments import discounted, group_sum, last_sampled_R, need, old_logp_N, sampled_R
from whet.batch import Batch

Advantage = tuple[Tensor, Tensor | None]


def token_rewards(batch: Batch, *, kl_coef: float = 0.0, estimator: str = "k1") -> Tensor:
    """[N] the rollout's reward at its last sampled token, less kl_coef times the KL at every one."""
    last_R = last_sampled_R(batch)
    has_R = last_R >= 0
    reward_N = batch.reward_R.new_zeros(batch.tokens)
    reward_N[last_R[has_R]] = batch.reward_R[has_R]
    if kl_coef > 0:
        reward_N -= kl_coef * reference_kl(batch, old_logp_N(batch), estimator)
    return reward_N


def grpo(batch: Batch, *, reward_N: Tensor, normalize_std: bool, std_epsilon: float) -> Advantage:
    """(S - mean_G) / (std_G + eps), or S - mean_G; S is the rollout's total reward, std has n - 1 below.

    arXiv:2402.03300 section 4.1.2; without std: arXiv:2503.20783. In a group of one mean := 0, std := 1.
    """
    score_R, count_R, mean_R = _group_scores(batch, reward_N)
    centred_R = torch.where(count_R > 1, score_R - mean_R, score_R)
    if normalize_std:
        squares_R = torch.where(sampled_R(batch) > 0, (score_R - mean_R).square(), 0.0)
        std_R = (group_sum(squares_R, batch.group_R) / (count_R - 1).clamp(min=1)).sqrt()
        centred_R = centred_R / (torch.where(count_R > 1, std_R, 1.0) + std_epsilon)
    return _spread(batch, centred_R, like=reward_N), None


def rloo(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """S - mean of the others' S = n / (n - 1) * (S - mean_G), arXiv:2402.14740; 0 in a group of one."""
    score_R, count_R, mean_R = _group_scores(batch, reward_N)
    adv_R = (score_R - mean_R) * count_R / (count_R - 1).clamp(min=1)
    return _spread(batch, torch.where(count_R > 1, adv_R, 0.0), like=reward_N), None


def gae(batch: Batch, *, reward_N: Tensor, gamma: float, lam: float) -> Advantage:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; the return is A + V.

    arXiv:1506.02438 eq. 16. t runs over the sampled tokens of a rollout, so that an environment's tokens
    between two turns neither discount nor carry a value; after the last one V is 0.
    """
    value_N = need(batch.value_N, "batch.value_N").to(reward_N.dtype)
    at_M = batch.mask_N.nonzero().flatten()
    row_M, value_M = batch.row_N[at_M], value_N[at_M]
    next_M = torch.zeros_like(value_M)
    next_M[:-1] = torch.where(row_M[:-1] == row_M[1:], value_M[1:], 0.0)
    delta_M = reward_N[at_M] + gamma * next_M - value_M
    adv_M = discounted(delta_M, row_M, gamma * lam)
    zero_N = torch.zeros_like(reward_N)
    return zero_N.index_put((at_M,), adv_M), zero_N.index_put((at_M,), adv_M + value_M)


def reinforce(batch: Batch, *, reward_N: Tensor, gamma: float) -> Advantage:
    """A_t = r_t + gamma A_{t+1} over the sampled tokens: the discounted return, no baseline."""
    at_M = batch.mask_N.nonzero().flatten()
    return_M = discounted(reward_N[at_M], batch.row_N[at_M], gamma)
    return torch.zeros_like(reward_N).index_put((at_M,), return_M), None


def none(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """A_t = r_t: the token's own reward as it is."""
    return reward_N, None


def whiten(x_N: Tensor, mask_N: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the sampled tokens of the batch, var with n - 1; 0 elsewhere."""
    x_M = x_N[mask_N].double()
    if len(x_M) == 0:
        return x_N
    centred_M = x_M - x_M.mean()
    scaled_M = centred_M / (centred_M.square().sum() / max(len(x_M) - 1, 1) + 1e-8).sqrt()
    return torch.zeros_like(x_N).masked_scatter(mask_N, scaled_M.to(x_N.dtype))


ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "grpo": grpo,
    "rloo": rloo,
    "gae": gae,
    "reinforce": reinforce,
    "none": none,
}


def _group_scores(batch: Batch, reward_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R] each rollout's total reward, the number of rollouts in its group and their mean.

    In float64: the mean of equal float32 rewards is then that reward, and a uniform group gets exactly 0.
    """
    score_R = batch.sum_R(reward_N.double())
    count_R = group_sum((sampled_R(batch) > 0).double(), batch.group_R)
    return score_R, count_R, group_sum(score_R, batch.group_R) / count_R.clamp(min=1)


def _spread(batch: Batch, x_R: Tensor, *, like: Tensor) -> Tensor:
    """[N] the rollout's number at each of its sampled tokens, 0 elsewhere."""
    return torch.where(batch.mask_N, x_R[batch.row_N], 0.0).to(like.dtype)
