"""Advantages: how much better each sampled token was than expected.

An advantage is a function of a batch and the rewards of its tokens; it returns `adv_N` and, where there is
something for a critic to learn, `return_N`. Further keyword arguments are settings of `config.Algorithm`.
A rollout without a sampled token took no action and is not counted. This module has the advantages with a number for
every token; `baselines` has those with one for every rollout, `turns` those with one for every turn.
Shape letters: N tokens, R rollouts, M sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from whet.algos.baselines import (
    Advantage,
    asymre,
    best,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opmd,
    opo,
    rec,
    reinforce_plus_plus_baseline,
    rloo,
    softmean,
    win_rate,
)
from whet.algos.bootstrap import with_last
from whet.algos.implicit import prime
from whet.algos.kl import reference_kl
from whet.algos.segments import discounted, last_sampled_R, need, old_logp_N, turn_of_M
from whet.algos.token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from whet.algos.turns import gigpo, step_wise_grpo, turn_level_gae
from whet.algos.whitening import whiten
from whet.batch import Batch


def token_rewards(batch: Batch, *, kl_coef: float = 0.0, estimator: str = "k1") -> Tensor:
    """[N] the rollout's reward at its last sampled token, minus kl_coef times the KL at every sampled token. What the
    environment gave for a turn stands at the turn's last token, and only the rest at the rollout's."""
    last_R = last_sampled_R(batch)
    has_R = last_R >= 0
    reward_N, rest_R = batch.reward_R.new_zeros(batch.tokens), batch.reward_R
    if batch.turn_reward_N is not None:
        reward_N += torch.where(batch.mask_N, batch.turn_reward_N, 0.0).to(reward_N.dtype)
        rest_R = (rest_R.double() - batch.sum_R(reward_N.double())).to(rest_R.dtype)
    reward_N[last_R[has_R]] += rest_R[has_R]
    if kl_coef > 0:
        reward_N -= kl_coef * reference_kl(batch, old_logp_N(batch), estimator)
    return reward_N


def gae(
    batch: Batch, *, reward_N: Tensor, gamma: float, lam: float, bootstrap_truncated: bool = False
) -> Advantage:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; the return is A + V.

    arXiv:1506.02438 eq. 16. t runs over the sampled tokens of a rollout, strand after strand, so that an
    environment's tokens between two turns and context neither discount nor carry a value; after the last one V is 0.
    bootstrap_truncated: where a limit ended the rollout, it is the critic's (arXiv:1712.00378).
    """
    value_N = need(batch.value_N, "batch.value_N").to(reward_N.dtype)
    at_M = batch.mask_N.nonzero().flatten()
    row_M, value_M = batch.rollout_N[at_M], value_N[at_M]
    next_M = torch.zeros_like(value_M)
    next_M[:-1] = torch.where(row_M[:-1] == row_M[1:], value_M[1:], 0.0)
    if bootstrap_truncated:
        next_M = with_last(next_M, row_M, batch)
    delta_M = reward_N[at_M] + gamma * next_M - value_M
    adv_M = discounted(delta_M, row_M, gamma * lam)
    zero_N = torch.zeros_like(reward_N)
    return zero_N.index_put((at_M,), adv_M), zero_N.index_put((at_M,), adv_M + value_M)


def reinforce(batch: Batch, *, reward_N: Tensor, gamma: float) -> Advantage:
    """A_t = r_t + gamma A_{t+1} over the sampled tokens: the discounted return, no baseline."""
    at_M = batch.mask_N.nonzero().flatten()
    return_M = discounted(reward_N[at_M], batch.rollout_N[at_M], gamma)
    return torch.zeros_like(reward_N).index_put((at_M,), return_M), None


def reinforce_plus_plus(
    batch: Batch, *, reward_N: Tensor, gamma: float, reset_at_turns: bool = False
) -> Advantage:
    """whiten(R), R_t = r_t + gamma R_{t+1} over the sampled tokens, over the batch. arXiv:2501.03262.

    The return crosses the environment's tokens undiscounted, as in verl 0.9.0 and 0.9.1. reset_at_turns: it begins anew
    at the end of each turn, as in verl 0.8.0 and in SkyRL 0.3.
    """
    at_M = batch.mask_N.nonzero().flatten()
    row_M = turn_of_M(batch) if reset_at_turns else batch.rollout_N[at_M]
    return_M = discounted(reward_N[at_M], row_M, gamma)
    return whiten(torch.zeros_like(reward_N).index_put((at_M,), return_M), batch.mask_N), None


def remax(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """The rewards from t on minus the reward of the greedy reply to the same task. arXiv:2310.10505."""
    baseline_R = need(batch.baseline_R, "batch.baseline_R").to(reward_N.dtype)
    return_N, _ = reinforce(batch, reward_N=reward_N, gamma=1.0)
    return torch.where(batch.mask_N, return_N - baseline_R[batch.rollout_N], 0.0), None


def distill(
    batch: Batch,
    *,
    reward_N: Tensor,
    distill_coef: float,
    distill_estimator: str = "k1",
    distill_mixture: float = 0.5,
    distill_discount: float = 0.0,
) -> Advantage:
    """-distill_coef * k(log old - log ref) at every token, the reference being the teacher; rewards are not read.

    On-policy distillation: with k1, which is the difference itself, the policy gradient of the reverse KL, token by
    token (arXiv:2306.13649 section 3). jsd: b log ref + (1 - b) log old - log m, where b = distill_mixture and
    m = b ref + (1 - b) old: the generalized Jensen-Shannon divergence (section 2 there) at the sampled token.
    distill_discount g: the sum over this and the later tokens of the reply, the k-th later one times g^k.
    """
    teacher_N, old_N = need(batch.logp_ref_N, "batch.logp_ref_N"), old_logp_N(batch)
    if distill_estimator == "jsd":
        b = distill_mixture
        mixed_N = torch.logaddexp(teacher_N + math.log(b), old_N + math.log1p(-b))
        kl_N = torch.where(batch.mask_N, b * teacher_N + (1 - b) * old_N - mixed_N, 0.0)
    else:
        kl_N = reference_kl(batch, old_N, distill_estimator)
    if distill_discount > 0:
        at_M = torch.nonzero(batch.mask_N).flatten()
        sum_M = discounted(kl_N[at_M], batch.rollout_N[at_M], distill_discount)
        kl_N = torch.zeros_like(kl_N).index_put((at_M,), sum_M)
    return (-distill_coef * kl_N).to(reward_N.dtype), None


def reward(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """S at every token: the rollout's total reward, no baseline."""
    score_R = batch.sum_R(reward_N.double())
    return torch.where(batch.mask_N, score_R[batch.rollout_N], 0.0).to(reward_N.dtype), None


def none(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """A_t = r_t: the token's own reward, unchanged."""
    return reward_N, None


ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "rec": rec,
    "opo": opo,
    "gpg": gpg,
    "opmd": opmd,
    "asymre": asymre,
    "maxrl": maxrl,
    "best": best,
    "softmean": softmean,
    "win_rate": win_rate,
    "prime": prime,
    "gae": gae,
    "turn_level_gae": turn_level_gae,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gigpo": gigpo,
    "step_wise_grpo": step_wise_grpo,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "distill": distill,
    "reward": reward,
    "none": none,
}
