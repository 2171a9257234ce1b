"""Losses on compared or labelled replies: pairs (dpo, cpo, orpo, simpo) and single replies (kto).

Each is one number per pair or rollout. It stands at one sampled token, the last one of the chosen reply or of the
rollout, so that the aggregation's weight there makes the mean over pairs or rollouts.
Shape letters: N tokens, R rollouts, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Pairs:
    """What the losses of `PAIR_LOSSES` read of pairs: u of the chosen, v of the rejected replies."""

    beta: float
    smoothing: float
    """e, the assumed share of flipped labels."""
    u_P: Tensor
    """log pi/ref of the chosen reply, a sum over its tokens."""
    v_P: Tensor
    """The same of the rejected reply."""
    mean_u_P: Tensor
    mean_v_P: Tensor
    """The same as means over tokens."""
    nll_P: Tensor
    """Mean -log pi of the chosen reply's tokens."""
    ipo_mean: bool

    @property
    def z_P(self) -> Tensor:
        """u - v: the margin."""
        return self.u_P - self.v_P


def _sigmoid(p: Pairs) -> Tensor:
    return _smoothed(p.beta * p.z_P, p.smoothing)


def _sigmoid_norm(p: Pairs) -> Tensor:
    return _smoothed(p.beta * (p.mean_u_P - p.mean_v_P), p.smoothing)


def _robust(p: Pairs) -> Tensor:
    x_P, e = p.beta * p.z_P, p.smoothing
    return (-(1 - e) * logsigmoid(x_P) + e * logsigmoid(-x_P)) / (1 - 2 * e)


def _hinge(p: Pairs) -> Tensor:
    return relu(1 - p.beta * p.z_P)


def _ipo(p: Pairs) -> Tensor:
    z_P = p.mean_u_P - p.mean_v_P if p.ipo_mean else p.z_P
    return (z_P - 1 / (2 * p.beta)).square()


def _exo(p: Pairs) -> Tensor:
    x_P, e = p.beta * p.z_P, p.smoothing
    up_P = torch.sigmoid(x_P) * (logsigmoid(x_P) - math.log1p(-e))
    return up_P + torch.sigmoid(-x_P) * (logsigmoid(-x_P) - math.log(e))


def _nca(p: Pairs) -> Tensor:
    u_P, v_P = p.beta * p.u_P, p.beta * p.v_P
    return -logsigmoid(u_P) - (logsigmoid(-u_P) + logsigmoid(-v_P)) / 2


def _bco(p: Pairs) -> Tensor:
    return -logsigmoid(p.beta * p.u_P) - logsigmoid(-p.beta * p.v_P)


def _self_play(p: Pairs) -> Tensor:
    half = 1 / (2 * p.beta)
    return (p.u_P - half).square() + (p.v_P + half).square()


def _apo_zero(p: Pairs) -> Tensor:
    return 1 - torch.sigmoid(p.beta * p.u_P) + torch.sigmoid(p.beta * p.v_P)


def _apo_down(p: Pairs) -> Tensor:
    return torch.sigmoid(p.beta * p.u_P) + 1 - torch.sigmoid(p.beta * p.z_P)


def _sft(p: Pairs) -> Tensor:
    return p.nll_P


PAIR_LOSSES: Mapping[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo": _exo,
    "nca": _nca,
    "bco": _bco,
    "self_play": _self_play,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sft": _sft,
}


def dpo(
    batch: Batch,
    out: Outputs,
    *,
    beta: float,
    label_smoothing: float,
    pair_loss: str | Sequence[str] = "sigmoid",
    pair_weights: Sequence[float] | None = None,
    ipo_mean: bool = True,
) -> Loss:
    """A loss on u = log pi/ref (chosen), v = log pi/ref (rejected), sums over tokens, and z = u - v; several losses are
    summed with their weights. b is beta, e label_smoothing, s the sigmoid.

    sigmoid       -(1 - e) log s(b z) - e log s(-b z)          arXiv:2305.18290 eq. 7; e > 0: Mitchell 2023
    sigmoid_norm  the same, u and v means over tokens          Tulu 3, arXiv:2411.15124
    robust        (-(1 - e) log s(b z) + e log s(-b z)) / (1 - 2 e)      arXiv:2403.00409
    hinge         max(0, 1 - b z)                              SLiC, arXiv:2309.06657
    ipo           (z - 1 / (2 b))^2                            arXiv:2310.12036 eq. 17; ipo_mean: u, v are means
    exo           s(b z) log(s(b z) / (1 - e)) + s(-b z) log(s(-b z) / e)      arXiv:2402.00856 eq. 16
    nca           -log s(b u) - (log s(-b u) + log s(-b v)) / 2                arXiv:2402.05369
    bco           -log s(b u) - log s(-b v)                    arXiv:2404.04656, without its shift
    self_play     (u - 1 / (2 b))^2 + (v + 1 / (2 b))^2        Self-Play PO, arXiv:2405.00675 eq. 4.7, hard labels
    apo_zero      1 - s(b u) + s(b v)                          arXiv:2408.06266 eq. 7
    apo_down      s(b u) + 1 - s(b z)                          arXiv:2408.06266 eq. 8
    sft           mean -log pi of the chosen reply's tokens    arXiv:2404.19733

    Of a group's two rollouts the one with the higher reward is the chosen one.
    """
    chosen, rejected = pairs(batch)
    ratio_R = _log_ratio_R(batch, out)
    mean_R = ratio_R / sampled_R(batch).clamp(min=1)
    given = Pairs(
        beta=beta,
        smoothing=label_smoothing,
        u_P=ratio_R[chosen],
        v_P=ratio_R[rejected],
        mean_u_P=mean_R[chosen],
        mean_v_P=mean_R[rejected],
        nll_P=-_mean_logp_R(batch, out)[chosen],
        ipo_mean=ipo_mean,
    )
    names = [pair_loss] if isinstance(pair_loss, str) else pair_loss
    loss_P = torch.zeros_like(given.u_P)
    for name, weight in zip(names, pair_weights or [1.0] * len(names), strict=True):
        loss_P = loss_P + weight * PAIR_LOSSES[name](given)
    return _of_pairs(batch, loss_P, chosen=beta * given.u_P, rejected=beta * given.v_P)


def online_dpo(
    batch: Batch,
    out: Outputs,
    *,
    beta: float,
    label_smoothing: float,
    pair_loss: str | Sequence[str] = "sigmoid",
    pair_weights: Sequence[float] | None = None,
    ipo_mean: bool = True,
    pairs_of: str = "extremes",
) -> Loss:
    """`dpo` on the policy's own replies, arXiv:2402.04792. pairs_of says which of a group are left to make pairs: its
    extremes, or all of them, of which each two that follow each other are one (verl's recipe `spin`)."""
    return dpo(
        batch,
        out,
        beta=beta,
        label_smoothing=label_smoothing,
        pair_loss=pair_loss,
        pair_weights=pair_weights,
        ipo_mean=ipo_mean,
    )


def cpo(batch: Batch, out: Outputs, *, beta: float, label_smoothing: float, nll_weight: float) -> Loss:
    """-(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z) + nll_weight (mean -log pi of the chosen reply's tokens).

    z = log pi (chosen) - log pi (rejected), sums over tokens, e = label_smoothing; arXiv:2401.08417: DPO with a
    uniform reference, and the likelihood of the chosen reply.
    """
    chosen, rejected = pairs(batch)
    reward_R = beta * batch.sum_R(need(out.logp_N, "outputs.logp_N"))
    nll_P = -_mean_logp_R(batch, out)[chosen]
    loss_P = _smoothed(reward_R[chosen] - reward_R[rejected], label_smoothing) + nll_weight * nll_P
    loss = _of_pairs(batch, loss_P, chosen=reward_R[chosen], rejected=reward_R[rejected])
    loss.stats["chosen_nll_nats"] = _both(nll_P, like=nll_P)
    return loss


def simpo(
    batch: Batch, out: Outputs, *, beta: float, target_margin: float, reward_alpha: float = 0.0
) -> Loss:
    """-log sigmoid(beta (a_chosen - a_rejected) - target_margin), a the mean log pi of a reply's tokens.

    arXiv:2405.14734 eq. 6: no reference, and long replies are worth no more than short ones. With reward_alpha c other
    than 0 a is (1 - exp(-c a)) / c (AlphaPO, arXiv:2501.03884), which has the limit a.
    """
    chosen, rejected = pairs(batch)
    a_R = _mean_logp_R(batch, out)
    if reward_alpha != 0:
        a_R = -torch.expm1(-reward_alpha * a_R) / reward_alpha
    reward_R = beta * a_R
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
        logp_sample_N=None if batch.logp_sample_N is None else batch.logp_sample_N[from_N],
        length_S=length_S,
        prompt_S=batch.prompt_S,
        rollout_S=batch.rollout_S,
        group_R=torch.arange(batch.rollouts, device=segment_N.device),
        reward_R=batch.reward_R,
        stopped_R=batch.stopped_R,
    )


def _smoothed(x_P: Tensor, e: float) -> Tensor:
    """[P] -(1 - e) log sigmoid(x) - e log sigmoid(-x)."""
    return -(1 - e) * logsigmoid(x_P) - e * logsigmoid(-x_P)


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
