"""A rollout engine that can only be asked over HTTP: a client of a server like SGLang's, see `servers`."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
from safetensors.torch import save_file

from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate
from whet.rollout.gate import Gate
from whet.rollout.requests import RequestError, check, check_score
from whet.types import (
    Completion,
    Receipt,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    WhetError,
    spans_of,
)

T = TypeVar("T")


class HttpEngine:
    """Who may ask when, and what becomes of a call that is given up."""

    def __init__(self, url: str, *, vocab: int, max_context: int, version: int = 0) -> None:
        self.url, self.vocab, self.max_context, self.version = url, vocab, max_context, version
        self.can = Capabilities(
            logprobs="unfiltered",
            stop_texts=False,
            penalties=True,
            images=False,
            in_flight_updates=True,
            reproducible="server",
        )
        self.gate = Gate(lambda: self.version)
        self.calls: set[asyncio.Task[Any]] = set()
        self.since = time.time()

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        check(request, vocab=self.vocab, max_context=self.max_context, decodes=False)
        async with self.gate.passing(request.least_version):
            return await self._owned(self.ask(request, on_tokens))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        for request in requests:
            check_score(request, vocab=self.vocab, max_context=self.max_context)
        async with self.gate.passing():
            return list(await self._owned(asyncio.gather(*map(self.scored, requests))))

    async def close(self) -> None:
        self.gate.close("the rollout engine was closed")
        for call in self.calls:
            call.cancel()

    async def ask(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        raise NotImplementedError

    async def scored(self, request: ScoreRequest) -> TokenLogprobs:
        raise NotImplementedError

    async def abort(self, rid: str) -> None:
        raise NotImplementedError

    async def _owned(self, work: Awaitable[T]) -> T:
        """The result, unless the engine is closed meanwhile."""
        call = asyncio.ensure_future(_awaited(work))
        self.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if self.gate.closed is not None and this is not None and not this.cancelling():
                raise WhetError(self.gate.closed) from None
            raise
        finally:
            self.calls.discard(call)

    async def post(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        events = [event async for event in self.events(path, body, method=method)]
        return events[-1]

    async def events(
        self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST"
    ) -> AsyncIterator[Any]:
        """Every server-sent event; or the one answer."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.request(method, self.url + path, json=body) as said,
        ):
            if said.status != 200:
                message = (await said.json())["message"]
                raise (RequestError if said.status == 400 else WhetError)(message)
            if said.content_type == "text/event-stream":
                async for line in said.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        if "message" in event:
                            raise WhetError(event["message"])
                        yield event
            elif said.content_type == "text/plain":
                lines = (line.split() for line in (await said.text()).splitlines())
                yield {name.partition(":")[2]: float(number) for name, number in lines}
            else:
                yield await said.json()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def known(values: list[float], sampling: Sampling, can: Capabilities) -> dict[str, list[float] | None]:
    """Both kinds of log-probs, from the one that such servers tell."""
    sampled = [0.0] * len(values) if sampling.temperature == 0 else values
    return {"logprobs": values if can.tells_logprobs(sampling) else None, "sample_logprobs": sampled}


def written(update: WeightUpdate, folder: str) -> None:
    save_file({name: t.contiguous() for name, t in update.named()}, Path(folder) / "model.safetensors")


class Sglang(HttpEngine):
    """Over a server like SGLang's, which tells the version of each event alone: every reply is streamed."""

    async def ask(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        s = request.sampling
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "stop_token_ids",
            "ignore_eos",
        )
        params = {name: getattr(s, name) for name in names} | {
            "max_new_tokens": s.max_tokens,
            "min_new_tokens": s.min_tokens,
            "sampling_seed": s.key,
        }
        body = {"rid": request.id, "input_ids": list(request.prompt), "sampling_params": params}
        versions: list[int] = []
        try:
            async for event in self.events("/generate", body | {"return_logprob": True, "stream": True}):
                if new := event["output_ids"][len(versions) :]:
                    versions += [int(event["meta_info"]["weight_version"])] * len(new)
                    if on_tokens is not None:
                        on_tokens(new)
        except BaseException:
            await self.abort(request.id)
            raise
        info = event["meta_info"]
        if info["finish_reason"]["type"] == "abort":
            raise WhetError(f"the server aborted request {request.id}")
        return Completion(
            token_ids=event["output_ids"],
            **known([row[0] for row in info["output_token_logprobs"]], s, self.can),
            spans=spans_of(versions),
            finish_reason=info["finish_reason"]["type"],
        )

    async def abort(self, rid: str) -> None:
        await self.post("/abort_request", {"rid": rid})

    async def scored(self, request: ScoreRequest) -> TokenLogprobs:
        params = {"max_new_tokens": 0, "temperature": request.temperature}
        body = {"input_ids": list(request.token_ids), "sampling_params": params, "return_logprob": True}
        info = (await self.post("/generate", body | {"top_logprobs_num": request.top_k}))["meta_info"]
        top = info["input_top_logprobs"][request.start :]
        return TokenLogprobs(
            version=int(info["weight_version"]),
            logprobs=[row[0] for row in info["input_token_logprobs"][request.start :]],
            top=[[(token, value) for value, token, _ in row] for row in top] if request.top_k else [],
        )

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(written, update, folder)
            body = {"model_path": folder, "weight_version": str(update.version)}
            said = await self.post("/update_weights_from_disk", body)
        if not said["success"]:
            raise WhetError(said["message"])
        await self.post("/continue_generation")
        self.version = update.version
        self.gate.updated()
        return Receipt(self.url, update.version, said["message"])

    async def pause(self, finish: bool) -> None:
        if finish:
            await self.gate.pause(True)
        else:
            self.gate.entry.shut()
        await self.post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self.post("/continue_generation")
        self.gate.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        tags = [tag for part, tag in (("weights", "weights"), ("cache", "kv_cache")) if part in what]
        path = "/resume_memory_occupation" if device == "gpu" else "/release_memory_occupation"
        await self.post(path, {"tags": tags})

    async def health(self) -> Health:
        counts = await self.post("/metrics", method="GET")
        requests, tokens = counts["num_requests_total"], counts["generation_tokens_total"]
        return Health(since=self.since, requests=int(requests), tokens=int(tokens))
