"""Losses on compared or labelled replies: pairs (dpo, orpo, simpo) and single replies (kto).

Each is one number per pair or rollout. It stands at one sampled token, the last one of the chosen reply or of the
rollout, so that the aggregation's weight there makes the mean over pairs or rollouts.
Shape letters: N tokens, R rollouts, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from whet.algos.aggregate import pairs
from whet.algos.segments import last_sampled_R, need, sampled_R
from whet.batch import Batch, Loss, Outputs
from whet.types import DataError

Forward = Callable[[Batch, Literal["logprobs"]], Tensor]
"""[N] log-probs of a batch's sampled tokens by one model (`TrainEngine.forward`)."""


def dpo(
    batch: Batch, out: Outputs, *, beta: float, label_smoothing: float, pair_loss: str = "sigmoid"
) -> Loss:
    """A loss on z = log pi/ref (chosen) - log pi/ref (rejected), sums over tokens; e is label_smoothing.

    sigmoid  -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z)   arXiv:2305.18290 eq. 7; e > 0: Mitchell 2023
    robust   (-(1 - e) log sigmoid(beta z) + e log sigmoid(-beta z)) / (1 - 2 e)   arXiv:2403.00409
    hinge    max(0, 1 - beta z)                                                    arXiv:2309.06657
    ipo      (z - 1 / (2 beta))^2                                                  arXiv:2310.12036 eq. 17

    Of a group's two rollouts the one with the higher reward is the chosen one.
    """
    chosen, rejected = pairs(batch)
    ratio_R = _log_ratio_R(batch, out)
    z_P = ratio_R[chosen] - ratio_R[rejected]
    good_P, bad_P = -logsigmoid(beta * z_P), -logsigmoid(-beta * z_P)
    loss_P = {
        "sigmoid": (1 - label_smoothing) * good_P + label_smoothing * bad_P,
        "robust": ((1 - label_smoothing) * good_P - label_smoothing * bad_P) / (1 - 2 * label_smoothing),
        "hinge": relu(1 - beta * z_P),
        "ipo": (z_P - 1 / (2 * beta)).square(),
    }[pair_loss]
    return _of_pairs(batch, loss_P, chosen=beta * ratio_R[chosen], rejected=beta * ratio_R[rejected])


def simpo(batch: Batch, out: Outputs, *, beta: float, target_margin: float) -> Loss:
    """-log sigmoid(beta (a_chosen - a_rejected) - target_margin), a the mean log pi of a reply's tokens.

    arXiv:2405.14734 eq. 6: no reference, and long replies are worth no more than short ones.
    """
    chosen, rejected = pairs(batch)
    reward_R = beta * _mean_logp_R(batch, out)
    loss_P = -logsigmoid(reward_R[chosen] - reward_R[rejected] - target_margin)
    return _of_pairs(batch, loss_P, chosen=reward_R[chosen], rejected=reward_R[rejected])


def orpo(batch: Batch, out: Outputs, *, odds_weight: float) -> Loss:
    """-a_chosen - odds_weight log sigmoid(o_chosen - o_rejected), a the mean log pi of a reply's tokens.

    o = log(e^a / (1 - e^a)) are the reply's log odds; arXiv:2403.07691 eq. 6-7. The first term is SFT on the chosen
    reply, which takes the place of a reference.
    """
    chosen, rejected = pairs(batch)
    a_R = _mean_logp_R(batch, out)
    odds_R = a_R - _log1mexp(a_R)
    loss_P = -a_R[chosen] - odds_weight * logsigmoid(odds_R[chosen] - odds_R[rejected])
    loss = _of_pairs(batch, loss_P, chosen=odds_R[chosen], rejected=odds_R[rejected])
    loss.stats["chosen_nll_nats"] = _both(-a_R[chosen], like=a_R)
    return loss


def kto(
    batch: Batch, out: Outputs, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Loss:
    """desirable_weight (1 - sigmoid(beta (x - z0))), or undesirable_weight (1 - sigmoid(beta (z0 - x))).

    arXiv:2402.01306 eq. 8, less the constant: x = log pi/ref of the reply, z0 = batch.kl_zero_R (`kl_zero`). A reply
    with a reward above 0 is desirable.
    """
    good_R = batch.reward_R > 0
    ratio_R = _log_ratio_R(batch, out)
    gain_R = beta * (ratio_R - need(batch.kl_zero_R, "batch.kl_zero_R"))
    loss_R = torch.where(
        good_R, desirable_weight * torch.sigmoid(-gain_R), undesirable_weight * torch.sigmoid(gain_R)
    )
    last_R, implied_R = last_sampled_R(batch), (beta * ratio_R).detach()
    has_R = last_R >= 0
    stats = {
        "accuracy": ((gain_R > 0) == good_R).to(implied_R.dtype),
        "desirable_reward": implied_R[good_R],
        "undesirable_reward": implied_R[~good_R],
        "kl_zero_nats": need(batch.kl_zero_R, "batch.kl_zero_R"),
    }
    loss_N = torch.zeros_like(need(out.logp_N, "outputs.logp_N"))
    return Loss(loss_N.index_put((last_R[has_R],), loss_R[has_R]), stats)


def kl_zero(batch: Batch, *, policy: Forward, reference: Forward) -> Tensor:
    """[R] KTO's z0 = max(0, mean of log pi/ref of the NEXT rollout's reply to this one's prompt), one number for all.

    arXiv:2402.01306 section 4: how far the policy has gone from the reference on replies that were not written for
    the prompt. Over the whole batch and without a gradient, so that it does not depend on how the batch is split later.
    """
    other = mismatched(batch)
    ratio_R = other.sum_R((policy(other, "logprobs") - reference(other, "logprobs")).double())
    return ratio_R.mean().clamp(min=0).to(batch.reward_R.dtype).expand(batch.rollouts).clone()


def mismatched(batch: Batch) -> Batch:
    """Each rollout's prompt with the reply of the rollout after it; the first one's for the last. DataError unless
    every rollout has one segment."""
    if batch.rollouts < 2:
        raise DataError(
            "the loss 'kto' compares replies of different tasks, so a step needs at least two tasks."
        )
    if batch.segments > batch.rollouts:
        raise DataError(
            f"the loss 'kto' gives each prompt the reply to another, but {batch.rollouts} rollouts have "
            f"{batch.segments} strands; it needs rollouts of one strand each."
        )
    next_S = torch.arange(batch.segments, device=batch.length_S.device).roll(-1)
    length_S = batch.prompt_S + (batch.length_S - batch.prompt_S)[next_S]
    segment_N = torch.repeat_interleave(length_S)
    at_N = torch.arange(len(segment_N), device=segment_N.device) - (length_S.cumsum(0) - length_S)[segment_N]
    after_N = at_N - batch.prompt_S[segment_N]
    reply_S = (batch.start_S + batch.prompt_S)[next_S]
    from_N = torch.where(after_N < 0, batch.start_S[segment_N] + at_N, reply_S[segment_N] + after_N)
    return Batch(
        token_ids_N=batch.token_ids_N[from_N],
        mask_N=batch.mask_N[from_N],
        segment_N=segment_N,
        rollout_N=segment_N,
        version_N=batch.version_N[from_N],
        logp_sample_N=batch.logp_sample_N[from_N],
        length_S=length_S,
        prompt_S=batch.prompt_S,
        rollout_S=batch.rollout_S,
        group_R=torch.arange(batch.rollouts, device=segment_N.device),
        reward_R=batch.reward_R,
        stopped_R=batch.stopped_R,
    )


def _log_ratio_R(batch: Batch, out: Outputs) -> Tensor:
    """[R] log pi - log ref of each whole reply."""
    return batch.sum_R(need(out.logp_N, "outputs.logp_N") - need(batch.logp_ref_N, "batch.logp_ref_N"))


def _mean_logp_R(batch: Batch, out: Outputs) -> Tensor:
    """[R] mean log pi of the sampled tokens of each reply."""
    return batch.sum_R(need(out.logp_N, "outputs.logp_N")) / sampled_R(batch).clamp(min=1)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x <= 0, exact on both sides of e^x = 1/2; at most -1e-7 is taken for x, to stay finite."""
    x = x.clamp(max=-1e-7)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))


def _of_pairs(batch: Batch, loss_P: Tensor, *, chosen: Tensor, rejected: Tensor) -> Loss:
    """Each pair's loss at the last sampled token of its chosen reply; chosen, rejected: [P] their implied rewards."""
    last_P = last_sampled_R(batch)[pairs(batch)[0]]
    loss_N = batch.reward_R.new_zeros(batch.tokens, dtype=loss_P.dtype).index_put((last_P,), loss_P)
    stats = {"accuracy": chosen > rejected, "margin": chosen - rejected}
    stats |= {"chosen_reward": chosen, "rejected_reward": rejected}
    return Loss(loss_N, {name: _both(x, like=loss_P) for name, x in stats.items()})


def _both(x_P: Tensor, *, like: Tensor) -> Tensor:
    """[R] a pair's number at both its rollouts, so that the mean over rollouts is the mean over pairs."""
    return x_P.detach().to(like.dtype).repeat_interleave(2)
