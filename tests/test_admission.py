"""How many rows the native engine samples at once: as many as the pages of its cache hold, whatever they could become.

The case is a limit of 16,000 tokens and replies of about 1,000. Here it has a sixteenth of this size:
`max_tokens=1024`, replies of 64 tokens, and a cache of 1 MiB, which is 128 pages of 16 tokens. An engine that reserves
the limit for each row would let one row in.
"""

from __future__ import annotations

from test_native import Spy, all_free, ask, engine, prompts, run
from tiny import VOCAB, tiny_model
from whet.models.attention import PAGE
from whet.rollout.native.engine import NativeEngine
from whet.types import Sampling

MOST, REPLY, PROMPT = 1024, 64, 8
PAGES = 128
A_ROW = -(-(PROMPT + REPLY) // PAGE)
"""Pages of a row at its end."""
ROWS = PAGES // A_ROW
"""So many rows are at their end at once."""


def cached(megabytes: int) -> NativeEngine:
    return engine(tiny_model(), max_context=PROMPT + MOST, max_num_seqs=256, cache_mb=megabytes)


def jobs(count: int) -> list[tuple[list[int], Sampling]]:
    """Replies that end by themselves once they have 64 tokens, or a few more."""
    ends = tuple(range(2, VOCAB - 20))
    return [
        (prompt, Sampling(key=n, max_tokens=MOST, min_tokens=REPLY - 1, stop_token_ids=ends))
        for n, prompt in enumerate(prompts([PROMPT] * count))
    ]


def test_as_many_rows_as_the_pages_hold_are_live_at_once_from_their_first_token_to_their_last() -> None:
    """25 rows of five pages each: one prefill lets all of them in, and none goes back to the queue."""
    e = cached(1)
    spy = Spy(e)
    assert (e.scheduler.pages.count, ROWS) == (PAGES, 25)
    assert PAGES // e.scheduler.pages.needed(PROMPT + MOST) == 1
    done = run(ask(e, jobs(ROWS)))
    assert {c.finish_reason for c in done} == {"stop"}
    assert all(REPLY <= len(c.token_ids) <= A_ROW * PAGE - PROMPT for c in done)
    assert spy.steps[: REPLY - 1] == [ROWS] * (REPLY - 1), "the prefill samples the first token"
    assert (len(spy.prefills), e.counts.preemptions) == (1, 0)
    assert all_free(e)


def test_with_more_rows_than_that_the_pages_stay_full_and_every_reply_is_the_same() -> None:
    """A hundred rows begin at once, with a page each. As they grow, some go back to the queue and continue later, with
    the tokens and log-probs of an engine that has room for all. As long as one waits, no more pages are free than it
    needs, as one has to stay free; so at least 25 rows are live."""
    roomy, e = cached(8), cached(1)
    expected = run(ask(roomy, jobs(100)))
    assert roomy.counts.preemptions == 0
    spy = Spy(e)
    unused: list[int] = []
    live: list[int] = []

    def look(number: int) -> None:
        if e.scheduler.waiting:
            unused.append(e.scheduler.pages.available)
            live.append(spy.steps[-1])

    spy.before_step = look
    assert run(ask(e, jobs(100))) == expected
    assert spy.steps[0] == 100
    assert e.counts.preemptions > 0
    assert len(unused) > REPLY
    assert max(unused) <= A_ROW
    assert min(live) >= ROWS
    assert all_free(e)
