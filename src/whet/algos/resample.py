"""How often each rollout counts in the loss: `count_R`.

Functions of a batch; weights multiply by the counts, and denominators count with them. Random numbers come from a
stream of `seeds`, so the same step draws the same again after a resume. Shape letters: R rollouts, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from whet.algos.baselines import compare
from whet.algos.segments import group_sum, sampled_R, strictly_below
from whet.batch import Batch
from whet.seeds import uniforms

EPSILON = 1e-8
"""Added to every weight, so that a batch of zeros can be drawn from."""


def counts(
    batch: Batch, resample: Callable[..., Tensor] | None, *, stream: int, groups: int, finished_only: bool
) -> Tensor | None:
    """[R] the product of all that counts rollouts, with the counts that the batch has; None where each counts once.

    resample: one of RESAMPLE with its settings, or None. groups: how many the step should have; copies replace missing
    ones. finished_only: truncated rollouts count 0 times.
    """
    factors: list[Tensor] = [] if batch.count_R is None else [batch.count_R]
    if resample is not None:
        factors.append(resample(batch, stream=stream))
    if groups > int(batch.group_R[-1]) + 1:
        factors.append(copies(batch, stream=stream, groups=groups))
    if finished_only:
        factors.append(batch.stopped_R.float())
    return torch.stack(factors).prod(0) if factors else None


def drawn(batch: Batch, *, stream: int, weight: Callable[..., Tensor], **settings: float) -> Tensor:
    """[R] how often each rollout comes up when as many are drawn, with replacement, in proportion to its weight.
    settings: of the weight.

    Policy filtration (PF-PPO), arXiv:2409.06957; as in verl the scores are the rewards, without a KL.
    """
    takes_R = sampled_R(batch) > 0
    if not bool(takes_R.any()):
        return takes_R.float()
    weight_R = torch.zeros(batch.rollouts, dtype=torch.float64, device=takes_R.device)
    weight_R[takes_R] = weight(batch.reward_R[takes_R].double(), **settings) + EPSILON
    share_R = weight_R.cumsum(0) / weight_R.sum()
    number = int(takes_R.sum())
    u = torch.from_numpy(uniforms(stream, 0, number)).to(share_R.device)
    row = torch.searchsorted(share_R, u, right=True).clamp(max=int(takes_R.nonzero().max()))
    return torch.bincount(row, minlength=batch.rollouts).float()


def by_power(score: Tensor, power: float) -> Tensor:
    """|S|^power"""
    return score.abs() ** power


def by_extremes(score: Tensor) -> Tensor:
    """1 for the highest and the lowest score of the batch, 0 between."""
    return ((score == score.max()) | (score == score.min())).double()


def by_best(score: Tensor) -> Tensor:
    """0.4 for the highest score of the batch, 0.1 for the others."""
    return torch.where(score == score.max(), 0.4, 0.1).double()


def balanced(batch: Batch, *, stream: int) -> Tensor:
    """[R] 0 for as many random rollouts below their group's mean as there are more of them than of the others; else 1.

    `drop=balance` of Trinity's REC, arXiv:2509.24203. A rollout at the mean is one of the others.
    """
    s = compare(batch, batch.reward_R.double(), sampled_R(batch) > 0)
    bad_R = s.takes_R & (s.count_R > 1) & (s.score_R < s.mean_R)
    surplus_R = group_sum(bad_R.long() - (s.takes_R & ~bad_R).long(), batch.group_R)
    lot_R = torch.from_numpy(uniforms(stream, 0, batch.rollouts)).to(batch.reward_R.device)
    place_R = strictly_below(torch.where(bad_R, lot_R, 2.0), batch.group_R)
    return (~(bad_R & (place_R < surplus_R))).float()


def copies(batch: Batch, *, stream: int, groups: int) -> Tensor:
    """[R] 1, and one more for each time a group is drawn at random to replace a dropped group.

    `duplicate_experiences` of Trinity's GRPO.
    """
    have = int(batch.group_R[-1]) + 1
    u = uniforms(stream, 0, max(groups - have, 0))
    count_G = 1 + np.bincount((u * have).astype(np.int64), minlength=have)
    return torch.from_numpy(count_G).to(batch.group_R.device)[batch.group_R].float()


RESAMPLE: dict[str, Callable[..., Tensor]] = {
    "pow": partial(drawn, weight=by_power),
    "max_min": partial(drawn, weight=by_extremes),
    "max_random": partial(drawn, weight=by_best),
    "balance": balanced,
}
