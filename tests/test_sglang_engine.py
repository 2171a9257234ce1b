"""SGLang over HTTP: what it alone is asked, and how its log-probs are read. What holds of every server is in
test_served_contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import PreTrainedModel

from asking import reply
from servers import SglangServer
from serving import sglang_engine
from test_rollout_contract import END, LIMIT, PROMPT, module, run
from tiny import VOCAB
from whet import environment
from whet.models import kernels
from whet.rollout.engine import WeightUpdate, own_engine
from whet.rollout.http import versions
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.sglang import completion
from whet.rollout.http.sglang_facts import unfit
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requests import RequestError
from whet.types import ConfigError, Sampling, ScoreRequest, VersionSpan, WhetError

environment.prepare(threads=None, exact=True)

Handler = Callable[[Any], Awaitable[Any]]


def double(model: PreTrainedModel | None = None) -> SglangServer:
    return SglangServer(
        NativeEngine(model or module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    )


@pytest.fixture
def server() -> Iterator[SglangServer]:
    there = double()
    yield there
    there.stop()


async def opened(server: SglangServer, model: PreTrainedModel | None = None, **how: Any) -> HttpEngine:
    engine = sglang_engine(server.url, model or module(), max_context=LIMIT, end_token_ids=[END], **how)
    await engine.open()
    return engine


def asked(server: SglangServer, path: str) -> list[Any]:
    return [body for called, body in server.asked if called == path]


def replies(server: SglangServer) -> list[Any]:
    """Requests for replies, without those of the canary and scores."""
    bodies = asked(server, "/generate")
    return [b for b in bodies if "canary" not in b["rid"] and b["sampling_params"]["max_new_tokens"]]


# ---------------------------------------------------------------- what it is asked


def test_end_tokens_are_held_back_in_a_request_of_their_own(server: SglangServer) -> None:
    """A server of token ids refuses min_new_tokens."""
    ends = tuple(range(2, 50))

    async def story() -> Any:
        engine = await opened(server)
        done = await reply(engine, PROMPT, Sampling(max_tokens=9, min_tokens=4, stop_token_ids=ends, key=3))
        only = await reply(engine, PROMPT, Sampling(max_tokens=4, min_tokens=4, stop_token_ids=ends, key=3))
        await engine.close()
        return done, only

    done, only = run(story())
    first, rest, alone = replies(server)
    held = first["sampling_params"]
    assert set(held["logit_bias"]) == {str(token) for token in (END, *ends)}
    assert (held["max_new_tokens"], held["ignore_eos"]) == (4, True)
    assert "logit_bias" not in rest["sampling_params"]
    assert rest["input_ids"] == [*PROMPT, *done.token_ids[:4]]
    assert rest["sampling_params"]["max_new_tokens"] == 5
    assert alone["sampling_params"] == held
    assert done.token_ids[:4] == only.token_ids
    assert not {END, *ends} & set(only.token_ids)
    assert done.logprobs is None
    assert len(done.sample_logprobs) == len(done.token_ids)
    assert done.spans == (VersionSpan(0, 0, len(done.token_ids)),)


@pytest.mark.parametrize(
    ("saver", "backup", "parts"),
    [(True, True, ["kv_cache", "weights"]), (True, False, ["kv_cache"]), (False, False, None)],
)
def test_memory_is_given_back_as_far_as_it_comes_back(
    server: SglangServer, saver: bool, backup: bool, parts: list[str] | None
) -> None:
    """Weights without a copy in the host's memory would be lost."""
    server.info |= {"enable_memory_saver": saver, "enable_weights_cpu_backup": backup}

    async def story() -> None:
        engine = await opened(server)
        before = await reply(engine, PROMPT, Sampling(max_tokens=5, key=1))
        await engine.place("cpu")
        waiting = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=5, key=1)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await engine.place("gpu")
        assert await waiting == before
        await engine.close()

    run(story())
    given = [body["tags"] for body in asked(server, "/release_memory_occupation")]
    assert given == ([] if parts is None else [parts])
    taken = [body["tags"] for body in asked(server, "/resume_memory_occupation")]
    assert taken == ([] if parts is None else [parts[::-1]])


@pytest.mark.parametrize("backup", [True, False])
def test_a_server_that_a_killed_run_has_left_asleep_is_woken_up(server: SglangServer, backup: bool) -> None:
    """One that is awake is not: it would end."""
    server.info["enable_weights_cpu_backup"] = backup

    async def story() -> None:
        left = await opened(server)
        before = await reply(left, PROMPT, Sampling(max_tokens=5, key=1))
        await left.place("cpu")
        for _ in range(2):
            engine = await opened(server)
            assert (await reply(engine, PROMPT, Sampling(max_tokens=5, key=1))).token_ids == before.token_ids
            await engine.close()
        await left.close()

    run(story())
    taken = [body["tags"] for body in asked(server, "/resume_memory_occupation")]
    assert taken == [["weights", "kv_cache"] if backup else ["kv_cache"]]


# ---------------------------------------------------------------- what it says


def test_filters_leave_the_trained_log_probs_known_and_penalties_do_not(server: SglangServer) -> None:
    """Against the engine behind the double, which tells both."""

    async def story() -> None:
        engine = await opened(server)
        model = NativeEngine(module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
        filtered = await reply(engine, PROMPT, Sampling(max_tokens=8, key=2, top_p=0.5, temperature=0.8))
        (scored,) = await model.score(
            [
                ScoreRequest(
                    token_ids=(*PROMPT, *filtered.token_ids), start=len(PROMPT), temperature=0.8, top_k=0
                )
            ]
        )
        np.testing.assert_allclose(filtered.logprobs, scored.logprobs, atol=1e-5)
        assert filtered.sample_logprobs is None
        penalised = await reply(engine, PROMPT, Sampling(max_tokens=8, key=2, repetition_penalty=1.4))
        assert penalised.logprobs is None
        assert penalised.sample_logprobs is not None
        plain = await reply(engine, PROMPT, Sampling(max_tokens=8, key=2, temperature=0.8))
        assert plain.logprobs == plain.sample_logprobs
        await engine.close()

    run(story())


def test_which_log_probs_are_known_by_what_a_server_tells() -> None:
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "greedy": {"temperature": 0.0},
        "tempered": {"temperature": 0.7},
        "filtered": {"top_p": 0.9},
        "penalised": {"repetition_penalty": 1.2},
        "held back": {"min_tokens": 3},
    }
    kinds: dict[Any, set[str]] = {
        "always": set(settings),
        "unpenalised": {"plain", "greedy", "tempered", "filtered"},
        "unfiltered": {"plain", "greedy", "tempered"},
        "plain": {"plain", "greedy"},
        "never": set(),
    }
    for kind, known in kinds.items():
        can = replace(own_engine(stop_texts=False), logprobs=kind)
        assert {name for name, how in settings.items() if can.tells_logprobs(Sampling(**how))} == known, kind


def test_streams_of_both_forms_are_read(server: SglangServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        sampling = Sampling(max_tokens=10, key=4, ignore_eos=True)
        whole = await reply(engine, PROMPT, sampling)
        for form in (False, True):
            server.info["incremental_streaming_output"] = form
            given: list[int] = []
            assert await reply(engine, PROMPT, sampling, on_tokens=given.extend) == whole
            assert given == whole.token_ids
        await engine.close()

    run(story())


def said(**change: Any) -> dict[str, Any]:
    """A reply as SGLang 0.5.23 composes it (`TokenizerManager._handle_batch_output`)."""
    info = {
        "id": "a",
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-0.25, 1, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    }
    return {"output_ids": [7, 8, 1], "meta_info": info | change}


def test_a_reply_is_read() -> None:
    done = completion(said(), Sampling(temperature=0.7), ends={1}, name="it")
    assert (done.token_ids, done.finish_reason) == ([7, 8, 1], "stop")
    assert done.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert done.logprobs == done.sample_logprobs == [-0.5, -1.5, -0.25]
    assert completion(said(), Sampling(temperature=0), ends={1}, name="it").sample_logprobs == [0.0] * 3


@pytest.mark.parametrize(("ends", "reason"), [({1}, "stop"), ({2}, "length"), (set(), "length")])
def test_an_end_token_in_the_last_place_ends_a_reply(ends: set[int], reason: str) -> None:
    """Whatever is looked at first: SGLang 0.5.21 to 0.5.23 look at end tokens (`Req.update_finish_state`), older ones
    at the limit of tokens, which tell `length` of such a reply."""
    full = said(finish_reason={"type": "length", "length": 3})
    assert completion(full, Sampling(max_tokens=3), ends=ends, name="it").finish_reason == reason


def test_a_reply_that_ends_in_its_last_place_is_told_as_by_other_engines(server: SglangServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        free = await reply(engine, PROMPT, Sampling(max_tokens=1, temperature=0, ignore_eos=True))
        assert free.finish_reason == "length"
        asked = Sampling(max_tokens=1, temperature=0, stop_token_ids=(free.token_ids[0],))
        done = await reply(engine, PROMPT, asked)
        assert (done.token_ids, done.finish_reason) == (free.token_ids, "stop")
        await engine.close()

    run(story())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": {"type": "abort", "message": "no room"}}, "'abort'.*no room"),
        ({"finish_reason": None}, "None"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-1.5, 9, None], [-0.25, 1, None]]}, "other tokens"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "1 other tokens"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 8, None], [-0.2, 1, None]]}, "not finite"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-3.4e38, 8, None], [-0.2, 1, None]]}, "not finite"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "not named by whet"),
    ],
)
def test_a_reply_that_is_not_whole_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WhetError, match=words):
        completion(said(**change), Sampling(), ends={1}, name="it")


# ---------------------------------------------------------------- what it refuses, and lies


def test_a_cache_that_is_not_emptied_stops_the_update(server: SglangServer) -> None:
    async def refuses(body: Any) -> Any:
        return web.Response(text="Flush cache failed.\n", status=400)

    async def story() -> None:
        engine = await opened(server)
        server.fails["/flush_cache"] = refuses
        with pytest.raises(WhetError, match="refused to forget its cache"):
            await engine.update_weights(WeightUpdate(version=1, module=module()))
        await engine.close()

    run(story())


def test_a_refused_update_tells_why(server: SglangServer) -> None:
    async def fails(body: Any) -> Any:
        return web.json_response({"success": False, "message": "no such folder"}, status=400)

    async def lies(body: Any) -> Any:
        return {"success": False, "message": "out of memory"}

    async def story() -> None:
        engine = await opened(server)
        for handler, words in ((fails, "no such folder"), (lies, "out of memory")):
            server.fails["/update_weights_from_disk"] = handler
            with pytest.raises(WhetError, match=words):
                await engine.update_weights(WeightUpdate(version=1, module=module()))
        await engine.close()

    run(story())


def test_a_score_of_other_tokens_is_refused(server: SglangServer) -> None:
    async def story() -> None:
        engine = await opened(server)

        async def other(body: Any) -> Any:
            return await server.generate(body | {"input_ids": body["input_ids"][::-1]})

        server.fails["/generate"] = other
        with pytest.raises(WhetError, match="log-probs of 3 other tokens than the 3"):
            await engine.score([ScoreRequest(token_ids=(3, 4, 5, 6), start=1)])
        await engine.close()

    run(story())


def test_the_last_token_of_the_vocabulary_is_scored(server: SglangServer) -> None:
    """SGLang names it 0 in its answer (`SchedulerLogprobResultProcessor`, 0.5.21 to 0.5.23)."""
    tokens = (3, VOCAB - 1, 5, VOCAB - 1)

    async def story() -> None:
        engine = await opened(server)
        (score,) = await engine.score([ScoreRequest(token_ids=tokens, start=1)])
        (own,) = await server.engine.score([ScoreRequest(token_ids=tokens, start=1)])
        assert score.logprobs == own.logprobs
        await engine.close()

    run(story())


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.5.20", "refused"), ("0.5.13.post1", "refused"), ("0.5.21", "unseen"), ("0.5.21rc1", "unseen")],
)
def test_versions(version: str, state: str) -> None:
    assert versions.known(version, "sglang").state == state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.5.20"}, "0.5.20: whet needs"),
        ({"max_req_input_len": LIMIT}, f"--context-length {LIMIT + 8}"),
        ({"speculative_algorithm": "EAGLE"}, "draft model"),
        ({"disaggregation_mode": "prefill"}, "apart"),
        ({"enable_watermark": True}, "watermark"),
        ({"preferred_sampling_params": {"top_p": 0.9}}, "sampling settings of its own"),
        ({"enable_metrics": False}, "--enable-metrics"),
    ],
)
def test_a_server_that_whet_cannot_work_with_is_refused(
    server: SglangServer, change: dict[str, Any], words: str
) -> None:
    server.info |= change
    with pytest.raises(ConfigError, match=words):
        run(opened(server))


def test_a_server_of_another_kind_is_refused(server: SglangServer) -> None:
    async def other(body: Any) -> Any:
        return {"name": "something else"}

    server.fails["/server_info"] = other
    with pytest.raises(ConfigError, match="does not answer as SGLang does"):
        run(opened(server))
    assert "does not generate" in unfit(server.info, generates=False, max_context=LIMIT)


def test_seeds_are_read_under_deterministic_inference_alone(server: SglangServer) -> None:
    async def story() -> None:
        engine = await opened(server)
        assert engine.can.reproducible == "server"
        with pytest.raises(RequestError, match=r"min_p=0\.1.*deterministic"):
            await reply(engine, PROMPT, Sampling(max_tokens=3, min_p=0.1))
        server.info["enable_deterministic_inference"] = False
        await engine.open()
        assert engine.can.reproducible == "no"
        assert len((await reply(engine, PROMPT, Sampling(max_tokens=3, min_p=0.1))).token_ids) > 0
        await engine.close()

    run(story())
