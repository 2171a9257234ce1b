"""vLLM as a rollout engine, over HTTP: tokens in, tokens and log-probs out.

Its log-probs are those of the distribution that is sampled (`--logprobs-mode processed_logprobs`): with a temperature
alone they are the trained distribution's, too; with filters the trainer's own are needed, and `Completion.logprobs` is
None. Its random numbers are its own: equal seeds give equal tokens on the same server, at the same load.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

from whet import seeds
from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate
from whet.rollout.gate import Gate
from whet.rollout.http.calls import Call, Calls, reading
from whet.rollout.http.published import Folder, Version, Written
from whet.rollout.http.served import Owned, finite, likeliest, whole
from whet.rollout.http.supported import Detected, detect
from whet.rollout.requests import RequestError, check, check_score, ends_of
from whet.types import (
    Completion,
    FinishReason,
    Receipt,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    VersionSpan,
    WhetError,
)

log = logging.getLogger(__name__)

GENERATE = Call("/inference/v1/generate", "for a reply", limit="reply", repeats=False)
SCORE = Call("/inference/v1/generate", "for log-probs", limit="reply")
ABORT = Call("/abort_requests", "to abort a request")
PAUSE = Call("/pause", "to pause")
FINISH = Call("/pause", "to finish its requests", limit="reply")
RESUME = Call("/resume", "to resume")
LOAD = Call("/collective_rpc", "to load weights", limit="load")
LOAD_ADAPTERS = Call("/v1/load_lora_adapter", "to load adapters", limit="load")
LABEL = Call("/update_weight_version", "to name its weights")
RESET = Call("/reset_prefix_cache", "to forget its cache")
SLEEP = Call("/sleep", "to sleep", limit="load")
WAKE = Call("/wake_up", "to wake up", limit="load")
METRICS = Call("/metrics", "for its counts", method="GET")

CAN = Capabilities(
    logprobs="unfiltered",
    stop_texts=False,
    penalties=True,
    images=False,
    in_flight_updates=True,
    reproducible="server",
    score_temperatures=False,
)
CAN_WITH_ADAPTERS = replace(CAN, in_flight_updates=False)
"""vLLM 0.32 scores given tokens beside adapters only while it computes nothing else (the process that computes ends
otherwise), so requests in flight finish before new adapters are proved."""
ADAPTERS = "policy"
"""What a server is told that the adapters are called."""
TAGS: dict[Part, str] = {"weights": "weights", "cache": "kv_cache"}
_COUNT = re.compile(r"^vllm:(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_ENDED = ('finished_reason="stop"', 'finished_reason="length"')


class VllmEngine:
    """A `RolloutEngine` that is one vLLM server; `opened` asks it what it is.

    vocab: size of the model's output layer. end_token_ids: end a reply. version: of the weights that it is said to
    have, until the first update.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        folder: Folder,
        vocab: int,
        max_context: int,
        end_token_ids: Collection[int],
        version: int = 0,
    ) -> None:
        self.calls, self.folder, self.name = calls, folder, calls.url
        self.vocab, self.max_context, self.end_token_ids = vocab, max_context, frozenset(end_token_ids)
        self.version = version
        self.is_ = Detected("", False)
        self._gate = Gate(lambda: self.version)
        self._owned = Owned(self._gate)
        self._since = time.time()
        self._run = uuid.uuid4().hex
        """Makes the salt of the cache this engine's own: another run may have had the same server and versions."""
        self._away: set[Part] = set()
        self._named: dict[str, str] = {}
        """What requests say of the model: nothing, or that they are for the adapters, once there are some."""
        self._alone = asyncio.Lock()

    async def open(self) -> None:
        """Ask the server what it is, and name its weights. Raises ConfigError where whet cannot sample from it."""
        self.is_ = await detect(self.calls, max_context=self.max_context, adapters=self.folder.adapters)
        await self.calls.ask(LABEL, {"new_version": str(self.version)})

    @property
    def program(self) -> str:
        """The version of the server."""
        return self.is_.version

    # -- the seam

    @property
    def can(self) -> Capabilities:
        return CAN_WITH_ADAPTERS if self.folder.adapters else CAN

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`."""
        check(request, vocab=self.vocab, max_context=self.max_context, decodes=False)
        async with self._gate.passing(request.least_version):
            return await self._owned(self.completed(request, on_tokens))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """See `RolloutEngine`. Only at temperature 1: a server scores prompts without one; and not beside adapters."""
        if self.folder.adapters:
            raise RequestError(
                "vLLM cannot score given tokens beside other requests with rollout.server.lora=adapter; use merge"
            )
        for request in requests:
            check_score(request, vocab=self.vocab, max_context=self.max_context)
            if request.temperature != 1.0:
                raise RequestError(
                    f"a score with temperature={request.temperature:g}: vLLM scores given tokens at temperature 1 "
                    "alone; ask for 1, or use rollout.engine=native"
                )
        async with self._gate.passing():
            return list(await self._owned(asyncio.gather(*map(self.scored, requests))))

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """See `RolloutEngine`. Requests in flight are computed anew under the new weights, with their tokens so far."""
        written = update.tensors
        if not isinstance(written, Written):
            written = Written(self.folder, update)
        version = await written.there()
        before, began = self.version, time.monotonic()
        try:
            await self._load(version, update.version)
            loaded_s = time.monotonic() - began
            measured = await self.folder.canary.prove(self, version.expected, version.before)
        except BaseException as error:
            self.version = before
            self._gate.close(f"{self.name} may have a mix of weights: {error}")
            raise
        log.info(
            "weights version %d: loaded by %s in %.2f s, proved in %.2f s: %s",
            update.version, self.name, loaded_s, time.monotonic() - began - loaded_s,
            ", ".join(f"{name} {value:.3g}" for name, value in measured.items()),
        )  # fmt: skip
        self._gate.updated()
        return Receipt(self.name, update.version, measured=measured)

    async def pause(self, finish: bool) -> None:
        """See `RolloutEngine`."""
        if finish:
            await self._gate.pause(True)
            await self.calls.ask(FINISH, query={"mode": "wait"})
        else:
            self._gate.entry.shut()
            await self.calls.ask(PAUSE, query={"mode": "keep"})

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        await self.calls.ask(RESUME)
        self._gate.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """See `RolloutEngine`. A server that was started without --enable-sleep-mode keeps its memory."""
        if device == "cpu":
            self._away |= what
            self._gate.entry.shut()
            if self.is_.sleeps:  # all or nothing
                await self.calls.ask(SLEEP, query={"level": "1", "mode": "keep"})
                for part in PARTS - self._away:
                    await self.calls.ask(WAKE, query={"tags": TAGS[part]})
            return
        for part in ("weights", "cache"):
            if part in what & self._away and self.is_.sleeps:
                await self.calls.ask(WAKE, query={"tags": TAGS[part]})
        self._away -= what
        if not self._away:
            await self.resume()

    async def health(self) -> Health:
        """See `RolloutEngine`."""
        said = await self.calls.ask(METRICS)
        with reading(self.name, METRICS):
            found = [(m["name"], m["labels"], int(float(m["value"]))) for m in _COUNT.finditer(said)]
        requests = sum(
            value
            for name, labels, value in found
            if name == "request_success_total" and any(reason in labels for reason in _ENDED)
        )
        tokens = sum(
            value for name, _, value in found if name in ("prompt_tokens_total", "generation_tokens_total")
        )
        return Health(since=self._since, requests=requests, tokens=tokens)

    async def close(self) -> None:
        """See `RolloutEngine`. The server goes on; who started it ends it."""
        self.calls.ending = True
        self._gate.close("the rollout engine was closed")
        await self._owned.end()
        await self.calls.close()

    # -- asking, whoever may pass

    async def completed(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """One reply. When its caller goes away, it is aborted."""
        body = self._body(request)
        try:
            if on_tokens is None:
                said = await self.calls.ask(GENERATE, body)
            else:
                said = {"choices": [await self._streamed(body, on_tokens)]}
        except BaseException:
            await self.calls.tell(ABORT, {"request_ids": [f"generate-tokens-{request.id}"]})
            raise
        with reading(self.name, GENERATE):
            done = completion(_choice(said), request.sampling, name=self.name)
            return whole(done, request, vocab=self.vocab, name=self.name)

    async def scored(self, request: ScoreRequest) -> TokenLogprobs:
        """Log-probs of given tokens: those of a prompt, after which one token is sampled."""
        body = {
            "request_id": f"score-{uuid.uuid4().hex}",
            "token_ids": list(request.token_ids),
            **self._named,
            "cache_salt": self._salt,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": request.top_k},
        }
        async with self._alone if self.folder.adapters else nullcontext():
            said = await self.calls.ask(SCORE, body)
        given = request.token_ids[request.start :]
        with reading(self.name, SCORE):
            rows = said["prompt_logprobs"][request.start :]
            told = [row[str(token)]["logprob"] for token, row in zip(given, rows, strict=True)]
            return TokenLogprobs(
                version=_spans(_choice(said), self.name)[-1].version,
                logprobs=[finite(value, self.name) for value in told],
                top=[likeliest(row, request.top_k) for row in rows] if request.top_k else [],
            )

    async def _streamed(self, body: dict[str, Any], on_tokens: OnTokens) -> dict[str, Any]:
        """The choice that all events make together."""
        tokens: list[int] = []
        logprobs: list[Any] = []
        last: dict[str, Any] = {}
        async for event in self.calls.events(GENERATE, body | {"stream": True}):
            with reading(self.name, GENERATE):
                parts = [*event["choices"]]
                new = [token for part in parts for token in part["token_ids"]]
                logprobs += [row for part in parts for row in (part["logprobs"] or {}).get("content", ())]
                last = parts[-1] if parts else last
            tokens += new
            if new:
                on_tokens(new)
        return last | {"token_ids": tokens, "logprobs": {"content": logprobs}}

    async def _load(self, version: Version, number: int) -> None:
        """The phases of an update: stop, load, name, forget what was cached, go on. Nobody passes meanwhile."""
        self._gate.entry.shut()
        if self.folder.adapters:
            await self.calls.ask(FINISH, query={"mode": "wait"})
            told = {"lora_name": ADAPTERS, "lora_path": str(version.path), "load_inplace": True}
            await self.calls.ask(LOAD_ADAPTERS, told)
            self._named = {"model": ADAPTERS}
        else:
            await self.calls.ask(PAUSE, query={"mode": "keep"})
            arguments = {"weights_path": str(version.path)}
            await self.calls.ask(LOAD, {"method": "reload_weights", "kwargs": arguments})
        await self.calls.ask(LABEL, {"new_version": str(number)})
        await self.calls.ask(RESET, query={"reset_running_requests": "true"})
        self.version = number
        await self.calls.ask(RESUME)

    def _body(self, request: Request) -> dict[str, Any]:
        s = request.sampling
        same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "min_tokens")
        return {
            "request_id": request.id,
            "token_ids": list(request.prompt),
            **self._named,
            "cache_salt": self._salt,
            "sampling_params": {
                **{name: getattr(s, name) for name in same},
                "n": 1,
                "logprobs": 0,
                # the position is a part of a random number's name; and 63 bits are what it takes
                "seed": seeds.key(s.key, len(request.prompt)) >> 1,
                # every end token is named, whatever the server's files say of the model
                "ignore_eos": True,
                "stop_token_ids": sorted(ends_of(s, self.end_token_ids)),
            },
        }

    @property
    def _salt(self) -> str:
        """What was cached under other weights is never found."""
        return f"{self._run}-{self.version}"


# ---------------------------------------------------------------- what it says


def completion(choice: dict[str, Any], sampling: Sampling, *, name: str) -> Completion:
    """A reply as whet has it. Raises WhetError for one that is not whole."""
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise WhetError(f"{name} ended a reply with {reason!r}; expected stop or length")
    finish: FinishReason = reason
    tokens, rows = choice["token_ids"], choice["logprobs"]["content"]
    if [row["token_id"] for row in rows] != tokens:
        raise WhetError(
            f"{name} returned log-probs of {len(rows)} other tokens than the {len(tokens)} that it sampled"
        )
    told = [finite(row["logprob"], name) for row in rows]
    return Completion(
        token_ids=tokens,
        logprobs=told if CAN.tells_logprobs(sampling) else None,
        sample_logprobs=[0.0] * len(told) if sampling.temperature == 0 else told,
        spans=_spans(choice, name),
        finish_reason=finish,
    )


def _choice(said: Any) -> dict[str, Any]:
    (choice,) = said["choices"]
    assert isinstance(choice, dict)
    return choice


def _spans(choice: dict[str, Any], name: str) -> tuple[VersionSpan, ...]:
    """The versions of the tokens, from the reply itself: asked for later, a version may be another one."""
    told = choice.get("weight_versions") or []
    try:
        return tuple(VersionSpan(int(span["version"]), span["start"], span["end"]) for span in told)
    except ValueError as error:
        raise WhetError(f"{name} sampled from weights that were not named by whet: {told}") from error
