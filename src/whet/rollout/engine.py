"""The interface of rollout engines. Tokens in, tokens and log-probs out; text never becomes tokens here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from whet.types import Completion, Sampling


@dataclass(frozen=True)
class WeightSource:
    """Where new weights come from. Exactly one of the two is set.

    module: the trainer's own module, by reference (same process, same device): nothing is moved.
    tensors: an iterator of (Hugging Face name, tensor), gathered one at a time.
    """

    module: Any = None
    tensors: Iterator[tuple[str, Any]] | None = None


class RolloutEngine(Protocol):
    version: int

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion of `token_ids`. Many calls run at once; equal prompts share their prefill."""

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """When this returns, every newly sampled token carries `version`."""

    async def pause(self, finish: bool) -> None:
        """Stop sampling: after the requests in flight have finished, or at once, keeping them for `load_weights`."""

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        """Give the accelerator's memory back ('cpu') or take it again ('gpu')."""

    async def close(self) -> None: ...
