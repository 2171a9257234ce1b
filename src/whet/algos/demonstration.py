"""Losses on given replies, alone or among the policy's own rollouts (mixes).

A mix is two losses on one batch: the policy's on its own rollouts, a supervised loss on the demonstrations. For each
part the other one counts as not sampled: it is in no denominator, clip fraction, entropy or KL.
Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from whet.algos.segments import need
from whet.batch import Batch, Loss, LossFn, Outputs, select, tokens_of
from whet.config.recipes import Resolved


def sft(batch: Batch, out: Outputs) -> Loss:
    """-log pi: cross entropy of the given reply."""
    return _loss(batch, -need(out.logp_N, "outputs.logp_N"), out)


def sft_is(batch: Batch, out: Outputs) -> Loss:
    """-p log pi, p = pi without gradient: tokens count by how likely they are already (DFT, arXiv:2508.05629)."""
    logp_N = need(out.logp_N, "outputs.logp_N")
    return _loss(batch, -logp_N.detach().exp() * logp_N, out)


def sft_phi(batch: Batch, out: Outputs, *, phi_cutoff: float) -> Loss:
    """-p (1 - p) min(log pi, log phi_cutoff), p = pi without gradient: CHORD's phi, arXiv:2508.11408.

    Tokens with a probability near 1 or 0 have the smallest weight; above the cutoff a token has no gradient.
    """
    logp_N = need(out.logp_N, "outputs.logp_N")
    own_N = logp_N.detach()
    weight_N = own_N.exp() * -torch.expm1(own_N)  # 1 - p, to the last digit where p is almost 1
    return _loss(batch, -weight_N * logp_N.clamp(max=math.log(phi_cutoff)), out)


def _loss(batch: Batch, loss_N: Tensor, out: Outputs) -> Loss:
    zero = loss_N.new_zeros(())
    nll_N = -need(out.logp_N, "outputs.logp_N").detach()
    return Loss(torch.where(batch.mask_N, loss_N, zero), {"nll_nats": torch.where(batch.mask_N, nll_N, zero)})


# ---------------------------------------------------------------- mixes


def own(batch: Batch) -> Batch:
    """The batch in which only the policy's own rollouts count: the tokens of demonstrations are masked out."""
    return batch if batch.expert_R is None else _masked(batch, ~batch.expert_R)


def without_experts(batch: Batch) -> Batch:
    """The policy's own rollouts alone, the demonstrations taken out."""
    return batch if batch.expert_R is None else select(batch, torch.nonzero(~batch.expert_R).flatten())


def among_experts(batch: Batch, own_R: Tensor) -> Tensor:
    """[R] numbers of the own rollouts at their places in the whole batch, 1 at the demonstrations."""
    if batch.expert_R is None:
        return own_R
    return torch.ones_like(batch.expert_R, dtype=own_R.dtype).masked_scatter(~batch.expert_R, own_R)


def mixed(policy: LossFn, expert: LossFn) -> LossFn:
    """policy: loss on the own rollouts; expert: loss on the demonstrations. Each has metrics of its own part only."""
    return partial(_mixed, policy, expert)


def _mixed(policy: LossFn, expert: LossFn, batch: Batch, out: Outputs) -> Loss:
    expert_R = need(batch.expert_R, "batch.expert_R")
    mine, given = own(batch), _masked(batch, expert_R)
    a, b = policy(mine, out), expert(given, out)
    stats = {name: _part(x, mine, ~expert_R) for name, x in a.stats.items()}
    stats |= {f"expert_{name}": _part(x, given, expert_R) for name, x in b.stats.items()}
    return Loss(a.loss_N + b.loss_N, stats)


def mixed_weights(batch: Batch, *, weights: Callable[[Batch], Tensor], mu: float) -> Tensor:
    """[N] (1 - mu) times the weights of the own rollouts, mu times those of the demonstrations.

    Each part is normalised separately, so mu is the weight of the demonstrations for any share of the tokens.
    """
    expert_R = need(batch.expert_R, "batch.expert_R")
    weight_N = batch.reward_R.new_zeros(batch.tokens)
    for share, keep_R in ((1 - mu, ~expert_R), (mu, expert_R)):
        rows = torch.nonzero(keep_R).flatten()  # taken out: blocks of rollouts are those of the part
        if len(rows):
            at = tokens_of(batch, rows)
            weight_N = weight_N.index_put((at,), share * weights(select(batch, rows)))
    return weight_N


def cosine(mu: float, step: int, *, warmup_steps: int, valley: float | None, decay_steps: int) -> float:
    """The demonstrations' weight in a step (the first is 1): linear from 0 to mu, then a cosine down to valley.

    arXiv:2508.11408. warmup_steps = 0: mu from the start; valley = None: it stays there.
    """
    if step < warmup_steps:
        return mu * step / warmup_steps
    if valley is None:
        return mu
    done = min((step - warmup_steps) / decay_steps, 1.0) if decay_steps else 1.0
    return valley + (mu - valley) * (1 + math.cos(math.pi * done)) / 2


MU_SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine}
"""`algorithm.mix.mu_schedule`: the weight of the demonstrations from mu, the step and the schedule's settings."""


def mu_at(r: Resolved, step: int) -> float:
    """The demonstrations' weight in a step (the first is 1)."""
    assert r.mix is not None
    made = r.settings.get("mix.mu_schedule")
    return r.mix.mu if made is None else MU_SCHEDULES[made.name](r.mix.mu, step, **made.settings)


def _masked(batch: Batch, keep_R: Tensor) -> Batch:
    return replace(batch, mask_N=batch.mask_N & keep_R[batch.rollout_N])


def _part(x: Tensor, part: Batch, keep_R: Tensor) -> Tensor:
    """The numbers of one part: [N] or [R] -> as many as it has sampled tokens or rollouts."""
    return x[part.mask_N] if len(x) == part.tokens else x[keep_R]
