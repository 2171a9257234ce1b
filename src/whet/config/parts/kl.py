"""Sections about the distance to the reference policy: in the loss, and taken off the reward."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, NonNegative, Positive, Section


class Kl(Section):
    """A term of the loss: coef times the KL to the reference at every token, with gradient."""

    coef: NonNegative = 0.0
    """Weight; 0 is off."""
    estimator: Literal[
        "k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k2+", "k3+", "low_var_kl+", "abs+",
        "corrected_k3", "unbiased_k3", "full",
    ] = "low_var_kl"  # fmt: skip
    """Per token, d = log pi - log ref (Schulman 2020): k1 = d, k2 = d^2/2, k3 = exp(-d)-1+d, low_var_kl = k3 with
    bounds (so that one odd token cannot rule a step), abs = |d|. With +: the value of the name, the gradient of k2.
    corrected_k3 and unbiased_k3: k3 times the ratio to the policy that sampled, that one at most 2. full: the sum over
    the vocabulary, exact; the reference runs again with every update."""


class RewardKl(Section):
    """A penalty: coef times the KL to the reference, taken off the reward of every token, without gradient."""

    coef: NonNegative = 0.0
    """Weight, or where the controller starts; 0 is off."""
    estimator: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """As in algorithm.kl; k1 because a value needs no gradient and this one is unbiased."""
    target: Above0 | None = None
    """Adaptive controller: steer the mean KL to this many nats a token. None: fixed weight."""
    horizon: Positive = 10000
    """Adaptive controller: rollouts over which it corrects."""
