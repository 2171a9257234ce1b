"""Any server with OpenAI's /v1/completions as a rollout engine, as far as it goes: it must return token ids
(`return_token_ids`, an extension of vLLM that SGLang has, too), and it is never given weights.

It samples for what needs no weight sync: `whet eval` of a model that it serves. Instead of a sync, the log-probs that
it tells of a few replies are compared with those of the model here: what it serves is proved, not believed.

Sources: vLLM's `entrypoints/openai/completion/{protocol,serving}.py` (0.33.0: `CompletionRequest`, and what a chunk
has), SGLang's `srt/entrypoints/openai/{protocol,serving_completions}.py` (0.5.23).

- A reply is always streamed: no route tells whether a request gets on, so its tokens are counted as they come.
- Servers differ in whether a log-prob follows the temperature (vLLM's `--logprobs-mode`), and none says so. At
  temperature 1 without filters, and greedily, all agree; other log-probs are left out.
- Closing the connection is how a request is aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from whet import seeds
from whet.guard.foreign import words
from whet.models.kernels import Ops
from whet.rollout.engine import PLAIN, Capabilities, OnTokens, Part, WeightUpdate
from whet.rollout.http.calls import MOST_TOLD, UNREADABLE, Call, Calls, Unreachable, reading
from whet.rollout.http.canary import Canary
from whet.rollout.http.published import Written
from whet.rollout.http.served import Taking, choices_of, finite, scored_prompt
from whet.rollout.requests import RequestError, ends_of
from whet.rollout.weights import copy_weights
from whet.types import (
    Completion,
    ConfigError,
    FinishReason,
    Metrics,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    VersionSpan,
    WhetError,
)

log = logging.getLogger(__name__)

COMPLETE = Call("/v1/completions", "for a reply", limit="reply", repeats=False)
SCORE = Call("/v1/completions", "for log-probs", limit="reply")
TRY = Call("/v1/completions", "for a first reply", limit="reply")
MODELS = Call("/v1/models", "for its models", method="GET")
SCHEMA = Call("/openapi.json", "for what it takes", method="GET")

OPTIONAL = ("top_k", "min_p", "repetition_penalty", "min_tokens")
"""Settings beyond OpenAI's own; a server says in its schema that it takes them."""


@dataclass(frozen=True)
class Endpoint:
    """What a server said of itself, and what it was seen to do. version: the name of the model."""

    version: str
    takes: frozenset[str]
    """Fields of a request, by its schema; empty where it has none."""


class OpenAIApi:
    """See `ServerApi`. model: of this process; what the server serves is compared with it. asked: name of the model to
    ask for; None: the only one."""

    title = "OpenAI-compatible"
    no_sleep = "has no call for it"

    def __init__(
        self,
        calls: Calls,
        *,
        model: Any,
        ops: Ops,
        canary: Canary,
        end_token_ids: Collection[int],
        asked: str | None,
    ) -> None:
        self.calls, self.model, self.ops, self.canary = calls, model, ops, canary
        self.end_token_ids, self.asked = frozenset(end_token_ids), asked
        self.is_ = Endpoint("", frozenset())
        self._requests = self._tokens = 0

    @property
    def version(self) -> str:
        return self.is_.version

    @property
    def can(self) -> Capabilities:
        return Capabilities(
            logprobs="plain",
            stop_texts=False,
            penalties="repetition_penalty" in self.is_.takes,
            in_flight_updates=False,
            reproducible="no",
            score_temperatures=False,
        )

    @property
    def no_scores(self) -> str:
        if "prompt_logprobs" in self.is_.takes:
            return ""
        return (
            f"{self.calls.url} does not score given tokens (it takes no prompt_logprobs); use rollout.engine=vllm, "
            "sglang or native"
        )

    async def open(self, weights: int) -> None:
        """See `ServerApi`."""
        name = await self._model()
        self.is_ = Endpoint(name, await self._fields())
        try:
            said = await self.calls.ask(TRY, self._trial(stop_token_ids=[], ignore_eos=True))
            with reading(self.calls.url, TRY):
                first = _choice(said)
                tokens, told = first.get("token_ids"), _logprobs(first)
            if not isinstance(tokens, list) or len(tokens) != 2:
                raise ConfigError(f"{self.calls.url} {NO_TOKENS}")
            if len(told) != 2:
                raise ConfigError(
                    f"{self.calls.url} tells no log-probs of the tokens that it samples (logprobs)"
                )
            said = await self.calls.ask(TRY, self._trial(stop_token_ids=tokens[:1]))
        except RequestError as error:
            raise ConfigError(f"{self.calls.url} {NO_TOKENS}. It says: {error}") from error
        with reading(self.calls.url, TRY):
            ended = _choice(said)
            ends = ended["token_ids"] == tokens[:1] and ended["finish_reason"] == "stop"
        if not ends:
            raise ConfigError(
                f"{self.calls.url} ignores stop_token_ids, so replies would not end where this run's end: use a server "
                "that takes them (vLLM, SGLang)"
            )

    def check(self, sampling: Sampling) -> None:
        """See `ServerApi`."""
        for name in OPTIONAL:
            if getattr(sampling, name) != getattr(PLAIN, name) and name not in self.is_.takes:
                raise RequestError(
                    f"{name}={getattr(sampling, name):g}: {self.calls.url} does not say that it takes {name} "
                    f"(/openapi.json), and might ignore it; leave it at {getattr(PLAIN, name):g}"
                )

    async def completed(self, request: Request, weights: int, on_tokens: OnTokens | None) -> Completion:
        """See `ServerApi`."""
        ends = ends_of(request.sampling, self.end_token_ids)
        tokens: list[int] = []
        told: list[Any] = []
        reason: str | None = None
        self._tokens += len(request.prompt)
        async with aclosing(self.calls.events(COMPLETE, self._body(request, ends))) as events:
            async for event in events:
                with reading(self.calls.url, COMPLETE):
                    choices = choices_of(event)
                    new = [token for choice in choices for token in choice.get("token_ids") or []]
                    told += [value for choice in choices for value in _logprobs(choice)]
                    reason = next((c["finish_reason"] for c in choices if c["finish_reason"]), reason)
                tokens += new
                self._tokens += len(new)
                if new and on_tokens is not None:
                    on_tokens(new)
        self._requests += 1
        if len(tokens) != len(told):
            raise WhetError(
                f"{self.calls.url} told log-probs of {len(told)} of the {len(tokens)} tokens it sampled"
            )
        with reading(self.calls.url, COMPLETE):
            finish = _finish(reason, tokens, ends, name=self.calls.url)
        s, values = request.sampling, [finite(value, self.calls.url) for value in told]
        known = self.can.tells_logprobs(s)
        return Completion(
            token_ids=tokens,
            logprobs=values if known else None,
            sample_logprobs=[0.0] * len(tokens) if s.temperature == 0 else values if known else None,
            spans=(VersionSpan(weights, 0, len(tokens)),),
            finish_reason=finish,
        )

    async def scored(self, request: ScoreRequest, weights: int) -> TokenLogprobs:
        """See `ServerApi`. By `prompt_logprobs`, an extension of vLLM."""
        body = {
            **self._named(request.token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": request.top_k,
        }
        said = await self.calls.ask(SCORE, body)
        self._requests += 1
        self._tokens += len(request.token_ids)
        with reading(self.calls.url, SCORE):
            return scored_prompt(_choice(said)["prompt_logprobs"], request, weights, self.calls.url)

    async def take(self, update: WeightUpdate, engine: Taking) -> Metrics:
        """See `ServerApi`. Nothing is sent: the server has the weights already, or it is refused."""
        await engine.begin()
        given = update.tensors.update if isinstance(update.tensors, Written) else update
        model = given.module
        if model is None:
            copy_weights(self.model, given.named())
            model = self.model
        engine.arrived(update.version)
        return await self.canary.prove_replies(engine, model, self.ops, update.version)

    async def pause(self) -> None:
        """See `ServerApi`. Nobody is let in, and those who were have finished."""

    async def resume(self) -> None:
        """See `ServerApi`."""

    async def place(self, away: frozenset[Part], *, was: frozenset[Part]) -> None:
        """See `ServerApi`. It keeps its memory."""

    async def counts(self) -> tuple[int, int]:
        """See `ServerApi`. The requests are this client's; that the server lives is asked."""
        await self.calls.ask(MODELS)
        return self._requests, self._tokens

    # -- what it is

    async def _model(self) -> str:
        try:
            names = [str(model["id"]) for model in (await self.calls.ask(MODELS))["data"]]
        except (RequestError, *UNREADABLE) as error:
            raise ConfigError(
                f"{self.calls.url} does not answer as an OpenAI-compatible server does: {error}; "
                "rollout.server.urls has addresses without /v1"
            ) from error
        if self.asked is None and len(names) == 1:
            return names[0]
        if self.asked in names:
            return str(self.asked)
        raise ConfigError(
            f"{self.calls.url} serves {words(', '.join(names), MOST_TOLD) or 'no model'}; rollout.server.model "
            "names one of them"
        )

    async def _fields(self) -> frozenset[str]:
        """Of a request for a completion, by the schema of the server."""
        try:
            schema = await self.calls.ask(SCHEMA)
            return frozenset(schema["components"]["schemas"]["CompletionRequest"]["properties"])
        except Unreachable:
            raise
        except (WhetError, *UNREADABLE) as error:
            log.info(
                "%s has no schema, so it is asked with OpenAI's own settings alone: %s", self.calls.url, error
            )
            return frozenset()

    def _trial(self, **how: Any) -> dict[str, Any]:
        return {**self._named((0,)), "max_tokens": 2, "temperature": 0.0, "logprobs": 1, **how}

    def _named(self, prompt: Collection[int]) -> dict[str, Any]:
        return {"model": self.is_.version, "prompt": list(prompt), "return_token_ids": True}

    def _body(self, request: Request, ends: Collection[int]) -> dict[str, Any]:
        s = request.sampling
        return {
            **self._named(request.prompt),
            **{name: getattr(s, name) for name in OPTIONAL if name in self.is_.takes and name != "top_k"},
            **({"top_k": s.top_k or -1} if "top_k" in self.is_.takes else {}),
            "n": 1,
            "stream": True,
            "logprobs": 1,
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "seed": seeds.key(s.key, len(request.prompt)) >> 1,
            "stop_token_ids": sorted(ends),
            "ignore_eos": not ends,
        }


NO_TOKENS = (
    "does not return the ids of the tokens that it samples (return_token_ids). whet never makes tokens of a reply's "
    "text, so it cannot sample from this server: use one that returns them (vLLM, SGLang)"
)


def _choice(said: Any) -> dict[str, Any]:
    try:
        (choice,) = said["choices"]
    except (KeyError, TypeError, ValueError) as error:
        raise WhetError(f"an answer has no choice, or several: {words(str(said), MOST_TOLD)}") from error
    assert isinstance(choice, dict)
    return choice


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return list((choice.get("logprobs") or {}).get("token_logprobs") or [])


def _finish(reason: str | None, tokens: list[int], ends: Collection[int], *, name: str) -> FinishReason:
    """Raises WhetError for a reply that is not whole, or that ends at a token that ends no reply of this run."""
    if reason not in ("stop", "length"):
        raise WhetError(f"{name} ended a reply with {reason!r}; expected stop or length")
    ended = bool(tokens) and tokens[-1] in ends
    if reason == "length" and not ended:  # some servers look at the limit before they look at end tokens
        return "length"
    if not ended:
        raise WhetError(
            f"{name} ended a reply at token {tokens[-1] if tokens else None}, which ends no reply of this run: the "
            "files of its model name another end token (eos_token_id)"
        )
    return "stop"
