"""vLLM over HTTP: what it said once, what is asked of it, and every way in which its weights may be wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import PreTrainedModel

from asking import reply
from backends.transcripts import ASKED, differences, read
from servers import VllmServer
from serving import LIMITS, folder_of, vllm_engine
from test_rollout_contract import END, LIMIT, PROMPT, jobs, module
from tiny import VOCAB
from whet import environment
from whet.config.checks_run import problems
from whet.config.schema import Config, LoraConfig, RolloutConfig
from whet.models import kernels
from whet.models.lora import adapted, attach, refresh
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.calls import Call, CallLimits, Calls, Unreachable
from whet.rollout.http.canary import apart
from whet.rollout.http.process import arguments
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.supported import lacking, unfit
from whet.rollout.http.versions import known
from whet.rollout.http.vllm import completion
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.requests import RequestError
from whet.rollout.router import Router
from whet.types import ConfigError, Request, Sampling, ScoreRequest, VersionSpan, WhetError

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


# ---------------------------------------------------------------- what it is asked


def test_a_request_says_all_that_its_sampling_depends_on(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        for key, prompt in ((5, [5, 9]), (5, [5, 9]), (5, [5, 9, 7]), (6, [5, 9])):
            await reply(engine, prompt, Sampling(key=key, max_tokens=3, stop_token_ids=(4,)))
        await engine.update_weights(WeightUpdate(version=8, module=module()))
        await reply(engine, [5], Sampling(max_tokens=2, ignore_eos=True))
        await engine.close()

    run(story())
    bodies = [body for body in asked(server, "/inference/v1/generate") if "canary" not in body["request_id"]]
    bodies = [body for body in bodies if "prompt_logprobs" not in body["sampling_params"]]
    first, same, longer, other, later = bodies
    params = [body["sampling_params"] for body in bodies]
    assert first["sampling_params"] == same["sampling_params"]
    assert len({p["seed"] for p in params[:4]}) == 3  # of the key and the position
    assert all(0 <= p["seed"] < 2**63 and p["n"] == 1 and p["ignore_eos"] for p in params)
    assert params[0]["stop_token_ids"] == [END, 4]
    assert params[4]["stop_token_ids"] == []
    assert first["cache_salt"] == longer["cache_salt"] == other["cache_salt"]
    assert first["cache_salt"].removesuffix("-0") == later["cache_salt"].removesuffix("-8")
    assert first["cache_salt"] != later["cache_salt"]


def test_a_reply_that_nobody_waits_for_is_aborted(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        work = asyncio.create_task(
            engine.generate(
                Request(
                    id="mine", session="", prompt=(5, 9), sampling=Sampling(max_tokens=100, ignore_eos=True)
                )
            )
        )
        while not asked(server, "/inference/v1/generate"):
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert asked(server, "/abort_requests") == [{"request_ids": ["generate-tokens-mine"]}]
        await engine.close()

    run(story())


def test_weights_are_given_in_phases_and_a_version_that_was_written_is_not_written_again(
    server: VllmServer, tmp_path: Path
) -> None:
    """A server that starts again gets the files of its version, whatever was learned since."""
    model = module()

    async def story() -> None:
        engine = await opened(server, model)
        update = folder_of(engine).ship(WeightUpdate(version=1, module=model))
        server.asked.clear()
        receipt = await engine.update_weights(update())
        phases = [path for path, _ in server.asked]
        assert phases[:5] == [
            "/pause",
            "/collective_rpc",
            "/update_weight_version",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert receipt.measured["sync/canary_mean"] < 1e-6
        first = asked(server, "/collective_rpc")[0]["kwargs"]["weights_path"]
        before = load_file(next(Path(first).glob("*.safetensors")))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        await engine.update_weights(update())
        again = load_file(next(Path(first).glob("*.safetensors")))
        assert all(torch.equal(before[name], again[name]) for name in before)
        await engine.close()

    run(story())


def test_a_tied_output_layer_is_sent_under_both_names(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module(seed=1)))
        folder = Path(asked(server, "/collective_rpc")[0]["kwargs"]["weights_path"])
        found = load_file(next(folder.glob("*.safetensors")))
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
        await engine.close()

    run(story())


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


def test_old_versions_are_removed(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        for version in range(1, 6):
            await engine.update_weights(WeightUpdate(version=version, module=module()))
        names = sorted(path.name for path in folder_of(engine).root.iterdir())
        assert names == ["weights-00000004", "weights-00000005"]
        await engine.close()

    run(story())


# ---------------------------------------------------------------- every way in which weights may be wrong

Fault = Callable[[VllmServer], Awaitable[None]]


def moved(share: float, *, seed: int = 0) -> PreTrainedModel:
    """The first model, a small step further."""
    model, noise = module(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(share * torch.randn(p.shape, generator=noise))
    return model


async def nothing(body: Any) -> Any:
    return {"results": [None]}


def partly(server: VllmServer, keep: Callable[[int, str], bool]) -> Callable[[Any], Awaitable[Any]]:
    """Loads the tensors that `keep` lets through, and says that all is well."""

    async def load_some(body: Any) -> Any:
        folder = Path(body["kwargs"]["weights_path"])
        found = load_file(next(folder.glob("*.safetensors")))
        own = dict(server.engine.module.named_parameters())
        with torch.no_grad():
            for number, (name, parameter) in enumerate(own.items()):
                if keep(number, name):
                    parameter.copy_(found[name])
        tensors = iter([(n, p.detach().clone()) for n, p in own.items()])
        await server.engine.update_weights(WeightUpdate(version=server.engine.version, tensors=tensors))
        return {"results": [None]}

    return load_some


@pytest.mark.parametrize("step", [0.1, 3e-5])
@pytest.mark.parametrize("fault", ["stale", "half", "first layer alone"])
def test_weights_that_did_not_arrive_are_found(server: VllmServer, fault: str, step: float) -> None:
    """At any size of a step: one that moves log-probs by less than the bound, too."""
    faults = {
        "stale": nothing,
        "half": partly(server, lambda number, name: number % 2 == 0),
        "first layer alone": partly(server, lambda number, name: "layers.0" in name),
    }

    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        receipt = await engine.update_weights(WeightUpdate(version=2, module=moved(step, seed=1)))
        assert (receipt.measured["sync/canary_moved_mean"] < 1e-3) == (step < 0.1)
        server.fails["/collective_rpc"] = faults[fault]
        with pytest.raises(WhetError, match="does not have weights version 3"):
            await engine.update_weights(WeightUpdate(version=3, module=moved(step, seed=2)))
        assert engine.version == 2
        with pytest.raises(WhetError, match="mix of weights"):
            await reply(engine, PROMPT, Sampling(max_tokens=3))
        server.fails.clear()
        await engine.update_weights(WeightUpdate(version=4, module=moved(step, seed=3)))
        assert set((await reply(engine, PROMPT, Sampling(max_tokens=3))).versions) == {4}
        await engine.close()

    run(story())


def test_an_output_layer_that_was_lost_is_found() -> None:
    """The server has packed its tied output layer for itself, and an update does not reach it."""
    from whet.config.schema import ModelConfig, ScratchConfig
    from whet.models.load import build

    def untied(seed: int) -> PreTrainedModel:
        scratch = ScratchConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            intermediate_size=64, initializer_range=0.1, tie_word_embeddings=False,
        )  # fmt: skip
        how: dict[str, Any] = {
            "eos_token_id": END,
            "pad_token_id": 0,
            "device": "cpu",
            "dtype": torch.float32,
        }
        model = build(ModelConfig(scratch=scratch), vocab_size=VOCAB, seed=seed, **how)
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
        return model

    engine = NativeEngine(untied(0), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    server = VllmServer(engine)

    async def story() -> None:
        client = await opened(server, untied(0))
        await client.update_weights(WeightUpdate(version=1, module=untied(0)))
        server.fails["/collective_rpc"] = partly(server, lambda number, name: "lm_head" not in name)
        with pytest.raises(WhetError, match="a tied output layer that is not updated does this"):
            await client.update_weights(WeightUpdate(version=2, module=untied(1)))
        await client.close()

    try:
        run(story())
    finally:
        server.stop()


@pytest.mark.parametrize("step", [0.1, 1e-3])
def test_a_cache_that_survives_a_sync_is_found(server: VllmServer, step: float) -> None:
    """Scores are computed anew; replies come from what was cached under the weights before."""
    before = NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT)
    as_it_was, new = server.generate, server.engine

    async def from_old_cache(body: Any) -> Any:
        if "prompt_logprobs" in body["sampling_params"]:
            return await as_it_was(body)
        server.engine, before.version = before, new.version
        try:
            return await as_it_was(body)
        finally:
            server.engine = new

    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        server.fails["/inference/v1/generate"] = from_old_cache
        with pytest.raises(WhetError, match="from a cache of older weights"):
            await engine.update_weights(WeightUpdate(version=2, module=moved(step)))
        await engine.close()

    run(story())


def test_a_wrong_version_is_found(server: VllmServer) -> None:
    async def said_only(body: Any) -> Any:
        return {"success": True, "new_version": body["new_version"]}

    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        server.fails["/update_weight_version"] = said_only
        with pytest.raises(
            WhetError, match="reports that it samples from version 1, after weights version 2"
        ):
            await engine.update_weights(WeightUpdate(version=2, module=module(seed=1)))
        await engine.close()

    run(story())


def test_the_canary_s_distances_by_hand() -> None:
    assert apart([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]]) == (0.5, 1.0)
    assert apart([[-1.0]], [[-1.0, -2.0]])[0] == float("inf")


# ---------------------------------------------------------------- dead, hanging, lying


def quick(answer: float) -> CallLimits:
    return replace(LIMITS, answer=answer)


def test_a_hanging_server_is_found_within_its_deadline(server: VllmServer) -> None:
    async def hang(body: Any) -> Any:
        await asyncio.sleep(3600)

    async def story() -> None:
        engine = await opened(server, limits=quick(0.2))
        server.fails["/pause"] = hang
        with pytest.raises(Unreachable, match=r"rollout\.server\.timeout_s=0\.2 s when asked to pause"):
            await engine.pause(finish=False)
        await engine.close()

    run(story())


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


def test_the_requests_of_a_dead_server_are_asked_of_another() -> None:
    servers = [
        VllmServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT))
        for _ in range(2)
    ]

    async def story() -> None:
        engines = [await opened(server) for server in servers]
        router = Router([Replica(f"engine-{n}", e) for n, e in enumerate(engines)], exact=False)
        await router.update_weights(WeightUpdate(version=1, module=module()))
        work = jobs(12, ignore_eos=True)
        flying = asyncio.gather(*(reply(router, p, s) for p, s in work))
        while not any(
            "canary" not in body["request_id"] and "logprobs" in body["sampling_params"]
            for body in asked(servers[0], "/inference/v1/generate")
        ):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(servers[0].stop)
        done = await flying
        assert [len(c.token_ids) for c in done] == [12] * 12
        assert [name for name, _ in router.dropped] == ["engine-0"]
        await router.close()

    try:
        run(story())
    finally:
        servers[1].stop()


def test_what_routers_measure_is_the_worst_of_their_replicas(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        router = Router([Replica("engine-0", engine)], exact=False)
        receipt = await router.update_weights(WeightUpdate(version=1, module=module()))
        assert set(receipt.measured) == {
            "sync/canary_mean",
            "sync/canary_max",
            "sync/canary_decode_mean",
            "sync/canary_moved_mean",
        }
        await router.close()

    run(story())


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.32.0", "seen"),
        ("0.32.0+cpu", "seen"),
        ("0.31.2", "refused"),
        ("0.33.1", "unseen"),
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
    config = read()["server_info"]["answer"]["vllm_config"]["model_config"]
    assert unfit(config, speculative=None, max_context=127) == ""
    assert "at least 129" in unfit(config, speculative=None, max_context=128)
    raw = config | {"logprobs_mode": "raw_logprobs"}
    assert "processed_logprobs" in unfit(raw, speculative=None, max_context=127)
    assert "speculative" in unfit(config, speculative={"method": "ngram"}, max_context=127)


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


def test_scores_and_replies_agree(server: VllmServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        done = await reply(engine, PROMPT, Sampling(max_tokens=8, key=2))
        tokens = (*PROMPT, *done.token_ids)
        (scored,) = await engine.score([ScoreRequest(token_ids=tokens, start=len(PROMPT), top_k=2)])
        np.testing.assert_allclose(scored.logprobs, done.logprobs or (), atol=1e-5)
        assert [len(row) for row in scored.top] == [2] * 8
        assert all(row[0][1] >= row[1][1] for row in scored.top)
        await engine.close()

    run(story())
