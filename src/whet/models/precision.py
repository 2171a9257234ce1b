"""Half precision in training: the dtype that a forward computes in, and the scale of a float16 loss.

A float16 number ends at 65504 and is 0 below 6e-8. Gradients lie near the lower end, so the loss is multiplied by a
scale that is as large as it can be without overflow; gradients are divided by it, in float32, before they are used
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import CDLL, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from whet.config.schema import PrecisionConfig
from whet.models import float8
from whet.models.build import if_built

NORMED = 1 << 20
"""Numbers whose squares are summed at a time."""
_SUMMED = (torch.float32, torch.bfloat16)
"""What C sums (`whet_square_sum` in kernels.c)."""
GROWTH = 2.0
"""Factor of the scale when it grows; its inverse after a step that is not finite."""
LARGEST = 2.0**24
"""Where growth ends: small gradients lose nothing any more, and the loss itself must stay finite."""


@dataclass
class LossScale:
    """The scale of a loss, and for how many steps it has held."""

    scale: float
    every: int = 2000
    """Finite steps in a row after which it doubles, as torch's GradScaler."""
    held: int = 0

    def after(self, finite: bool) -> None:
        """Follow one optimizer step."""
        if not finite:
            self.scale, self.held = self.scale / GROWTH, 0
        elif self.held + 1 == self.every:
            self.scale, self.held = max(self.scale, min(self.scale * GROWTH, LARGEST)), 0
        else:
            self.held += 1


def loss_scale(precision: PrecisionConfig, dtypes: Iterable[torch.dtype]) -> LossScale | None:
    """The scale that parameters of these dtypes need; None: nothing is float16."""
    if precision.compute == "float16" or torch.float16 in dtypes:
        return LossScale(precision.loss_scale)
    return None


@contextmanager
def computing(
    precision: PrecisionConfig, device: torch.device, plain: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """Inside it matrix products are computed in the dtypes of the config. plain: modules whose weight stays out of
    float8."""
    with ExitStack() as stack:
        if precision.compute is not None:
            stack.enter_context(torch.autocast(device.type, getattr(torch, precision.compute)))
        if precision.float8 is not None:
            stack.enter_context(float8.products(precision.float8, plain))
        yield


@torch.no_grad()
def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """The norm of all together, float64: so it does not depend on how they are cut beyond their own rounding."""
    return sum_of_squares(grads).sqrt()


@torch.no_grad()
def sum_of_squares(grads: Iterable[Tensor]) -> Tensor:
    """Of all their numbers, float64. One rank and the engine of one process add up in the same order, so they have the
    same bits."""
    squares = [_square_sum(g) for g in grads]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)


def _square_sum(g: Tensor) -> Tensor:
    """Sum of squares, float64. Of plain numbers on a CPU it is computed in C, to the same bits on every machine; else
    of some rows of a large tensor at a time, for on a CPU torch first makes a float64 copy of what it is given."""
    lib = _lib() if type(g) in (Tensor, nn.Parameter) and g.is_cpu and g.dtype in _SUMMED else None
    if lib is not None and g.is_contiguous():
        half = g.dtype is torch.bfloat16
        return torch.tensor(lib.whet_square_sum(g.data_ptr(), g.numel(), half), dtype=torch.float64)
    blocks = (g,) if g.numel() <= NORMED else g.split(max(1, NORMED * len(g) // g.numel()))
    return torch.stack([torch.linalg.vector_norm(b, dtype=torch.float64).square() for b in blocks]).sum()


@cache
def _lib() -> CDLL | None:
    if (lib := if_built()) is not None:
        lib.whet_square_sum.argtypes, lib.whet_square_sum.restype = [c_void_p, c_int64, c_int], c_double
    return lib
