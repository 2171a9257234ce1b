"""Statistics of an update: sums and counts over its micro-batches and ranks, divided once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whet.algos.mismatch import mismatch, perplexities
from whet.algos.segments import need
from whet.batch import Batch, Loss, Outputs
from whet.types import Metrics


class Sums:
    """Means (of names with `max`, maxima) of loss statistics over a whole minibatch, however it was cut: sums and
    counts, divided once."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.largest: dict[str, float] = {}

    @torch.no_grad()
    def add(self, batch: Batch, out: Outputs, result: Loss) -> None:
        self.loss += float((result.loss_N * need(batch.weight_N, "batch.weight_N")).sum(dtype=torch.float64))
        for name, x in result.stats.items():
            self._take(name, x[batch.mask_N] if len(x) == batch.tokens else x)
        if out.logp_N is not None and batch.logp_sample_N is not None:
            at_M = torch.nonzero(batch.mask_N & (batch.version_N >= 0)).flatten()
            for name, x in mismatch(out.logp_N[at_M], batch.logp_sample_N[at_M]).items():
                self._take(name, x)

    def _take(self, name: str, x: Tensor) -> None:
        if len(x) == 0:
            return
        if "max" in name.split("_"):
            self._raise(name, float(x.max()))
        else:
            self.sums[name] = self.sums.get(name, 0.0) + float(x.sum(dtype=torch.float64))
            self.counts[name] = self.counts.get(name, 0) + len(x)

    def join(self, other: Sums) -> None:
        """Take in what another rank has seen."""
        self.loss += other.loss
        for name, x in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + x
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        for name, x in other.largest.items():
            self._raise(name, x)

    def _raise(self, name: str, x: float) -> None:
        """NaN is above all numbers: `max` would pass it over or keep it, as they come."""
        before = self.largest.get(name, -math.inf)
        self.largest[name] = math.nan if math.isnan(x) or math.isnan(before) else max(before, x)

    def means(self) -> Metrics:
        means = {name: self.sums[name] / n for name, n in self.counts.items()}
        return {"loss": self.loss, **means, **perplexities(means), **self.largest}
