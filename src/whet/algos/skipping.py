"""Rollouts without an effect on the gradient, and when they need not be computed.

Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whet.algos.correction import is_on
from whet.algos.segments import need, sampled_R
from whet.batch import Batch
from whet.config.functions import LOSSES, Skips
from whet.config.recipes import Resolved
from whet.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Skipping:
    """The rollouts that a stage may skip, and why not more."""

    skips: Skips = "nothing"
    before_models: bool = False
    """Rewards alone decide what is skipped: advantages are computed before any model runs."""
    why: str = ""
    """Reasons why rollouts without an effect on the gradient are read, or might be. Empty: none."""


def skipping(r: Resolved, train: TrainConfig, *, mtp: bool = False) -> Skipping:
    """The rollouts that a stage may skip. mtp: the policy has layers of multi-token prediction, which learn."""
    if r.kind != "online" or not train.skip_zero_weight:
        return Skipping()
    if why := _reads_all(r, train, mtp=mtp):
        return Skipping(why=f"no rollout is skipped: {why}")
    whys, skips = [], LOSSES[r.loss].skips
    if why := _reads_zero(r):
        skips = "no weight"
        whys.append(f"rollouts without advantage are not skipped: {why}")
    if why := _asks_first(r):
        whys.append(f"log-probs and values are computed of all rollouts: {why}")
    return Skipping(skips=skips, before_models=not _asks_first(r), why="; ".join(whys))


def _reads_all(r: Resolved, train: TrainConfig, *, mtp: bool) -> str:
    """Parts of the algorithm that read several rollouts at once, or may."""
    if r.loss not in LOSSES:
        return f"the loss {r.loss} may read it"
    if LOSSES[r.loss].skips == "nothing":
        return f"the loss {r.loss} reads the whole minibatch"
    if mtp:
        return "model.mtp is a term over all tokens"
    terms = [name for name in ("router_aux_loss_coef", "router_z_loss_coef") if getattr(train, name) > 0]
    return f"train.{terms[0]} is a term over all tokens" if terms else ""


def _reads_zero(r: Resolved) -> str:
    """Parts of the algorithm that train on rollouts with any advantage."""
    loss = LOSSES[r.loss]
    if loss.skips != "no advantage":
        return f"the loss {r.loss} trains on them, or compares others with them"
    terms = {
        **{f"loss.{key}": r.settings["loss"].settings[key] != value for key, value in loss.skips_if.items()},
        "kl.coef": r.kl.coef > 0,
        "entropy_coef": r.entropy_coef != 0,
        "entropy_control": "entropy_control" in r.settings,
        "positive_nll_coef": r.positive_nll_coef > 0,
    }
    return ", ".join(f"algorithm.{key} is on" for key, on in terms.items() if on)


def _asks_first(r: Resolved) -> str:
    """Parts that run models on every rollout before its advantage is known."""
    if is_on(r.correction):
        return "algorithm.correction compares them"
    if r.reward_kl.coef > 0:
        return "algorithm.reward_kl subtracts its KL from the rewards"
    if "entropy" in r.needs:
        return "algorithm.top_entropy_quantile compares their entropies"
    if "entropy_clip" in r.settings:
        return "algorithm.entropy_clip compares what they do to the entropy"
    asks = ":" in r.advantage or r.needs & {"critic", "collision", "old"}
    return f"the advantage {r.advantage} reads them, or may read them" if asks else ""


def without_effect(batch: Batch, weight_N: Tensor, *, skips: Skips) -> Tensor:
    """[R] bool: the rollout has no effect on the gradient. weight_N: as for one minibatch; only zeros matter.

    Advantages and weights are looked at one after the other: a loss may give a token the mean advantage of its rollout.
    """
    if skips == "nothing":
        return torch.zeros_like(batch.stopped_R)
    acts_N = weight_N != 0
    if skips == "no weight":
        return batch.sum_R(acts_N.long()) == 0
    pushes_N = need(batch.adv_N, "batch.adv_N") != 0
    if batch.expert_R is not None:
        pushes_N |= batch.expert_R[batch.rollout_N]
    if batch.correction_N is not None:
        acts_N &= batch.correction_N != 0
    return (batch.sum_R(acts_N.long()) == 0) | (batch.sum_R(pushes_N.long()) == 0)


def skip(batch: Batch, without_R: Tensor, minibatches: Iterable[Tensor]) -> Batch:
    """The batch with `skipped_R`: those without effect, save the first of each minibatch that would have none left of
    the policy's own. Its gradient of 0 is the optimizer step's, and its log-probs are compared with the engine's."""
    skipped_R = without_R.clone()
    own_R = batch.sum_R((batch.version_N >= 0).long()) > 0
    for rows in minibatches:
        own = rows[own_R[rows]]
        some = own if len(own) else rows
        if bool(skipped_R[some].all()):
            skipped_R[some[0]] = False
    return replace(batch, skipped_R=skipped_R)


def shares(batch: Batch) -> dict[str, float]:
    """Of the step's rollouts and sampled tokens, how much was skipped; nothing where nothing may be."""
    if batch.skipped_R is None:
        return {}
    tokens_R = sampled_R(batch)
    return {
        "train/skipped_rollouts_frac": float(batch.skipped_R.double().mean()),
        "train/skipped_tokens_frac": int(tokens_R[batch.skipped_R].sum()) / max(int(tokens_R.sum()), 1),
    }
