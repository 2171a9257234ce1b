"""Section about tokens that an older policy sampled, or an engine that computes differently."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, NonNegative, Section


class RejectConfig(Section):
    """One test that tokens or rollouts must pass. r = pi_old / pi_sampled, the trainer over the engine."""

    statistic: Literal["ratio", "k2", "k3"] = "ratio"
    """Statistic of each token: ratio = r; k2 = (log r)^2 / 2; k3 = r - 1 - log r, in nats."""
    over: Literal["token", "sum", "mean", "max"] = "token"
    """Scope of the test. token: each token is tested alone. sum, mean: the rollout is tested by the sum or mean over
    its sampled tokens (for a ratio: the product, the geometric mean). max: the rollout is tested by all its tokens; one
    token outside the bounds rejects the rollout."""
    low: NonNegative | None = None
    """Smallest value that passes. None: no bound."""
    high: Above0 | None = None
    """Largest value that passes. None: no bound."""


class CorrectionConfig(Section):
    """Off-policy correction: the policy loss is weighted by w = pi_old / pi_sampled, and tokens can be rejected.

    Without `weight`, `reject`, `second_moment` and `staleness_decay` it is off. KL and entropy are never weighted.
    """

    weight: str | dict[str, Any] | None = None
    """Importance weight: of the token, of the whole rollout (sequence: product over its sampled tokens), or the
    geometric mean of that product. A name, or a table of the name and its settings: {name: token, high: 2.0}. Or your
    own function, 'my/file.py:name', called with the batch and the log-ratios [N]. None: no weight."""
    staleness_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Multiply the weight of a token by this factor to the power of the age of its policy, in versions. 1: off."""
    reject: tuple[RejectConfig, ...] = ()
    """Tests of tokens or rollouts; a token or rollout that fails one test has weight 0."""
    second_moment: Above0 | None = None
    """Reject the tokens with the largest (log w)^2 until the mean of the others over the step is below this (M2PO,
    arXiv:2510.01161; AReaL's example: 0.04). None: off."""
    denominator: Literal["kept", "all"] = "kept"
    """Denominator of the averages in the loss. kept: tokens of weight 0 are excluded from the loss, KL and entropy
    (verl); all: these tokens count in the denominator, in KL and in entropy (Cosmos-RL, IcePop)."""
