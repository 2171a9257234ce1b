"""The contract of the rollout seam. Every engine passes it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asking import reply
from tiny import FAMILIES, VOCAB, tiny_model
from whet import environment, seeds
from whet.config.schema import Model, Scratch
from whet.models import kernels
from whet.models.load import build
from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.rollout.hf import HfEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.rollout.scripted import ScriptedEngine
from whet.types import Completion, Sampling, Span, WhetError

environment.prepare(threads=None, exact=True)

T = TypeVar("T")
END = 1
LIMIT = 128
"""Longest rollout of the engines here."""
PROMPT = [5, 9, 2, 33]


def letters(token_ids: list[int]) -> str:
    return "".join("abc"[t % 3] for t in token_ids)


def module() -> PreTrainedModel:
    """intermediate_size is a multiple of 32: silu of torch rounds the last numbers of a tensor differently, so that
    with the PyTorch twins other widths are not exact."""
    scratch = Scratch(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        initializer_range=0.1,
    )
    return build(
        Model(scratch=scratch),
        vocab_size=VOCAB,
        eos_token_id=END,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )


def native(kind: str) -> RolloutEngine:
    ops = kernels.load(kind)  # type: ignore[arg-type]
    return NativeEngine(module(), ops, end_token_ids=[END], max_context=LIMIT, decode=letters)


def hf() -> RolloutEngine:
    return HfEngine(module(), end_token_ids=[END], max_context=LIMIT, decode=letters)


def scripted() -> RolloutEngine:
    """Says pseudo-random tokens that depend on prompt and key."""

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        for _ in range(20):  # longer than it takes to stop all replicas of a router
            await asyncio.sleep(0)
        stream = seeds.key(0 if sampling.temperature == 0 else sampling.key, *token_ids)
        uniform = seeds.uniforms(stream, len(token_ids), sampling.max_tokens + sampling.min_tokens + 20)
        return np.floor(uniform * VOCAB).astype(int).tolist()

    return ScriptedEngine(say, end_token_ids=[END], max_context=LIMIT, vocab=VOCAB, decode=letters)


def routed(make: Callable[[], RolloutEngine]) -> RolloutEngine:
    """Three of them behind a router."""
    return Router([Replica(f"engine-{n}", make()) for n in range(3)])


ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "native-torch": lambda: native("torch"),
    "native": lambda: native("auto"),
    "hf": hf,
    "scripted": scripted,
    "router-native": lambda: routed(lambda: native("auto")),
    "router-scripted": lambda: routed(scripted),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    return ENGINES[request.param]()


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


async def ask(e: RolloutEngine, jobs: list[tuple[list[int], Sampling]]) -> list[Completion]:
    return list(await asyncio.gather(*(reply(e, p, s) for p, s in jobs)))


def jobs(count: int, **options: Any) -> list[tuple[list[int], Sampling]]:
    draw = random.Random(2)
    return [
        ([draw.randrange(2, VOCAB) for _ in range(1 + i % 7)], Sampling(key=i, max_tokens=12, **options))
        for i in range(count)
    ]


def test_lists_are_equally_long_and_reasons_are_true(engine: RolloutEngine) -> None:
    for _, done in zip(range(40), run(ask(engine, jobs(40, stop_token_ids=(3, 4, 5, 6))))):
        n = len(done.token_ids)
        assert 1 <= n <= 12
        assert n == len(done.logprobs) == len(done.sample_logprobs) == len(done.versions)
        assert all(0 <= t < VOCAB for t in done.token_ids)
        assert all(lp <= 0 and math.isfinite(lp) for lp in done.logprobs + done.sample_logprobs)
        ends = {END, 3, 4, 5, 6}
        assert not ends & set(done.token_ids[:-1])
        assert done.finish_reason == ("stop" if done.token_ids[-1] in ends else "length")
        assert n == 12 or done.finish_reason == "stop"


def test_the_caller_s_list_is_not_touched(engine: RolloutEngine) -> None:
    prompt = list(PROMPT)
    done = run(reply(engine, prompt, Sampling(max_tokens=5)))
    assert prompt == PROMPT
    assert done.token_ids[: len(PROMPT)] != PROMPT


def test_min_tokens_holds_end_tokens_back(engine: RolloutEngine) -> None:
    ends = tuple(range(2, 50))
    short = run(ask(engine, jobs(10, stop_token_ids=ends)))
    long = run(ask(engine, jobs(10, stop_token_ids=ends, min_tokens=6)))
    assert min(len(c.token_ids) for c in short) < 6
    for done in long:
        assert not {END, *ends} & set(done.token_ids[:6])
        assert 6 < len(done.token_ids) <= 12 or done.finish_reason == "length"


def test_ignore_eos_goes_to_the_limit(engine: RolloutEngine) -> None:
    done = run(ask(engine, jobs(30, ignore_eos=True)))
    assert {(len(c.token_ids), c.finish_reason) for c in done} == {(12, "length")}
    assert any(END in c.token_ids for c in done)


def test_stop_strings_end_a_reply_that_contains_them(engine: RolloutEngine) -> None:
    stopped = run(ask(engine, jobs(20, stop=("ab", "cca"))))
    for done in stopped:
        text = letters(done.token_ids)
        ended = text.endswith(("ab", "cca"))
        assert "ab" not in text[:-1]
        assert "cca" not in text[:-1]
        assert done.finish_reason == ("stop" if ended or done.token_ids[-1] == END else "length")
        assert len(text) == 12 or done.finish_reason == "stop"
    assert sum(letters(c.token_ids).endswith(("ab", "cca")) for c in stopped) > 5


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], Sampling(), "empty"),
        ([3] * 100, Sampling(max_tokens=29), "limit of 128"),
        ([3, VOCAB], Sampling(max_tokens=5), "vocabulary"),
        ([3, -1], Sampling(max_tokens=5), "vocabulary"),
        ([3], Sampling(max_tokens=0), "max_tokens=0"),
        ([3], Sampling(max_tokens=4, min_tokens=5), "min_tokens=5"),
        ([3], Sampling(max_tokens=4, ignore_eos=True, stop=("a",)), "ignore_eos"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    engine: RolloutEngine, prompt: list[int], sampling: Sampling, words: str
) -> None:
    async def story() -> None:
        with pytest.raises(WhetError, match=words):
            await reply(engine, prompt, sampling)
        await reply(engine, [3], Sampling(max_tokens=2))  # nobody else is harmed

    run(story())


def test_the_longest_possible_rollout_is_served(engine: RolloutEngine) -> None:
    done = run(reply(engine, [3] * 100, Sampling(max_tokens=28, ignore_eos=True)))
    assert len(done.token_ids) == 28


def test_stop_strings_need_a_decoder() -> None:
    for e in (
        NativeEngine(tiny_model(), kernels.load("auto"), end_token_ids=[], max_context=32),
        HfEngine(tiny_model(), end_token_ids=[], max_context=32),
        ScriptedEngine(lambda *_: [1]),
    ):
        with pytest.raises(WhetError, match="decode"):
            run(reply(e, [3], Sampling(max_tokens=3, stop=("a",))))


def test_key_and_prompt_decide_batch_and_order_do_not(engine: RolloutEngine) -> None:
    work = [(PROMPT, Sampling(key=77, max_tokens=12, ignore_eos=True)), *jobs(50)]
    alone = [run(ask(engine, [job]))[0] for job in work[:8]]
    order = list(range(len(work)))
    random.Random(1).shuffle(order)
    together = dict(zip(order, run(ask(engine, [work[i] for i in order]))))
    assert [together[i] for i in range(8)] == alone
    keys = [(PROMPT, Sampling(key=k, max_tokens=12, ignore_eos=True)) for k in (1, 2, 3, 1)]
    replies = [tuple(c.token_ids) for c in run(ask(engine, keys))]
    assert replies[0] == replies[3]
    assert len(set(replies)) == 3


def test_greedy_needs_no_key(engine: RolloutEngine) -> None:
    work = [(PROMPT, Sampling(key=k, temperature=0, max_tokens=12)) for k in (1, 2)]
    first, second = run(ask(engine, work))
    assert first == second
    assert set(first.sample_logprobs) == {0.0}


def test_versions_follow_load_weights(engine: RolloutEngine) -> None:
    async def story() -> None:
        assert engine.version == 0
        before = await ask(engine, jobs(4))
        await engine.pause(finish=True)
        held = asyncio.create_task(ask(engine, jobs(4)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not held.done()
        await engine.update_weights(WeightUpdate(version=12, module=module()))
        assert engine.version == 12
        after = await held
        assert {v for c in before for v in c.versions} == {0}
        assert {v for c in after for v in c.versions} == {12}
        assert [c.token_ids for c in before] == [c.token_ids for c in after]

    run(story())


def test_a_finishing_pause_lets_those_in_flight_finish(engine: RolloutEngine) -> None:
    async def story() -> None:
        flying = asyncio.create_task(ask(engine, jobs(6)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.pause(finish=True)
        await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert flying.done()
        assert {v for c in flying.result() for v in c.versions} == {0}

    run(story())


def test_a_keeping_pause_stops_at_once_and_goes_on_after_the_weights(engine: RolloutEngine) -> None:
    expected = run(ask(engine, jobs(6, ignore_eos=True)))

    async def story() -> list[Completion]:
        flying = asyncio.create_task(ask(engine, jobs(6, ignore_eos=True)))
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.pause(finish=False)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not flying.done()
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        return await flying

    for done, whole in zip(run(story()), expected):
        assert done.token_ids == whole.token_ids
        assert done.versions == sorted(done.versions)
        assert set(done.versions) <= {0, 1}


def test_cancelling_one_leaves_the_others(engine: RolloutEngine) -> None:
    expected = run(ask(engine, jobs(6)))

    async def story() -> list[Completion]:
        doomed = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=100, ignore_eos=True)))
        others = asyncio.create_task(ask(engine, jobs(6)))
        for _ in range(3):
            await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await others

    assert run(story()) == expected


def test_close_ends_every_wait_with_a_reason(engine: RolloutEngine) -> None:
    async def story() -> None:
        flying = [asyncio.create_task(reply(engine, p, s)) for p, s in jobs(4, ignore_eos=True)]
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.pause(finish=False)
        flying.append(asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=3))))
        await asyncio.sleep(0)
        await engine.close()
        for result in await asyncio.gather(*flying, return_exceptions=True):
            assert isinstance(result, WhetError)
            assert "closed" in str(result)
        with pytest.raises(WhetError, match="closed"):
            await reply(engine, PROMPT, Sampling(max_tokens=3))

    run(story())


# ---------------------------------------------------------------- native against the reference


@pytest.mark.parametrize("family", FAMILIES)
def test_native_and_hf_agree(family: str) -> None:
    module = tiny_model(family)
    fast = NativeEngine(module, kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    slow = HfEngine(module, end_token_ids=[END], max_context=LIMIT)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.5, "top_k": 9},
        {"top_p": 0.7, "min_tokens": 3},
        {"repetition_penalty": 1.4, "min_p": 0.05},
    ]
    work = [
        (prompt, replace(sampling, max_tokens=10, **kinds[i % 5]))
        for i, (prompt, sampling) in enumerate(jobs(15))
    ]
    before = module.config._attn_implementation
    for ours, theirs in zip(run(ask(fast, work)), run(ask(slow, work))):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        np.testing.assert_allclose(ours.sample_logprobs, theirs.sample_logprobs, atol=1e-5)
    assert module.config._attn_implementation == before


def test_hf_goes_on_under_new_weights_with_a_new_cache() -> None:
    first, other = tiny_model(seed=0), tiny_model(seed=1)

    async def story(e: HfEngine) -> Completion:
        flying = asyncio.create_task(reply(e, PROMPT, Sampling(max_tokens=12, key=4, ignore_eos=True)))
        for _ in range(6):
            await asyncio.sleep(0)
        await e.update_weights(WeightUpdate(version=1, module=other))
        return await flying

    done = run(story(HfEngine(first, end_token_ids=[END], max_context=LIMIT)))
    kept = done.versions.count(0)
    assert 0 < kept < 12
    fresh = HfEngine(other, end_token_ids=[END], max_context=LIMIT)
    rest = run(
        reply(fresh, PROMPT + done.token_ids[:kept], Sampling(max_tokens=12 - kept, key=4, ignore_eos=True))
    )
    assert rest.token_ids == done.token_ids[kept:]
    np.testing.assert_allclose(rest.logprobs, done.logprobs[kept:], atol=1e-6)


def test_a_script_may_return_a_whole_completion_and_is_recorded() -> None:
    whole = Completion(
        token_ids=[4],
        logprobs=[-0.5],
        sample_logprobs=[-0.25],
        spans=(Span(3, 0, 1),),
        finish_reason="length",
    )
    e = ScriptedEngine(lambda token_ids, sampling, version: whole, version=3)
    assert run(reply(e, [1, 2], Sampling(key=6))) is whole
    assert [(c.token_ids, c.sampling.key, c.version) for c in e.calls] == [([1, 2], 6, 3)]
    run(e.update_weights(WeightUpdate(version=4, module="m")))
    assert e.loaded == [WeightUpdate(version=4, module="m")]
