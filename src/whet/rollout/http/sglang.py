"""SGLang as a rollout engine, over HTTP: tokens in, tokens and log-probs out.

What is asked and what it means was read in the source of SGLang 0.5.21 to 0.5.23 (`srt/entrypoints/http_server.py`,
`srt/managers/{io_struct,tokenizer_manager,scheduler}.py`, `srt/layers/{sampler,logprob_processor}.py`,
`srt/sampling/sampling_params.py`) and in its `docs/advanced_features/sglang_for_rl.md`. No server was seen running.

- A log-prob of a sampled token is that of the distribution after temperature and penalties, before top_k, top_p and
  min_p; greedily, of the model's own. So `Completion.logprobs` is known with filters, and not with a penalty, and
  `Completion.sample_logprobs` the other way round.
- `ignore_eos` switches every end token off, those of `stop_token_ids` too; otherwise the model's own end a reply, too.
- `min_new_tokens` needs a tokenizer, which a server of token ids has not: end tokens are held back by `logit_bias`, in
  a request of their own for the first tokens.
- `sampling_seed` is read with --enable-deterministic-inference alone, which cannot sample with min_p.
- An abort ends every request whose id begins with the one that is named, so ids begin with a number that is drawn.
- It does not tell whether its memory is given back, and ends when memory is taken that is not. So the name of its
  weights tells it, written after memory was given back, and before it is taken again.
- `/pause_generation` in the mode `retract` takes requests back to the queue, without their cache: it is recomputed
  under the weights that are there when they go on. In the mode `in_place` the old cache would survive.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from whet import seeds
from whet.guard.foreign import words
from whet.models.routing import Routes
from whet.rollout.engine import FILTERS, PARTS, PLAIN, Capabilities, OnTokens, Part, WeightUpdate
from whet.rollout.http.calls import MOST_TOLD, Call, Calls, reading
from whet.rollout.http.published import Folder
from whet.rollout.http.routed import of_buffer
from whet.rollout.http.served import Taking, finite, through_folder
from whet.rollout.http.sglang_facts import ASLEEP, TAGS, Facts, detect
from whet.rollout.requests import RequestError, ends_of
from whet.types import (
    Completion,
    ExpertIds,
    Metrics,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    VersionSpan,
    WhetError,
)

GENERATE = Call("/generate", "for a reply", limit="reply", repeats=False)
SCORE = Call("/generate", "for log-probs", limit="reply")
ABORT = Call("/abort_request", "to abort a request")
PAUSE = Call("/pause_generation", "to pause")
RESUME = Call("/continue_generation", "to go on")
LOAD = Call("/update_weights_from_disk", "to load weights", limit="load")
LABEL = Call("/update_weight_version", "to name its weights")
FLUSH = Call("/flush_cache", "to forget its cache")
RELEASE = Call("/release_memory_occupation", "to give memory back", limit="load")
TAKE = Call("/resume_memory_occupation", "to take memory again", limit="load")
METRICS = Call("/metrics", "for its counts", method="GET")

CAN = Capabilities(
    logprobs="unpenalised",
    stop_texts=False,
    penalties=True,
    in_flight_updates=True,
    reproducible="no",
    score_temperatures=False,
    experts=True,
)
"""Without --enable-deterministic-inference."""
NEVER = -1e9
"""A bias with which a token is not sampled; JSON has no infinity."""
_COUNT = re.compile(r"^sglang:(?P<name>\w+)(?:\{[^}]*\})? (?P<value>\S+)", re.MULTILINE)


class SglangApi:
    """See `ServerApi`. end_token_ids: end a reply. routes: of the experts that replies have; None: they have none."""

    title = "SGLang"
    no_scores = ""

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
        self.is_, self.routes = Facts("", deterministic=False, parts=frozenset()), routes
        self._weights = 0
        """Version of what it samples from."""
        self._run = uuid.uuid4().hex
        """Makes the key of the cache this engine's own: another run may have had the same server and versions."""

    @property
    def version(self) -> str:
        return self.is_.version

    @property
    def no_sleep(self) -> str:
        if self.is_.parts == PARTS:
            return ""
        return "keeps its memory: start it with --enable-memory-saver and --enable-weights-cpu-backup"

    @property
    def can(self) -> Capabilities:
        return replace(CAN, reproducible="server") if self.is_.deterministic else CAN

    async def open(self, weights: int) -> None:
        """See `ServerApi`."""
        self.is_ = await detect(self.calls, max_context=self.max_context, experts=self.routes is not None)
        self._weights = weights
        await self.place(frozenset(), was=self.is_.away)  # a killed run may have left it asleep or paused
        await self.resume()
        await self._label(frozenset())

    def check(self, sampling: Sampling) -> None:
        """See `ServerApi`."""
        if sampling.min_p and self.is_.deterministic:
            raise RequestError(
                f"min_p={sampling.min_p:g}: SGLang cannot sample with it under --enable-deterministic-inference, and "
                "would end; start the server without, or leave min_p at 0"
            )

    async def completed(self, request: Request, weights: int, on_tokens: OnTokens | None) -> Completion:
        """See `ServerApi`. Replies with min_tokens are sampled in two parts."""
        s = request.sampling
        if not s.min_tokens:
            return await self._reply(request, weights, on_tokens)
        first = replace(request, sampling=replace(s, max_tokens=s.min_tokens, min_tokens=0))
        held = await self._reply(first, weights, on_tokens, without=ends_of(s, self.end_token_ids))
        if s.max_tokens == s.min_tokens:
            return _of_min_tokens(held, [])
        rest = replace(s, max_tokens=s.max_tokens - s.min_tokens, min_tokens=0)
        more = replace(request, prompt=(*request.prompt, *held.token_ids), sampling=rest)
        return _of_min_tokens(held, [await self._reply(more, weights, on_tokens)])

    async def scored(self, request: ScoreRequest, weights: int) -> TokenLogprobs:
        """See `ServerApi`. Of a prompt after which nothing is sampled, computed anew from its first token."""
        body = {
            "rid": f"{uuid.uuid4().hex}-score",
            "input_ids": list(request.token_ids),
            "extra_key": self._key(weights),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": request.top_k,
        }
        said = await self.calls.ask(SCORE, body)
        name, given = self.calls.url, request.token_ids[request.start :]
        with reading(name, SCORE):
            info = said["meta_info"]
            rows = info["input_token_logprobs"][request.start :]
            # 0 stands for the last id of the vocabulary, too, whose log-prob is the right one
            if len(rows) != len(given) or any(row[1] not in (token, 0) for row, token in zip(rows, given)):
                raise WhetError(
                    f"{name} told log-probs of {len(rows)} other tokens than the {len(given)} it was given"
                )
            top = info["input_top_logprobs"][request.start :] if request.top_k else []
            if request.top_k and len(top) != len(rows):
                raise WhetError(f"{name} told the likeliest tokens of {len(top)} of the {len(rows)} places")
            return TokenLogprobs(
                version=_number(info["weight_version"], name),
                logprobs=[finite(row[0], name) for row in rows],
                top=[
                    [(int(token), float(value)) for value, token, *_ in row[: request.top_k]] for row in top
                ],
            )

    async def take(self, update: WeightUpdate, engine: Taking) -> Metrics:
        """See `ServerApi`."""

        async def load(path: Path) -> None:
            """The phases: take requests back, load and name, forget what was cached, go on."""
            await engine.begin()
            await self.pause()
            told = {"model_path": str(path), "weight_version": str(update.version), "flush_cache": True}
            said = await self.calls.ask(LOAD, told)
            with reading(self.calls.url, LOAD):
                if not said["success"]:
                    raise WhetError(
                        f"{self.calls.url} did not load the weights: {words(said['message'], MOST_TOLD)}"
                    )
            await self.calls.ask(FLUSH)  # refused where something is still cached
            self._weights = update.version
            engine.arrived(update.version)
            await self.resume()

        return await through_folder(self.folder, update, engine, load)

    async def pause(self) -> None:
        """See `ServerApi`."""
        await self.calls.ask(PAUSE, {"mode": "retract"})

    async def resume(self) -> None:
        """See `ServerApi`."""
        await self.calls.ask(RESUME, {})

    async def place(self, away: frozenset[Part], *, was: frozenset[Part]) -> None:
        """See `ServerApi`. Nothing may be sampled meanwhile."""
        if away - was:
            await self.pause()
        away, was = away & self.is_.parts, was & self.is_.parts
        if more := _tags(away - was)[::-1]:
            await self.calls.ask(RELEASE, {"tags": more})
        if away != was:
            await self._label(away)
        if back := _tags(was - away):
            await self.calls.ask(TAKE, {"tags": back})

    async def _label(self, away: frozenset[Part]) -> None:
        """Name its weights by their version, or by what is away."""
        name = ASLEEP + " ".join(_tags(away)) if away else str(self._weights)
        await self.calls.ask(LABEL, {"new_version": name, "abort_all_requests": False})

    async def counts(self) -> tuple[int, int]:
        """See `ServerApi`. Tokens are counted at every step of the scheduler; requests when they end."""
        found = {"num_requests_total": 0, "realtime_tokens_total": 0}
        said = await self.calls.ask(METRICS)
        with reading(self.calls.url, METRICS):
            for m in _COUNT.finditer(said):
                if m["name"] in found:
                    found[m["name"]] += int(float(m["value"]))
        return found["num_requests_total"], found["realtime_tokens_total"]

    # -- one request

    async def _reply(
        self, request: Request, weights: int, on_tokens: OnTokens | None, *, without: Collection[int] = ()
    ) -> Completion:
        """without: tokens that are not sampled, and so end nothing."""
        ends = frozenset() if without else ends_of(request.sampling, self.end_token_ids)
        body = self._body(request, weights, ends, without)
        try:
            said = await (
                self.calls.ask(GENERATE, body) if on_tokens is None else self._streamed(body, on_tokens)
            )
            name = self.calls.url
            with reading(name, GENERATE):
                made = completion(said, request.sampling, ends=ends, penalised=bool(without), name=name)
                if self.routes is None:
                    return made
                tokens = len(request.prompt) + len(made.token_ids)
                told = said["meta_info"].get("routed_experts")
                return replace(made, experts=of_buffer(told, self.routes, tokens, name=name))
        except BaseException:
            await self.calls.tell(ABORT, {"rid": body["rid"]})
            raise

    def _body(
        self, request: Request, weights: int, ends: Collection[int], without: Collection[int]
    ) -> dict[str, Any]:
        s = request.sampling
        same = ("temperature", "top_p", "min_p", "repetition_penalty")
        held = {"logit_bias": {str(token): NEVER for token in sorted(without)}} if without else {}
        return {
            "rid": f"{uuid.uuid4().hex}-{request.id}",
            "input_ids": list(request.prompt),
            "extra_key": self._key(weights),
            "return_logprob": True,
            **({} if self.routes is None else {"return_routed_experts": True}),
            "sampling_params": {
                **{name: getattr(s, name) for name in same},
                **held,
                "n": 1,
                "top_k": s.top_k or -1,
                "max_new_tokens": s.max_tokens,
                # the position is a part of a random number's name; and 63 bits are what it takes
                "sampling_seed": seeds.key(s.key, len(request.prompt)) >> 1,
                "stop_token_ids": sorted(ends),
                "ignore_eos": not ends,
            },
        }

    async def _streamed(self, body: dict[str, Any], on_tokens: OnTokens) -> dict[str, Any]:
        """The answer that all events make together. Each has all tokens so far, the last one with what is known of
        them; or (--incremental-streaming-output) the new ones alone."""
        tokens: list[int] = []
        rows: list[Any] = []
        last: dict[str, Any] = {}
        async for last in self.calls.events(GENERATE, body | {"stream": True}):
            with reading(self.calls.url, GENERATE):
                info = last["meta_info"]
                count = info["completion_tokens"] - len(tokens)
                new = [*last["output_ids"][-count:]] if count else []
                rows += info["output_token_logprobs"][-count:] if count else []
            tokens += new
            if new:
                on_tokens(new)
        with reading(self.calls.url, GENERATE):
            info = last["meta_info"]
            whole = info.get("output_token_logprobs") or []
            return {
                "output_ids": tokens,
                "meta_info": info | {"output_token_logprobs": whole if len(whole) == len(tokens) else rows},
            }

    def _key(self, weights: int) -> str:
        """What was cached under other weights is never found."""
        return f"{self._run}-{weights}"


def _tags(parts: frozenset[Part]) -> list[str]:
    return [tag for part, tag in TAGS.items() if part in parts]


# ---------------------------------------------------------------- what it says


def completion(
    said: dict[str, Any], sampling: Sampling, *, ends: Collection[int], penalised: bool = False, name: str
) -> Completion:
    """A reply as whet has it. penalised: some tokens were held back. Raises WhetError for one that is not whole, or
    that ends at a token that ends no reply of this run."""
    info, tokens = said["meta_info"], said["output_ids"]
    reason = (info["finish_reason"] or {}).get("type")
    if reason not in ("stop", "length"):
        why = (info["finish_reason"] or {}).get("message") or ""
        raise WhetError(f"{name} ended a reply with {reason!r}; expected stop or length. {why}".rstrip())
    rows = info["output_token_logprobs"]
    if [row[1] for row in rows] != tokens:
        raise WhetError(
            f"{name} told log-probs of {len(rows)} other tokens than the {len(tokens)} that it sampled"
        )
    ended = bool(tokens) and tokens[-1] in ends
    if reason == "stop" and not ended:
        raise WhetError(
            f"{name} ended a reply at token {tokens[-1] if tokens else None}, which ends no reply of this run: the "
            "files of its model name another end token (eos_token_id); start it with those of the trained model"
        )
    told = [finite(row[0], name) for row in rows]
    return Completion(
        token_ids=tokens,
        logprobs=told if sampling.repetition_penalty == 1 and not penalised else None,
        sample_logprobs=_of_sampling(told, sampling),
        spans=_spans(info, name),
        finish_reason="stop" if ended else "length",
    )


def _of_sampling(told: list[float], sampling: Sampling) -> list[float] | None:
    """Under the distribution that was sampled; it is told from before the filters."""
    if sampling.temperature == 0:
        return [0.0] * len(told)
    return told if all(getattr(sampling, n) == getattr(PLAIN, n) for n in FILTERS) else None


def _of_min_tokens(held: Completion, rest: list[Completion]) -> Completion:
    """One reply of its part in which end tokens were held back, and of what came after. Its log-probs are not known."""
    parts = [held, *rest]
    told = [part.sample_logprobs for part in parts]
    spans = list(held.spans)
    for part in rest:
        for version, start, end in part.spans:
            begins = start + len(held.token_ids)
            if spans and spans[-1].version == version:
                begins = spans.pop().start
            spans.append(VersionSpan(version, begins, end + len(held.token_ids)))
    return Completion(
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=None,
        sample_logprobs=None if None in told else [value for values in told for value in values or ()],
        spans=tuple(spans),
        finish_reason=parts[-1].finish_reason,
        experts=_of_parts(parts),
    )


def _of_parts(parts: Sequence[Completion]) -> ExpertIds | None:
    """Each part has those of all tokens before it, too; a token keeps those that it was computed with first."""
    found = parts[0].experts
    for part in parts[1:]:
        if found is not None and part.experts is not None:
            found = np.concatenate((found, part.experts[len(found) :]))
    return found


def _spans(info: dict[str, Any], name: str) -> tuple[VersionSpan, ...]:
    """The versions of the tokens, from the reply itself: asked for later, a version may be another one."""
    return tuple(
        VersionSpan(_number(span["version"], name), span["start"], span["end"])
        for span in info.get("weight_versions") or []
    )


def _number(version: str, name: str) -> int:
    try:
        return int(version)
    except ValueError as error:
        raise WhetError(f"{name} sampled from weights that were not named by whet: {version}") from error
