"""vLLM over HTTP: what it said once, adapters, and what it is; for what holds of every server, test_served_contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import PreTrainedModel

from asking import reply
from backends.transcripts import ASKED, differences, read
from servers import VllmServer
from serving import LIMITS, folder_of, vllm_engine
from test_rollout_contract import END, LIMIT, PROMPT, module
from whet import environment
from whet.config.checks_run import problems
from whet.config.schema import Config, LoraConfig, RolloutConfig
from whet.models import kernels
from whet.models.lora import adapted, attach, refresh
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.calls import Call, Calls, Unreachable
from whet.rollout.http.canary import apart
from whet.rollout.http.process import arguments
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.supported import lacking, unfit
from whet.rollout.http.versions import known
from whet.rollout.http.vllm import FINISH, GENERATE, METRICS, RESUME, completion
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requests import RequestError
from whet.types import ConfigError, Sampling, ScoreRequest, VersionSpan, WhetError

environment.prepare(threads=None, exact=True)

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


@pytest.fixture
def server() -> Iterator[VllmServer]:
    engine = NativeEngine(module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    there = VllmServer(engine)
    yield there
    there.stop()


async def opened(server: VllmServer, model: PreTrainedModel | None = None, **how: Any) -> HttpEngine:
    engine = vllm_engine(server.url, model or module(), max_context=LIMIT, end_token_ids=[END], **how)
    await engine.open()
    return engine


def asked(server: VllmServer, path: str) -> list[Any]:
    return [body for called, body in server.asked if called == path]


# ---------------------------------------------------------------- what the real server said


def test_a_recorded_reply_is_read() -> None:
    said = read()["generate"]["answer"]["choices"][0]
    done = completion(said, Sampling(temperature=0.7), name="it")
    assert done.token_ids == said["token_ids"]
    assert len(done.token_ids) == 4
    assert done.spans == (VersionSpan(3, 0, 4),)
    assert done.logprobs == done.sample_logprobs == [row["logprob"] for row in said["logprobs"]["content"]]
    assert completion(said, Sampling(top_p=0.5), name="it").logprobs is None
    assert completion(said, Sampling(temperature=0.0), name="it").sample_logprobs == [0.0] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": "abort"}, "'abort'"),
        ({"finish_reason": None}, "None"),
        ({"token_ids": [1, 2, 3]}, "other tokens"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 4}]}, "not named by whet"),
    ],
)
def test_a_reply_that_is_not_whole_is_refused(change: dict[str, Any], words: str) -> None:
    said = read()["generate"]["answer"]["choices"][0] | change
    with pytest.raises(WhetError, match=words):
        completion(said, Sampling(), name="it")


def test_the_stand_in_for_a_missing_log_prob_is_no_log_prob() -> None:
    said = read()["generate"]["answer"]["choices"][0]
    said["logprobs"]["content"][2]["logprob"] = -9999.0
    with pytest.raises(WhetError, match="not finite"):
        completion(said, Sampling(), name="it")


def test_the_double_answers_in_the_shape_of_the_real_server(server: VllmServer) -> None:
    from backends.transcripts import ask

    names = [name for name in ASKED if name not in ("lost_folder", "too_long")]
    recorded = read()
    for name in names:
        method, path, body = ASKED[name]
        said = ask(server.url, method, path, body, name)
        assert said["status"] == recorded[name]["status"] == 200
        assert differences(recorded[name]["answer"], said["answer"]) == [], name
    chunks = ask(server.url, *ASKED["stream"], "stream")["answer"].split("\n\n")
    known_chunks = recorded["stream"]["answer"].split("\n\n")
    assert chunks[-2] == known_chunks[-2] == "data: [DONE]"
    first, real = (json.loads(lines[0].removeprefix("data: ")) for lines in (chunks, known_chunks))
    assert differences(real, first) == []


def test_a_shape_that_differs_is_told() -> None:
    ours = {"a": [{"b": 1.0, "c": None}], "d": {"7": {"e": "x"}}}
    assert differences(ours, {"a": [{"b": 2, "c": 3}], "d": {"9": {"e": "y"}}, "more": 1}) == []
    assert differences(ours, {"a": [{"c": 3}], "d": {"9": {"e": 1}}}) == [
        ".a[].b is not there",
        ".d.*.e is float, not str",
    ]


def test_a_closed_engine_opens_no_connection_any_more(server: VllmServer) -> None:
    """A look at its health may still come, and nobody would close what it opens."""

    async def story() -> None:
        engine = await opened(server)
        await engine.close()
        with pytest.raises(Unreachable, match="its engine was closed"):
            await engine.health()
        assert engine.calls.session is None

    run(story())


# ---------------------------------------------------------------- adapters


def with_adapters(*, seed: int = 0, **lora: Any) -> PreTrainedModel:
    """The model with adapters that do something: of several ranks and scales."""
    model = module()
    attach(model, LoraConfig(**{"rank": 3, "alpha": 7, "rank_pattern": {"q_proj": 5}, **lora}), seed=0)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.lora_B.copy_(0.1 * torch.randn(layer.lora_B.shape, generator=noise))
    refresh(model)
    return model


@pytest.mark.parametrize("adapters", [True, False])
def test_adapters_travel_alone_or_merged(server: VllmServer, adapters: bool) -> None:
    """The server has the base; what it samples is what the trainer has, which the canary proves. A version of adapters
    has nothing of the base."""
    server.adapters = True

    async def story() -> None:
        model = with_adapters(seed=1)
        engine = await opened(server, model, adapters=adapters)
        for version in (1, 2):
            update = WeightUpdate(version=version, module=with_adapters(seed=version))
            measured = (await engine.update_weights(update)).measured
            assert measured["sync/canary_mean"] < 1e-5
            assert measured["sync/canary_moved_mean"] > 1e-3 or version == 1
            assert set((await reply(engine, PROMPT, Sampling(max_tokens=3))).versions) == {version}
        written = load_file(next(folder_of(engine).root.glob("*2/*.safetensors")))
        assert all("lora_" in name for name in written) == adapters
        called = {path for path, _ in server.asked}
        assert ("/v1/load_lora_adapter" in called, "/collective_rpc" in called) == (adapters, not adapters)
        await engine.close()

    run(story())


def test_scores_beside_adapters_are_asked_one_after_the_other(server: VllmServer) -> None:
    """And only by the canary, after the requests in flight have finished: a real server ends otherwise."""
    server.adapters = True
    as_it_was, now, most = server.generate, 0, 0

    async def counted(body: Any) -> Any:
        nonlocal now, most
        scores = "prompt_logprobs" in body["sampling_params"]
        now += scores
        most = max(most, now)
        assert not scores or not server.running
        try:
            return await as_it_was(body)
        finally:
            now -= scores

    async def story() -> None:
        engine = await opened(server, with_adapters(), adapters=True)
        await engine.update_weights(WeightUpdate(version=1, module=with_adapters(seed=1)))
        server.fails["/inference/v1/generate"] = counted
        flying = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=60, ignore_eos=True)))
        while not server.running:
            await asyncio.sleep(0.005)
        await engine.update_weights(WeightUpdate(version=2, module=with_adapters(seed=2)))
        assert set((await flying).versions) == {1}
        assert most == 1
        assert not engine.can.in_flight_updates
        with pytest.raises(RequestError, match="use merge"):
            await engine.score([ScoreRequest(token_ids=(5, 9), start=1)])
        await engine.close()

    run(story())


def test_adapters_that_did_not_arrive_are_found(server: VllmServer) -> None:
    server.adapters = True

    async def nothing_loaded(body: Any) -> Any:
        return web.Response(text="Success: LoRA adapter 'policy' added successfully.")

    async def story() -> None:
        engine = await opened(server, with_adapters(), adapters=True)
        await engine.update_weights(WeightUpdate(version=1, module=with_adapters(seed=1)))
        server.fails["/v1/load_lora_adapter"] = nothing_loaded
        with pytest.raises(WhetError, match="does not have weights version 2"):
            await engine.update_weights(WeightUpdate(version=2, module=with_adapters(seed=2)))
        await engine.close()

    run(story())


def test_what_cannot_travel_as_adapters_is_refused(server: VllmServer) -> None:
    with pytest.raises(ConfigError, match="start it with --enable-lora"):
        run(opened(server, with_adapters(), adapters=True))
    with pytest.raises(ConfigError, match="has no adapters"):
        run(opened(server, module(), adapters=True))
    with pytest.raises(ConfigError, match=r"norm.* is trained in full"):
        run(opened(server, with_adapters(modules_to_save=("norm",)), adapters=True))


# ---------------------------------------------------------------- the canary and calls


def test_the_canary_s_distances_by_hand() -> None:
    assert apart([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]]) == (0.5, 1.0)
    assert apart([[-1.0]], [[-1.0, -2.0]])[0] == float("inf")


def test_only_calls_that_may_be_repeated_are(server: VllmServer) -> None:
    """The connection is lost once: a pause is asked again, a reply is not."""
    left = {"/pause": 1, "/inference/v1/generate": 1}

    def once(path: str, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def lost(body: Any) -> Any:
            if left[path]:
                left[path] -= 1
                body["http"].transport.abort()
                return web.Response()
            return await handler(body)

        return lost

    async def story() -> None:
        engine = await opened(server)
        server.fails["/pause"] = once("/pause", server.pause)
        server.fails["/inference/v1/generate"] = once("/inference/v1/generate", server.generate)
        await engine.pause(finish=False)
        await engine.resume()
        with pytest.raises(Unreachable, match="for a reply"):
            await reply(engine, PROMPT, Sampling(max_tokens=3))
        assert [len(asked(server, path)) for path in left] == [2, 1]
        await engine.close()

    run(story())


def test_a_reply_waits_for_the_end_of_a_pause_that_lets_nobody_in(
    server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 refuses requests in such a pause (`EngineCoreProc._reject_add_while_paused`), 0.32 queued them."""
    monkeypatch.setattr("whet.rollout.http.calls.BUSY_S", 0.01)

    async def story() -> None:
        engine = await opened(server)
        await engine.calls.ask(FINISH, query={"mode": "wait"})
        waiting = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=3)))
        while not asked(server, GENERATE.path):
            await asyncio.sleep(0.01)
        await engine.calls.ask(RESUME)
        assert len((await waiting).token_ids) == 3
        assert len(asked(server, GENERATE.path)) > 1
        await engine.close()

    run(story())


def test_the_double_takes_a_call_by_its_own_method_alone(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        for call in (replace(RESUME, method="GET"), replace(METRICS, method="POST")):
            with pytest.raises(WhetError, match="status 405"):
                await engine.calls.ask(call)
        await engine.close()

    run(story())


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.32.0", "seen"),
        ("0.32.0+cpu", "seen"),
        ("0.31.2", "refused"),
        ("0.33.1", "unseen"),
        ("0.34.0rc1", "unseen"),
        ("0.33.0rc2", "unseen"),
        ("0.32.0rc1", "unseen"),
        ("1.0", "unseen"),
    ],
)
def test_versions(version: str, state: str) -> None:
    assert known(version).state == state


def test_a_text_that_is_no_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a version"):
        known("nightly")


def test_a_server_that_lacks_routes_or_fields_is_refused_with_what_to_do() -> None:
    said = read()["openapi"]["answer"]
    assert lacking(said) == ""
    without = {**said, "paths": {p: {} for p in said["paths"] if p != "/collective_rpc"}}
    assert "VLLM_SERVER_DEV_MODE=1" in lacking(without)
    without = {**said, "paths": {p: {} for p in said["paths"] if p != "/inference/v1/generate"}}
    assert "--tokens-only" in lacking(without)
    del said["components"]["schemas"]["GenerateTokensChoice"]["properties"]["weight_versions"]
    assert "GenerateTokensChoice.weight_versions" in lacking(said)


def test_settings_that_whet_cannot_work_with_are_refused() -> None:
    whole = read()["server_info"]["answer"]["vllm_config"]
    assert unfit(whole, max_context=127) == ""
    assert "at least 129" in unfit(whole, max_context=128)
    raw = whole | {"model_config": whole["model_config"] | {"logprobs_mode": "raw_logprobs"}}
    assert "processed_logprobs" in unfit(raw, max_context=127)
    assert "speculative" in unfit(whole | {"speculative_config": {"method": "ngram"}}, max_context=127)
    assert "watermark" in unfit(whole | {"watermark_config": {"algorithm": "gumbel"}}, max_context=127)


def test_a_server_of_another_kind_is_refused(server: VllmServer) -> None:
    async def other(body: Any) -> Any:
        return {"name": "something else"}

    async def old(body: Any) -> Any:
        return {"version": "0.20.1"}

    for said, words in ((other, "does not answer as vLLM does"), (old, "0.20.1: whet needs")):
        server.fails["/version"] = said
        with pytest.raises(ConfigError, match=words):
            run(opened(server))


def test_a_token_is_sent_and_its_refusal_names_the_key(server: VllmServer) -> None:
    async def guarded(body: Any) -> Any:
        if body["http"].headers.get("Authorization") != "Bearer open sesame":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await server.version(body)

    server.fails["/version"] = guarded
    version = Call("/version", "for its version", method="GET")

    async def story(token: str | None) -> Any:
        calls = Calls(server.url, limits=LIMITS, token=token)
        try:
            return await calls.ask(version)
        finally:
            await calls.close()

    assert run(story("open sesame")) == {"version": "0.32.0"}
    with pytest.raises(WhetError, match=r"rollout\.server\.token"):
        run(story("wrong"))


def test_options_become_arguments() -> None:
    given = {
        "tensor_parallel_size": 2,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "hf-overrides": {"head_dtype": "float32"},
        "allowed": ["a", "b"],
        "left-out": None,
    }
    assert arguments(given) == [
        "--tensor-parallel-size", "2", "--enforce-eager", "--no-enable-prefix-caching",
        "--hf-overrides", '{"head_dtype": "float32"}', "--allowed", "a", "b",
    ]  # fmt: skip
    for name, words in (
        ("port", "port is set by whet"),
        ("logprobs_mode", "set by whet"),
        ("--host", "set by whet"),
        ("weight_transfer_config", r"nccl, ipc .* need GPUs .*rollout\.server\.weights_dir"),
        ("speculative-config", "draft model"),
    ):
        with pytest.raises(ConfigError, match=words):
            arguments({name: {"backend": "nccl"}})
    with pytest.raises(ConfigError, match=r"'enforce-eager:true' .* with a space"):
        arguments({"enforce-eager:true": None})  # what YAML makes of {enforce-eager:true}


@pytest.mark.parametrize(
    ("name", "words"), [("trtllm", "TensorRT-LLM"), ("tensorrt_llm", "TensorRT-LLM"), ("vlm", "vllm")]
)
def test_other_engines_are_refused_by_name_with_what_to_use(name: str, words: str) -> None:
    (said,) = [
        text for key, text in problems(Config(rollout=RolloutConfig(engine=name))) if key == "rollout.engine"
    ]
    assert words in said
    assert "vllm" in said
