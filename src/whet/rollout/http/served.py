"""A rollout engine that is one inference server: who may ask it when, what becomes of what is given up, and weights
that are proved. What a kind of server is asked, and in which words, is its `ServerApi` (`vllm`, `sglang`, `openai`)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate
from whet.rollout.gate import Gate
from whet.rollout.http.calls import Calls
from whet.rollout.http.canary import Asked
from whet.rollout.http.published import Folder, Written
from whet.rollout.requests import RequestError, check, check_score, unusable
from whet.types import (
    Completion,
    ConfigError,
    Metrics,
    Receipt,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    WhetError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


class Taking(Asked, Protocol):
    """The engine, to its `ServerApi` that gives its server new weights."""

    async def begin(self) -> None:
        """From here on the server may have a mix of weights, until all is proved: nobody is let in, and where requests
        cannot go on with new weights, those in flight have finished."""

    def arrived(self, version: int) -> None:
        """The server samples from these weights now, which is to be proved."""


class ServerApi(Protocol):
    """One kind of server."""

    title: str
    """As people call it: 'SGLang'."""

    @property
    def version(self) -> str:
        """Of the server's program, or what else tells it from others; empty before `open`."""

    @property
    def can(self) -> Capabilities: ...

    @property
    def no_scores(self) -> str:
        """Why it does not score given tokens; empty: it does."""

    @property
    def no_sleep(self) -> str:
        """Why it gives no memory of an accelerator back, and what to do; empty: it does, and has it again as it was."""

    async def open(self, weights: int) -> None:
        """Ask the server what it is. From here on it samples, even if a killed run has left it paused, and its weights
        are of this version. Raises ConfigError, with what to do, where whet cannot sample from it."""

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError for settings that this server does not take."""

    async def completed(self, request: Request, weights: int, on_tokens: OnTokens | None) -> Completion:
        """One reply, of weights that were of this version when it began. A request that fails, or whose caller goes
        away, is aborted."""

    async def scored(self, request: ScoreRequest, weights: int) -> TokenLogprobs: ...

    async def take(self, update: WeightUpdate, engine: Taking) -> Metrics:
        """Give the server these weights and prove that it has them. Returns what was measured. Raises WhetError where
        it does not have them."""

    async def pause(self) -> None:
        """Stop sampling, and keep the requests."""

    async def resume(self) -> None: ...

    async def place(self, away: frozenset[Part], *, was: frozenset[Part]) -> None:
        """Give memory of the accelerator back, or take it again, so that it has none for the parts that are to be away;
        `was`: those that are away until now. Nobody is let in while any is."""

    async def counts(self) -> tuple[int, int]:
        """Requests that have ended, and tokens that were computed, so far. Answered by the server itself."""


class Owned:
    """The calls of an engine that are under way: they end with it, for the reason that its gate has."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._work: set[asyncio.Future[Any]] = set()

    async def __call__(self, work: Awaitable[T]) -> T:
        """The result, unless the engine is closed meanwhile."""
        owned = asyncio.ensure_future(work)
        self._work.add(owned)
        try:
            return await owned
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if self._gate.closed is not None and this is not None and not this.cancelling():
                raise WhetError(self._gate.closed) from None
            raise
        finally:
            self._work.discard(owned)

    async def end(self) -> None:
        """Cancel all; the gate is closed."""
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)


class HttpEngine:
    """A `RolloutEngine` that is one server. vocab: size of the model's output layer. version: of the weights that the
    server is said to have, until the first update."""

    def __init__(
        self, api: ServerApi, calls: Calls, *, vocab: int, max_context: int, version: int = 0
    ) -> None:
        self.api, self.calls, self.name = api, calls, calls.url
        self.vocab, self.max_context, self.version = vocab, max_context, version
        self._gate = Gate(lambda: self.version)
        self._owned = Owned(self._gate)
        self._since = time.time()
        self._away: frozenset[Part] = frozenset()
        self._mixed = False
        """An update has begun."""

    async def open(self, *, sleeps: bool = False) -> None:
        """Ask the server what it is, and name its weights. sleeps: it has to (`place`). Raises ConfigError where whet
        cannot work with it."""
        await self.api.open(self.version)
        if sleeps and (why := self.api.no_sleep):
            raise ConfigError(f"rollout.server.sleep=true: {self.name} {why}")

    @property
    def program(self) -> str:
        """The version of the server, or what else tells it from others."""
        return self.api.version

    # -- the seam

    @property
    def can(self) -> Capabilities:
        return self.api.can

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`."""
        check(request, vocab=self.vocab, max_context=self.max_context, decodes=False)
        self.api.check(request.sampling)
        async with self._gate.passing(request.least_version):
            return await self._owned(self.completed(request, on_tokens))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """See `RolloutEngine`. Only at temperature 1: servers score prompts without one."""
        if why := self.api.no_scores:
            raise RequestError(why)
        for request in requests:
            check_score(request, vocab=self.vocab, max_context=self.max_context)
            if request.temperature != 1.0:
                raise RequestError(
                    f"a score with temperature={request.temperature:g}: {self.api.title} scores given tokens at "
                    "temperature 1 alone; ask for 1, or use rollout.engine=native"
                )
        async with self._gate.passing():
            return list(await self._owned(asyncio.gather(*map(self.scored, requests))))

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """See `RolloutEngine`. Where the server can, requests in flight go on with the new weights."""
        before, self._mixed = self.version, False
        try:
            measured = await self.api.take(update, self)
        except BaseException as error:
            self.version = before
            if self._mixed:
                self._gate.close(f"{self.name} may have a mix of weights: {error}")
            raise
        self._gate.updated()
        return Receipt(self.name, update.version, measured=measured)

    async def pause(self, finish: bool) -> None:
        """See `RolloutEngine`. A server that cannot stop in mid-reply finishes its replies."""
        if (finish or not self.can.in_flight_updates) and not await self._gate.pause(True):
            return
        self._gate.entry.shut()
        await self.api.pause()

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        await self.api.resume()
        self._gate.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """See `RolloutEngine`. A server that was not started so that it can keeps its memory."""
        away = self._away | what if device == "cpu" else self._away - what
        if device == "cpu":
            self._gate.entry.shut()
        await self.api.place(away, was=self._away)
        self._away = away
        if device == "gpu" and not away:
            await self.resume()

    async def health(self) -> Health:
        """See `RolloutEngine`."""
        requests, tokens = await self.api.counts()
        return Health(since=self._since, requests=requests, tokens=tokens)

    async def close(self) -> None:
        """See `RolloutEngine`. The server goes on; who started it ends it."""
        self.calls.ending = True
        self._gate.close("the rollout engine was closed")
        await self._owned.end()
        await self.calls.close()

    async def begin(self) -> None:
        """See `Taking`."""
        self._mixed = True
        self._gate.entry.shut()
        if not self.can.in_flight_updates:
            await self._gate.pause(True)

    def arrived(self, version: int) -> None:
        """See `Taking`."""
        self.version = version

    # -- asking, whoever may pass

    async def completed(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """One reply."""
        done = await self.api.completed(request, self.version, on_tokens)
        if why := unusable(done, most=request.sampling.max_tokens, vocab=self.vocab):
            raise WhetError(f"{self.name}: {why}")
        return done

    async def scored(self, request: ScoreRequest) -> TokenLogprobs:
        """Log-probs of given tokens."""
        return await self.api.scored(request, self.version)


async def through_folder(
    folder: Folder, update: WeightUpdate, engine: Asked, load: Callable[[Path], Awaitable[None]]
) -> Metrics:
    """Give a server new weights as files: write them unless another server has them already, let it load them, and
    prove by the canary that it has them."""
    written = update.tensors if isinstance(update.tensors, Written) else Written(folder, update)
    version, began = await written.there(), time.monotonic()
    await load(version.path)
    loaded_s = time.monotonic() - began
    measured = await folder.canary.prove(engine, version.expected, version.before)
    log.info(
        "weights version %d: loaded by %s in %.2f s, proved in %.2f s: %s",
        update.version, engine.name, loaded_s, time.monotonic() - began - loaded_s,
        ", ".join(f"{name} {value:.3g}" for name, value in measured.items()),
    )  # fmt: skip
    return measured


NO_LOGPROB = -9999.0
"""What servers say where a log-prob is NaN or minus infinity; some say the smallest number that there is, or null."""


MOST_LOGPROB = 0.01
"""A log-prob is at most 0; rounding may leave it a little above."""


def finite(value: Any, name: str) -> float:
    """A log-prob that a server told. Raises WhetError for one that is none."""
    if value is None or (isinstance(value, float) and (value <= NO_LOGPROB or math.isnan(value))):
        raise WhetError(f"{name} told a log-prob that is not finite; its weights have most likely diverged")
    if type(value) not in (int, float) or not NO_LOGPROB < value <= MOST_LOGPROB:
        raise WhetError(f"{name} told the log-prob {str(value)[:40]!r}; expected a number of at most 0")
    return float(value)


def choices_of(event: Mapping[str, Any]) -> list[Any]:
    """What an event has of the one reply that was asked for; nothing where it tells counts alone. ValueError for
    another reply (n > 1), whose tokens would count as those of this one."""
    found = [*event["choices"]]
    if any(choice.get("index", 0) != 0 for choice in found):
        raise ValueError("several replies, expected one (n=1)")
    return found


def scored_prompt(
    rows: Sequence[Mapping[str, Mapping[str, Any]]], request: ScoreRequest, version: int, name: str
) -> TokenLogprobs:
    """Of `prompt_logprobs`, as vLLM tells them: a row for each position, by the tokens' ids."""
    rows = rows[request.start :]
    told = [
        row[str(token)]["logprob"]
        for token, row in zip(request.token_ids[request.start :], rows, strict=True)
    ]
    return TokenLogprobs(
        version=version,
        logprobs=[finite(value, name) for value in told],
        top=[_likeliest(row, request.top_k) for row in rows] if request.top_k else [],
    )


def _likeliest(row: Mapping[str, Mapping[str, Any]], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens of a position of a prompt, likeliest first; the given token is among them, too."""
    ranked = sorted((told["rank"], int(token), float(told["logprob"])) for token, told in row.items())
    return [(token, value) for rank, token, value in ranked if rank <= count]
