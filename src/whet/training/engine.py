"""The interface of train engines, which hold weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from whet.batch import Batch, LossFn
from whet.types import Metrics


class TrainEngine(Protocol):
    version: int

    def forward(self, batch: Batch, want: Literal["logprobs", "values", "collision"]) -> Tensor:
        """[N] float32, no gradient; 0 where mask_N is false. collision: the sum over the vocabulary of p^2."""

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        """Micro-batches, backward, clip, one optimizer step. The loss is sum(loss_N * batch.weight_N)."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names, gathered one at a time."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        """Colocated engines: give the accelerator's memory to the other engine, or take it back."""
