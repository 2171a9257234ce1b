"""Losses per token, unreduced: `batch.weight_N` has the weight of each token (see `aggregate`).

A loss is a function of a batch and the model's outputs for it; further keyword arguments are settings of
`config.Algorithm`, by name. It is 0 where nothing was sampled. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from whet.algos.clipped import aipo, cispo, dppo, importance_sampling, ppo, rollout_is, sapo, softmax_ppo
from whet.algos.correction import Reject
from whet.algos.covariance import clip_cov, clip_cov_over, kl_cov, kl_cov_over
from whet.algos.demonstration import sft, sft_is, sft_phi
from whet.algos.distillation import gkd
from whet.algos.kl import reference_kl
from whet.algos.plain import cross_entropy, dro, opmd, reinforce, reinforce_is, reinforce_is_over, topr
from whet.algos.preference import cpo, dpo, kto, online_dpo, orpo, simpo
from whet.algos.rec import rec
from whet.algos.second_moment import m2po, m2po_over
from whet.algos.segments import need
from whet.algos.sequence import geo_mean, gspo, self_play, vespo
from whet.algos.terms import Totals, mean_term, own, pair_term, positive
from whet.batch import Batch, Loss, LossFn, Outputs

OnePer = Literal["token", "reply", "pair"]


def regularized(loss: LossFn, **terms: Any) -> LossFn:
    """The loss with the terms of `_regularized`."""
    return partial(_regularized, loss, **terms)


def _regularized(
    loss: LossFn,
    batch: Batch,
    out: Outputs,
    *,
    kl_coef: float,
    estimator: str,
    entropy_coef: float,
    entropy_own_mean: bool = False,
    positive_nll_coef: float = 0.0,
    one_per: OnePer = "token",
    totals: Totals | None = None,
    share: float = 1.0,
    reject: Reject | None = None,
) -> Loss:
    """correction * loss + kl_coef * (KL to the reference) - entropy_coef * entropy, at every token.

    With entropy_own_mean the entropy is a mean over tokens, independent of their weights; positive_nll_coef
    weighs the mean of -log pi over the tokens of rollouts with a reward above 0. one_per: what the loss has one number
    of. Of a pair, the KL is the mean over the tokens of both replies; of a reply, KL and entropy are means over all
    tokens. totals: of the minibatch that the batches given are parts of; None: every batch is a whole one. share:
    factor of the terms with a mean of their own; all others have it in their weights. reject: see
    `correction.without_rejected`.
    """
    base = loss(batch, out)
    loss_N, stats = base.loss_N, dict(base.stats)
    if batch.correction_N is not None:
        loss_N = loss_N * batch.correction_N
    if reject is not None:
        loss_N, stats["rejected_frac"] = reject(batch, need(out.logp_N, "outputs.logp_N"), loss_N)
    if kl_coef > 0:
        kl_N = reference_kl(batch, need(out.logp_N, "outputs.logp_N"), estimator)
        stats["kl_loss_nats"] = kl_N.detach()
        if one_per == "pair":
            kl_N = share * pair_term(batch, kl_N, total=(totals or Totals.of(batch)).sampled)
        elif one_per == "reply":
            kl_N = share * mean_term(batch, kl_N, own(batch), total=(totals or Totals.of(batch)).own)
        loss_N = loss_N + kl_coef * kl_N
    if entropy_coef != 0:
        entropy_N = torch.where(own(batch), need(out.entropy_N, "outputs.entropy_N"), 0.0)
        if entropy_own_mean or one_per == "reply":
            total = (totals or Totals.of(batch)).own
            entropy_N = share * mean_term(batch, entropy_N, own(batch), total=total)
        loss_N = loss_N - entropy_coef * entropy_N
    if positive_nll_coef > 0:
        nll_N, at_N = -need(out.logp_N, "outputs.logp_N"), positive(batch)
        term_N = mean_term(batch, nll_N, at_N, total=(totals or Totals.of(batch)).positive)
        loss_N = loss_N + positive_nll_coef * share * term_N
    if out.entropy_N is not None:
        stats["entropy_nats"] = out.entropy_N.detach()
    return Loss(loss_N, stats)


LOSSES: dict[str, Callable[..., Loss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "vespo": vespo,
    "self_play": self_play,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo": dppo,
    "aipo": aipo,
    "softmax_ppo": softmax_ppo,
    "importance_sampling": importance_sampling,
    "m2po": m2po,
    "rollout_is": rollout_is,
    "reinforce": reinforce,
    "gpg": reinforce,
    "reinforce_is": reinforce_is,
    "dro": dro,
    "opmd": opmd,
    "topr": topr,
    "rec": rec,
    "cross_entropy": cross_entropy,
    "gkd": gkd,
    "sft": sft,
    "sft_is": sft_is,
    "sft_phi": sft_phi,
    "dpo": dpo,
    "online_dpo": online_dpo,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
    "kto": kto,
}

LOSSES_OVER: dict[str, Callable[..., LossFn]] = {
    "clip_cov": clip_cov_over,
    "kl_cov": kl_cov_over,
    "m2po": m2po_over,
    "reinforce_is": reinforce_is_over,
}
"""Losses that read, or may read, the whole minibatch before it is split: f(minibatch, logprobs, *, settings) -> LossFn;
logprobs() gives its log-probs."""
