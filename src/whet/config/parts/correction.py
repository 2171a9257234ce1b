"""The section about what was sampled by another policy, or by an engine that computes in another way."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whet.config.parts.base import Above0, NonNegative, Section


class Reject(Section):
    """One test that tokens or rollouts must pass. r = pi_old / pi_sampled, the trainer's over the engine's."""

    statistic: Literal["ratio", "k2", "k3"] = "ratio"
    """Of each token: ratio = r; k2 = (log r)^2 / 2; k3 = r - 1 - log r, nats."""
    over: Literal["token", "sum", "mean", "max"] = "token"
    """token: each token for itself. sum, mean: the rollout by the sum or mean over its sampled tokens (of a ratio: the
    product, the geometric mean). max: the rollout by all of its tokens, the whole of it for one outside."""
    low: NonNegative | None = None
    """Smallest that passes. None: no bound."""
    high: Above0 | None = None
    """Largest that passes. None: no bound."""


class Correction(Section):
    """Off-policy correction: weights of the policy loss by w = pi_old / pi_sampled, and tokens left out.

    Without `weight`, `reject` and `staleness_decay` it is off. KL and entropy are never weighted.
    """

    weight: Literal["token", "sequence", "geometric"] | None = None
    """Importance weight: of the token, of the whole rollout (product over its sampled tokens), or the geometric mean
    of it. None: no weight."""
    low: NonNegative | None = None
    """Smallest weight. None: no bound."""
    high: Above0 | None = None
    """Largest weight; 2 to 5 is usual. None: no bound."""
    outside: Literal["truncate", "mask"] = "truncate"
    """A weight outside the bounds becomes the bound (TIS), or 0 (MIS, IcePop, AReaL's cap)."""
    normalize: bool = False
    """Divide the weights by their mean over the step: over its tokens, or over its rollouts where a rollout has one."""
    staleness_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Multiply a token's weight by this, to the power of how many versions ago it was sampled. 1: off."""
    reject: tuple[Reject, ...] = ()
    """Tests; what fails one has weight 0."""
    denominator: Literal["kept", "all"] = "kept"
    """What averages of the loss divide by: kept leaves tokens of weight 0 out of the loss, KL and entropy altogether
    (verl); all keeps them in the count, in KL and in entropy (Cosmos-RL, IcePop)."""
