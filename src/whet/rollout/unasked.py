"""The engine of a process that samples nothing: a trainer without evaluation, whose explorers are other processes. It
counts versions, and is in the place of one whose servers nobody would ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate
from whet.types import Completion, Receipt, Request, ScoreRequest, TokenLogprobs, WhetError

NOBODY = "this process samples nothing: its explorers do (mode=train without evaluation)"


class Unasked:
    """A `RolloutEngine` that has versions alone. can: of the engine of the explorers."""

    def __init__(self, can: Capabilities) -> None:
        self.can, self.version, self._since = can, 0, time.time()

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Raises WhetError."""
        raise WhetError(NOBODY)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Raises WhetError."""
        raise WhetError(NOBODY)

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """See `RolloutEngine`. No weights are read."""
        self.version = update.version
        return Receipt("nobody", update.version)

    async def pause(self, finish: bool) -> None:
        """Nothing is in flight."""

    async def resume(self) -> None:
        """Nothing waits."""

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """It has no memory."""

    async def health(self) -> Health:
        """Nothing was asked."""
        return Health(since=self._since, requests=0, tokens=0)

    async def close(self) -> None:
        """Nothing is open."""
