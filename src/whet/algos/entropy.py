"""The weight of the entropy bonus: a constant, or one that is moved so that the entropy stays at a target.

Adaptive entropy control of Skywork-OR1 (arXiv:2505.22312), measured and moved once an optimizer step as in
TRL 1.16 (`use_adaptive_entropy`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EntropyBonus:
    """What is kept from one optimizer step to the next."""

    coef: float
    entropy_nats: float | None = None
    """The policy's mean entropy a token in the step before. None: there was none."""


@dataclass(frozen=True)
class EntropyControl:
    """How the weight is found."""

    coef: float
    """The constant weight, or the first one."""
    target_nats: float | None = None
    """None: the weight is constant."""
    delta: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there may be a bonus."""
        return self.coef != 0 or self.target_nats is not None

    def weight(self, bonus: EntropyBonus) -> float:
        """The weight in the next optimizer step: 0 while the entropy is above the target, or not known."""
        if self.target_nats is None:
            return self.coef
        last = bonus.entropy_nats
        return bonus.coef if last is not None and last <= self.target_nats else 0.0

    def after(self, bonus: EntropyBonus, entropy_nats: float | None) -> EntropyBonus:
        """After an optimizer step with this mean entropy: raised by delta up to the target, lowered above it, between
        low and high. A step that measured none moves nothing."""
        if self.target_nats is None or entropy_nats is None or not math.isfinite(entropy_nats):
            return bonus
        step = self.delta if entropy_nats <= self.target_nats else -self.delta
        return replace(
            bonus, coef=min(max(bonus.coef + step, self.low), self.high), entropy_nats=entropy_nats
        )
