"""vLLM as a rollout engine, over HTTP: tokens in, tokens and log-probs out.

Its log-probs are those of the distribution that is sampled (`--logprobs-mode processed_logprobs`): with a temperature
alone they are the trained distribution's, too; with filters the trainer's own are needed, and `Completion.logprobs` is
None. Its random numbers are its own: equal seeds give equal tokens on the same server, at the same load.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet import seeds
from whet.models.routing import Routes
from whet.rollout.engine import PARTS, Capabilities, OnTokens, Part, WeightUpdate
from whet.rollout.http.calls import Call, Calls, reading
from whet.rollout.http.published import Folder
from whet.rollout.http.routed import of_file
from whet.rollout.http.served import Taking, choices_of, finite, scored_prompt, through_folder
from whet.rollout.http.supported import Detected, detect
from whet.rollout.requests import ends_of
from whet.types import (
    Completion,
    FinishReason,
    Metrics,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    VersionSpan,
    WhetError,
)

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
    in_flight_updates=True,
    reproducible="server",
    score_temperatures=False,
    experts=True,
)
CAN_WITH_ADAPTERS = replace(CAN, in_flight_updates=False)
"""vLLM 0.32 scores given tokens beside adapters only while it computes nothing else (the process that computes ends
otherwise), so requests in flight finish before new adapters are proved."""
ADAPTERS = "policy"
"""What a server is told that the adapters are called."""
TAGS: dict[Part, str] = {"weights": "weights", "cache": "kv_cache"}
_COUNT = re.compile(r"^vllm:(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_ENDED = ('finished_reason="stop"', 'finished_reason="length"')


class VllmApi:
    """See `ServerApi`. end_token_ids: end a reply. routes: of the experts that replies have; None: they have none."""

    title = "vLLM"

    def __init__(
        self,
        calls: Calls,
        folder: Folder,
        *,
        max_context: int,
        end_token_ids: Collection[int],
        routes: Routes | None = None,
    ) -> None:
        self.calls, self.folder = calls, folder
        self.max_context, self.end_token_ids = max_context, frozenset(end_token_ids)
        self.is_, self.routes = Detected("", False), routes
        self._run = uuid.uuid4().hex
        """Makes the salt of the cache this engine's own: another run may have had the same server and versions."""
        self._named: dict[str, str] = {}
        """What requests say of the model: nothing, or that they are for the adapters, once there are some."""
        self._alone = asyncio.Lock()

    @property
    def version(self) -> str:
        return self.is_.version

    @property
    def can(self) -> Capabilities:
        return CAN_WITH_ADAPTERS if self.folder.adapters else CAN

    @property
    def no_scores(self) -> str:
        if self.folder.adapters:
            return "vLLM cannot score given tokens beside other requests with rollout.server.lora=adapter; use merge"
        return ""

    @property
    def no_sleep(self) -> str:
        if self.is_.sleeps:
            return ""
        return "keeps its memory: start it with --enable-sleep-mode, which vLLM has with an accelerator alone"

    async def open(self, weights: int) -> None:
        """See `ServerApi`."""
        self.is_ = await detect(
            self.calls,
            max_context=self.max_context,
            adapters=self.folder.adapters,
            experts=self.routes is not None,
        )
        await self.place(frozenset(), was=PARTS)  # a killed run may have left it asleep or paused
        await self.resume()
        await self.calls.ask(LABEL, {"new_version": str(weights)})

    def check(self, sampling: Sampling) -> None:
        """See `ServerApi`. It takes all."""

    async def completed(self, request: Request, weights: int, on_tokens: OnTokens | None) -> Completion:
        """See `ServerApi`."""
        body = self._body(request, weights)
        try:
            if on_tokens is None:
                said = await self.calls.ask(GENERATE, body)
            else:
                said = {"choices": [await self._streamed(body, on_tokens)]}
        except BaseException:
            await self.calls.tell(ABORT, {"request_ids": [f"generate-tokens-{request.id}"]})
            raise
        with reading(self.calls.url, GENERATE):
            choice = _choice(said)
            made = completion(choice, request.sampling, name=self.calls.url)
            if self.routes is None:
                return made
            tokens = len(request.prompt) + len(made.token_ids)
            told = choice.get("routed_experts")
            return replace(made, experts=of_file(told, self.routes, tokens, name=self.calls.url))

    async def scored(self, request: ScoreRequest, weights: int) -> TokenLogprobs:
        """See `ServerApi`. Those of a prompt, after which one token is sampled."""
        body = {
            "request_id": f"score-{uuid.uuid4().hex}",
            "token_ids": list(request.token_ids),
            **self._named,
            "cache_salt": self._salt(weights),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": request.top_k},
        }
        async with self._alone if self.folder.adapters else nullcontext():
            said = await self.calls.ask(SCORE, body)
        name = self.calls.url
        with reading(name, SCORE):
            version = _spans(_choice(said), name)[-1].version
            return scored_prompt(said["prompt_logprobs"], request, version, name)

    async def take(self, update: WeightUpdate, engine: Taking) -> Metrics:
        """See `ServerApi`. Requests in flight are computed anew under the new weights, with their tokens so far."""

        async def load(path: Path) -> None:
            """The phases: stop, load, name, forget what was cached, go on."""
            await engine.begin()
            await (self._load_adapters(path) if self.folder.adapters else self._load(path))
            await self.calls.ask(LABEL, {"new_version": str(update.version)})
            await self.calls.ask(RESET, query={"reset_running_requests": "true"})
            engine.arrived(update.version)
            await self.resume()

        return await through_folder(self.folder, update, engine, load)

    async def _load(self, path: Path) -> None:
        await self.pause()
        await self.calls.ask(LOAD, {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})

    async def _load_adapters(self, path: Path) -> None:
        """Once the server computes nothing, not even what was aborted."""
        await self.calls.ask(FINISH, query={"mode": "wait"})
        told = {"lora_name": ADAPTERS, "lora_path": str(path), "load_inplace": True}
        await self.calls.ask(LOAD_ADAPTERS, told)
        self._named = {"model": ADAPTERS}

    async def pause(self) -> None:
        """See `ServerApi`."""
        await self.calls.ask(PAUSE, query={"mode": "keep"})

    async def resume(self) -> None:
        """See `ServerApi`."""
        await self.calls.ask(RESUME)

    async def place(self, away: frozenset[Part], *, was: frozenset[Part]) -> None:
        """See `ServerApi`. It sleeps as a whole, and what is to stay wakes up again."""
        if not self.is_.sleeps:
            return
        if away - was:
            await self._wake(was)
            await self.calls.ask(SLEEP, query={"level": "1", "mode": "keep"})
            was = PARTS
        await self._wake(was - away)

    async def _wake(self, parts: frozenset[Part]) -> None:
        for part in ("weights", "cache"):
            if part in parts:
                await self.calls.ask(WAKE, query={"tags": TAGS[part]})

    async def counts(self) -> tuple[int, int]:
        """See `ServerApi`."""
        said = await self.calls.ask(METRICS)
        with reading(self.calls.url, METRICS):
            found = [(m["name"], m["labels"], int(float(m["value"]))) for m in _COUNT.finditer(said)]
        requests = sum(
            value
            for name, labels, value in found
            if name == "request_success_total" and any(reason in labels for reason in _ENDED)
        )
        tokens = sum(
            value for name, _, value in found if name in ("prompt_tokens_total", "generation_tokens_total")
        )
        return requests, tokens

    # -- one request

    async def _streamed(self, body: dict[str, Any], on_tokens: OnTokens) -> dict[str, Any]:
        """The choice that all events make together."""
        tokens: list[int] = []
        logprobs: list[Any] = []
        last: dict[str, Any] = {}
        async for event in self.calls.events(GENERATE, body | {"stream": True}):
            with reading(self.calls.url, GENERATE):
                parts = choices_of(event)
                new = [token for part in parts for token in part["token_ids"]]
                logprobs += [row for part in parts for row in (part["logprobs"] or {}).get("content", ())]
                last = parts[-1] if parts else last
            tokens += new
            if new:
                on_tokens(new)
        return last | {"token_ids": tokens, "logprobs": {"content": logprobs}}

    def _body(self, request: Request, weights: int) -> dict[str, Any]:
        s = request.sampling
        same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "min_tokens")
        return {
            "request_id": request.id,
            "token_ids": list(request.prompt),
            **self._named,
            "cache_salt": self._salt(weights),
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

    def _salt(self, weights: int) -> str:
        """What was cached under other weights is never found."""
        return f"{self._run}-{weights}"


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
