"""Half precision in training: the dtype that a forward computes in, and the scale of a float16 loss.

A float16 number ends at 65504 and is 0 below 6e-8. Gradients lie near the lower end, so the loss is multiplied by a
scale that is as large as it can be without overflow; gradients are divided by it, in float32, before they are used
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.config.schema import Precision

GROWTH = 2.0
"""Factor of the scale after `loss_scale_steps` finite steps; its inverse after one that is not."""
LARGEST = 2.0**24
"""Where growth ends: small gradients lose nothing any more, and the loss itself must stay finite."""


@dataclass
class LossScale:
    """The scale of a loss, and for how many steps it has held."""

    scale: float
    every: int
    """Finite steps after which it doubles."""
    held: int = 0

    def after(self, finite: bool) -> None:
        """Follow one optimizer step."""
        if not finite:
            self.scale, self.held = self.scale / GROWTH, 0
        elif self.held + 1 == self.every:
            self.scale, self.held = max(self.scale, min(self.scale * GROWTH, LARGEST)), 0
        else:
            self.held += 1


def loss_scale(precision: Precision, dtypes: Iterable[torch.dtype]) -> LossScale | None:
    """The scale that parameters of these dtypes need; None: nothing is float16."""
    if precision.compute == "float16" or torch.float16 in dtypes:
        return LossScale(precision.loss_scale, precision.loss_scale_steps)
    return None


def computing(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Inside it matrix products of float32 tensors are computed in `dtype`; None: as they are."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def compute_dtype(precision: Precision) -> torch.dtype | None:
    found: torch.dtype | None = getattr(torch, precision.compute) if precision.compute else None
    return found


@torch.no_grad()
def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """The norm of all together, float32 whatever they are."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
