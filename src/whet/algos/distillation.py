"""Distillation as a loss: the divergence from a teacher at the policy's own tokens, with its own gradient.

`advantages.distill` learns from the same teacher by the policy gradient. Shape letters: A rows (places of replies),
S tokens that are compared at a place, N tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whet.algos.kl import ESTIMATORS
from whet.algos.segments import need
from whet.batch import Batch, Loss, Outputs

OF_ENGINE = ("full", "forward_topk", "jsd", "jsd_topk")
"""Divergences over many tokens at each place, which the engine adds to the loss: it alone has both output layers."""

FAR = 80.0
"""A log-ratio counts as at most this inside a mixture: the smaller probability is below e^-80 there, and so is what it
weighs."""

NEAR_1 = -1e-7
"""Log-probs of all compared tokens sum to at most this beside a rest, without gradient above, as in TRL 1.16."""


@dataclass(frozen=True)
class TopK:
    """The tokens that are compared at each place."""

    k: int
    of: Literal["teacher", "policy", "both"] = "teacher"
    """Whose likeliest."""
    rest: Literal["drop", "tail", "renormalize"] = "drop"
    """The probability of the other tokens: left out, compared as one more token, or given to those compared."""
    floor: float | None = None
    """Log-probs of both models count as at least this. None: as they are."""


@dataclass(frozen=True)
class Divergence:
    """A divergence of the policy p and the reference q at a place: the generalized Jensen-Shannon divergence

        beta KL(q, m) + (1 - beta) KL(p, m),  m = beta q + (1 - beta) p    (arXiv:2306.13649 section 2)

    and, as there and in TRL 1.16, for beta 1 KL(p, q), for beta 0 KL(q, p).
    """

    beta: float = 1.0
    top: TopK | None = None
    """None: over the whole vocabulary."""
    least: float | None = None
    most: float | None = None
    """A place's divergence counts as at least and at most this, without gradient outside. None: no limit."""


KL = Divergence()
"""Of the policy to the reference, over the whole vocabulary."""


def beside(result: Loss, batch: Batch, kl_N: Tensor, *, coef: float) -> Loss:
    """A loss with `coef` times a divergence from the reference added to it; demonstrations have none."""
    if batch.expert_R is not None:
        kl_N = torch.where(batch.expert_R[batch.rollout_N], 0.0, kl_N)
    return Loss(result.loss_N + coef * kl_N, {**result.stats, "kl_loss_nats": kl_N.detach()})


def of_support(
    of: Divergence, logp_AS: Tensor, logq_AS: Tensor, kept_AS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[A, S] each token's part of the divergence (the sum counts; one column more with a tail), and [A, S] the
    derivative of the sum by log p, where log p are as of a whole distribution.

    Where p and q sum to 1 over S, constants are taken off that derivative which do not change that of the logits, so
    that it is exactly 0 where p and q are equal.
    """
    top = of.top
    if top is None:
        return _parts(of.beta, logp_AS, logq_AS, whole=True)
    within_AS = torch.ones_like(logp_AS, dtype=torch.bool) if kept_AS is None else kept_AS
    if top.rest == "drop":
        low_AS, logq_AS = (x if top.floor is None else x.clamp(min=top.floor) for x in (logp_AS, logq_AS))
        part_AS, g_AS = _parts(of.beta, low_AS, logq_AS, whole=False)
        return torch.where(within_AS, part_AS, 0.0), torch.where(within_AS & (low_AS <= logp_AS), g_AS, 0.0)
    p_AS, q_AS = (torch.where(within_AS, x, -torch.inf) for x in (logp_AS, logq_AS))
    sum_A, other_A = p_AS.logsumexp(-1, keepdim=True), q_AS.logsumexp(-1, keepdim=True)
    if top.rest == "renormalize":
        part_AS, g_AS = _parts(of.beta, logp_AS - sum_A, logq_AS - other_A, whole=True)
        part_AS, g_AS = torch.where(within_AS, part_AS, 0.0), torch.where(within_AS, g_AS, 0.0)
        return part_AS, g_AS - (p_AS - sum_A).exp() * g_AS.sum(-1, keepdim=True)
    rest_A, rest_of_q_A = _rest(sum_A), _rest(other_A)
    part_AS, g_AS = _parts(of.beta, logp_AS, logq_AS, whole=True)
    part_A, g_A = _parts(of.beta, rest_A, rest_of_q_A, whole=True)
    parts_AS = torch.cat((torch.where(within_AS, part_AS, 0.0), part_A), -1)
    g_A = torch.where(sum_A > NEAR_1, 0.0, g_A)
    return parts_AS, torch.where(within_AS, g_AS, 0.0) - g_A * (p_AS - rest_A).exp()


def _parts(beta: float, logp_AS: Tensor, logq_AS: Tensor, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Each token's part, and the derivative of their sum by each log p. whole: p and q sum to 1 over the tokens."""
    gap_AS = logp_AS - logq_AS
    p_AS = logp_AS.exp()
    if beta == 1:
        part_AS = p_AS * gap_AS
        return part_AS, part_AS if whole else part_AS + p_AS
    q_AS = logq_AS.exp()
    if beta == 0:
        return -q_AS * gap_AS, p_AS - q_AS if whole else -q_AS
    over_p_AS = torch.log1p(beta * torch.expm1((-gap_AS).clamp(max=FAR)))  # log m - log p
    over_q_AS = torch.log1p((1 - beta) * torch.expm1(gap_AS.clamp(max=FAR)))  # log m - log q
    own_AS = -(1 - beta) * p_AS * over_p_AS
    return own_AS - beta * q_AS * over_q_AS, own_AS


def _rest(sum_A: Tensor) -> Tensor:
    """log(1 - e^sum), which is never -inf."""
    return torch.log(-torch.expm1(sum_A.clamp(max=NEAR_1)))


def gkd(
    batch: Batch,
    out: Outputs,
    *,
    divergence: str,
    jsd_beta: float,
    top_k: int,
    top_k_of: str,
    top_k_rest: str,
    min_logprob: float | None,
    max_divergence: float | None,
    distill_coef: float,
) -> Loss:
    """distill_coef k(d) at every token, d = log pi - log teacher, k(d) at most max_divergence; its gradient is that of
    k, not the policy gradient (arXiv:2306.13649). 0 for divergences `OF_ENGINE`, which read the other settings
    (`over_tokens`).
    """
    logp_N = need(out.logp_N, "outputs.logp_N")
    if divergence in OF_ENGINE:
        return Loss(torch.zeros_like(logp_N))
    kl_N = ESTIMATORS[divergence](logp_N - need(batch.logp_ref_N, "batch.logp_ref_N"))
    if max_divergence is not None:
        kl_N = kl_N.clamp(-max_divergence, max_divergence)
    kl_N = torch.where(batch.mask_N, kl_N, kl_N.new_zeros(()))
    return Loss(distill_coef * kl_N, {"kl_loss_nats": kl_N.detach()})


def over_tokens(
    *,
    divergence: str,
    jsd_beta: float,
    top_k: int,
    top_k_of: Literal["teacher", "policy", "both"],
    top_k_rest: Literal["drop", "tail", "renormalize"],
    min_logprob: float | None,
    max_divergence: float | None,
) -> Divergence:
    """The divergence of a name of `OF_ENGINE` with gkd's settings. forward_topk: as verl 0.8.0, at least 0."""
    if divergence == "full":
        return Divergence(most=max_divergence)
    if divergence == "forward_topk":
        return Divergence(0.0, TopK(top_k, floor=min_logprob), least=0.0, most=max_divergence)
    top = TopK(top_k, top_k_of, top_k_rest) if divergence == "jsd_topk" else None
    return Divergence(jsd_beta, top, most=max_divergence)
