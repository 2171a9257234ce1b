"""The end of an update: a step of the optimizer, or none where the gradient is not finite."""

from __future__ import annotations

import math

from whet.models.optim import Optimizer, not_finite
from whet.models.zero import ZeroOptimizer
from whet.types import Metrics


def step_or_skip(optimizer: Optimizer | ZeroOptimizer, *, in_a_row: int, most: int) -> tuple[int, Metrics]:
    """(steps that were skipped in a row, 0 after one that was not; the numbers of this one). in_a_row: before it.

    WhetError where more than `most` in a row are skipped.
    """
    lr, norm = optimizer.lr, optimizer.clip()
    finite, scaled = math.isfinite(norm), {}
    if (scale := optimizer.loss_scale) is not None:
        scaled = {"loss_scale": scale.scale}
        scale.after(finite)
    if finite:
        optimizer.step()
        in_a_row = 0
    else:
        optimizer.skip()
        # a loss scale that is too large says nothing of the data: it halves until it is not
        in_a_row += scale is None or scale.scale < 1.0
        if in_a_row > most:
            raise not_finite(optimizer.step_count, norm, in_a_row, most)
    optimizer.zero_grad()
    stepped = {"lr": lr, "skipped_steps": float(not finite), **scaled}
    return in_a_row, {**stepped, "grad_norm": norm} if finite else stepped
