"""Servers with OpenAI's interface: what one must return, what it is asked, and the proof that it serves this model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from transformers import AutoModelForCausalLM

import whet
from asking import reply, request
from fuzz.servers import KINDS, Told
from servers import OpenAIServer, Server
from serving import digits_model, openai_engine
from test_rollout_contract import END, LIMIT, PROMPT, module, run
from test_served_contract import moved
from whet import environment
from whet.config.load import load
from whet.config.plan import plans
from whet.models import kernels
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.served import HttpEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requests import RequestError
from whet.types import Completion, ConfigError, Sampling, ScoreRequest, WhetError

environment.prepare(threads=None, exact=True)


def double() -> OpenAIServer:
    return OpenAIServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT))


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    there = double()
    yield there
    there.stop()


async def opened(server: Server, **how: Any) -> HttpEngine:
    engine = openai_engine(server.url, module(), max_context=LIMIT, end_token_ids=[END], **how)
    await engine.open()
    return engine


def bodies(server: OpenAIServer) -> list[Any]:
    return [body for path, body in server.asked if path == "/v1/completions" and body.get("stream")]


# ---------------------------------------------------------------- what it has to do


def without(*names: str) -> Any:
    """An answer that lacks these fields of a choice."""

    def change(said: Any) -> Any:
        for choice in said["choices"]:
            for name in names:
                del choice[name]
        return said

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("token_ids"), "does not return the ids of the tokens.*use one that returns them"),
        (without("logprobs"), "tells no log-probs"),
    ],
)
def test_a_server_without_token_ids_or_log_probs_is_refused(
    server: OpenAIServer, change: Any, words: str
) -> None:
    async def lacking(body: Any) -> Any:
        return change(await server.completions(body))

    server.fails["/v1/completions"] = lacking
    with pytest.raises(ConfigError, match=words):
        run(opened(server))


def test_a_server_that_takes_no_tokens_is_refused(server: OpenAIServer) -> None:
    async def text_alone(body: Any) -> Any:
        return web.json_response({"error": {"message": "prompt: expected a text"}}, status=400)

    server.fails["/v1/completions"] = text_alone
    with pytest.raises(ConfigError, match=r"does not return the ids.*expected a text"):
        run(opened(server))


def test_a_server_that_ignores_end_tokens_is_refused(server: OpenAIServer) -> None:
    async def ignoring(body: Any) -> Any:
        return await server.completions(body | {"stop_token_ids": [], "ignore_eos": True})

    server.fails["/v1/completions"] = ignoring
    with pytest.raises(ConfigError, match="ignores stop_token_ids"):
        run(opened(server))


def test_a_model_is_named_where_there_are_several(server: OpenAIServer) -> None:
    server.models = ["one", "two"]
    for asked in (None, "three"):
        with pytest.raises(ConfigError, match=r"serves one, two; rollout.server.model names one"):
            run(opened(server, asked=asked))
    run(opened(server, asked="two"))
    assert {body["model"] for path, body in server.asked if path == "/v1/completions"} == {"two"}


def test_what_a_server_does_not_say_that_it_takes_is_not_asked_of_it(server: OpenAIServer) -> None:
    """It might be ignored, and replies be of another distribution."""
    server.fields = ()

    async def story() -> None:
        engine = await opened(server)
        for name, value in (("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.3), ("min_tokens", 2)):
            with pytest.raises(RequestError, match=rf"{name}={value}.*/openapi.json"):
                await reply(engine, PROMPT, Sampling(max_tokens=3, **{name: value}))
        assert not engine.can.penalties
        assert len((await reply(engine, PROMPT, Sampling(max_tokens=3, ignore_eos=True))).token_ids) == 3
        with pytest.raises(RequestError, match="does not score given tokens"):
            await engine.score([ScoreRequest(token_ids=(3, 4), start=1)])
        await engine.close()

    run(story())
    assert not {"top_k", "min_p", "repetition_penalty", "min_tokens"} & set(bodies(server)[0])


# ---------------------------------------------------------------- requests and replies


def test_log_probs_that_servers_define_differently_are_left_out(server: OpenAIServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        plain = await reply(engine, PROMPT, Sampling(max_tokens=6, key=2))
        tokens = (*PROMPT, *plain.token_ids)
        (scored,) = await engine.score([ScoreRequest(token_ids=tokens, start=len(PROMPT), top_k=2)])
        np.testing.assert_allclose(plain.logprobs, scored.logprobs, atol=1e-5)
        assert plain.sample_logprobs == plain.logprobs
        assert [len(row) for row in scored.top] == [2] * 6
        greedy = await reply(engine, PROMPT, Sampling(max_tokens=6, temperature=0))
        assert greedy.logprobs is not None
        assert greedy.sample_logprobs == [0.0] * 6
        for other in ({"temperature": 0.5}, {"top_p": 0.5}, {"repetition_penalty": 1.2}):
            done = await reply(engine, PROMPT, Sampling(max_tokens=6, key=2, **other))  # type: ignore[arg-type]
            assert (done.logprobs, done.sample_logprobs) == (None, None)
        await engine.close()

    run(story())


# ---------------------------------------------------------------- its weights


def test_the_model_that_it_serves_is_proved_without_sending_anything(server: OpenAIServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        receipt = await engine.update_weights(WeightUpdate(version=3, module=module()))
        assert receipt.measured["sync/canary_mean"] < 1e-6
        assert set((await reply(engine, PROMPT, Sampling(max_tokens=3))).versions) == {3}
        assert {path for path, _ in server.asked} == {"/v1/models", "/openapi.json", "/v1/completions"}
        await engine.close()

    run(story())


@pytest.mark.parametrize("step", [0.1, 0.02])
def test_another_model_than_it_serves_is_found(server: OpenAIServer, step: float) -> None:
    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        with pytest.raises(WhetError, match=r"does not have weights version 2.*never given weights"):
            await engine.update_weights(WeightUpdate(version=2, module=moved(step)))
        assert engine.version == 1
        with pytest.raises(WhetError, match="mix of weights"):
            await reply(engine, PROMPT, Sampling(max_tokens=3))
        await engine.close()

    run(story())


def test_log_probs_of_another_number_than_tokens_are_found(server: OpenAIServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        said = server.said

        def fewer(tokens: list[int], done: Any, sampling: Sampling) -> dict[str, Any]:
            told = said(tokens, done, sampling)
            told["choices"][0]["logprobs"]["token_logprobs"] = told["choices"][0]["logprobs"][
                "token_logprobs"
            ][1:]
            return told

        server.said = fewer  # type: ignore[method-assign]
        with pytest.raises(WhetError, match="log-probs of 5 of the 6 tokens"):
            await reply(engine, PROMPT, Sampling(max_tokens=6, ignore_eos=True))
        await engine.close()

    run(story())


@pytest.mark.parametrize("kind", ["openai", "vllm"])
def test_several_replies_where_one_was_asked_for_are_refused(kind: str) -> None:
    """The tokens of both were joined to one reply, which had as many as its versions say."""

    def event(index: int, tokens: list[int], reason: str | None = None) -> dict[str, Any]:
        rows = [{"token_id": token, "logprob": -0.5} for token in tokens]
        return {
            "index": index,
            "token_ids": tokens,
            "logprobs": {"content": rows, "token_logprobs": [-0.5] * len(tokens)},
            "finish_reason": reason,
            "weight_versions": [{"version": "0", "start": 0, "end": 4}],
        }

    def told(*choices: dict[str, Any]) -> Completion:
        engine = KINDS[kind][1](Told([[{"choices": [choice]} for choice in choices]]))
        asked = request(PROMPT, Sampling(max_tokens=4))
        return asyncio.run(engine.generate(asked, lambda tokens: None))

    assert told(event(0, [5, 6]), event(0, [7, 8], "length")).token_ids == [5, 6, 7, 8]
    with pytest.raises(WhetError, match="several replies, expected one"):
        told(event(0, [5]), event(1, [6]), event(0, [7, 8], "length"))


def test_an_end_token_in_the_last_place_ends_a_reply(server: OpenAIServer) -> None:
    """Some servers look at the limit of tokens first (SGLang), and tell `length` of such a reply."""
    said = server.said

    def of_the_limit(*given: Any) -> Any:
        told = said(*given)
        if told["choices"][0]["finish_reason"]:
            told["choices"][0]["finish_reason"] = "length"
        return told

    async def story() -> None:
        engine = await opened(server)
        server.said = of_the_limit  # type: ignore[method-assign]
        free = await reply(engine, PROMPT, Sampling(max_tokens=3, ignore_eos=True, temperature=0))
        assert free.finish_reason == "length"
        asked = Sampling(max_tokens=1, temperature=0, stop_token_ids=(free.token_ids[0],))
        done = await reply(engine, PROMPT, asked)
        assert (done.token_ids, done.finish_reason) == (free.token_ids[:1], "stop")
        await engine.close()

    run(story())


# ---------------------------------------------------------------- whole

ROWS = [{"prompt": p, "answer": "1"} for p in ("12", "34", "56", "78")]


def test_training_with_it_is_refused_and_its_addresses_are_needed(tmp_path: Path) -> None:
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"path": "tests/data/words.jsonl", "limit": 4}]},
        "rewards": {"a": {"function": "math"}},
        "rollout": {"engine": "openai", "server": {"urls": ["http://127.0.0.1:9"]}},
        "train": {"steps": 1},
        "machine": {"device": "cpu"},
    }
    with pytest.raises(ConfigError, match=r"openai takes no new weights.*whet eval"):
        plans(load(None, (), tree))
    with pytest.raises(ConfigError, match="openai starts no server"):
        plans(load(None, ("rollout.server.urls=[]",), tree), trains=False)
    assert plans(load(None, (), tree), trains=False)
    assert plans(load(None, ("train.engine=simulated",), tree))


def evaluated_texts(run_dir: Path) -> list[str]:
    (file,) = (run_dir / "bench" / "eval").glob("*.parquet")
    texts: list[str] = pq.read_table(file)["text"].to_pylist()
    return texts


def test_whet_eval_and_generate_sample_a_model_where_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replies are the server's, and the same; a server of another model is refused."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")

    rows = tmp_path / "held.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for seed, name in enumerate(("model", "other")):
        digits_model(seed, tmp_path / name)
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "model").requires_grad_(False)
    server = OpenAIServer(NativeEngine(there, kernels.load("auto"), end_token_ids=[], max_context=200))
    digits = {"digits": {"function": "format", "arguments": {"pattern": ".*[0-4].*"}}}

    def how(name: str) -> dict[str, Any]:
        return {
            "data": str(rows),
            "run_dir": str(tmp_path / "eval" / name),
            "rollout": {"engine": "openai", "sampling": {"max_tokens": 6}, "server": {"urls": [server.url]}},
            "machine": {"device": "cpu", "logprob_parity": "off"},
        }

    def evaluated(name: str) -> list[dict[str, Any]]:
        return whet.evaluate(tmp_path / name, rewards=digits, **how(name))

    try:
        (found,) = evaluated("model")
        assert found["eval/held/tasks"] == 4
        assert len(bodies(server)) == 4 + 4  # four of the canary
        out = whet.generate(tmp_path / "model", output=tmp_path / "replies.parquet", **how("model"))
        texts = [[text] for text in evaluated_texts(tmp_path / "eval" / "model")]
        assert [row["responses"] for row in pq.read_table(out).to_pylist()] == texts
        with pytest.raises(WhetError, match="never given weights"):
            evaluated("other")
        trained = whet.train(
            name="simulated",
            model=str(tmp_path / "model"),
            rewards=digits,
            train={
                "steps": 2,
                "tasks_per_step": 2,
                "engine": "simulated",
                "engine_arguments": {"step_s": 0.1},
            },
            **{**how("model"), "run_dir": str(tmp_path / "simulated")},
        )
        assert [line["train/version"] for line in trained.metrics if "train/version" in line] == [1.0, 2.0]
    finally:
        server.stop()
