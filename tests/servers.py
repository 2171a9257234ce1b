"""Small servers with the HTTP interfaces of vLLM, SGLang and OpenAI, each around a `NativeEngine` in a thread."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file

from backends.transcripts import read
from on_thread import OnThread
from whet.rollout.engine import OnTokens, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requests import RequestError
from whet.types import (
    Completion,
    ExpertIds,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    VersionSpan,
    WhetError,
)

Handler = Callable[[Any], Awaitable[Any]]

READ = {"/version", "/openapi.json", "/server_info", "/metrics", "/model_info", "/v1/models"}
"""Paths that are asked with GET; servers answer 405 to another method than a path's own."""


class Server(OnThread):
    """What all have: a thread with an event loop, requests by their ids, weights from a file, and faults."""

    def __init__(self, engine: NativeEngine, *, port: int = 0) -> None:
        self.engine, self.port = engine, port
        engine.beat = lambda what: time.sleep(0.002)  # a reply takes long enough to be interrupted
        self.running: dict[str, asyncio.Task[Completion]] = {}
        self.aborted: set[str] = set()
        self.asked: list[tuple[str, Any]] = []
        """Every call: path and body."""
        self.fails: dict[str, Handler] = {}
        """What is done instead of a call, by its path: faults are injected here."""
        self.keep: Callable[[int, str], bool] = lambda number, name: True
        """Which tensors a load takes, by number and name. It says in any case that all is well."""
        self.names = True
        """It says of which version its weights are."""
        self.stale: NativeEngine | None = None
        """Samples in the place of `engine`, from an old cache."""
        self.hangs = False
        """Nothing is answered."""
        self.slow_s = 0.0
        """Before each answer."""
        self.holds = False
        """Replies are kept back, unless they are aborted."""
        self.eos: frozenset[int] = frozenset()
        """End tokens in the files of its model."""
        self.url = ""
        self.begin()

    def routes(self) -> dict[str, Handler]:
        raise NotImplementedError

    async def _end(self) -> None:
        self._ended.set()
        await self.engine.close()  # what still runs ends
        await self._runner.cleanup()

    async def _start(self) -> None:
        self._ended = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        for path, handler in self.routes().items():
            method = "GET" if path in READ else "POST"
            app.router.add_route(method, path, self._answering(self._noting(path, handler)))
        self._runner = web.AppRunner(app, shutdown_timeout=5.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._up.set()

    def _noting(self, path: str, handler: Handler) -> Handler:
        async def noted(body: dict[str, Any]) -> Any:
            self.asked.append((path, {k: v for k, v in body.items() if k != "http"}))
            if self.hangs:
                await self._ended.wait()
            if self.slow_s:
                await asyncio.sleep(self.slow_s)
            return await self.fails.get(path, handler)(body)

        return noted

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
        engine = self.stale or self.engine
        task = self.running[request.id] = asyncio.ensure_future(engine.generate(request, on_tokens))
        try:
            done = await task
            while self.holds and request.id not in self.aborted:
                await asyncio.sleep(0.005)
            return None if request.id in self.aborted else done
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
        try:
            while (event := await queue.get()) is not None:
                await said.write(f"data: {json.dumps(event)}\n\n".encode())
        except ConnectionError:  # whoever asked has gone away
            self.abort(request.id)
            raise
        try:
            end = last(await work)
        except WhetError as error:
            end = {"message": str(error)}
        await said.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
        return said

    async def load(self, path: Path) -> None:
        """Takes what it finds, and does not say what it lacks."""
        assert not self.engine.away, "it sleeps"
        found = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
        if not found:
            raise WhetError(f"{path} has no weights")
        own = dict(self.engine.module.named_parameters())
        with torch.no_grad():
            for number, (name, parameter) in enumerate(own.items()):
                if name in found and self.keep(number, name):
                    parameter.copy_(found[name])
        tensors = iter([(name, p.detach().clone()) for name, p in own.items()])
        await self.engine.update_weights(WeightUpdate(version=self.engine.version, tensors=tensors))
        await self.engine.pause(False)

    def label(self, version: str) -> None:
        """Name the weights."""
        if self.names:
            self.engine.version = int(version)
            if self.stale is not None:
                self.stale.version = int(version)

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
        self.base: dict[str, torch.Tensor] = {}
        """Weights as the server started with them, once adapters are loaded; and whether it can have any."""
        self.adapters = False
        self.sleeps = True
        """It was started with --enable-sleep-mode."""
        self.rejects = False
        """Since 0.33 a pause that waits for replies (`wait`) lets no request in until it ends."""
        super().__init__(engine, port=port)

    def routes(self) -> dict[str, Handler]:
        return {
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
        config = said["vllm_config"]["model_config"]
        config |= {"max_model_len": self.engine.max_context + 1, "enable_sleep_mode": self.sleeps}
        tells = self.engine.runner.routes is not None
        said["vllm_config"]["aux_output_config"] = {"enable_return_routed_experts": tells}
        return said

    async def generate(self, body: dict[str, Any]) -> Any:
        given = dict(body["sampling_params"])
        assert body.get("model") == ("policy" if self.base else None)
        if self.rejects:
            return self.refusal(WhetError("Generation is paused. Please retry after it resumes."), 503)
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
        if done is not None and done.experts is not None:  # --enable-return-routed-experts
            np.save(file := BytesIO(), done.experts)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()

    def _versions(self, spans: tuple[VersionSpan, ...]) -> list[dict[str, Any]]:
        return [{"version": str(s.version), "start": s.start, "end": s.end} for s in spans]

    async def _score(self, rid: str, ids: list[int], top: int) -> Any:
        found = await self.scored(ids, temperature=1.0, top=top)
        rows: list[Any] = [None, *by_ids(ids[1:], found, top=top)]
        said = self.answer("score")
        said |= {"request_id": rid, "prompt_logprobs": rows}
        said["choices"][0]["weight_versions"] = [{"version": str(found.version), "start": 0, "end": 1}]
        return said

    async def abort_requests(self, body: dict[str, Any]) -> Any:
        for rid in body["request_ids"]:
            self.abort(rid)
        return self.answer("abort")

    async def pause(self, body: dict[str, Any]) -> Any:
        self.rejects = body["mode"] == "wait"
        await self.engine.pause(self.rejects)
        return self.answer("pause")

    async def resume(self, body: dict[str, Any]) -> Any:
        self.rejects = False
        await self.engine.resume()
        return self.answer("resume")

    async def collective_rpc(self, body: dict[str, Any]) -> Any:
        assert body["method"] == "reload_weights"
        await self.load(Path(body["kwargs"]["weights_path"]))
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
        for number, target in enumerate(told["target_modules"]):
            if not self.keep(number, target):
                continue
            a, b = (found[f"base_model.model.{target}.lora_{x}.weight"] for x in "AB")
            assert a.shape[0] == told["r"]
            weights[f"{target}.weight"] += told["lora_alpha"] / told["r"] * b @ a
        tensors = iter(weights.items())
        await self.engine.update_weights(WeightUpdate(version=self.engine.version, tensors=tensors))
        await self.engine.pause(False)
        return web.Response(text="Success: LoRA adapter 'policy' added successfully.")

    async def update_weight_version(self, body: dict[str, Any]) -> Any:
        self.label(body["new_version"])
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


def _buffer(experts: ExpertIds) -> str:
    """The bare numbers, as SGLang sends them (--enable-return-routed-experts)."""
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def _rows(tokens: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    rows = [{"token_id": t, "logprob": v, "rank": 1} for t, v in zip(tokens, logprobs)]
    return [row | {"top_logprobs": [row]} for row in rows]


class SglangServer(Server):
    """SGLang as the source of 0.5.23 has it, with --skip-tokenizer-init. Nothing of it was recorded."""

    def __init__(self, engine: NativeEngine, *, port: int = 0) -> None:
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "max_req_input_len": engine.max_context + 1,
            "skip_tokenizer_init": True,
            "enable_metrics": True,
            "speculative_algorithm": None,
            "disaggregation_mode": "null",
            "preferred_sampling_params": None,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            "enable_deterministic_inference": True,
            "enable_return_routed_experts": engine.runner.routes is not None,
        }
        self.waiting = False
        """It is paused, and its requests are in the queue (retract)."""
        self.named = "default"
        super().__init__(engine, port=port)

    def routes(self) -> dict[str, Handler]:
        return {
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weight_version": self.update_weight_version,
            "/flush_cache": self.flush_cache,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
            "/metrics": self.metrics,
        }

    def refusal(self, error: WhetError, status: int) -> web.Response:
        return web.json_response({"error": {"message": str(error)}}, status=status)

    async def server_info(self, body: dict[str, Any]) -> Any:
        return self.info

    async def model_info(self, body: dict[str, Any]) -> Any:
        return {"is_generation": True, "weight_version": self.named}

    def label(self, version: str) -> None:
        self.named = version
        if version.isdecimal():
            super().label(version)

    async def generate(self, body: dict[str, Any]) -> Any:
        given = dict(body["sampling_params"])
        if any(running.startswith(body["rid"]) for running in self.running):
            raise RequestError(f"Duplicate request ID detected: {body['rid']}")
        if given["max_new_tokens"] == 0:
            return await self._score(body)
        if given.pop("min_new_tokens", 0):
            raise RequestError("min_new_tokens is unavailable when skip_tokenizer_init=True")
        assert body["return_logprob"]
        assert given.pop("n") == 1
        request, sampling = self._request(body, given)
        if not body.get("stream"):
            return self._reply(await self.ask(request), [], sampling)
        if self.info.get("incremental_streaming_output"):
            return await self._in_parts(body["http"], self._reply(await self.ask(request), [], sampling))
        so_far: list[int] = []

        def chunk(tokens: list[int]) -> dict[str, Any]:
            """All so far. Its log-probs are not known before the end."""
            so_far.extend(tokens)
            rows = [[-1.0, token, None] for token in so_far]
            info = {
                "finish_reason": None,
                "completion_tokens": len(so_far),
                "output_token_logprobs": rows,
            }
            return {"output_ids": list(so_far), "meta_info": info}

        return await self.stream(
            body["http"], request, chunk, lambda done: self._reply(done, so_far, sampling)
        )

    async def _in_parts(self, http: web.Request, whole: dict[str, Any]) -> web.StreamResponse:
        """Each event has the new tokens alone (--incremental-streaming-output)."""
        said = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await said.prepare(http)
        tokens, info = whole["output_ids"], whole["meta_info"]
        for begin in range(0, len(tokens), 3):
            part = slice(begin, begin + 3)
            rows = info["output_token_logprobs"][part]
            told_ = info if part.stop >= len(tokens) else {"finish_reason": None}
            told_ = told_ | {"completion_tokens": min(part.stop, len(tokens)), "output_token_logprobs": rows}
            event = {"output_ids": tokens[part], "meta_info": told_}
            await said.write(f"data: {json.dumps(event)}\n\n".encode())
        await said.write(b"data: [DONE]\n\n")
        return said

    def _request(self, body: dict[str, Any], given: dict[str, Any]) -> tuple[Request, Sampling]:
        """ignore_eos switches every end off; the model's own ends count, too."""
        bias = given.pop("logit_bias", {})
        ends = frozenset() if given.pop("ignore_eos") else {*given.pop("stop_token_ids"), *self.eos}
        given.pop("stop_token_ids", None)
        held = {int(token) for token, value in bias.items() if value <= -1e6}
        names = {"max_new_tokens": "max_tokens", "sampling_seed": "key"}
        values = {names.get(name, name): value for name, value in given.items()}
        if values["top_k"] == -1:
            values["top_k"] = 0
        sampling = Sampling(
            **values,
            stop_token_ids=tuple(sorted(ends | held)),
            min_tokens=values["max_tokens"] if held else 0,
            ignore_eos=not ends and not held,
        )
        self.engine.end_token_ids = frozenset()
        return Request(
            id=body["rid"], session="", prompt=tuple(body["input_ids"]), sampling=sampling
        ), sampling

    def _reply(self, done: Completion | None, so_far: list[int], sampling: Sampling) -> dict[str, Any]:
        if done is None:
            info: dict[str, Any] = {"finish_reason": {"type": "abort", "message": "Abort in the test."}}
            return {"output_ids": so_far, "meta_info": {**info, "completion_tokens": len(so_far)}}
        rows = [[value, token, None] for token, value in zip(done.token_ids, before_filters(done, sampling))]
        matched = {"stop": {"matched": done.token_ids[-1]}, "length": {"length": len(done.token_ids)}}
        return {
            "output_ids": done.token_ids,
            "meta_info": {
                "finish_reason": {"type": done.finish_reason, **matched[done.finish_reason]},
                "completion_tokens": len(done.token_ids),
                "output_token_logprobs": rows,
                "weight_version": str(done.spans[-1].version),
                "weight_versions": [
                    {"version": str(s.version), "start": s.start, "end": s.end} for s in done.spans
                ],
                **({} if done.experts is None else {"routed_experts": _buffer(done.experts)}),
            },
        }

    async def _score(self, body: dict[str, Any]) -> Any:
        assert body["logprob_start_len"] == 0
        top = body["top_logprobs_num"]
        found = await self.scored(body["input_ids"], temperature=1.0, top=top)
        last = self.engine.module.get_output_embeddings().out_features - 1
        # `SchedulerLogprobResultProcessor` takes the last id for that of an image
        told_ = [token if token < last else 0 for token in body["input_ids"]]
        rows = [[value, token, None] for value, token in zip([None, *found.logprobs], told_)]
        info = {
            "finish_reason": {"type": "length", "length": 0},
            "completion_tokens": 0,
            "input_token_logprobs": rows,
            "output_token_logprobs": [],
            "weight_version": str(found.version),
        }
        if top:
            info["input_top_logprobs"] = [None, *([[v, t, None] for t, v in likely] for likely in found.top)]
        return {"output_ids": [], "meta_info": info}

    async def abort_request(self, body: dict[str, Any]) -> Any:
        """Every request whose id begins so; none, if there is none of this very id."""
        if body["rid"] in self.running:
            for rid in [rid for rid in self.running if rid.startswith(body["rid"])]:
                self.abort(rid)
        return web.Response()

    async def pause_generation(self, body: dict[str, Any]) -> Any:
        assert body["mode"] == "retract"
        await self.engine.pause(False)
        self.waiting = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> Any:
        self.waiting = False
        await self.engine.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        try:
            await self.load(Path(body["model_path"]))
        except WhetError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.label(body["weight_version"])
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def update_weight_version(self, body: dict[str, Any]) -> Any:
        self.label(body["new_version"])
        return {"success": True, "message": "", "new_version": body["new_version"]}

    async def flush_cache(self, body: dict[str, Any]) -> Any:
        if self.running and not self.waiting:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def release_memory_occupation(self, body: dict[str, Any]) -> Any:
        if self.running and not self.waiting:
            return web.json_response({"error": {"message": "the server is not idle"}}, status=400)
        await self.engine.place("cpu", _parts(body))
        return web.json_response(None)

    async def resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        assert _parts(body) <= self.engine.away, "the scheduler ends"
        await self.engine.place("gpu", _parts(body))
        await self.engine.pause(False)
        return web.json_response(None)

    async def metrics(self, body: dict[str, Any]) -> web.Response:
        """Tokens are counted by what was computed for them."""
        health = await self.engine.health()
        label = '{model_name="it"'
        lines = [
            "# TYPE sglang:num_requests_total counter",
            f'sglang:num_requests_total{label},is_streaming="false"}} {float(health.requests)}',
            f'sglang:realtime_tokens_total{label},mode="prefill_compute"}} 0.0',
            f'sglang:realtime_tokens_total{label},mode="decode"}} {float(health.tokens)}',
        ]
        return web.Response(text="\n".join(lines) + "\n")


def before_filters(done: Completion, sampling: Sampling) -> list[float]:
    """SGLang tells log-probs from after temperature and penalties, and before the filters."""
    values = (
        done.sample_logprobs if sampling.repetition_penalty != 1 or sampling.min_tokens else done.logprobs
    )
    assert values is not None
    return told(done, sampling) if sampling.temperature == 0 else values


def _parts(body: dict[str, Any]) -> frozenset[Any]:
    return frozenset({"weights": "weights", "kv_cache": "cache"}[tag] for tag in body["tags"])


class OpenAIServer(Server):
    """/v1/completions with the extensions of vLLM that its schema names."""

    def __init__(self, engine: NativeEngine, *, port: int = 0) -> None:
        self.models = ["it"]
        self._numbers = count()
        self.fields: tuple[str, ...] = (
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "prompt_logprobs",
        )
        super().__init__(engine, port=port)

    def routes(self) -> dict[str, Handler]:
        return {
            "/v1/models": self.list_models,
            "/openapi.json": self.openapi,
            "/v1/completions": self.completions,
        }

    def refusal(self, error: WhetError, status: int) -> web.Response:
        return web.json_response({"error": {"message": str(error)}}, status=status)

    async def list_models(self, body: dict[str, Any]) -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}

    async def openapi(self, body: dict[str, Any]) -> Any:
        return {
            "components": {
                "schemas": {"CompletionRequest": {"properties": {name: {} for name in self.fields}}}
            }
        }

    async def completions(self, body: dict[str, Any]) -> Any:
        assert body["model"] in self.models
        if "prompt_logprobs" in body:
            return await self._score(body)
        ends = frozenset() if body.get("ignore_eos") else {*body["stop_token_ids"], *self.eos}
        same = ("temperature", "top_p", "max_tokens", "min_p", "repetition_penalty", "min_tokens")
        sampling = Sampling(
            **{name: body[name] for name in same if name in body},
            top_k=max(body.get("top_k", 0), 0),
            key=body.get("seed", 0),
            stop_token_ids=tuple(sorted(ends)),
            ignore_eos=not ends,
        )
        self.engine.end_token_ids = frozenset()
        rid = f"cmpl-{next(self._numbers)}"
        request = Request(id=rid, session="", prompt=tuple(body["prompt"]), sampling=sampling)
        if not body.get("stream"):
            done = await self.ask(request)
            assert done is not None
            return self.said(done.token_ids, done, sampling)
        sent = 0

        def chunk(tokens: list[int]) -> dict[str, Any]:
            nonlocal sent
            sent += len(tokens)
            return self.said(tokens, None, sampling)

        def last(done: Completion | None) -> dict[str, Any]:
            """The log-probs of a stream are those of the last chunk, which are known with the completion."""
            return self.said([] if done is None else done.token_ids[sent:], done, sampling)

        return await self.stream(body["http"], request, chunk, last)

    def said(self, tokens: list[int], done: Completion | None, sampling: Sampling) -> dict[str, Any]:
        values = told(done, sampling) if done else []
        names = [f"token_id:{token}" for token in (done.token_ids if done else [])]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "logprobs": {"tokens": names, "token_logprobs": values, "top_logprobs": [], "text_offset": []},
            "finish_reason": done.finish_reason if done else None,
        }
        return {"id": "cmpl", "object": "text_completion", "model": self.models[0], "choices": [choice]}

    async def _score(self, body: dict[str, Any]) -> Any:
        found = await self.scored(body["prompt"], temperature=1.0, top=body["prompt_logprobs"])
        rows: list[Any] = [None, *by_ids(body["prompt"][1:], found, top=body["prompt_logprobs"])]
        choice = {"index": 0, "token_ids": [1], "prompt_logprobs": rows, "finish_reason": "length"}
        return {"choices": [choice]}


def by_ids(tokens: list[int], found: TokenLogprobs, *, top: int) -> list[dict[str, Any]]:
    """Log-probs of a prompt as vLLM tells them."""
    rows = []
    for token, logp, likely in zip(tokens, found.logprobs, found.top or [[]] * len(found.logprobs)):
        row = {str(token): {"logprob": logp, "rank": top + 1, "decoded_token": None}}
        row |= {
            str(t): {"logprob": v, "rank": n + 1, "decoded_token": None} for n, (t, v) in enumerate(likely)
        }
        rows.append(row)
    return rows
