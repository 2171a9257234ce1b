"""Sections about the KL to the reference policy: in the loss, and in the reward."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import Above0, NonNegative, Positive, Section


class KlConfig(Section):
    """A term of the loss: coef times the KL to the reference at every token, with gradient. Beside a loss on pairs
    (dpo) it is the mean over the tokens of both replies."""

    coef: NonNegative = 0.0
    """Weight; 0 is off. (verl: kl_loss_coef; TRL: beta)"""
    estimator: Literal[
        "k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k2+", "k3+", "low_var_kl+", "abs+",
        "corrected_k3", "unbiased_k3", "full",
    ] = "low_var_kl"  # fmt: skip
    """Estimator per token, with d = log pi - log ref (Schulman 2020): k1 = d, k2 = d^2/2, k3 = exp(-d)-1+d, low_var_kl
    = k3 with bounds (so that one outlier token cannot dominate a step), abs = |d|. (verl: kl_loss_type) With +: the
    value of the named estimator, the gradient of k2. corrected_k3: k3 times the ratio pi / pi_old, at most 2.
    unbiased_k3: k3 times that ratio, at most 10. full: the exact sum over the vocabulary; the reference runs again
    with every update."""


class RewardKlConfig(Section):
    """A penalty: coef times the KL to the reference, subtracted from the reward of every token, without gradient."""

    coef: NonNegative = 0.0
    """Weight, or initial weight of the adaptive controller; 0 is off. (verl: kl_ctrl.kl_coef)"""
    estimator: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """Estimator, as in algorithm.kl; k1, because a value needs no gradient and k1 is unbiased. (verl: kl_penalty)"""
    target: Above0 | None = None
    """Target of the adaptive controller: mean KL in nats per token. None: fixed weight."""
    horizon: Positive = 10000
    """Horizon of the adaptive controller, in rollouts."""
