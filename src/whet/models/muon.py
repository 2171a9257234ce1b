"""Muon: orthogonalised momentum, for the matrices inside a model (K. Jordan 2024, kellerjordan.github.io/posts/muon).

A step is scaled so that its entries are as large as AdamW's usually are (arXiv:2502.16982 section 2.2), so one learning
rate serves both: embeddings, output layer, norms and biases stay with AdamW.

Where ranks have parts of a matrix, momentum is sharded; the matrices are gathered one at a time to be orthogonalised,
and each rank applies its part of the result.

Shape letters: O rows, I columns of a matrix; experts of a mixture are given as a stack of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from whet.models.sharded import Wholes

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the published quintic: singular values of (0, 1] end between about 0.7 and 1.2 after five rounds."""
RMS = 0.2
"""Root mean square of AdamW's updates, as measured in arXiv:2502.16982."""


class Muon:
    """The part of torch's optimizer interface that `optim` uses: parameter groups, state by parameter, a step."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, momentum: float, wholes: Wholes) -> None:
        """A group: `params` of two or more dimensions, `lr` and `weight_decay`, set before a step."""
        self.param_groups, self.momentum, self.wholes = list(groups), momentum, wholes
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = direction(self.wholes.of(p, self._averaged(p, p.grad)))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    size = max(update.shape[-2:])
                    p.add_(self.wholes.part(p, update), alpha=-group["lr"] * RMS * size**0.5)

    def _averaged(self, p: nn.Parameter, grad: Tensor) -> Tensor:
        """Nesterov's look ahead over the running mean of gradients."""
        mean = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        mean.lerp_(grad, 1 - self.momentum)
        return grad.lerp(mean, self.momentum)


def direction(x: Tensor) -> Tensor:
    """The orthogonal matrix next to x, roughly: U V^T of its singular value decomposition, by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
