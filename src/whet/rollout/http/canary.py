"""Proof that a server has the weights of the trainer: log-probs of fixed tokens, the trainer's against the server's.

A server answers 200 to an update that left its weights, or its cache, as they were, and a checksum that it computes
itself says nothing of the weights that it multiplies with. So after every sync the server scores a few sequences that
never change (its prefill: this finds missing, stale and half-updated weights), and continues their prompts, whose
log-probs it must then score alike (its decode steps and its cache: this finds a cache that has survived the sync).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from transformers import PreTrainedModel

from whet import seeds
from whet.models.forward import decoder
from whet.models.kernels import Ops
from whet.rollout.native.scoring import scored
from whet.types import Completion, Request, Sampling, ScoreRequest, TokenLogprobs, WhetError

SEQUENCES = 4
PROMPT = 160
"""Tokens of a prompt: more than a block of any cache (128 on a CPU)."""
REPLY = 8
CLOSE = 1e-6
"""Nats: differences of rounding in float32 may be smaller in one version and larger in the next."""
BOUNDS = {"float32": 1e-3, "float64": 1e-3}
"""Of the mean difference, by the dtype of the model."""
BOUND = 0.05
"""Of other dtypes."""


class Asked(Protocol):
    """What a server is asked while no request of the run may pass."""

    name: str

    async def scored(self, request: ScoreRequest) -> TokenLogprobs: ...

    async def completed(self, request: Request) -> Completion: ...


@dataclass(frozen=True)
class Expected:
    """The trainer's log-probs of the fixed sequences, under one version."""

    version: int
    sequences: tuple[tuple[int, ...], ...]
    start: int
    """Where the scored tokens begin."""
    logprobs: tuple[tuple[float, ...], ...]

    def moved(self, other: Expected | None) -> float:
        """Mean difference to another version, in nats a token; 0 where there is none."""
        return 0.0 if other is None else apart(self.logprobs, other.logprobs)[0]


@dataclass
class Canary:
    """The fixed sequences of a run, and how close servers came to the trainer so far.

    bound: of the mean difference, in nats a token. Below it a difference may still tell: weights that have moved by
    much more than the servers ever differed are there in full, or the difference shows it. So a stale version is found
    at small learning rates, too, down to four times the rounding of the server.
    """

    bound: float
    max_context: int
    sequences: tuple[tuple[int, ...], ...] = ()
    start: int = 0
    floors: dict[str, float] = field(default_factory=dict)
    """The largest mean difference that was accepted, by what was compared."""

    def expected(self, model: PreTrainedModel, ops: Ops, version: int) -> Expected:
        """The trainer's side, in its own arithmetic. The first model continues the prompts, for all versions."""
        computes = decoder(model, ops)
        if not self.sequences:
            reply = max(1, min(REPLY, self.max_context // 2))
            self.start = max(1, min(PROMPT, self.max_context - reply))
            vocab = model.get_output_embeddings().out_features
            sequences = [_prompt(number, self.start, vocab) for number in range(SEQUENCES)]
            for step in range(reply):  # likely tokens, but not the likeliest alone
                asked = [
                    ScoreRequest(token_ids=(*s, 0), start=len(s), top_k=min(3, vocab)) for s in sequences
                ]
                found = scored(computes, ops, asked, version=version)
                sequences = [
                    (*s, row.top[0][(step + number) % len(row.top[0])][0])
                    for number, (s, row) in enumerate(zip(sequences, found))
                ]
            self.sequences = tuple(sequences)
        asked = [ScoreRequest(token_ids=s, start=self.start) for s in self.sequences]
        rows = scored(computes, ops, asked, version=version)
        return Expected(version, self.sequences, self.start, tuple(tuple(r.logprobs) for r in rows))

    async def prove(self, server: Asked, expected: Expected, before: Expected | None) -> dict[str, float]:
        """What was measured, as metrics. Raises WhetError where the server does not have the weights of `expected`, or
        samples from others."""
        version, start = expected.version, expected.start
        scores = await asyncio.gather(
            *(server.scored(ScoreRequest(token_ids=s, start=start)) for s in expected.sequences)
        )
        replies = await asyncio.gather(
            *(server.completed(_request(number, s, start)) for number, s in enumerate(expected.sequences))
        )
        again = await asyncio.gather(
            *(
                server.scored(ScoreRequest(token_ids=(*s[:start], *reply.token_ids), start=start))
                for s, reply in zip(expected.sequences, replies)
            )
        )
        said = {s.version for s in (*scores, *again)} | {v for r in replies for v in r.versions}
        if said != {version}:
            raise WhetError(
                f"{server.name} reports that it samples from version {', '.join(map(str, sorted(said)))}, after "
                f"weights version {version} were given to it"
            )
        moved = expected.moved(before)
        mean, most = apart([s.logprobs for s in scores], expected.logprobs)
        decode, _ = apart([list(r.logprobs or ()) for r in replies], [s.logprobs for s in again])
        if why := self._off("weights", mean, moved):
            raise WhetError(
                f"{server.name} does not have weights version {version}: its log-probs and the trainer's differ by "
                f"{mean:.3g} nats a token, {why}. An update was lost, incomplete or overwritten (a tied output layer "
                "that is not updated does this), or the server computes something else; its rollouts would come from "
                "other weights, so the step stops"
            )
        if why := self._off("cache", decode, moved):
            raise WhetError(
                f"{server.name} samples after weights version {version} from a cache of older weights: its replies and "
                f"its scores of the same tokens differ by {decode:.3g} nats a token, {why}. Start it without prefix "
                "caching (no-enable-prefix-caching); the step stops"
            )
        return {
            "sync/canary_mean": mean,
            "sync/canary_max": most,
            "sync/canary_decode_mean": decode,
            "sync/canary_moved_mean": moved,
        }

    async def prove_replies(
        self, server: Asked, model: PreTrainedModel, ops: Ops, version: int
    ) -> dict[str, float]:
        """The same of a server that is given no weights and may not score: the log-probs that it tells of replies to
        the fixed prompts, against those of `model` for the same tokens. Raises WhetError where it samples from
        others."""
        expected = await asyncio.to_thread(self.expected, model, ops, version)
        start = expected.start
        replies = await asyncio.gather(
            *(server.completed(_request(number, s, start)) for number, s in enumerate(expected.sequences))
        )
        asked = [
            ScoreRequest(token_ids=(*s[:start], *reply.token_ids), start=start)
            for s, reply in zip(expected.sequences, replies)
        ]
        own = await asyncio.to_thread(scored, decoder(model, ops), ops, asked, version=version)
        mean, most = apart([list(r.logprobs or ()) for r in replies], [row.logprobs for row in own])
        if not mean <= self.bound:
            raise WhetError(
                f"{server.name} does not have weights version {version}: the log-probs of its replies and the ones "
                f"here differ by {mean:.3g} nats a token, and rollout.server.canary_bound is {self.bound:g}. It is "
                "never given weights: let it serve this very model, in the same dtype, or use rollout.engine=vllm, "
                "sglang or native"
            )
        return {"sync/canary_mean": mean, "sync/canary_max": most}

    def _off(self, what: str, mean: float, moved: float) -> str:
        """Why a difference is too large; empty: it is not."""
        if not mean <= self.bound:  # NaN, too
            return f"and rollout.server.canary_bound is {self.bound:g}"
        floor = self.floors.get(what)
        if floor is not None and mean > max(4 * floor, moved / 4):
            return f"before it was at most {floor:.3g}, and this version moved the trainer's by {moved:.3g}"
        self.floors[what] = max(mean, floor or CLOSE)
        return ""


def apart(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(mean, largest) absolute difference. Infinite where the numbers of tokens differ."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return math.inf, math.inf
    difference = np.abs(
        np.concatenate([np.asarray(row) for row in one]) - np.concatenate([*map(np.asarray, other)])
    )
    return float(difference.mean()), float(difference.max())


def _prompt(number: int, count: int, vocab: int) -> tuple[int, ...]:
    uniform = seeds.uniforms(seeds.key("canary", number), 0, count)
    return tuple(int(u * vocab) for u in uniform)


def _request(number: int, sequence: Sequence[int], start: int) -> Request:
    sampling = Sampling(key=seeds.key("canary", number), max_tokens=len(sequence) - start, ignore_eos=True)
    return Request(id=f"canary-{number}", session="", prompt=tuple(sequence[:start]), sampling=sampling)
