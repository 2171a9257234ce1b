"""Dropout that depends on the tokens, not on how a batch is split.

The dropped features of a token are a function of all tokens up to it, of the layer and of the optimizer step. So
packing, micro-batches and shared prompts change no gradient, and a resumed run drops the same features as the unbroken
one.

Shape letters: N tokens of the batch, U tokens to compute, I features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet import seeds
from whet.batch import Batch
from whet.models.packing import PackedLayout

_GOLDEN, _FIRST, _SECOND = (
    x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""splitmix64's constants (see `seeds`) as int64, which wraps as it does."""


@dataclass(frozen=True)
class Noise:
    """What decides what is dropped in one layer."""

    name_U: Tensor
    key: int

    def drop(self, x: Tensor, share: float, *, first: int = 0) -> Tensor:
        """x [..., U, I] with a share of its features 0 and the rest scaled up. 53 random bits a feature. first: number
        of its first feature, where x has a part of them."""
        key = torch.tensor(self.key >> 1, device=x.device)  # 63 bits: int64
        column_I = torch.arange(first, first + x.shape[-1], device=x.device) * _GOLDEN
        bits_UI = _mix(_mix(self.name_U ^ key)[:, None] + column_I)
        kept_UI = _shift(bits_UI, 11).double() * 2.0**-53 >= share
        return x * kept_UI.to(x.dtype) / (1.0 - share)

    def of(self, layer: str) -> Noise:
        return Noise(self.name_U, seeds.key(self.key, layer))


def token_names(batch: Batch, plan: PackedLayout) -> Tensor:
    """[U] int64: a name for each token to compute, made of its segment's tokens up to it."""
    each_N = _mix(batch.token_ids_N * _GOLDEN + batch.position_N)
    sum_N = each_N.cumsum(0)
    name_N = sum_N - (sum_N - each_N)[batch.start_S][batch.segment_N]
    return name_N[plan.at_U]


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)
