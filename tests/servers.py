"""Two small servers shaped like the HTTP interfaces of vLLM and SGLang, each around a `NativeEngine` in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load_file

from whet.rollout.engine import OnTokens, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requests import RequestError
from whet.sync.manifest import describe
from whet.types import Completion, Request, Sampling, ScoreRequest, TokenLogprobs, WhetError

Handler = Callable[[Any], Awaitable[Any]]


class Server:
    """What both have: a thread with an event loop, requests by their ids, and weights from a file."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        engine.beat = lambda what: time.sleep(0.002)  # a reply takes long enough to be interrupted
        self.running: dict[str, asyncio.Task[Completion]] = {}
        self.aborted: set[str] = set()
        self.staged: Path | None = None
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def routes(self) -> dict[str, Handler]:
        raise NotImplementedError

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        await self.engine.close()  # what still runs ends
        await self._runner.cleanup()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        for path, handler in self.routes().items():
            app.router.add_route("*", path, self._answering(handler))
        self._runner = web.AppRunner(app, shutdown_timeout=5.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._up.set()

    def _answering(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(http: web.Request) -> web.StreamResponse:
            body = {**http.query, **(await http.json() if http.can_read_body else {}), "http": http}
            try:
                said = await handler(body)
            except RequestError as error:
                return web.json_response({"message": str(error)}, status=400)
            except WhetError as error:
                return web.json_response({"message": str(error)}, status=500)
            return said if isinstance(said, web.StreamResponse) else web.json_response(said or {})

        return answer

    async def ask(self, request: Request, on_tokens: OnTokens | None = None) -> Completion | None:
        """None: it was aborted."""
        if request.id in self.aborted:
            return None
        task = self.running[request.id] = asyncio.ensure_future(self.engine.generate(request, on_tokens))
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            del self.running[request.id]

    def abort(self, rid: str) -> None:
        self.aborted.add(rid)
        if (task := self.running.get(rid)) is not None:
            task.cancel()

    async def stream(
        self, http: web.Request, request: Request, chunk: Callable[[list[int]], Any], last: Callable[..., Any]
    ) -> web.StreamResponse:
        """Server-sent events: of each batch of tokens as they come, and of the completion."""
        said = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        queue: asyncio.Queue[Any] = asyncio.Queue()
        work = asyncio.ensure_future(self.ask(request, lambda tokens: queue.put_nowait(chunk(tokens))))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        await said.prepare(http)
        while (event := await queue.get()) is not None:
            await said.write(f"data: {json.dumps(event)}\n\n".encode())
        try:
            end = last(await work)
        except WhetError as error:
            end = {"message": str(error)}
        await said.write(f"data: {json.dumps(end)}\n\n".encode())
        return said

    async def load(self, path: Path, version: int) -> str:
        """The checksum of what was loaded."""
        tensors = load_file(path / "model.safetensors")
        await self.engine.update_weights(WeightUpdate(version=version, tensors=iter(tensors.items())))
        return describe(version, self.engine.module.named_parameters()).digest

    async def scored(self, ids: list[int], *, temperature: float, top: int) -> TokenLogprobs:
        request = ScoreRequest(token_ids=tuple(ids), start=1, temperature=temperature, top_k=top)
        return (await self.engine.score([request]))[0]


def told(done: Completion, sampling: Sampling) -> list[float]:
    """Servers tell one log-prob a token: after filters, but of greedy replies that of the model."""
    values = done.logprobs if sampling.temperature == 0 else done.sample_logprobs
    assert values is not None
    return values


class VllmServer(Server):
    """POST /inference/v1/generate and its neighbours."""

    def routes(self) -> dict[str, Handler]:
        return {
            "/inference/v1/generate": self.generate,
            "/inference/v1/abort_requests": self.abort_requests,
            "/pause": self.pause,
            "/resume": self.resume,
            "/start_weight_update": self.start_weight_update,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_weight_update,
            "/weight_checker": self.weight_checker,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/metrics": self.metrics,
        }

    async def generate(self, body: dict[str, Any]) -> Any:
        given = dict(body["sampling_params"])
        if (top := given.pop("prompt_logprobs", None)) is not None:
            found = await self.scored(body["token_ids"], temperature=given["temperature"], top=top)
            rows = [
                [{"token_id": t, "logprob": v} for t, v in ((token, logp), *likely)]
                for token, logp, likely in zip(
                    body["token_ids"][1:], found.logprobs, found.top or [[]] * len(found.logprobs)
                )
            ]
            return {"prompt_logprobs": [None, *rows], "weight_version": found.version}
        sampling = Sampling(
            key=given.pop("seed"), **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        )
        request = Request(
            id=body["request_id"], session="", prompt=tuple(body["token_ids"]), sampling=sampling
        )
        if not body.get("stream"):
            return self._choice(await self.ask(request), sampling)
        return await self.stream(
            body["http"],
            request,
            lambda tokens: {"choices": [{"token_ids": tokens}]},
            lambda done: self._choice(done, sampling),
        )

    def _choice(self, done: Completion | None, sampling: Sampling) -> dict[str, Any]:
        if done is None:
            return {"choices": [{"token_ids": [], "finish_reason": "abort"}]}
        rows = [{"token_id": t, "logprob": v} for t, v in zip(done.token_ids, told(done, sampling))]
        return {
            "choices": [
                {
                    "token_ids": done.token_ids,
                    "logprobs": {"content": rows},
                    "weight_versions": [span._asdict() for span in done.spans],
                    "finish_reason": done.finish_reason,
                }
            ]
        }

    async def abort_requests(self, body: dict[str, Any]) -> None:
        for rid in body["request_ids"]:
            self.abort(rid)

    async def pause(self, body: dict[str, Any]) -> None:
        await self.engine.pause({"wait": True, "keep": False}[body["mode"]])

    async def resume(self, body: dict[str, Any]) -> None:
        await self.engine.resume()

    async def start_weight_update(self, body: dict[str, Any]) -> None:
        self.staged = None

    async def update_weights(self, body: dict[str, Any]) -> None:
        self.staged = Path(body["update_info"]["path"])

    async def finish_weight_update(self, body: dict[str, Any]) -> None:
        assert self.staged is not None
        await self.load(self.staged, body["weight_version"])

    async def weight_checker(self, body: dict[str, Any]) -> dict[str, str]:
        return {"checksum": describe(0, self.engine.module.named_parameters()).digest}

    async def sleep(self, body: dict[str, Any]) -> None:
        await self.engine.place("cpu")

    async def wake_up(self, body: dict[str, Any]) -> None:
        names = {"weights": "weights", "kv_cache": "cache"}
        await self.engine.place("gpu", frozenset({names[body["tags"]]}))  # type: ignore[arg-type]

    async def metrics(self, body: dict[str, Any]) -> web.Response:
        health = await self.engine.health()
        lines = {"request_success_total": health.requests, "generation_tokens_total": health.tokens}
        return web.Response(text="".join(f"vllm:{name} {float(x)}\n" for name, x in lines.items()))


class SglangServer(Server):
    """POST /generate and its neighbours."""

    def routes(self) -> dict[str, Handler]:
        return {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
            "/metrics": self.metrics,
        }

    async def generate(self, body: dict[str, Any]) -> Any:
        given = dict(body["sampling_params"])
        if given["max_new_tokens"] == 0:
            top = body["top_logprobs_num"]
            found = await self.scored(body["input_ids"], temperature=given["temperature"], top=top)
            pairs = zip(found.logprobs, body["input_ids"][1:])
            rows = [None, *([[v, t, None] for t, v in likely] for likely in found.top)]
            said = {
                "input_token_logprobs": [
                    [None, body["input_ids"][0], None],
                    *([v, t, None] for v, t in pairs),
                ]
            }
            return {"meta_info": {**said, "input_top_logprobs": rows, "weight_version": str(found.version)}}
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "key"}
        values = {names.get(k, k): tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        sampling = Sampling(**values)
        request = Request(id=body["rid"], session="", prompt=tuple(body["input_ids"]), sampling=sampling)
        so_far: list[int] = []

        def chunk(tokens: list[int]) -> dict[str, Any]:
            so_far.extend(tokens)
            return {"output_ids": list(so_far), "meta_info": {"weight_version": str(self.engine.version)}}

        def last(done: Completion | None) -> dict[str, Any]:
            if done is None:
                return {"output_ids": so_far, "meta_info": {"finish_reason": {"type": "abort"}}}
            rows = [[v, t, None] for t, v in zip(done.token_ids, told(done, sampling))]
            info = {"output_token_logprobs": rows, "weight_version": str(done.spans[-1].version)}
            return {
                "output_ids": done.token_ids,
                "meta_info": {**info, "finish_reason": {"type": done.finish_reason}},
            }

        assert body["stream"], "this double only streams"
        return await self.stream(body["http"], request, chunk, last)

    async def abort_request(self, body: dict[str, Any]) -> None:
        self.abort(body["rid"])

    async def pause_generation(self, body: dict[str, Any]) -> None:
        assert body["mode"] == "in_place"
        await self.engine.pause(False)

    async def continue_generation(self, body: dict[str, Any]) -> None:
        await self.engine.resume()

    async def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            checksum = await self.load(Path(body["model_path"]), int(body["weight_version"]))
        except WhetError as error:
            return {"success": False, "message": str(error)}
        return {"success": True, "message": checksum}

    async def release_memory_occupation(self, body: dict[str, Any]) -> None:
        await self.engine.place("cpu", _parts(body))

    async def resume_memory_occupation(self, body: dict[str, Any]) -> None:
        await self.engine.place("gpu", _parts(body))

    async def metrics(self, body: dict[str, Any]) -> web.Response:
        health = await self.engine.health()
        return web.Response(
            text=f"sglang:num_requests_total {health.requests}\nsglang:generation_tokens_total {health.tokens}\n"
        )


def _parts(body: dict[str, Any]) -> frozenset[Any]:
    return frozenset({"weights": "weights", "kv_cache": "cache"}[tag] for tag in body["tags"])
