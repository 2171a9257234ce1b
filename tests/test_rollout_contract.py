"""The contract of the rollout seam. Every engine passes it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asking import reply
from servers import OpenAIServer, Server, SglangServer, VllmServer
from serving import REAL, openai_engine, real_server, sglang_engine, vllm_engine
from swept import except_for
from test_exact import attention_agrees
from tiny import DEVICE, FEW, VOCAB, tiny_model
from whet import environment, seeds
from whet.batch import Batch, pack
from whet.config.schema import ModelConfig
from whet.models import kernels
from whet.models.forward import decoder
from whet.models.load import build
from whet.models.logprob_parity import self_test
from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.rollout.hf import HfEngine
from whet.rollout.http.vllm import RESUME
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.requests import RequestError
from whet.rollout.router import Router
from whet.rollout.scripted import ScriptedEngine
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import Completion, Group, Rollout, Sampling, ScoreRequest, Task, VersionSpan, WhetError

environment.prepare(threads=None, exact=True)

T = TypeVar("T")
END = 1
LIMIT = 128
"""Longest rollout of the engines here."""
PROMPT = [5, 9, 2, 33]


def letters(token_ids: list[int]) -> str:
    return "".join("abc"[t % 3] for t in token_ids)


def module(seed: int = 0) -> PreTrainedModel:
    """intermediate_size is a multiple of 32: silu of torch rounds the last numbers of a tensor differently, so that
    with the PyTorch twins other widths are not exact. head_dim: vLLM has no attention for 16 on a CPU."""
    scratch = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "initializer_range": 0.1,
    }
    return build(
        ModelConfig(scratch=scratch),
        vocab_size=VOCAB,
        eos_token_id=END,
        pad_token_id=0,
        seed=seed,
        device=DEVICE,
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


def served(server: type[Server], client: Callable[[str], RolloutEngine]) -> Iterator[RolloutEngine]:
    """Behind HTTP."""
    engine = NativeEngine(module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    there = server(engine)
    try:
        yield client(there.url)
    finally:
        there.stop()


def client(make: Callable[..., Any]) -> Callable[[str], RolloutEngine]:
    """What a run makes, for a server."""

    def opened(url: str) -> RolloutEngine:
        engine: Any = make(url, module(), max_context=LIMIT, end_token_ids=[END])
        run(engine.open())
        return engine  # type: ignore[no-any-return]

    return opened


def real() -> Iterator[RolloutEngine]:
    """A real server, as it would be at its start."""
    engine = vllm_engine(real_server(module, LIMIT).url, module(), max_context=LIMIT, end_token_ids=[END])

    async def fresh() -> None:
        await engine.calls.ask(RESUME)
        await engine.open()
        await engine.update_weights(WeightUpdate(version=0, module=module()))

    run(fresh())
    yield engine
    run(engine.close())


ENGINES: dict[str, Callable[[], Iterator[RolloutEngine]]] = {
    "native-torch": lambda: iter([native("torch")]),
    "native": lambda: iter([native("auto")]),
    "hf": lambda: iter([hf()]),
    "scripted": lambda: iter([scripted()]),
    "router-native": lambda: iter([routed(lambda: native("auto"))]),
    "router-scripted": lambda: iter([routed(scripted)]),
    "vllm-recorded": lambda: served(VllmServer, client(vllm_engine)),
    "sglang-shaped": lambda: served(SglangServer, client(sglang_engine)),
    "openai-shaped": lambda: served(OpenAIServer, client(openai_engine)),
}
if REAL:
    ENGINES["vllm"] = real
WITH_MODELS = {name for name in ENGINES if "scripted" not in name}
TAKE_WEIGHTS = WITH_MODELS - {"openai-shaped"}
STOP_IN_MID_REPLY = set(ENGINES) - {"openai-shaped"}
KEEP_NOTHING = {"hf", "scripted", "router-scripted"}
"""Their memory is the trainer's, or a request's own: there is nothing to put away, and nothing to wait for."""


@pytest.fixture(params=except_for(lambda name: name not in ("native-torch", "router-scripted"), ENGINES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(name: str) -> Iterator[RolloutEngine]:
    yield from ENGINES[name]()


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

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
        assert done.logprobs is not None
        assert done.sample_logprobs is not None
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


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.9}])
@pytest.mark.parametrize("made", [native, hf])
def test_weights_that_diverged_are_said_to_have(
    made: Callable[..., RolloutEngine], how: dict[str, float]
) -> None:
    wrong, engine = module(), made("auto") if made is native else made()
    with torch.no_grad():
        wrong.get_output_embeddings().weight[3] = math.nan
    run(engine.update_weights(WeightUpdate(version=1, module=wrong)))
    with pytest.raises(WhetError, match="the policy's weights have most likely diverged"):
        run(reply(engine, PROMPT, Sampling(max_tokens=4, **how)))


def test_ignore_eos_goes_to_the_limit(engine: RolloutEngine) -> None:
    done = run(ask(engine, jobs(30, ignore_eos=True)))
    assert {(len(c.token_ids), c.finish_reason) for c in done} == {(12, "length")}
    assert any(END in c.token_ids for c in done)


def test_stop_strings_end_a_reply_that_contains_them(engine: RolloutEngine) -> None:
    if not engine.can.stop_texts:
        with pytest.raises(RequestError, match="stop strings"):
            run(ask(engine, jobs(1, stop=("ab", "cca"))))
        return
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
        ([3], Sampling(max_tokens=4, ignore_eos=True, stop_token_ids=(3,)), "ignore_eos"),
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
    if engine.can.reproducible != "everywhere":
        pytest.skip("it does not promise that")
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
    assert set(first.sample_logprobs or ()) == {0.0}


def test_versions_follow_update_weights(engine: RolloutEngine) -> None:
    async def story() -> None:
        assert engine.version == 0
        before = await ask(engine, jobs(4))
        await engine.pause(finish=True)
        held = asyncio.create_task(ask(engine, jobs(4)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not held.done()
        receipt = await engine.update_weights(WeightUpdate(version=12, module=module()))
        assert (receipt.version, receipt.error) == (12, "")
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


def test_a_keeping_pause_stops_at_once_and_goes_on_after_the_weights(
    engine: RolloutEngine, name: str
) -> None:
    if name not in STOP_IN_MID_REPLY:
        assert not engine.can.in_flight_updates
        pytest.skip("it says that it cannot")
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


def test_close_ends_every_wait_with_a_reason(engine: RolloutEngine, name: str) -> None:
    async def story() -> None:
        flying = [asyncio.create_task(reply(engine, p, s)) for p, s in jobs(4, ignore_eos=True)]
        for _ in range(3):
            await asyncio.sleep(0)
        if name in STOP_IN_MID_REPLY:
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


LONG = Sampling(max_tokens=100, key=3, ignore_eos=True)


def test_a_reply_goes_on_under_other_weights_and_its_spans_say_where(
    engine: RolloutEngine, name: str
) -> None:
    """From the first token of the other weights on it is what these sample after the tokens so far."""
    if name not in TAKE_WEIGHTS:
        pytest.skip("it takes no weights")
    other = module(seed=1)
    same_numbers = engine.can.reproducible == "everywhere"
    sampling = LONG if same_numbers else replace(LONG, temperature=0.0)

    async def story() -> Completion:
        begun = asyncio.Event()
        flying = asyncio.create_task(reply(engine, PROMPT, sampling, on_tokens=lambda tokens: begun.set()))
        await begun.wait()
        await engine.pause(finish=False)
        await engine.update_weights(WeightUpdate(version=1, module=other))
        return await flying

    done = run(story())
    before, after = done.spans
    assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 100)
    assert before.end == after.start
    assert done.versions == [0] * before.end + [1] * (100 - before.end)
    kept = done.token_ids[: before.end]
    fresh = NativeEngine(other, kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    rest = run(reply(fresh, PROMPT + kept, replace(sampling, max_tokens=100 - before.end)))
    assert done.token_ids[before.end :] == rest.token_ids


def test_a_pause_can_end_without_new_weights(engine: RolloutEngine) -> None:
    expected = run(ask(engine, jobs(4)))

    async def story(finish: bool) -> list[Completion]:
        await engine.pause(finish)
        held = asyncio.create_task(ask(engine, jobs(4)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not held.done()
        await engine.resume()
        return await held

    assert [run(story(finish)) for finish in (True, False)] == [expected] * 2


def test_a_pause_that_is_resumed_while_it_waits_stops_nobody(engine: RolloutEngine) -> None:
    async def story() -> None:
        flying = asyncio.create_task(ask(engine, jobs(6)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pausing = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not pausing.done()
        await engine.resume()
        await asyncio.gather(flying, pausing)
        assert len(await ask(engine, jobs(2))) == 2

    run(story())


def test_a_pause_that_is_cut_off_by_the_end_of_the_engine_holds_nobody_up(engine: RolloutEngine) -> None:
    async def story() -> None:
        flying = asyncio.create_task(ask(engine, jobs(6)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pausing = asyncio.create_task(engine.pause(finish=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not pausing.done()
        await engine.close()
        await asyncio.gather(flying, pausing, return_exceptions=True)
        with pytest.raises(WhetError, match="closed"):
            await reply(engine, PROMPT, Sampling(max_tokens=3))

    run(story())


def test_a_full_set_mends_what_half_of_one_has_broken(engine: RolloutEngine, name: str) -> None:
    if name not in TAKE_WEIGHTS:
        pytest.skip("it takes no weights")
    full = [(n, p.detach()) for n, p in module(seed=1).named_parameters()]
    work = jobs(3, temperature=1.0 if engine.can.reproducible == "everywhere" else 0.0)

    async def story() -> list[Completion]:
        with pytest.raises(WhetError, match=r"1 of \d+ parameters were not received"):
            await engine.update_weights(WeightUpdate(version=1, tensors=iter(full[1:])))
        assert engine.version == 0
        await engine.update_weights(WeightUpdate(version=2, tensors=iter(full)))
        return await ask(engine, work)

    done = run(story())
    fresh = NativeEngine(
        module(seed=1), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT, version=2
    )
    assert [(c.token_ids, c.spans) for c in done] == [(c.token_ids, c.spans) for c in run(ask(fresh, work))]


def test_a_request_waits_for_the_least_version_that_it_names(engine: RolloutEngine) -> None:
    async def story() -> None:
        now = await reply(engine, PROMPT, Sampling(max_tokens=3), least_version=0)
        assert set(now.versions) == {0}
        waiting = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=3), least_version=2))
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        await engine.pause(finish=True)  # does not wait for it
        await engine.resume()
        assert not waiting.done()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reply(engine, PROMPT, Sampling(max_tokens=3), least_version=3)
        await engine.update_weights(WeightUpdate(version=2, module=module()))
        assert set((await waiting).versions) == {2}
        late = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=3), least_version=9))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(WhetError, match="closed"):
            await late

    run(story())


def test_an_adapter_that_is_not_served_is_refused(engine: RolloutEngine) -> None:
    with pytest.raises(RequestError, match="adapter 'theirs'"):
        run(reply(engine, PROMPT, Sampling(max_tokens=3), adapter="theirs"))


# ---------------------------------------------------------------- scores


def test_scores_are_the_log_probs_of_the_model(engine: RolloutEngine, name: str) -> None:
    """Against a softmax over the logits of transformers; of sampled tokens, what was told when they were sampled."""
    temperature = 0.7 if engine.can.score_temperatures else 1.0
    sampling = Sampling(max_tokens=12, key=5, temperature=temperature)
    done = run(reply(engine, PROMPT, sampling))
    tokens = (*PROMPT, *done.token_ids)
    ask = [
        ScoreRequest(token_ids=tokens, start=len(PROMPT), temperature=temperature, top_k=3),
        ScoreRequest(token_ids=tokens[:6], start=1),
    ]
    first, second = run(engine.score(ask))
    assert (first.version, second.version, second.top) == (0, 0, [])
    assert (len(first.logprobs), len(first.top), len(second.logprobs)) == (
        len(done.token_ids),
        len(done.token_ids),
        5,
    )
    if name not in WITH_MODELS:
        assert first.logprobs == done.logprobs
        return
    with torch.no_grad():
        model = module()
        logits_TV = model(torch.tensor([tokens], device=model.device)).logits[0].float().cpu()
    for given, found in zip(ask, (first, second)):
        logp_AV = (logits_TV[: len(given.token_ids)][given.start - 1 : -1] / given.temperature).log_softmax(
            -1
        )
        expected = [float(logp_V[t]) for logp_V, t in zip(logp_AV, given.token_ids[given.start :])]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(first.logprobs, done.logprobs or (), atol=1e-5)
    for row, logp_V in zip(first.top, (logits_TV[len(PROMPT) - 1 : -1] / temperature).log_softmax(-1)):
        assert [t for t, _ in row] == logp_V.topk(3).indices.tolist()
        np.testing.assert_allclose([v for _, v in row], logp_V.topk(3).values, atol=1e-5)


def test_a_temperature_that_it_cannot_score_at_is_refused(engine: RolloutEngine) -> None:
    ask = [ScoreRequest(token_ids=(3, 4), start=1, temperature=0.7)]
    if engine.can.score_temperatures:
        assert len(run(engine.score(ask))) == 1
    else:
        with pytest.raises(RequestError, match=r"temperature=0\.7"):
            run(engine.score(ask))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ScoreRequest(token_ids=(3, 4), start=0), "from index 0 of 2"),
        (ScoreRequest(token_ids=(3, 4), start=2), "from index 2 of 2"),
        (ScoreRequest(token_ids=(3, VOCAB), start=1), "vocabulary"),
        (ScoreRequest(token_ids=(3,) * 200, start=1), "limit is 128"),
        (ScoreRequest(token_ids=(3, 4), start=1, temperature=0.0), "temperature above 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(engine: RolloutEngine, given: ScoreRequest, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run(engine.score([ScoreRequest(token_ids=(3, 4), start=1), given]))


@pytest.mark.parametrize("kind", ["torch", "auto"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_native_scores_equal_what_was_sampled_and_what_is_trained_to_the_bit(
    kind: str, temperature: float
) -> None:
    if kind == "torch" and not attention_agrees():
        pytest.skip(
            "rows of torch's products do not agree here, and the attention of the twins is made of them"
        )
    model, ops = module(), kernels.load(kind)  # type: ignore[arg-type]
    assert self_test(decoder(model, ops), ops, vocab_size=VOCAB, seed=1, temperature=temperature).exact
    e = NativeEngine(model, ops, end_token_ids=[END], max_context=LIMIT, prefill_tokens=40)  # several packs
    work = [(p, replace(s, temperature=temperature)) for p, s in jobs(9)]
    done = run(ask(e, work))
    asked = [
        ScoreRequest(token_ids=(*p, *c.token_ids), start=len(p), temperature=temperature)
        for (p, _), c in zip(work, done)
    ]
    scored = run(e.score(asked))
    assert [s.logprobs for s in scored] == [c.logprobs for c in done]
    for given, one in zip(asked, scored):  # as the trainer computes a rollout
        batch = packed(given)
        trained_N = TorchEngine(model, ops, cut=MicroBatchPolicy(temperature=temperature)).forward(
            batch, "logprobs"
        )
        assert trained_N[batch.mask_N].tolist() == one.logprobs


def packed(given: ScoreRequest) -> Batch:
    """One rollout."""
    count, scored = len(given.token_ids), len(given.token_ids) - given.start
    mask = [False] * given.start + [True] * scored
    rollout = Rollout.one_strand(
        task=Task(uid=0, source="s", prompt=""), index=0, token_ids=np.array(given.token_ids), mask=np.array(mask),
        logprobs=np.zeros(count), sample_logprobs=np.zeros(count), versions=np.zeros(count), finish_reason="length",
    )  # fmt: skip
    return pack([Group(rollout.task, (rollout,))])


def test_a_score_waits_while_weights_change(engine: RolloutEngine) -> None:
    async def story() -> None:
        await engine.pause(finish=True)
        held = asyncio.create_task(engine.score([ScoreRequest(token_ids=(3, 4), start=1)]))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not held.done()
        await engine.update_weights(WeightUpdate(version=4, module=module()))
        assert (await held)[0].version == 4

    run(story())


# ---------------------------------------------------------------- tokens as they are sampled


async def streamed(e: RolloutEngine, prompt: list[int], sampling: Sampling) -> AsyncIterator[int]:
    """A consumer's side: the tokens of a reply, one by one. A consumer that goes away ends the request."""
    queue: asyncio.Queue[int | None] = asyncio.Queue()

    def put(tokens: list[int]) -> None:
        for token in tokens:
            queue.put_nowait(token)

    work = asyncio.create_task(reply(e, prompt, sampling, on_tokens=put))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (token := await queue.get()) is not None:
            yield token
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def test_a_consumer_gets_every_token_once_in_order(engine: RolloutEngine) -> None:
    given: list[list[int]] = [[] for _ in range(6)]

    async def story() -> list[Completion]:
        work = jobs(6, stop_token_ids=(3, 4))
        calls = (reply(engine, p, s, on_tokens=given[i].extend) for i, (p, s) in enumerate(work))
        return list(await asyncio.gather(*calls))

    done = run(story())
    assert given == [c.token_ids for c in done]
    assert [c.token_ids for c in done] == [
        c.token_ids for c in run(ask(engine, jobs(6, stop_token_ids=(3, 4))))
    ]


def test_a_consumer_may_go_away_half_way(engine: RolloutEngine, name: str) -> None:
    async def story() -> None:
        before, seen = await engine.health(), []
        async with aclosing(streamed(engine, PROMPT, LONG)) as tokens:
            async for token in tokens:
                seen.append(token)
                if len(seen) == 5:
                    break
        assert len(seen) == 5
        await engine.pause(finish=True)  # nothing is in flight
        await engine.resume()
        after = await engine.health()
        # a real server may have come to the end by then: test_backends.py has a longer reply
        tells = name in WITH_MODELS and name != "vllm"
        assert not tells or after.requests == before.requests, "it was aborted, not served"
        whole = await reply(engine, PROMPT, LONG)
        assert whole.token_ids[:5] == seen

    run(story())


def test_an_error_of_a_consumer_is_its_own_request_s(engine: RolloutEngine) -> None:
    def fails(tokens: list[int]) -> None:
        raise ValueError("no room")

    async def story() -> None:
        doomed = asyncio.create_task(reply(engine, PROMPT, Sampling(max_tokens=30), on_tokens=fails))
        others = await ask(engine, jobs(4))
        with pytest.raises(ValueError, match="no room"):
            await doomed
        assert others == await ask(engine, jobs(4))

    run(story())


def test_a_consumer_gets_every_token_once_across_a_change_of_weights(
    engine: RolloutEngine, name: str
) -> None:
    """Tokens of the reply come before each of three changes, and after the last one."""
    given: list[int] = []

    async def story() -> Completion:
        more = asyncio.Event()

        def take(tokens: list[int]) -> None:
            given.extend(tokens)
            more.set()

        flying = asyncio.create_task(reply(engine, PROMPT, LONG, on_tokens=take))
        for version in (1, 2, 3):
            more.clear()
            next_one = asyncio.create_task(more.wait())
            await asyncio.wait({flying, next_one}, return_when=asyncio.FIRST_COMPLETED)
            next_one.cancel()
            await engine.pause(finish=False)
            await engine.update_weights(WeightUpdate(version=version, module=module()))
        return await flying

    done = run(story())
    assert given == done.token_ids
    if name in TAKE_WEIGHTS:
        assert [span.version for span in done.spans] == [0, 1, 2, 3]


# ---------------------------------------------------------------- health and places


def test_health_counts_what_was_done(engine: RolloutEngine) -> None:
    async def story() -> None:
        before = await engine.health()
        done = await ask(engine, jobs(5))
        after = await engine.health()
        assert after.since == before.since
        assert after.requests - before.requests == 5
        assert after.tokens - before.tokens >= sum(len(c.token_ids) for c in done)
        await engine.score([ScoreRequest(token_ids=(3, 4, 5), start=1)])
        assert (await engine.health()).tokens - after.tokens >= 3

    run(story())


@pytest.mark.parametrize("parts", [{"weights", "cache"}, {"cache"}])
def test_requests_wait_until_what_was_put_away_is_back(
    engine: RolloutEngine, name: str, parts: set[Any]
) -> None:
    what = frozenset(parts)

    async def story() -> None:
        expected = await ask(engine, jobs(3))
        await engine.place("cpu", what)
        held = asyncio.create_task(ask(engine, jobs(3)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert name in KEEP_NOTHING or not held.done()
        await engine.place("gpu", what)
        assert await held == expected

    run(story())


def test_log_probs_that_are_not_known_are_none(engine: RolloutEngine) -> None:
    filtered = Sampling(max_tokens=6, key=2, top_p=0.5)
    done = run(reply(engine, PROMPT, filtered))
    assert (done.logprobs is not None) == engine.can.tells_logprobs(filtered)
    assert engine.can.tells_logprobs(Sampling(temperature=0.5)) == (
        engine.can.logprobs not in ("never", "plain")
    )


# ---------------------------------------------------------------- native against the reference


def test_greedy_replies_equal_those_of_the_reference(engine: RolloutEngine, name: str) -> None:
    if name not in WITH_MODELS:
        pytest.skip("it has no model")
    work = jobs(6, temperature=0.0)
    for ours, theirs in zip(run(ask(engine, work)), run(ask(hf(), work))):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        np.testing.assert_allclose(ours.logprobs or (), theirs.logprobs or (), atol=1e-5)


@pytest.mark.parametrize("family", FEW)
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


def test_hf_does_not_sample_from_half_of_what_a_torn_file_has() -> None:
    full = list(tiny_model(seed=1).named_parameters())

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from full[:3]
        raise OSError("the file is torn")

    async def story(e: HfEngine) -> None:
        with pytest.raises(OSError, match="torn"):
            await e.update_weights(WeightUpdate(version=1, tensors=torn()))
        with pytest.raises(WhetError, match="weights are incomplete: the file is torn"):
            await reply(e, PROMPT, Sampling(max_tokens=2))

    run(story(HfEngine(tiny_model(), end_token_ids=[END], max_context=LIMIT)))


def test_a_script_may_return_a_whole_completion_and_is_recorded() -> None:
    whole = Completion(
        token_ids=[4],
        logprobs=[-0.5],
        sample_logprobs=[-0.25],
        spans=(VersionSpan(3, 0, 1),),
        finish_reason="length",
    )
    e = ScriptedEngine(lambda token_ids, sampling, version: whole, version=3)
    assert run(reply(e, [1, 2], Sampling(key=6))) is whole
    assert [(c.token_ids, c.sampling.key, c.version) for c in e.calls] == [([1, 2], 6, 3)]
    run(e.update_weights(WeightUpdate(version=4, module="m")))
    assert e.loaded == [WeightUpdate(version=4, module="m")]
