"""The seam to whatever holds weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from whet.batch import Batch
from whet.types import Metrics


class TrainEngine(Protocol):
    version: int

    def forward(self, batch: Batch, want: Literal["logprobs", "values"]) -> Tensor:
        """[N] float32, no gradient; 0 where mask_N is false."""

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        """Micro-batches, backward, clip, one optimizer step. The loss is sum(loss_N * batch.weight_N)."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names, gathered one at a time."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        """Colocated engines: give the accelerator's memory to the other engine, or take it back."""


@dataclass(frozen=True)
class Outputs:
    """What the model says about one (micro-)batch, with gradient. 0 where mask_N is false."""

    logp_N: Tensor | None = None
    entropy_N: Tensor | None = None
    """With gradient only if the loss asked for it."""
    value_N: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """What a loss function returns: unreduced, reduced once by the engine with `batch.weight_N`."""

    loss_N: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [N] or, for numbers of a rollout, [R]; the engine reports their means over sampled tokens / rollouts."""


LossFn = Callable[[Batch, Outputs], Loss]
