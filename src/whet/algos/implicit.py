"""PRIME, arXiv:2502.01456: rewards of tokens by a language model that learns from outcomes alone.

The reward of a token is q = log pi_rm - log ref, in units of 1 / beta: the model is a critic without a value head. Its
label is the rollout's reward, between 0 and 1. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from whet.algos.segments import discounted, group_sum, last_sampled_R, need, sampled_R
from whet.batch import Batch, Loss, Outputs
from whet.types import DataError

SMALL = 1e-6
"""Added to the largest return before it divides, as in verl."""

# ---------------------------------------------------------------- the advantage


def prime(
    batch: Batch,
    *,
    process_coef: float,
    outcome_coef: float,
    implicit_beta: float,
    implicit_granularity: str,
    implicit_normalize: bool,
    implicit_loss: str = "ce",
    implicit_update: str = "before",
) -> tuple[Tensor, None]:
    """Returns of process_coef RLOO(p) + outcome_coef RLOO(S): verl's recipe `prime`, 0.4.0 to 0.6.1.

    p is beta q at each sampled token but the last one (granularity token), or their sum at the last one (whole); with
    implicit_normalize over the largest |return of p| of the batch. RLOO(p) = n / (n - 1) p - sum_G mean(p) / (n - 1)
    at each token, mean over a rollout's tokens; RLOO(S) the same of the reward alone, at the last token. The model
    learns with implicit_loss, before or after it gives its rewards (`learner`). A group of one: 0.
    """
    process_N = process_rewards(
        batch, implicit_beta, granularity=implicit_granularity, normalize=implicit_normalize
    )
    count_R = group_sum((sampled_R(batch) > 0).double(), batch.group_R)
    mean_R = batch.sum_R(process_N) / sampled_R(batch).clamp(min=1)
    out_N = process_coef * _rloo(process_N, mean_R[batch.rollout_N], batch, count_R)
    last_N = _last_N(batch)
    outcome_N = batch.reward_R.double()[batch.rollout_N]
    out_N += torch.where(last_N, outcome_coef * _rloo(outcome_N, outcome_N, batch, count_R), 0.0)
    return _returns(batch, out_N).to(batch.reward_R.dtype), None


def process_rewards(batch: Batch, beta: float, *, granularity: str, normalize: bool) -> Tensor:
    """[N] float64: p of `prime`; 0 where not sampled."""
    reward_N = beta * implied(batch).double()
    last_N = _last_N(batch)
    if granularity == "token":
        reward_N = torch.where(last_N, 0.0, reward_N)
    else:
        reward_N = torch.where(last_N, batch.sum_R(reward_N)[batch.rollout_N], 0.0)
    if normalize:
        reward_N = reward_N / (_returns(batch, reward_N).abs().max() + SMALL)
    return reward_N


def implied(batch: Batch) -> Tensor:
    """[N] q; 0 where not sampled."""
    q_N = need(batch.implicit_N, "batch.implicit_N") - need(batch.logp_ref_N, "batch.logp_ref_N")
    return torch.where(batch.mask_N, q_N, 0.0)


def _rloo(x_N: Tensor, mean_N: Tensor, batch: Batch, count_R: Tensor) -> Tensor:
    """[N] n / (n - 1) x - the sum of the group's means / (n - 1); 0 where not sampled, and in a group of one.

    mean_N: [N] the mean of x of the token's rollout.
    """
    of_R = torch.zeros_like(count_R).index_put((batch.rollout_N[batch.mask_N],), mean_N[batch.mask_N])
    sum_N, n_N = group_sum(of_R, batch.group_R)[batch.rollout_N], count_R[batch.rollout_N]
    out_N = (n_N * x_N - sum_N) / (n_N - 1).clamp(min=1)
    return torch.where(batch.mask_N & (n_N > 1), out_N, 0.0)


def _returns(batch: Batch, x_N: Tensor) -> Tensor:
    """[N] the sum of x from each sampled token of a rollout on."""
    at_M = batch.mask_N.nonzero().flatten()
    summed_M = discounted(x_N[at_M], batch.rollout_N[at_M], 1.0)
    return torch.zeros_like(x_N).index_put((at_M,), summed_M)


def _last_N(batch: Batch) -> Tensor:
    """[N] bool: the last sampled token of its rollout."""
    last_R = last_sampled_R(batch)
    out_N = torch.zeros_like(batch.mask_N)
    out_N[last_R[last_R >= 0]] = True
    return out_N


# ---------------------------------------------------------------- how the model learns


def labels(batch: Batch) -> Tensor:
    """[R] the outcomes. DataError for a reward that is no label."""
    if bool(((batch.reward_R < 0) | (batch.reward_R > 1)).any()):
        worst = float(batch.reward_R[(batch.reward_R - 0.5).abs().argmax()])
        raise DataError(
            f"advantage prime takes the reward of a rollout as its label, between 0 and 1; a rollout has {worst:g}. "
            "Change the weights of rewards, or the reward."
        )
    return batch.reward_R


def ce(batch: Batch, sum_R: Tensor) -> Tensor:
    """[R] the cross entropy of sigmoid(beta sum of q), given in sum_R, and the label."""
    label_R = labels(batch)
    return -label_R * logsigmoid(sum_R) - (1 - label_R) * logsigmoid(-sum_R)


def dpo(batch: Batch, sum_R: Tensor) -> Tensor:
    """[R] -log sigmoid of beta sum of q, less its mean over the group's rollouts with a lower label (of a rollout with
    label 0: a higher one, with the sign turned). These means are of before the update, without a gradient."""
    sign_R = torch.where(labels(batch) > 0, 1.0, -1.0)
    return -logsigmoid(sign_R * (sum_R - need(batch.rival_R, "batch.rival_R")))


MODEL_LOSSES: Mapping[str, Callable[[Batch, Tensor], Tensor]] = {"ce": ce, "dpo": dpo}


def model_loss(batch: Batch, out: Outputs, *, name: str, beta: float) -> Loss:
    """The loss of the model, one number a rollout, at its last sampled token."""
    q_N = need(out.logp_N, "outputs.logp_N") - need(batch.logp_ref_N, "batch.logp_ref_N")
    sum_R = beta * batch.sum_R(q_N)
    loss_R = MODEL_LOSSES[name](batch, sum_R)
    last_R = last_sampled_R(batch)
    has_R = last_R >= 0
    loss_N = torch.zeros_like(q_N).index_put((last_R[has_R],), loss_R[has_R])
    right_R = (sum_R > 0) == (batch.reward_R > 0.5)
    return Loss(loss_N, {"implied_reward": sum_R.detach(), "accuracy": right_R.to(q_N.dtype)})


def rivals(batch: Batch, beta: float) -> Tensor:
    """[R] beta times the mean sum of q over the rollouts of the group with a lower label, or, of a rollout with label
    0, with a higher one; 0 where there is none. As verl's `compute_detach_dpo_loss_rm`."""
    sum_R, label_R = beta * batch.sum_R(implied(batch)), labels(batch)
    same_RR = batch.group_R[:, None] == batch.group_R[None, :]
    lower_RR = label_R[None, :] < label_R[:, None]
    rival_RR = same_RR & torch.where((label_R > 0)[:, None], lower_RR, label_R[None, :] > label_R[:, None])
    count_R = rival_RR.sum(1)
    return (rival_RR.to(sum_R.dtype) @ sum_R) / count_R.clamp(min=1)
