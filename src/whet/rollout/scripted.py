"""A rollout engine whose replies come from a function: for tests, examples, and trying out an environment."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Literal

from whet.rollout.engine import WeightSource
from whet.rollout.gate import Gate
from whet.rollout.requests import Decode, StopText, check, ends_of
from whet.types import Completion, Sampling

Said = Completion | list[int]
Handler = Callable[[list[int], Sampling, int], Said | Awaitable[Said]]
"""(token_ids, sampling, version) -> a whole Completion, or the tokens to say; may be a coroutine and may
sleep."""


@dataclass(frozen=True)
class Call:
    """One `generate`, as the handler saw it."""

    token_ids: list[int]
    sampling: Sampling
    version: int


class ScriptedEngine:
    """A `RolloutEngine` without a model.

    Tokens from the handler end at the first end token (not one before min_tokens) or stop string, or at
    max_tokens, with log-prob 0: the script is certain. A Completion is passed on as it is. Everything is
    recorded in `calls` and `loaded`.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        end_token_ids: Collection[int] = (),
        max_context: int = 1 << 20,
        vocab: int = 1 << 31,
        decode: Decode | None = None,
        version: int = 0,
    ) -> None:
        self.handler, self.version, self.decode = handler, version, decode
        self.end_token_ids, self.max_context, self.vocab = frozenset(end_token_ids), max_context, vocab
        self.calls: list[Call] = []
        self.loaded: list[tuple[WeightSource, int]] = []
        self.gate = Gate()

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        decodes = self.decode is not None
        check(token_ids, sampling, vocab=self.vocab, max_context=self.max_context, decodes=decodes)
        async with self.gate.passing():
            version = self.version
            self.calls.append(Call(list(token_ids), sampling, version))
            said = self.handler(list(token_ids), sampling, version)
            if inspect.isawaitable(said):
                said = await said
            await self.gate.step()
        return said if isinstance(said, Completion) else self._cut(said, sampling, version)

    async def load_weights(self, source: WeightSource, version: int) -> None:
        self.loaded.append((source, version))
        self.version = version
        self.gate.resume()

    async def pause(self, finish: bool) -> None:
        await self.gate.pause(finish)

    def resume(self) -> None:
        """Resume without new weights."""
        self.gate.resume()

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        """There is nothing to move."""

    async def close(self) -> None:
        self.gate.close("the rollout engine was closed")

    def _cut(self, tokens: list[int], sampling: Sampling, version: int) -> Completion:
        ends = ends_of(sampling, self.end_token_ids)
        text = StopText(sampling.stop, self.decode) if sampling.stop and self.decode is not None else None
        kept: list[int] = []
        stopped = False
        for token in tokens:
            if stopped or len(kept) == sampling.max_tokens:
                break
            if token in ends and len(kept) < sampling.min_tokens:
                continue
            kept.append(token)
            stopped = token in ends or (text is not None and text.push(token))
        n = len(kept)
        return Completion(
            token_ids=kept,
            logprobs=[0.0] * n,
            sample_logprobs=[0.0] * n,
            versions=[version] * n,
            finish_reason="stop" if stopped or n < sampling.max_tokens else "length",
        )
