"""The native engine remembers: pages on demand, histories found in the cache, prefill in parts, preemption.

None of it changes a bit of what is sampled.
"""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asking import reply
from swept import except_for
from test_native import Spy, all_free, ask, at_step, engine, letters, prompts, run, shifted, trained_logprobs
from tiny import VOCAB, tiny_model
from whet.rollout.engine import WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.native.pages import Pages, digests
from whet.rollout.native.scheduler import Admission, Generation, Scheduler
from whet.types import Completion, Sampling, WhetError

# ---------------------------------------------------------------- the scheduler by itself


class Waiting:
    """Stands for a future that nobody awaits."""


def request(prompt: tuple[int, ...], max_tokens: int) -> Generation:
    return Generation(prompt, Sampling(max_tokens=max_tokens), frozenset(), True, Waiting())  # type: ignore[arg-type]


def check_pages(s: Scheduler) -> None:
    """Every page is free, idle or used as often as it stands in tables; what is known is known once."""
    pages = s.pages
    tables = [row.pages for row in s.running.values()]
    for page in range(pages.count):
        uses = sum(page in table for table in tables)
        assert pages.uses[page] == uses
        assert (page in pages.free) + (page in pages.idle) == (uses == 0)
        assert page not in pages.free or page not in pages.digest
        assert page not in pages.idle or page in pages.digest
    assert {digest: page for page, digest in pages.digest.items()} == pages.found
    assert all(len(table) == len(set(table)) for table in tables)


class Model:
    """Runs a scheduler as the engine does, and knows which tokens each page holds."""

    def __init__(self, s: Scheduler, draw: random.Random) -> None:
        self.s, self.draw = s, draw
        self.live: list[Generation] = []
        self.holds: dict[int, list[int]] = {}

    def write(self, pages: list[int], position: int, token: int) -> None:
        held = self.holds.setdefault(pages[position // 16], [])
        del held[position % 16 :]
        held.append(token)

    def sample(self, r: Generation) -> None:
        r.token_ids.append(self.draw.randrange(2))
        if len(r.token_ids) == r.sampling.max_tokens or self.draw.random() < 0.05:
            self.end(r)

    def end(self, r: Generation) -> None:
        if r in self.live:
            self.live.remove(r)
        self.s.release(r)

    def prefill(self, admissions: list[Admission]) -> None:
        assert sum(a.end - a.start for a in admissions) <= self.s.prefill_tokens
        for a in admissions:
            for position in range(a.start, a.end):
                self.write(a.rows[0].pages, position, a.history[position])
        for a in admissions:
            table = a.rows[0].pages
            assert [t for p in table for t in self.holds.get(p, [])][: a.end] == list(a.history[: a.end])
            for row in list(a.rows) if a.whole else []:
                at = len(a.history) // 16
                if len(a.history) % 16:
                    self.holds[row.pages[at]] = list(self.holds[table[at]])
                self.live.append(row.request)
                self.sample(row.request)

    def step(self) -> None:
        while (r := self.s.excess()) is not None:
            assert r is list(self.s.running)[-1]
            if r in self.live:
                self.live.remove(r)
            self.s.preempt(r)
        self.s.grow()
        for r in list(self.live):
            pages = self.s.running[r].pages
            assert 16 * len(pages) >= len(r.history), "there is a page for the token that is fed"
            self.write(pages, len(r.history) - 1, r.token_ids[-1])
            self.sample(r)


@settings(max_examples=80, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=25
    ),
    count=st.integers(5, 14),
    max_num_seqs=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_pages_are_never_lost_or_shared_wrongly(
    work: list[tuple[int, int, int]], count: int, max_num_seqs: int, seed: int
) -> None:
    """Random requests, ends, pauses and aborts: every row reads the tokens of its own history; all are served."""
    s = Scheduler(Pages(count, 16), max_num_seqs=max_num_seqs, prefill_tokens=32)
    draw = random.Random(seed)
    model = Model(s, draw)
    todo = [request(tuple([token, 1] * length)[:length], more) for token, length, more in work]
    everyone = list(todo)
    for _ in range(3000):
        if not todo and not s.busy:
            break
        if todo and draw.random() < 0.3:
            s.add([todo.pop()])
        chance = draw.random()
        if chance < 0.02 and s.running:
            model.end(draw.choice(list(s.running)))  # its caller has gone
        elif chance < 0.03 and s.waiting:
            s.forget(draw.choice(list(s.requests)[len(s.running) :]))
        elif chance < 0.04:
            model.live = []
            s.put_back(list(s.running))
            s.pages.forget()  # new weights
        elif chance < 0.6 and (admissions := s.admit()):
            model.prefill(admissions)
        elif model.live:
            model.step()
        assert len(s.running) <= max_num_seqs
        check_pages(s)
    assert not todo
    assert not s.busy, "everyone was served"
    assert all(len(r.token_ids) <= r.sampling.max_tokens for r in everyone)
    assert len(s.pages.free) + len(s.pages.idle) == count
    assert not any(s.pages.uses)


def test_the_row_that_came_last_goes_back_and_nobody_overtakes() -> None:
    """Four pages; a, b and c take one each and need a second one at once: c goes back, before d, which came later."""
    s = Scheduler(Pages(4, 16), max_num_seqs=8, prefill_tokens=64)
    a, b, c, d = (request((n,) * 15, 30) for n in range(4))
    s.add([a, b, c, d])
    assert [[row.request for row in x.rows] for x in s.admit()] == [[a], [b], [c]]  # one page stays free
    for r in (a, b, c):
        r.token_ids.append(9)
    assert s.excess() is None
    assert s.grow() == []  # their second token fills the page
    for r in (a, b, c):
        r.token_ids.append(9)
    assert s.excess() is c
    s.preempt(c)
    assert s.excess() is None
    assert [row.request for row in s.grow()] == [a, b]
    assert [r for w in s.waiting.values() for r in w.requests] == [c, d]
    assert s.admit() == []
    s.release(a)
    assert s.admit() == []  # two pages, and one stays free for b
    s.release(b)
    again = s.admit()
    assert [[row.request for row in x.rows] for x in again] == [[c], [d]]
    assert (again[0].history, s.counts.preemptions) == ((2,) * 15 + (9, 9), 1)


def test_the_page_unused_for_longest_goes_first_and_a_prefix_after_what_follows_it() -> None:
    pages = Pages(4, 2)
    first, second = digests([1, 2, 3, 4, 5], 2), digests([1, 2, 7, 7], 2)
    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert digests([1, 2, 3, 4, 8, 9], 2, first) == digests([1, 2, 3, 4, 8, 9], 2)
    table = pages.take(2)
    pages.keep(table, first)
    assert pages.prefix(first) == table
    pages.give(table)
    other = pages.share(pages.prefix(second)) + pages.take(1)
    assert other[0] == table[0]
    pages.keep(other, second)
    assert pages.take(2)[1] == table[1], "the free page, then the one that nobody uses"
    assert pages.prefix(first) == table[:1]
    assert pages.available == 0
    pages.give(other)
    assert pages.take(1) == [other[1]]
    assert pages.prefix(second) == [table[0]]
    pages.forget()
    assert pages.prefix(second) == []
    assert pages.free == [table[0]]


# ---------------------------------------------------------------- the engine remembers


async def converse(
    e: NativeEngine, turns: int, *, key: int, length: int = 21, between: int = 5
) -> list[tuple[list[int], Completion]]:
    """An episode: every turn's history is all that was before, and what an environment says."""
    draw, out = random.Random(key), []
    history = [draw.randrange(2, VOCAB) for _ in range(37)]
    for turn in range(turns):
        done = await reply(e, history, Sampling(key=key * 100 + turn, max_tokens=length, ignore_eos=True))
        out.append((history, done))
        history = history + done.token_ids + [draw.randrange(2, VOCAB) for _ in range(between)]
    return out


@pytest.mark.parametrize("turns", [2, 8])
def test_a_conversation_prefills_each_token_once(turns: int) -> None:
    """By hand: all full pages that were fed are found; the last token of a reply was never fed."""
    module = tiny_model()
    e = engine(module)
    told = run(converse(e, turns, key=3))
    found = [0] + [(len(h) + len(c.token_ids) - 1) // 16 * 16 for h, c in told[:-1]]
    assert e.counts.cached_tokens == sum(found)
    assert e.counts.prefilled_tokens == sum(len(h) - n for (h, _), n in zip(told, found))
    new = 37 + (turns - 1) * (5 + 1)  # what the environment said, and the last token of each reply
    assert e.counts.prefilled_tokens <= new + (turns - 1) * 15
    assert told[0][1].finish_reason == "length"
    for history, done in told:
        assert done.logprobs == trained_logprobs(module, history, done.token_ids, 1.0).tolist()
    assert all_free(e)


def test_conversations_side_by_side_are_those_alone() -> None:
    """Eight episodes of three turns in a cache that holds three of them: histories are evicted in between."""
    module = tiny_model()
    alone = [run(converse(engine(module), 3, key=k)) for k in range(8)]

    async def together(e: NativeEngine) -> list[list[tuple[list[int], Completion]]]:
        return list(await asyncio.gather(*(converse(e, 3, key=k) for k in range(8))))

    e = engine(module, prefill_tokens=32)
    e.scheduler.pages = Pages(24, 16)
    assert run(together(e)) == alone
    assert e.counts.preemptions > 0
    assert all_free(e)


def test_equal_beginnings_are_computed_once_even_in_one_prefill() -> None:
    common = prompts([40])[0]
    jobs = [
        (common + rest, Sampling(key=i, max_tokens=5)) for i, rest in enumerate(prompts([3, 9, 1], seed=5))
    ]
    module = tiny_model()
    e = engine(module)
    assert run(ask(e, jobs)) == [run(ask(engine(module), [job]))[0] for job in jobs]
    assert e.counts.cached_tokens == 2 * 32
    assert e.counts.prefilled_tokens == 43 + (8 + 9) + (8 + 1)


def test_short_replies_are_sampled_at_once_whatever_they_could_become() -> None:
    """A limit of 16,000 tokens a reply, and a cache of 16,016: as many rows as pages, less the one that stays free."""
    e = engine(tiny_model(), max_context=16_016, max_num_seqs=64, decode=letters)
    e.scheduler.pages = Pages(1001, 16)
    spy = Spy(e)
    work = [(p, Sampling(key=i, max_tokens=16_000, stop=("a",))) for i, p in enumerate(prompts([8] * 60))]
    done = run(ask(e, work))
    assert {c.finish_reason for c in done} == {"stop"}
    assert spy.steps[0] > 30
    assert (len(spy.prefills), e.counts.preemptions) == (1, 0)


def test_decode_steps_go_on_between_the_parts_of_a_long_history() -> None:
    module = tiny_model()
    short = [(p, Sampling(key=i, max_tokens=60, ignore_eos=True)) for i, p in enumerate(prompts([4, 5]))]
    long = (prompts([200])[0], Sampling(key=9, max_tokens=9))
    e = engine(module, prefill_tokens=32)
    spy, order = Spy(e), []
    prefill, step = e.runner.prefill, e.runner.step
    e.runner.prefill = lambda a: (order.append("part"), prefill(a))[1]  # type: ignore[method-assign]
    e.runner.step = lambda: (order.append("step"), step())[1]  # type: ignore[method-assign]

    async def story() -> list[Completion]:
        first = asyncio.create_task(ask(e, short))
        await at_step(spy, 3)
        last = await reply(e, *long)
        return [*await first, last]

    assert run(story()) == [run(ask(engine(module), [job]))[0] for job in [*short, long]]
    began = order.index("part", 1)
    assert order[began : began + 13] == ["part", "step"] * 6 + ["part"], "six parts of 32 tokens, one of 8"


# ---------------------------------------------------------------- a tiny cache changes nothing


def any_jobs(seed: int) -> list[tuple[list[int], Sampling]]:
    """Random prompts, some beginning alike, groups of random sizes, every kind of sampling."""
    draw = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.6, "top_p": 0.9},
        {"min_tokens": 12},
        {"stop": ("abba", "ccc")},
        {"stop": ("bb",), "temperature": 1.4, "top_k": 9},
        {"ignore_eos": True},
    ]
    common = [draw.randrange(2, VOCAB) for _ in range(70)]
    jobs: list[tuple[list[int], Sampling]] = []
    for number in range(draw.randint(4, 9)):
        own = [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 30))]
        prompt = common[: draw.choice([0, 0, 17, 48, 70])] + own
        kind = draw.choice(kinds)
        for member in range(draw.choice([1, 1, 3, 5])):
            key = seed * 1000 + number * 10 + member
            jobs.append((prompt, Sampling(key=key, max_tokens=draw.randint(12, 60), **kind)))
    return jobs


TINY = {"max_context": 170, "prefill_tokens": 32, "max_num_seqs": 6, "decode": letters}


@pytest.mark.parametrize("seed", except_for(range(4).__contains__, range(12)))
def test_preempted_evicted_and_in_parts_is_the_same_to_the_bit(seed: int) -> None:
    module, jobs = tiny_model(), any_jobs(seed)
    expected = run(ask(engine(module, decode=letters), jobs))
    e = engine(module, **TINY)
    e.scheduler.pages = Pages(11, 16)  # 160 tokens is the longest rollout
    spy = Spy(e)

    def check(number: int) -> None:
        check_pages(e.scheduler)

    spy.before_step = check
    assert run(ask(e, jobs)) == expected
    assert run(ask(e, jobs)) == expected  # with what is left in the cache
    assert e.counts.preemptions > 0
    assert all_free(e)


@pytest.mark.parametrize("seed", except_for(range(2).__contains__, range(6)))
def test_aborts_pauses_and_new_weights_in_a_tiny_cache_disturb_nobody(seed: int) -> None:
    module, jobs = tiny_model(), any_jobs(seed)
    expected = run(ask(engine(module, decode=letters), jobs))
    draw = random.Random(seed)

    async def story(e: NativeEngine) -> list[Completion]:
        tasks = [asyncio.create_task(reply(e, *job)) for job in jobs]
        for number in range(30):
            doomed = asyncio.create_task(reply(e, *draw.choice(any_jobs(seed + 50))))
            for _ in range(draw.randrange(9)):
                await asyncio.sleep(0)
            doomed.cancel()  # in the queue, in a part of its prefill, in its row, or back in the queue
            if number % 7 == 3:
                await e.pause(finish=False)
                await e.resume()
            if number % 11 == 5:
                await e.place("cpu")
                await e.place("gpu")
            if number % 10 == 9:
                await e.update_weights(WeightUpdate(version=e.version + 1, module=module))
            await asyncio.wait([doomed])
        return list(await asyncio.gather(*tasks))

    e = engine(module, **TINY)
    e.scheduler.pages = Pages(11, 16)
    for done, whole in zip(run(story(e)), expected):
        assert done.token_ids == whole.token_ids
        assert done.logprobs == whole.logprobs
        assert done.sample_logprobs == whole.sample_logprobs
        assert done.versions == sorted(done.versions)
    assert all_free(e)


def test_nothing_cached_crosses_a_change_of_the_weights() -> None:
    """By another module, by tensors, in place under the same version, and after a load that failed."""
    module = tiny_model()
    other = shifted(module)
    prompt = prompts([50])[0]
    job = [(prompt, Sampling(key=5, max_tokens=12, ignore_eos=True))]
    old, new = run(ask(engine(module), job)), run(ask(engine(other), job))
    tensors = [(n, p.detach().clone()) for n, p in other.named_parameters()]
    back = [(n, p.detach().clone()) for n, p in module.named_parameters()]

    async def story() -> None:
        e = engine(copy.deepcopy(module))
        sources: list[tuple[dict[str, Any], list[Completion]]] = [
            ({"tensors": iter(tensors)}, new),
            ({"tensors": iter(back)}, old),
            ({"module": other}, new),
            ({"module": module}, old),
        ]
        for source, want in sources:
            await ask(e, job)
            assert await ask(e, job) != [], "from the cache"
            await e.update_weights(WeightUpdate(version=e.version, **source))
            assert await ask(e, job) == want
        with pytest.raises(WhetError):
            await e.update_weights(WeightUpdate(version=9, tensors=iter(tensors[:-1])))
        await e.update_weights(WeightUpdate(version=0, tensors=iter(tensors)))
        assert await ask(e, job) == new
        before = e.counts.cached_tokens
        await e.place("cpu")
        await e.place("gpu")
        assert await ask(e, job) == new
        assert e.counts.cached_tokens == before, "the memory was given back"

    run(story())
