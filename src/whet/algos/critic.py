"""The critic's loss, and the running scale of its predictions. Shape letter: N tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whet.algos.segments import need
from whet.batch import Batch, Loss, Outputs


def value_loss(batch: Batch, out: Outputs, *, clip: float | None) -> Loss:
    """1/2 max((v - R)^2, (clip(v, V - c, V + c) - R)^2), V the value before; without c 1/2 (v - R)^2."""
    value_N = need(out.value_N, "outputs.value_N")
    return_N = need(batch.return_N, "batch.return_N")
    error_N = (value_N - return_N).square()
    stats = {"value": value_N.detach()}
    if clip is not None:
        old_N = need(batch.value_N, "batch.value_N")
        clipped_N = (value_N.clamp(old_N - clip, old_N + clip) - return_N).square()
        stats["value_clip_frac"] = (clipped_N > error_N).to(value_N.dtype)
        error_N = torch.maximum(error_N, clipped_N)
    return Loss(torch.where(batch.mask_N, error_N / 2, 0.0), stats)


@dataclass(frozen=True)
class Scale:
    """Running mean and standard deviation of returns: value = mean + std * the critic's output.

    A step's values, targets and clip all use the scale from before the step; the step's returns then update it. The
    critic's head is not rescaled with it (PopArt, arXiv:1602.07714, does that), so its output lags by a step.
    """

    first: float = 0.0
    """Decayed sum of the steps' mean returns."""
    second: float = 0.0
    """Decayed sum of the steps' mean squared returns."""
    weight: float = 0.0
    """Decayed number of steps: what the sums are divided by. 0: nothing seen, mean 0 and std 1."""

    @property
    def mean(self) -> float:
        return self.first / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """1 if there were no returns yet, or they did not vary."""
        variance = self.second / self.weight - self.mean**2 if self.weight else 1.0
        return math.sqrt(variance) if variance > 1e-12 else 1.0

    def seen(self, return_N: Tensor, mask_N: Tensor, *, decay: float) -> Scale:
        """The scale after a step with these returns; each step decays older ones by `decay`."""
        x_M = return_N[mask_N].double()
        if len(x_M) == 0 or not bool(x_M.isfinite().all()):
            return self
        return Scale(
            first=decay * self.first + float(x_M.mean()),
            second=decay * self.second + float(x_M.square().mean()),
            weight=decay * self.weight + 1.0,
        )

    def restored(self, value_N: Tensor, mask_N: Tensor) -> Tensor:
        """[N] the critic's output as values in reward units; 0 where nothing was sampled."""
        return torch.where(mask_N, self.mean + self.std * value_N, 0.0)

    def normalized(self, batch: Batch) -> Batch:
        """The batch as the critic sees it: old values and returns in units of the scale."""
        value_N, return_N = need(batch.value_N, "batch.value_N"), need(batch.return_N, "batch.return_N")
        return replace(
            batch, value_N=(value_N - self.mean) / self.std, return_N=(return_N - self.mean) / self.std
        )
