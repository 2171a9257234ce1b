"""The native engine: what it samples depends neither on pages, prompts shared and batches nor on pauses."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from asking import reply
from tiny import FAMILIES, SPARSE, VOCAB, tiny_model
from whet import environment
from whet.models import kernels
from whet.models.attention import PackedAttention, Segments
from whet.models.forward import decoder
from whet.models.logprobs import token_logprobs
from whet.rollout.engine import WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.native.pages import Pages
from whet.rollout.native.runner import Runner
from whet.rollout.native.scheduler import Admission, Generation
from whet.rollout.requests import StopText
from whet.types import Completion, Sampling, WhetError

environment.prepare(threads=None, exact=True)

T = TypeVar("T")
END = 1


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


def engine(module: PreTrainedModel | None = None, **options: Any) -> NativeEngine:
    ops = kernels.load("auto")
    defaults: dict[str, Any] = {"end_token_ids": [END], "max_context": 300}
    return NativeEngine(module or tiny_model(), ops, **{**defaults, **options})


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCAB) for _ in range(n)] for n in lengths]


async def ask(e: NativeEngine, jobs: list[tuple[list[int], Sampling]]) -> list[Completion]:
    return list(await asyncio.gather(*(reply(e, p, s) for p, s in jobs)))


def group(prompt: list[int], size: int, **options: Any) -> list[tuple[list[int], Sampling]]:
    return [(prompt, Sampling(key=1000 + i, **options)) for i in range(size)]


def all_free(e: NativeEngine) -> bool:
    """No page is used, each is free or known, and no row has a slot."""
    pages = e.scheduler.pages
    unused = sorted((*pages.free, *pages.idle)) == list(range(pages.count)) and not any(pages.uses)
    return unused and not e.runner.live.requests and sorted(e.runner.free) == list(range(len(e.runner.free)))


class Spy:
    """Records the prefills and the sizes of the steps of an engine."""

    def __init__(self, e: NativeEngine) -> None:
        self.prefills: list[list[tuple[int, int, int, list[list[int]]]]] = []
        """Of each history: start and end of what is computed, its rows, and their pages."""
        self.steps: list[int] = []
        self.before_step: Callable[[int], None] = lambda number: None
        runner, prefill, step = e.runner, e.runner.prefill, e.runner.step

        def spied_prefill(admissions: list[Admission]) -> list[Generation]:
            self.prefills.append(
                [(a.start, a.end, len(a.rows), [list(row.pages) for row in a.rows]) for a in admissions]
            )
            return prefill(admissions)

        def spied_step() -> list[Generation]:
            self.steps.append(len(runner.live.requests))
            self.before_step(len(self.steps))
            return step()

        runner.prefill, runner.step = spied_prefill, spied_step  # type: ignore[method-assign]


async def at_step(spy: Spy, number: int) -> None:
    """Until so many decode steps have begun."""
    while len(spy.steps) < number:
        await asyncio.sleep(0)


# ---------------------------------------------------------------- what is sampled


@torch.no_grad()
def trained_logprobs(module: PreTrainedModel, prompt: list[int], reply: list[int], heat: float) -> Tensor:
    """As the trainer computes them: one packed forward."""
    ops, model = kernels.load("auto"), decoder(module, kernels.load("auto"))
    ids = torch.tensor(prompt + reply)
    segments = Segments.of_lengths(torch.tensor([len(ids)]))
    hidden = model.hidden(ids, segments.position_N, PackedAttention(segments, ops))
    rows = hidden[len(prompt) - 1 : -1]
    return token_logprobs(rows, ids[len(prompt) :], head=model.head, ops=ops, temperature=heat)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_trainers_and_those_of_a_float64_forward(family: str) -> None:
    module = tiny_model(family)
    e = engine(module)
    jobs = [
        j
        for i, p in enumerate(prompts([1, 5, 16, 17]))
        for j in group(p, 3, temperature=0.7 + 0.1 * i, max_tokens=40)
    ]
    wide = copy.deepcopy(module).double()
    wide.set_attn_implementation("eager")
    if family in SPARSE:
        wide.set_experts_implementation("eager")
    for (prompt, sampling), done in zip(jobs, run(ask(e, jobs))):
        heat = sampling.temperature
        assert done.logprobs == trained_logprobs(module, prompt, done.token_ids, heat).tolist()
        with torch.no_grad():
            logits = wide(input_ids=torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / heat).log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs).double(), expected.double(), atol=1e-5, rtol=0)
        assert done.sample_logprobs == done.logprobs
    assert all_free(e)


def mixed_jobs(count: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of every length around a page, some equal, with every kind of sampling."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"top_k": 7},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.1, "min_tokens": 6},
        {"repetition_penalty": 1.7},
        {"ignore_eos": True},
        {"stop_token_ids": (7, 8, 9)},
    ]
    many = prompts([1 + i * 5 % 40 for i in range(count // 3 + 1)], seed=4)
    return [
        (many[i // 3], Sampling(key=i * 7919, max_tokens=1 + i * 11 % 30, **kinds[i % len(kinds)]))
        if kinds[i % len(kinds)].get("min_tokens", 0) <= 1 + i * 11 % 30
        else (many[i // 3], Sampling(key=i * 7919, max_tokens=30, **kinds[i % len(kinds)]))
        for i in range(count)
    ]


def test_alone_or_with_fifty_others_in_any_order_bit_for_bit() -> None:
    module = tiny_model()
    jobs = mixed_jobs(51)
    alone = [run(ask(engine(module), [job]))[0] for job in jobs]
    for seed, options in enumerate(
        [{}, {"max_num_seqs": 5, "prefill_tokens": 30}, {"cache_mb": 1, "max_num_seqs": 9}]
    ):
        order = list(range(len(jobs)))
        random.Random(seed).shuffle(order)
        e = engine(module, **options)
        together = run(ask(e, [jobs[i] for i in order]))
        for i, done in zip(order, together):
            assert done == alone[i]
        assert all_free(e)


def test_arriving_late_changes_nothing() -> None:
    module = tiny_model()
    jobs = mixed_jobs(24)
    expected = run(ask(engine(module), jobs))

    async def trickle(e: NativeEngine) -> list[Completion]:
        tasks = []
        for job in jobs:
            tasks.append(asyncio.create_task(reply(e, *job)))
            for _ in range(len(tasks) % 4):
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    assert run(trickle(engine(module, max_num_seqs=7))) == expected


def test_a_closed_engine_gives_its_cache_back_and_stays_closed() -> None:
    """It took the cache's memory anew, two seconds of zeros at the end of a run, and new weights opened it again."""
    e, two = engine(), group(prompts([5])[0], 2, max_tokens=3)

    async def story() -> None:
        await ask(e, two)
        assert e.runner.cache is not None
        await e.close()
        assert e.runner.cache is None
        with pytest.raises(WhetError, match="closed"):
            await e.update_weights(WeightUpdate(version=1, module=e.runner.module))
        with pytest.raises(WhetError, match="closed"):
            await ask(e, two)

    run(story())


def test_the_key_decides() -> None:
    prompt = prompts([9])[0]
    jobs = [(prompt, Sampling(key=key, max_tokens=20, ignore_eos=True)) for key in (1, 2, 1, 2**63 + 5)]
    first, second, again, large = run(ask(engine(), jobs))
    assert first == again
    assert len({tuple(c.token_ids) for c in (first, second, large)}) == 3


# ---------------------------------------------------------------- shared prefills and pages


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_equal_prompts_share_one_prefill_and_their_full_pages(length: int) -> None:
    module = tiny_model()
    prompt = prompts([length])[0]
    e = engine(module)
    spy = Spy(e)
    jobs = group(prompt, 8, max_tokens=24, ignore_eos=True)
    together = run(ask(e, jobs))
    assert [[rows for _, _, rows, _ in prefill] for prefill in spy.prefills] == [[8]]
    tables = spy.prefills[0][0][3]
    full = length // 16
    assert all(table[:full] == tables[0][:full] for table in tables)
    own = [page for table in tables for page in table[full:]]
    assert len(set(own)) == len(own) == 8, "one page each for the first tokens of the replies"
    assert together == [run(ask(engine(module), [job]))[0] for job in jobs]


def test_a_whole_step_is_prefilled_at_once_within_the_bound() -> None:
    """By hand: two of 20 tokens fit into 50; of 60 the 16 that fill a page fit after another 20; 44 are left."""
    e = engine(prefill_tokens=50)
    spy = Spy(e)
    jobs = [job for prompt in prompts([20, 20, 20, 60, 10]) for job in group(prompt, 2, max_tokens=4)]
    run(ask(e, jobs))
    spans = [[(start, end) for start, end, _, _ in prefill] for prefill in spy.prefills]
    assert spans == [[(0, 20), (0, 20)], [(0, 20), (0, 16)], [(16, 60)], [(0, 10)]]


def test_finished_rows_leave_and_waiting_ones_join() -> None:
    e = engine(max_num_seqs=4)
    spy = Spy(e)
    jobs = [(p, Sampling(key=i, max_tokens=3 + i, ignore_eos=True)) for i, p in enumerate(prompts([4] * 8))]
    done = run(ask(e, jobs))
    assert [len(c.token_ids) for c in done] == [3 + i for i in range(8)]
    assert max(spy.steps) == 4
    assert len(spy.prefills) == 5  # the first four, then each of the others as a row gets free
    assert all_free(e)


def test_a_full_cache_makes_requests_wait() -> None:
    module = tiny_model()
    e = engine(module)
    roomy = run(ask(e, mixed_jobs(30)))
    tight = engine(module, max_num_seqs=64)
    tight.scheduler.pages = Pages(5, 16)  # 80 tokens in all
    spy = Spy(tight)
    assert run(ask(tight, mixed_jobs(30))) == roomy
    assert len(spy.prefills) > 5
    # k and v, layers, heads, head size, tokens, bytes
    assert e.runner.page_bytes == 2 * 2 * 2 * 16 * 16 * 4
    half = engine(tiny_model().bfloat16()).runner
    assert half.cache is not None
    assert half.page_bytes == half.cache.nbytes // half.cache.pages == e.runner.page_bytes, "float32 on a CPU"


def test_a_group_larger_than_the_batch_is_cut() -> None:
    module = tiny_model()
    jobs = group(prompts([20])[0], 11, max_tokens=6)
    e = engine(module, max_num_seqs=4)
    spy = Spy(e)
    assert run(ask(e, jobs)) == run(ask(engine(module), jobs))
    rows = [rows for prefill in spy.prefills for _, _, rows, _ in prefill]
    assert rows[0] == 4
    assert sum(rows) == 11
    assert max(spy.steps) == 4
    assert e.counts.prefilled_tokens == 20 + 4 * (len(rows) - 1), "the others find the prompt's full page"


def test_what_can_never_fit_is_refused() -> None:
    e = engine(cache_mb=1, max_context=4096, max_num_seqs=1)
    pages = e.scheduler.pages.count
    assert pages == (1 << 20) // e.runner.page_bytes == 128
    with pytest.raises(WhetError, match=r"needs 129 pages of 16 tokens, but the KV cache has 128"):
        run(reply(e, [5] * 2000, Sampling(max_tokens=50)))
    with pytest.raises(WhetError, match="limit of 4096 tokens"):
        run(reply(e, [5] * 4000, Sampling(max_tokens=97)))
    with pytest.raises(WhetError, match="is less than one page"):
        engine(cache_mb=0)
    assert all_free(e)


# ---------------------------------------------------------------- ends


def test_min_tokens_and_end_tokens() -> None:
    ends = list(range(0, VOCAB, 2))
    e = engine(end_token_ids=ends)
    prompt = prompts([6])[0]
    free, held = run(
        ask(
            e,
            [
                (prompt, Sampling(max_tokens=40, key=3)),
                (prompt, Sampling(max_tokens=40, min_tokens=12, key=3)),
            ],
        )
    )
    assert free.finish_reason == held.finish_reason == "stop"
    assert free.token_ids[-1] in ends
    assert len(free.token_ids) < 12 < len(held.token_ids) + 1
    assert not set(held.token_ids[:-1]) & set(ends)
    # without the end tokens the others are likelier: renormalised there, and only there
    gap = torch.tensor(held.sample_logprobs) - torch.tensor(held.logprobs)
    assert bool((gap[:12] > 0.1).all())
    assert bool((gap[12:].abs() < 1e-5).all())


def test_repetition_penalty_sees_prompt_and_reply() -> None:
    prompt = [3, 4, 5]
    done = run(
        reply(
            engine(end_token_ids=[]), prompt, Sampling(temperature=0, repetition_penalty=1e6, max_tokens=15)
        )
    )
    assert len({*prompt, *done.token_ids}) == 18
    plain = run(reply(engine(end_token_ids=[]), prompt, Sampling(temperature=0, max_tokens=15)))
    assert len(set(plain.token_ids)) < 15  # a greedy random model repeats itself


def letters(token_ids: list[int]) -> str:
    return "".join(chr(ord("a") + t % 3) for t in token_ids)


def test_stop_strings_across_tokens() -> None:
    prompt = prompts([5])[0]
    jobs = [(prompt, Sampling(key=k, max_tokens=60, stop=("abba", "cc"))) for k in range(12)]
    free = [(prompt, Sampling(key=k, max_tokens=60)) for k in range(12)]
    e = engine(end_token_ids=[], decode=letters)
    stopped, whole = run(ask(e, jobs)), run(ask(e, free))
    for cut, full in zip(stopped, whole):
        text = letters(full.token_ids)
        ends = [text.find(s) + len(s) for s in ("abba", "cc") if s in text]
        expected = min(ends, default=60)
        assert cut.token_ids == full.token_ids[:expected]
        assert cut.finish_reason == ("stop" if ends else "length")
    assert sum(c.finish_reason == "stop" for c in stopped) > 6


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_text_equals_a_search_in_the_whole_text(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(["a", "b", "ab", "", " ba", "bbbbbbbbb", "é"]), max_size=80))
    stops = tuple(data.draw(st.lists(st.text("ab é", min_size=1, max_size=6), min_size=1, max_size=3)))
    watch = StopText(stops, lambda ids: "".join(pieces[i] for i in ids))
    for i in range(len(pieces)):
        whole = "".join(pieces[: i + 1])
        assert watch.push(i) == any(s in whole for s in stops)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), early=st.integers(0, 60))
def test_stop_text_within_the_early_tokens_ends_nothing(data: st.DataObject, early: int) -> None:
    pieces = data.draw(st.lists(st.sampled_from(["a", "b", "ab", "", " ba", "bbbbbbbbb", "é"]), max_size=80))
    stops = tuple(data.draw(st.lists(st.text("ab é", min_size=1, max_size=6), min_size=1, max_size=3)))
    watch = StopText(stops, lambda ids: "".join(pieces[i] for i in ids), early)
    passed = len("".join(pieces[:early]))
    for i in range(len(pieces)):
        whole = "".join(pieces[: i + 1])
        ends = [at + len(s) for s in stops for at in range(len(whole)) if whole.startswith(s, at)]
        assert watch.push(i) == (i >= early and any(end > passed for end in ends))


def test_stop_text_whose_first_letter_is_early_in_half() -> None:
    parts = [b"ab", "é".encode()[:1], "é".encode()[1:], b"c"]
    watch = StopText(("éc",), lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"), 2)
    assert [watch.push(i) for i in range(4)] == [False, False, False, True]


def test_min_tokens_hold_for_stop_strings_too() -> None:
    prompt = prompts([5])[0]
    jobs = [(prompt, Sampling(key=k, max_tokens=60, min_tokens=25, stop=("abba", "cc"))) for k in range(12)]
    free = [(prompt, Sampling(key=k, max_tokens=60)) for k in range(12)]
    e = engine(end_token_ids=[], decode=letters)
    held, whole = run(ask(e, jobs)), run(ask(e, free))
    for reply_, full in zip(held, whole):
        text = letters(full.token_ids)
        ends = [text.find(s, 26 - len(s)) + len(s) for s in ("abba", "cc") if text.find(s, 26 - len(s)) >= 0]
        assert reply_.token_ids == full.token_ids[: min(ends, default=60)]
    assert sum(any(s in letters(c.token_ids[:25]) for s in ("abba", "cc")) for c in whole) > 3


def test_stop_text_decodes_a_window() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "x" * len(ids)

    watch = StopText(("stop",), decode)
    assert not any(watch.push(0) for _ in range(5000))
    assert longest <= 4 * (4 + StopText.MARGIN)


# ---------------------------------------------------------------- weights, pauses, failures


def shifted(module: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(9)))
    return other


def long_jobs() -> list[tuple[list[int], Sampling]]:
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5, "top_p": 0.9},
        {"min_tokens": 20},
        {"temperature": 0},
    ]
    many = prompts([3, 16, 30])
    return [
        (many[i // 4], Sampling(key=i, max_tokens=30, ignore_eos=i % 2 == 0, **kinds[i % 4]))
        for i in range(12)
    ]


@pytest.mark.parametrize("step", [1, 7, 20])
def test_interrupted_and_continued_with_equal_weights_is_uninterrupted(step: int) -> None:
    module = tiny_model()
    expected = run(ask(engine(module), long_jobs()))

    async def interrupted(e: NativeEngine) -> list[Completion]:
        spy = Spy(e)
        work = asyncio.create_task(ask(e, long_jobs()))
        await at_step(spy, step)
        await e.pause(finish=False)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(spy.steps) == step  # nothing moves in a pause
        await e.update_weights(WeightUpdate(version=1, module=module))
        return await work

    e = engine(module)
    for done, whole in zip(run(interrupted(e)), expected):
        assert done.token_ids == whole.token_ids
        assert done.logprobs == whole.logprobs
        assert done.sample_logprobs == whole.sample_logprobs
        before = done.versions.count(0)
        assert done.versions == [0] * before + [1] * (len(done.versions) - before)
        assert before == min(step + 1, len(done.token_ids))
    assert all_free(e)


def test_after_an_interruption_the_rest_is_sampled_from_the_new_weights() -> None:
    module = tiny_model()
    other = shifted(module)

    async def interrupted(e: NativeEngine) -> list[Completion]:
        spy = Spy(e)
        work = asyncio.create_task(ask(e, long_jobs()))
        await at_step(spy, 6)
        await e.update_weights(WeightUpdate(version=5, module=other))  # without a pause: between two steps
        return await work

    changed = 0
    for (prompt, sampling), done in zip(long_jobs(), run(interrupted(engine(module)))):
        kept = done.token_ids[: done.versions.count(0)]
        assert set(done.versions) <= {0, 5}
        if len(kept) == len(done.token_ids):
            continue
        left = Sampling(
            **{
                **_fields(sampling),
                "max_tokens": 30 - len(kept),
                "min_tokens": max(0, sampling.min_tokens - len(kept)),
            }
        )
        rest = run(reply(engine(other), prompt + kept, left))
        assert rest.token_ids == done.token_ids[len(kept) :]
        assert rest.logprobs == done.logprobs[len(kept) :]
        changed += 1
    assert changed > 6


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


def test_a_finishing_pause_waits_for_those_in_flight_and_holds_the_others() -> None:
    async def story(e: NativeEngine) -> None:
        spy = Spy(e)
        first = asyncio.create_task(ask(e, long_jobs()))
        await at_step(spy, 3)
        pause = asyncio.create_task(e.pause(finish=True))
        await asyncio.sleep(0)
        second = asyncio.create_task(ask(e, long_jobs()))
        await pause
        assert all(set(c.versions) == {0} for c in await first)
        steps = len(spy.steps)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(spy.steps) == steps
        assert not second.done()
        await e.update_weights(WeightUpdate(version=7, module=e.runner.module))
        assert e.version == 7
        late = await second
        assert all(set(c.versions) == {7} for c in late)
        assert [c.token_ids for c in late] == [c.token_ids for c in first.result()]

    run(story(engine()))


def test_resume_without_new_weights_keeps_the_cache() -> None:
    module = tiny_model()

    async def story(e: NativeEngine) -> list[Completion]:
        spy = Spy(e)
        work = asyncio.create_task(ask(e, long_jobs()))
        await at_step(spy, 4)
        await e.pause(finish=False)
        await e.resume()
        done = await work
        assert len(spy.prefills) == 1
        return done

    assert run(story(engine(module))) == run(ask(engine(module), long_jobs()))


def test_a_pause_for_finishing_after_one_for_keeping() -> None:
    async def story(e: NativeEngine) -> None:
        spy = Spy(e)
        work = asyncio.create_task(ask(e, long_jobs()))
        await at_step(spy, 4)
        await e.pause(finish=False)
        await e.pause(finish=True)
        assert work.done() or not e.scheduler.busy
        await work

    run(story(engine()))


def test_weights_in_place_are_seen_and_another_module_is_adopted() -> None:
    module = tiny_model()
    other = shifted(module)
    jobs = long_jobs()
    e = engine(module)
    old, new = run(ask(e, jobs)), run(ask(engine(other, version=3), jobs))
    assert old != new
    with torch.no_grad():
        for p, q in zip(module.parameters(), other.parameters()):
            p.copy_(q)
    run(e.update_weights(WeightUpdate(version=3, module=module)))
    assert run(ask(e, jobs)) == new
    fresh = engine(tiny_model())
    run(fresh.update_weights(WeightUpdate(version=3, module=other)))
    assert run(ask(fresh, jobs)) == new
    with pytest.raises(WhetError, match="create a new engine"):
        run(fresh.update_weights(WeightUpdate(version=4, module=tiny_model(layers=3))))
    assert fresh.version == 3


def torn(good: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """As of a file that ends early."""
    yield from good[:3]
    raise OSError("the file is torn")


def faults(good: list[tuple[str, Tensor]]) -> dict[str, Iterable[tuple[str, Tensor]]]:
    name, tensor = good[3]
    return {
        "the file is torn": torn(good),
        "were not received": good[:-1],
        "was received twice": [*good, good[0]],
        "is not a parameter": [*good, ("model.extra.weight", tensor)],
        "expected": [*good[:3], (name, torch.zeros(*tensor.shape, 2)), *good[4:]],
    }


@pytest.mark.parametrize(
    "fault", ["were not received", "was received twice", "is not a parameter", "expected", "the file is torn"]
)
def test_a_weight_sync_that_is_not_whole_is_refused(fault: str) -> None:
    module = tiny_model()
    other = shifted(module)
    good = [(n, p.detach()) for n, p in other.named_parameters()]

    async def story(e: NativeEngine) -> list[Completion]:
        spy = Spy(e)
        flying = asyncio.create_task(reply(e, [3, 4], Sampling(max_tokens=60, ignore_eos=True)))
        await at_step(spy, 2)
        with pytest.raises(OSError if "torn" in fault else WhetError, match=fault):
            await e.update_weights(WeightUpdate(version=1, tensors=iter(faults(good)[fault])))
        assert e.version == 0
        with pytest.raises(WhetError, match="weights are incomplete"):
            await flying
        with pytest.raises(WhetError, match="weights are incomplete"):
            await reply(e, [3, 4], Sampling())
        await e.update_weights(WeightUpdate(version=2, tensors=iter(good)))
        return await ask(e, long_jobs())

    assert run(story(engine(module))) == run(ask(engine(other, version=2), long_jobs()))


def test_an_update_has_one_source() -> None:
    sources: tuple[dict[str, Any], ...] = ({}, {"module": nn.Linear(1, 1), "tensors": iter(())})
    for source in sources:
        with pytest.raises(WhetError, match="exactly one of module, tensors and source"):
            WeightUpdate(version=1, **source)


def test_a_cancelled_request_frees_its_row_and_disturbs_nobody() -> None:
    module = tiny_model()
    jobs = mixed_jobs(12)
    expected = run(ask(engine(module), jobs))

    async def story(e: NativeEngine) -> list[Completion]:
        spy = Spy(e)
        tasks = [asyncio.create_task(reply(e, *job)) for job in jobs]
        shared = [asyncio.create_task(reply(e, *jobs[0])) for _ in range(3)]
        doomed = [
            asyncio.create_task(reply(e, [7] * 20, Sampling(max_tokens=70, ignore_eos=True)))
            for _ in range(3)
        ]
        doomed[0].cancel()  # before it has begun
        await asyncio.sleep(0)
        doomed[1].cancel()  # in the queue
        await at_step(spy, 3)
        doomed[2].cancel()  # in its row
        await asyncio.wait(doomed)
        assert all(r.prompt[0] != 7 or len(r.prompt) != 20 for r in e.scheduler.requests)
        for task in shared:
            task.cancel()
        done = list(await asyncio.gather(*tasks))
        assert all_free(e)
        return done

    assert run(story(engine(module))) == expected


def test_close_ends_every_wait_with_a_reason() -> None:
    async def story(e: NativeEngine) -> None:
        spy = Spy(e)
        tasks = [asyncio.create_task(reply(e, *job)) for job in long_jobs()]
        await at_step(spy, 2)
        await e.pause(finish=False)
        tasks.append(asyncio.create_task(reply(e, [5], Sampling())))
        await asyncio.sleep(0)
        await e.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, WhetError)
            assert "closed" in str(result)
        with pytest.raises(WhetError, match="closed"):
            await reply(e, [5], Sampling())
        assert all_free(e)

    run(story(engine(max_num_seqs=4)))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_p=0.9)])
def test_weights_that_diverged_fail_every_request_and_nothing_hangs(sampling: Sampling) -> None:
    module = tiny_model()
    e = engine(module)
    good = copy.deepcopy(module)
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))

    async def story() -> None:
        results = await asyncio.gather(
            *(reply(e, [3, i], sampling) for i in range(4)), return_exceptions=True
        )
        assert all(isinstance(r, WhetError) and "logits" in str(r) for r in results)
        assert all_free(e)
        await e.update_weights(WeightUpdate(version=1, module=good))
        await reply(e, [3], sampling)

    run(story())


def test_the_cache_can_be_given_back_in_between() -> None:
    module = tiny_model()

    async def story(e: NativeEngine) -> list[Completion]:
        spy = Spy(e)
        work = asyncio.create_task(ask(e, long_jobs()))
        await at_step(spy, 5)
        await e.place("cpu")
        assert e.runner.cache is None
        for _ in range(3):
            await asyncio.sleep(0)
        await e.place("gpu")
        return await work

    assert run(story(engine(module))) == run(ask(engine(module), long_jobs()))


def test_other_coroutines_run_between_steps() -> None:
    async def story(e: NativeEngine) -> int:
        ticks = 0
        work = asyncio.create_task(reply(e, [3], Sampling(max_tokens=40, ignore_eos=True)))
        while not work.done():
            await asyncio.sleep(0)
            ticks += 1
        return ticks

    assert run(story(engine())) >= 40


def test_an_engine_outlives_its_event_loop() -> None:
    module = tiny_model()
    e = engine(module)

    async def leave() -> asyncio.Task[list[Completion]]:
        left = asyncio.create_task(ask(e, long_jobs()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return left

    assert asyncio.run(leave()).cancelled()
    assert run(ask(e, long_jobs())) == run(ask(engine(module), long_jobs()))
    assert all_free(e)
    assert isinstance(e.runner, Runner)
