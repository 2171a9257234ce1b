"""Answers of inference servers, each exchanged for others: what engines over HTTP make of them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from asking import request
from fuzz.case import Case
from fuzz.mutate import as_json, changed
from servers import OpenAIServer, Server, SglangServer, VllmServer
from serving import LIMITS
from tiny import VOCAB, tiny_model
from whet.models import kernels
from whet.rollout.http.calls import Call, Calls
from whet.rollout.http.openai import OpenAIApi
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.sglang import SglangApi
from whet.rollout.http.vllm import VllmApi
from whet.rollout.native.engine import NativeEngine
from whet.types import Completion, Sampling, ScoreRequest

END, CONTEXT, MOST = 1, 64, 6
PROMPT = (3, 4, 5)


def _vllm(calls: Any) -> HttpEngine:
    folder: Any = SimpleNamespace(adapters=False)
    api = VllmApi(calls, folder, max_context=CONTEXT, end_token_ids=[END])
    return HttpEngine(api, calls, vocab=VOCAB, max_context=CONTEXT)


def _sglang(calls: Any) -> HttpEngine:
    folder: Any = SimpleNamespace(adapters=False)
    api = SglangApi(calls, folder, max_context=CONTEXT, end_token_ids=[END])
    return HttpEngine(api, calls, vocab=VOCAB, max_context=CONTEXT)


def _openai(calls: Any) -> HttpEngine:
    nothing: Any = None
    api = OpenAIApi(calls, model=None, ops=nothing, canary=nothing, end_token_ids=[END], asked=None)
    return HttpEngine(api, calls, vocab=VOCAB, max_context=CONTEXT)


KINDS: Mapping[str, tuple[Callable[[NativeEngine], Server], Callable[[Any], HttpEngine]]] = {
    "vllm": (VllmServer, _vllm),
    "sglang": (SglangServer, _sglang),
    "openai": (OpenAIServer, _openai),
}


async def story(engine: HttpEngine) -> None:
    """Everything that an engine asks outside of a sync of weights. AssertionError where it takes what cannot be."""
    await engine.open()
    given: list[int] = []
    for on_tokens in (None, given.extend):
        done = await engine.generate(request(PROMPT, Sampling(max_tokens=MOST)), on_tokens)
        check(done)
    told = (await engine.score([ScoreRequest(token_ids=(*PROMPT, 6), start=1, top_k=2)]))[0]
    assert len(told.logprobs) == len(told.top) == len(PROMPT)
    assert all(type(x) is float and -9999 < x <= 0.01 for x in told.logprobs)
    health = await engine.health()
    assert type(health.requests) is type(health.tokens) is int


def check(done: Completion) -> None:
    """It is one that a trainer can learn from."""
    count = len(done.token_ids)
    assert 1 <= count <= MOST
    assert all(type(token) is int and 0 <= token < VOCAB for token in done.token_ids)
    assert len(done.versions) == count
    for told in (done.logprobs, done.sample_logprobs):
        assert told is None or (len(told) == count and all(math.isfinite(x) and x <= 0.01 for x in told))


class Recorder(Calls):
    """Keeps every answer of a server, in order."""

    def __init__(self, url: str) -> None:
        super().__init__(url, limits=LIMITS)
        self.kept: list[Any] = []

    async def ask(self, call: Call, body: Any = None, query: Any = None) -> Any:
        self.kept.append(await super().ask(call, body, query))
        return deepcopy(self.kept[-1])

    async def events(self, call: Call, body: Any) -> Any:
        events: list[Any] = []
        self.kept.append(events)
        async for event in super().events(call, body):
            events.append(deepcopy(event))
            yield event


class Told:
    """Gives the answers that it has, in order, whatever is asked."""

    url, limits, ending = "http://127.0.0.1:1", LIMITS, False

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    async def ask(self, call: Call, body: Any = None, query: Any = None) -> Any:
        return self.answers.pop(0)

    async def events(self, call: Call, body: Any) -> AsyncIterator[Any]:
        found = self.answers.pop(0)
        for event in found if isinstance(found, list) else [found]:
            yield event

    async def tell(self, call: Call, body: Any) -> None:
        pass


@cache
def recorded(kind: str) -> list[Any]:
    """The answers of a good server to `story`."""
    serve, make = KINDS[kind]
    model = tiny_model(layers=1)
    server = serve(NativeEngine(model, kernels.load("auto"), end_token_ids=[END], max_context=CONTEXT))
    calls = Recorder(server.url)

    async def record() -> None:
        try:
            await story(make(calls))
        finally:
            await calls.close()

    try:
        asyncio.run(record())
    finally:
        server.stop()
    return calls.kept


def make_server(random: Random) -> Case:
    """The name of the file is the kind of server. Answers are exchanged one by one, so that others come first."""
    kind = random.choice(sorted(KINDS))
    answers = deepcopy(recorded(kind))
    at = random.randrange(len(answers))
    answers[at] = changed(random, [answers[at]])
    answers[at] = answers[at][0] if isinstance(answers[at], list) and len(answers[at]) == 1 else answers[at]
    return Case({kind: as_json(answers)}, kind)


def read_server(folder: Path) -> None:
    (path,) = folder.iterdir()
    calls: Any = Told(json.loads(path.read_bytes()))
    asyncio.run(story(KINDS[path.name][1](calls)))


def good(kind: str) -> bytes:
    return as_json(recorded(kind))
