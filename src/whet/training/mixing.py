"""Weights between those of two models."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mix(own: Tensor, other: Tensor, share: float, *, key: int) -> Tensor:
    """share * other + (1 - share) * own, of own's dtype, computed in float32. share 1: the other's.

    Half precision is rounded up or down by random numbers of `key`, so that the mean is right: rounded to the nearest,
    a running mean would never follow a policy that is fewer than 1 / (2 * share) of its steps away.
    """
    if share == 1:
        return other
    mixed = own.float().lerp(other.to(own.device).float(), share)
    return _rounded(mixed, own.dtype, key) if own.dtype.itemsize < 4 else mixed.to(own.dtype)


def _rounded(x: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """A float32 number as one of the two of `dtype` next to it, the nearer one more often; exact where it is one."""
    lost = 23 + round(math.log2(torch.finfo(dtype).eps))  # bits of float32 that the dtype has not
    noise = torch.Generator(x.device).manual_seed(key)
    random = torch.randint(1 << lost, x.shape, generator=noise, dtype=torch.int32, device=x.device)
    bits = (x.contiguous().view(torch.int32) + random) & -(1 << lost)
    return bits.view(torch.float32).to(dtype)
