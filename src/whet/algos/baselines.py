"""Advantages with one number per rollout: its score minus a baseline from its group.

The score S of a rollout is the sum of its token rewards. A rollout without a sampled token is not counted.
Statistics are taken in float64: the mean of equal float32 rewards is then that reward, and a uniform group gets
exactly 0. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whet.algos.segments import group_max, group_sum, need, sampled_logp_N, sampled_R, strictly_below
from whet.algos.whitening import whiten
from whet.batch import Batch

Advantage = tuple[Tensor, Tensor | None]
"""`adv_N`, and `return_N` where there is something for a critic to learn."""


@dataclass(frozen=True)
class GroupScores:
    """Scores of the rollouts with statistics of their groups; every field is float64 except `takes_R`."""

    score_R: Tensor
    """Sum of the rollout's token rewards."""
    takes_R: Tensor
    """bool: it takes part."""
    group_R: Tensor
    count_R: Tensor
    """Rollouts of its group that take part."""
    mean_R: Tensor
    """Their mean score; 0 in a group of one, whose rollout has nothing to be compared with."""

    @property
    def centred_R(self) -> Tensor:
        """S - mean_G; S itself in a group of one."""
        return self.score_R - self.mean_R

    def std_R(self, ddof: int) -> Tensor:
        """Standard deviation of the group's scores, n - ddof below; 1 in a group of one."""
        squares_R = torch.where(self.takes_R & (self.count_R > 1), self.centred_R.square(), 0.0)
        var_R = group_sum(squares_R, self.group_R) / (self.count_R - ddof).clamp(min=1)
        return torch.where(self.count_R > 1, var_R.sqrt(), 1.0)

    def batch_std(self, ddof: int) -> Tensor:
        """Standard deviation of all scores of the batch; 1 if there is but one."""
        score_K = self.score_R[self.takes_R]
        one = self.score_R.new_ones(())
        return score_K.std(correction=ddof) if len(score_K) > 1 else one


def scores(batch: Batch, reward_N: Tensor, *, takes_R: Tensor | None = None) -> GroupScores:
    """The scores of a batch and their group means, over the rollouts that sampled something (and `takes_R`).

    A score has the precision of a reward: parts that stand at several turns are rounded one by one, and equal rewards
    would differ by that.
    """
    sampled = sampled_R(batch) > 0
    score_R = batch.sum_R(reward_N.double()).to(batch.reward_R.dtype).double()
    return compare(batch, score_R, sampled if takes_R is None else sampled & takes_R)


def compare(batch: Batch, score_R: Tensor, takes_R: Tensor) -> GroupScores:
    """Any float64 number of the rollouts, with the means of the groups over those that take part."""
    count_R = group_sum(takes_R.double(), batch.group_R)
    mean_R = group_sum(torch.where(takes_R, score_R, 0.0), batch.group_R) / count_R.clamp(min=1)
    return GroupScores(score_R, takes_R, batch.group_R, count_R, torch.where(count_R > 1, mean_R, 0.0))


def spread(batch: Batch, x_R: Tensor, *, like: Tensor) -> Tensor:
    """[N] the rollout's number at each of its sampled tokens, 0 elsewhere."""
    return torch.where(batch.mask_N, x_R[batch.rollout_N], 0.0).to(like.dtype)


# ---------------------------------------------------------------- in units of the group's deviation


def grpo(
    batch: Batch,
    *,
    reward_N: Tensor,
    normalize_std: bool,
    std_epsilon: float,
    std_ddof: int = 1,
    std_floor: float = 0.0,
    std_scope: Literal["group", "batch"] = "group",
    rank_penalty: float = 0.0,
) -> Advantage:
    """(S - mean_G) / (max(std, floor) + eps), or S - mean_G.

    arXiv:2402.03300 section 4.1.2; without std: arXiv:2503.20783. In a group of one mean := 0, std := 1. The std is
    the group's (n - ddof below) or that of all scores of the batch. rank_penalty: see `unlikely`.
    """
    s = scores(batch, reward_N)
    if rank_penalty:
        s = unlikely(batch, s, rank_penalty)
    adv_R = s.centred_R
    if normalize_std:
        std_R = s.std_R(std_ddof) if std_scope == "group" else s.batch_std(std_ddof)
        adv_R = adv_R / (std_R.clamp(min=std_floor) + std_epsilon)
    return spread(batch, adv_R, like=reward_N), None


def gdpo(
    batch: Batch,
    *,
    parts: Sequence[str],
    part_weights: Sequence[float] | None,
    normalize_std: bool,
    std_epsilon: float,
    std_ddof: int = 1,
) -> Advantage:
    """whiten(sum_c w_c (S_c - mean_G) / (std_c + eps)), S_c a part of the reward (arXiv:2601.05242).

    Each part is compared with its own mean and deviation in the group, as in grpo, so that none drowns another; the sum
    is whitened over the sampled tokens of the batch. Without part_weights every part has 1.
    """
    part_RC, takes_R = need(batch.part_RC, "batch.part_RC"), sampled_R(batch) > 0
    total_R = torch.zeros_like(batch.reward_R, dtype=torch.float64)
    for part_R, weight in zip(part_RC.double().T, part_weights or [1.0] * len(parts), strict=True):
        s = compare(batch, part_R, takes_R)
        total_R += weight * (
            s.centred_R / (s.std_R(std_ddof) + std_epsilon) if normalize_std else s.centred_R
        )
    return whiten(spread(batch, total_R, like=batch.reward_R), batch.mask_N), None


def unlikely(batch: Batch, s: GroupScores, penalty: float) -> GroupScores:
    """Scores of likely replies lowered, so that rare good ones count more: S (1 - penalty rank / n), arXiv:2506.02355.

    rank is the number of the group's rollouts with a lower mean log-prob, as sampled; equal ones share a rank.
    """
    mean_logp_R = batch.sum_R(sampled_logp_N(batch).double()) / sampled_R(batch).clamp(min=1)
    rank_R = strictly_below(torch.where(s.takes_R, mean_logp_R, torch.inf), batch.group_R).double()
    lowered_R = s.score_R * (1 - penalty * rank_R / s.count_R.clamp(min=1))
    return compare(batch, torch.where(s.count_R > 1, lowered_R, s.score_R), s.takes_R)


def grpo_passk(
    batch: Batch, *, reward_N: Tensor, normalize_std: bool, std_epsilon: float, std_ddof: int = 1
) -> Advantage:
    """The best rollout gets (S_1st - S_2nd) / (std_G + eps), or S_1st - S_2nd; all others 0. arXiv:2503.19595.

    Where two share the first place the difference is 0. A group of one has no second: 0.
    """
    s = scores(batch, reward_N)
    score_R = torch.where(s.takes_R, s.score_R, -torch.inf)
    best_R = s.takes_R & (score_R == group_max(score_R, batch.group_R))
    alone_R = group_sum(best_R.double(), batch.group_R) == 1
    second_R = group_max(torch.where(best_R, -torch.inf, score_R), batch.group_R)
    adv_R = torch.where(best_R & alone_R & (s.count_R > 1), score_R - second_R, 0.0)
    if normalize_std:
        adv_R = adv_R / (s.std_R(std_ddof) + std_epsilon)
    return spread(batch, adv_R, like=reward_N), None


def rec(batch: Batch, *, reward_N: Tensor, normalize_std: bool, std_epsilon: float) -> Advantage:
    """S - mean, or (S - mean) / (std + eps), over the rollouts that resampling kept; 0 for the others.

    Group-relative REINFORCE, arXiv:2509.24203; std has n below. A group of one keeps its score.
    """
    s = scores(batch, reward_N, takes_R=None if batch.count_R is None else batch.count_R > 0)
    adv_R = s.centred_R / (s.std_R(0) + std_epsilon) if normalize_std else s.centred_R
    return spread(batch, torch.where(s.takes_R, adv_R, 0.0), like=reward_N), None


# ---------------------------------------------------------------- less a baseline


def rloo(batch: Batch, *, reward_N: Tensor, single_rollout: Literal["zero", "raw"] = "zero") -> Advantage:
    """S - mean of the others' S = n / (n - 1) * (S - mean_G), arXiv:2402.14740.

    A group of one: 0 (SkyRL, verl's vectorised form), or S as it is (verl's plain form).
    """
    s = scores(batch, reward_N)
    adv_R = s.centred_R * s.count_R / (s.count_R - 1).clamp(min=1)
    alone_R = s.score_R if single_rollout == "raw" else torch.zeros_like(adv_R)
    return spread(batch, torch.where(s.count_R > 1, adv_R, alone_R), like=reward_N), None


def reinforce_plus_plus_baseline(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """whiten(S - mean_G) over the tokens of the batch, arXiv:2501.03262; S in a group of one."""
    adv_N = spread(batch, scores(batch, reward_N).centred_R, like=reward_N)
    return whiten(adv_N, batch.mask_N), None


def opo(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """S - sum_G(n_i S_i) / sum_G(n_i), n_i the tokens of a rollout: the baseline of least variance where every token
    adds as much. arXiv:2505.23585. S in a group of one.
    """
    s = scores(batch, reward_N)
    tokens_R = sampled_R(batch).double()
    mean_R = group_sum(tokens_R * s.score_R, batch.group_R) / group_sum(tokens_R, batch.group_R).clamp(min=1)
    return spread(batch, torch.where(s.count_R > 1, s.score_R - mean_R, s.score_R), like=reward_N), None


def gpg(
    batch: Batch, *, reward_N: Tensor, gpg_alpha: Literal["mixed_groups", "nonzero"] = "mixed_groups"
) -> Advantage:
    """alpha (S - mean_G), alpha = rollouts / rollouts that give a gradient. alpha S in a group of one.

    mixed_groups counts the rollouts of groups whose scores differ: B / (B - M) of arXiv:2504.02546, M the rollouts of
    groups that are all right or all wrong. nonzero counts those with an S other than 0, as verl 0.9.1.
    """
    s = scores(batch, reward_N)
    counts_R = s.score_R != 0
    if gpg_alpha == "mixed_groups":
        most_R = group_max(torch.where(s.takes_R, s.score_R, -torch.inf), s.group_R)
        least_R = -group_max(torch.where(s.takes_R, -s.score_R, -torch.inf), s.group_R)
        counts_R = (most_R > least_R) | (s.count_R == 1)
    counted = (s.takes_R & counts_R).double().sum().clamp(min=1)
    return spread(batch, s.centred_R * (s.takes_R.double().sum() / counted), like=reward_N), None


def opmd(
    batch: Batch, *, reward_N: Tensor, opmd_baseline: Literal["mean", "logavgexp"], tau: float
) -> Advantage:
    """S - mean_G, or S - tau log(mean_G exp(S / tau)), the value of the KL-regularised optimum. S in a group of one.

    Online policy mirror descent, arXiv:2505.17826.
    """
    s = scores(batch, reward_N)
    if opmd_baseline == "mean":
        return spread(batch, s.centred_R, like=reward_N), None
    score_R = torch.where(s.takes_R, s.score_R, -torch.inf)
    most_R = group_max(score_R, batch.group_R).nan_to_num(neginf=0.0)
    total_R = group_sum(((score_R - most_R) / tau).exp(), batch.group_R)
    value_R = most_R + tau * (total_R / s.count_R.clamp(min=1)).log()
    return spread(batch, torch.where(s.count_R > 1, s.score_R - value_R, s.score_R), like=reward_N), None


def softmean(batch: Batch, *, reward_N: Tensor, softmean_eta: float) -> Advantage:
    """S - 1/eta log(mean of exp(eta S)) over the rollouts of the batch; eta = 0: S less their mean.

    The baseline of verl's recipe `sppo` (0.4.0 to 0.6.1), one number for all tasks.
    """
    s = scores(batch, reward_N)
    score_K = s.score_R[s.takes_R]
    if softmean_eta == 0:
        baseline = score_K.sum() / max(len(score_K), 1)
    else:
        baseline = ((softmean_eta * score_K).logsumexp(0) - math.log(max(len(score_K), 1))) / softmean_eta
    return spread(batch, s.score_R - baseline, like=reward_N), None


def win_rate(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """P - 1/2, P the share of its group that a rollout beats, equal ones and itself counted half.

    The estimate of Self-Play Preference Optimization, arXiv:2405.00675 section 4, with rewards as the judge of pairs.
    """
    s = scores(batch, reward_N)
    below_R, above_R = (
        strictly_below(torch.where(s.takes_R, sign * s.score_R, torch.inf), batch.group_R) for sign in (1, -1)
    )
    return spread(batch, (below_R - above_R) / (2 * s.count_R.clamp(min=1)), like=reward_N), None


def asymre(batch: Batch, *, reward_N: Tensor, baseline_shift: float) -> Advantage:
    """S - (mean_G + shift): below 0 the shift favours good replies over bad ones, for off-policy data.

    arXiv:2506.20520. In a group of one the mean is 0.
    """
    return spread(batch, scores(batch, reward_N).centred_R - baseline_shift, like=reward_N), None


def best(batch: Batch, *, reward_N: Tensor) -> Advantage:
    """1 for the group's best rollout, 0 for the others: its log-likelihood alone is raised. Equal bests share the 1.

    Reward-ranked fine-tuning (RAFT), arXiv:2304.06767.
    """
    s = scores(batch, reward_N)
    score_R = torch.where(s.takes_R, s.score_R, -torch.inf)
    best_R = (s.takes_R & (score_R == group_max(score_R, batch.group_R))).double()
    return spread(batch, best_R / group_sum(best_R, batch.group_R).clamp(min=1), like=reward_N), None


def maxrl(batch: Batch, *, reward_N: Tensor, std_epsilon: float) -> Advantage:
    """(S - mean_G) / (mean_G + eps): with rewards of 0 and 1, towards the maximum of the likelihood of success
    (SkyRL `maxrl`). S in a group of one. Meant for rewards that are not negative.
    """
    s = scores(batch, reward_N)
    return spread(
        batch,
        torch.where(s.count_R > 1, s.centred_R / (s.mean_R + std_epsilon), s.score_R),
        like=reward_N,
    ), None
