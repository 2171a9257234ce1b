"""Two small servers with the HTTP interfaces of vLLM and SGLang, each around a `NativeEngine` in a thread."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from backends.transcripts import read
from whet.rollout.engine import OnTokens, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requests import RequestError
from whet.sync.manifest import describe
from whet.types import Completion, Request, Sampling, ScoreRequest, TokenLogprobs, VersionSpan, WhetError

Handler = Callable[[Any], Awaitable[Any]]


class Server:
    """What both have: a thread with an event loop, requests by their ids, and weights from a file."""

    def __init__(self, engine: NativeEngine, *, port: int = 0) -> None:
        self.engine, self.port = engine, port
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
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._up.set()

    def _answering(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(http: web.Request) -> web.StreamResponse:
            body = {**http.query, **(await http.json() if http.can_read_body else {}), "http": http}
            try:
                said = await handler(body)
            except RequestError as error:
                return self.refusal(error, 400)
            except WhetError as error:
                return self.refusal(error, 500)
            return said if isinstance(said, web.StreamResponse) else web.json_response(said or {})

        return answer

    def refusal(self, error: WhetError, status: int) -> web.Response:
        return web.json_response({"message": str(error)}, status=status)

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
        await said.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
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
    """vLLM 0.32, as it was recorded (`backends.transcripts`): every answer is a recorded one, with other values."""

    def __init__(self, engine: NativeEngine, *, port: int = 0) -> None:
        self.recorded = read()
        self.label = "default"
        self.base: dict[str, torch.Tensor] = {}
        """Weights as the server started with them, once adapters are loaded; and whether it can have any."""
        self.adapters = False
        self.asked: list[tuple[str, Any]] = []
        """Every call: path and body."""
        self.fails: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        """What is done instead of a call, by its path: faults are injected here."""
        super().__init__(engine, port=port)

    def routes(self) -> dict[str, Handler]:
        own = {
            "/version": self.version,
            "/openapi.json": self.openapi,
            "/server_info": self.server_info,
            "/inference/v1/generate": self.generate,
            "/abort_requests": self.abort_requests,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.collective_rpc,
            "/v1/load_lora_adapter": self.load_lora_adapter,
            "/update_weight_version": self.update_weight_version,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/metrics": self.metrics,
        }
        return {path: self._noting(path, handler) for path, handler in own.items()}

    def _noting(self, path: str, handler: Handler) -> Handler:
        async def noted(body: dict[str, Any]) -> Any:
            self.asked.append((path, {k: v for k, v in body.items() if k != "http"}))
            return await self.fails.get(path, handler)(body)

        return noted

    def answer(self, name: str) -> Any:
        return copy.deepcopy(self.recorded[name]["answer"])

    def refusal(self, error: WhetError, status: int) -> web.Response:
        said = self.answer("too_long" if status == 400 else "lost_folder")
        said["error"]["message"] = str(error)
        return web.json_response(said, status=status)

    async def version(self, body: dict[str, Any]) -> Any:
        return self.answer("version")

    async def openapi(self, body: dict[str, Any]) -> Any:
        said = self.answer("openapi")
        if self.adapters:
            said["paths"]["/v1/load_lora_adapter"] = {}
        return said

    async def server_info(self, body: dict[str, Any]) -> Any:
        said = self.answer("server_info")
        said["vllm_config"]["model_config"]["max_model_len"] = self.engine.max_context + 1
        return said

    async def generate(self, body: dict[str, Any]) -> Any:
        given = dict(body["sampling_params"])
        assert body.get("model") == ("policy" if self.base else None)
        rid = f"generate-tokens-{body['request_id']}"
        if (top := given.pop("prompt_logprobs", None)) is not None:
            return await self._score(rid, body["token_ids"], top)
        assert (given.pop("n"), given.pop("logprobs")) == (1, 0)
        ends = given.pop("stop_token_ids")
        # every end token comes with the request, whatever the model's own are
        self.engine.end_token_ids = frozenset()
        if ends:
            given["ignore_eos"] = False
        values = {k: v for k, v in given.items() if k != "seed"}
        sampling = Sampling(key=given["seed"], stop_token_ids=tuple(ends), **values)
        request = Request(id=rid, session="", prompt=tuple(body["token_ids"]), sampling=sampling)
        if not body.get("stream"):
            said = self.answer("generate")
            done = await self.ask(request)
            self._choose(said, done.token_ids if done else [], done, sampling)
            said["request_id"] = rid
            return said
        return await self.stream(
            body["http"],
            request,
            lambda tokens: self._event(rid, tokens, None, sampling),
            lambda done: self._event(rid, [], done, sampling, ends=True),
        )

    def _event(
        self, rid: str, tokens: list[int], done: Completion | None, sampling: Sampling, *, ends: bool = False
    ) -> Any:
        """One chunk. The log-probs are those of the last one, which are known with the completion."""
        chunks = [line for line in self.answer("stream").splitlines() if line.startswith("data: {")]
        said = json.loads(chunks[-1 if ends else 0].removeprefix("data: "))
        said["request_id"] = rid
        self._choose(said, tokens, done, sampling, ends=ends)
        if done is not None:
            said["choices"][0]["logprobs"] = {"content": _rows(done.token_ids, told(done, sampling))}
        return said

    def _choose(
        self, said: Any, tokens: list[int], done: Completion | None, sampling: Sampling, *, ends: bool = True
    ) -> None:
        choice = said["choices"][0]
        choice["token_ids"] = tokens
        choice["logprobs"] = {"content": _rows(done.token_ids, told(done, sampling)) if done else []}
        choice["finish_reason"] = (done.finish_reason if done else "abort") if ends else None
        choice["weight_versions"] = self._versions(done.spans) if done else None

    def _versions(self, spans: tuple[VersionSpan, ...]) -> list[dict[str, Any]]:
        return [{"version": str(s.version), "start": s.start, "end": s.end} for s in spans]

    async def _score(self, rid: str, ids: list[int], top: int) -> Any:
        found = await self.scored(ids, temperature=1.0, top=top)
        rows: list[Any] = [None]
        for token, logp, likely in zip(ids[1:], found.logprobs, found.top or [[]] * len(found.logprobs)):
            row = {str(token): {"logprob": logp, "rank": top + 1, "decoded_token": None}}
            row |= {
                str(t): {"logprob": v, "rank": n + 1, "decoded_token": None}
                for n, (t, v) in enumerate(likely)
            }
            rows.append(row)
        said = self.answer("score")
        said |= {"request_id": rid, "prompt_logprobs": rows}
        said["choices"][0]["weight_versions"] = [{"version": str(found.version), "start": 0, "end": 1}]
        return said

    async def abort_requests(self, body: dict[str, Any]) -> Any:
        for rid in body["request_ids"]:
            self.abort(rid)
        return self.answer("abort")

    async def pause(self, body: dict[str, Any]) -> Any:
        await self.engine.pause({"wait": True, "keep": False}[body["mode"]])
        return self.answer("pause")

    async def resume(self, body: dict[str, Any]) -> Any:
        await self.engine.resume()
        return self.answer("resume")

    async def collective_rpc(self, body: dict[str, Any]) -> Any:
        """Takes what it finds, and does not say what it lacks."""
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        found = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
        own = dict(self.engine.module.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                if name in found:
                    parameter.copy_(found[name])
        tensors = iter([(name, p.detach().clone()) for name, p in own.items()])
        await self.engine.update_weights(WeightUpdate(version=self.engine.version, tensors=tensors))
        await self.engine.pause(False)
        return {"results": [None]}

    async def load_lora_adapter(self, body: dict[str, Any]) -> Any:
        """W + B A alpha / r for every target; requests have to name the adapters from then on."""
        assert (body["lora_name"], body["load_inplace"]) == ("policy", True)
        folder = Path(body["lora_path"])
        told = json.loads((folder / "adapter_config.json").read_text())
        found = load_file(folder / "adapter_model.safetensors")
        own = dict(self.engine.module.named_parameters())
        self.base = self.base or {name: p.detach().clone() for name, p in own.items()}
        weights = {name: w.clone() for name, w in self.base.items()}
        for target in told["target_modules"]:
            a, b = (found[f"base_model.model.{target}.lora_{x}.weight"] for x in "AB")
            assert a.shape[0] == told["r"]
            weights[f"{target}.weight"] += told["lora_alpha"] / told["r"] * b @ a
        tensors = iter(weights.items())
        await self.engine.update_weights(WeightUpdate(version=self.engine.version, tensors=tensors))
        await self.engine.pause(False)
        return web.Response(text="Success: LoRA adapter 'policy' added successfully.")

    async def update_weight_version(self, body: dict[str, Any]) -> Any:
        self.engine.version = int(body["new_version"])
        return self.answer("label") | {"new_version": body["new_version"]}

    async def reset_prefix_cache(self, body: dict[str, Any]) -> Any:
        return self.answer("reset")

    async def sleep(self, body: dict[str, Any]) -> Any:
        await self.engine.place("cpu")
        return self.answer("sleep")

    async def wake_up(self, body: dict[str, Any]) -> Any:
        names = {"weights": "weights", "kv_cache": "cache"}
        await self.engine.place("gpu", frozenset({names[body["tags"]]}))  # type: ignore[arg-type]
        return self.answer("wake_cache")

    async def metrics(self, body: dict[str, Any]) -> web.Response:
        """Totals: requests that ended by length stand for all."""
        health = await self.engine.health()
        values = {
            'request_success_total{engine="0",finished_reason="length"': health.requests,
            "generation_tokens_total": health.tokens,
        }
        lines = []
        for line in self.answer("metrics").splitlines():
            named = next((v for k, v in values.items() if line.startswith(f"vllm:{k}")), 0)
            lines.append(f"{line.rpartition(' ')[0]} {float(named)}")
        return web.Response(text="\n".join(lines) + "\n")


def _rows(tokens: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    rows = [{"token_id": t, "logprob": v, "rank": 1} for t, v in zip(tokens, logprobs)]
    return [row | {"top_logprobs": [row]} for row in rows]


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
