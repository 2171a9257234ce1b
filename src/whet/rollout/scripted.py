"""A rollout engine whose replies come from a function: for tests, examples, and trying out an environment."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate, own_engine
from whet.rollout.gate import Gate
from whet.rollout.requests import Decode, StopText, check, check_score, ends_of
from whet.types import Completion, Receipt, Request, Sampling, ScoreRequest, TokenLogprobs, VersionSpan

Said = Completion | list[int]
Handler = Callable[[list[int], Sampling, int], Said | Awaitable[Said]]
"""(token_ids, sampling, version) -> a whole Completion, or the tokens to say; may be a coroutine and may
sleep."""


@dataclass(frozen=True)
class ScriptedCall:
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
        self.calls: list[ScriptedCall] = []
        self.loaded: list[WeightUpdate] = []
        self.gate = Gate(lambda: self.version)
        self.since, self.requests, self.tokens = time.time(), 0, 0

    @property
    def can(self) -> Capabilities:
        return own_engine(stop_texts=self.decode is not None)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`. All tokens are given to `on_tokens` at once."""
        check(request, vocab=self.vocab, max_context=self.max_context, decodes=self.decode is not None)
        prompt, sampling = list(request.prompt), request.sampling
        async with self.gate.passing(request.least_version):
            version = self.version
            self.calls.append(ScriptedCall(list(prompt), sampling, version))
            said = self.handler(prompt, sampling, version)
            if inspect.isawaitable(said):
                said = await said
            await self.gate.step()
        done = said if isinstance(said, Completion) else self._cut(said, sampling, version)
        self.requests += 1
        self.tokens += len(prompt) + len(done.token_ids)
        if on_tokens is not None and done.token_ids:
            on_tokens(list(done.token_ids))
        return done

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Log-probs of 0, as those of its replies; the given token is the only one with a probability above 0."""
        for request in requests:
            check_score(request, vocab=self.vocab, max_context=self.max_context)
        async with self.gate.passing():
            version = self.version
        self.requests += len(requests)
        self.tokens += sum(len(request.token_ids) for request in requests)
        return [
            TokenLogprobs(
                version=version,
                logprobs=[0.0] * (len(r.token_ids) - r.start),
                top=[[(token, 0.0)] for token in r.token_ids[r.start :]] if r.top_k else [],
            )
            for r in requests
        ]

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        self.loaded.append(update)
        self.version = update.version
        self.gate.updated()
        return Receipt("the engine", update.version)

    async def pause(self, finish: bool) -> None:
        await self.gate.pause(finish)

    async def resume(self) -> None:
        self.gate.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """There is nothing to move."""

    async def health(self) -> Health:
        return Health(since=self.since, requests=self.requests, tokens=self.tokens)

    async def close(self) -> None:
        self.gate.close("the rollout engine was closed")

    def _cut(self, tokens: list[int], sampling: Sampling, version: int) -> Completion:
        ends = ends_of(sampling, self.end_token_ids)
        text = StopText.of(sampling, self.decode)
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
            spans=(VersionSpan(version, 0, n),) if n else (),
            finish_reason="stop" if stopped or n < sampling.max_tokens else "length",
        )
