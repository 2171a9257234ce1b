"""Policy losses of the form -weight * log pi, without a trust region.

Per token, unreduced. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

import torch

from whet.algos.ratios import drift, ratio, sampled
from whet.algos.segments import need
from whet.batch import Batch, Loss, Outputs


def reinforce(batch: Batch, out: Outputs) -> Loss:
    """-A log pi (Williams 1992, doi:10.1007/BF00992696). Unbiased only on rollouts of the current policy."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, loss_N), drift(batch, out))


def opmd(batch: Batch, out: Outputs, *, tau: float) -> Loss:
    """-A log pi / (1 + tau): a step of online policy mirror descent (arXiv:2505.17826)."""
    loss_N = -need(batch.adv_N, "batch.adv_N") * need(out.logp_N, "outputs.logp_N") / (1 + tau)
    return Loss(sampled(batch, loss_N), drift(batch, out))


def topr(batch: Batch, out: Outputs, *, topr_threshold: float) -> Loss:
    """-sg(a) A log pi, a = min(r, 1) where A <= threshold, else 1 (tapered off-policy REINFORCE, arXiv:2503.14286).

    The paper's A is the reward itself; its ratio is that of the rollout, here as in Trinity that of the token.
    """
    adv_N = need(batch.adv_N, "batch.adv_N")
    taper_N = torch.where(adv_N <= topr_threshold, ratio(batch, out).detach().clamp(max=1), 1.0)
    loss_N = -taper_N * adv_N * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, loss_N), {"taper": taper_N} | drift(batch, out))


def cross_entropy(batch: Batch, out: Outputs) -> Loss:
    """-log pi of the policy's own rollouts, with any advantage: with the best of a group it is RAFT."""
    loss_N = sampled(batch, -need(out.logp_N, "outputs.logp_N"))
    return Loss(loss_N, {"nll_nats": loss_N.detach()} | drift(batch, out))
