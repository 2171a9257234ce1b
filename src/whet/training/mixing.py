"""Weights between those of two models."""

from __future__ import annotations

from torch import Tensor


def mix(own: Tensor, other: Tensor, share: float) -> Tensor:
    """share * other + (1 - share) * own, of own's dtype, computed in float32 and rounded once. share 1: the other's."""
    if share == 1:
        return other
    return own.float().lerp(other.to(own.device).float(), share).to(own.dtype)
