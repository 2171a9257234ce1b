"""The account of rollouts, and waits with a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumping import Jumping, go
from whet.guard.ledger import Ledger
from whet.guard.watch import Watch, wait
from whet.types import WhetError


def test_the_account_of_a_step_by_hand():
    ledger = Ledger()
    ledger.asked(16)
    ledger.trained(8)
    ledger.rejected(4, "uniform")
    ledger.book("failed/reward", 1)
    ledger.balance()
    ledger.balance(held=3)
    assert ledger.pending == 3
    assert ledger.end_step() == {
        "ledger/requested_rollouts": 16.0,
        "ledger/trained_rollouts": 8.0,
        "ledger/rejected/uniform_rollouts": 4.0,
        "ledger/failed/reward_rollouts": 1.0,
        "ledger/pending_rollouts": 3.0,
    }
    ledger.trained(3)
    assert ledger.end_step() == {"ledger/trained_rollouts": 3.0, "ledger/pending_rollouts": 0.0}
    ledger.balance(held=0)


def test_a_lost_rollout_and_one_too_many_are_found():
    ledger = Ledger()
    ledger.asked(4)
    ledger.trained(3)
    with pytest.raises(WhetError, match="asked 4, trained 3; so 1 are pending, but 0 were found"):
        ledger.balance(held=0)
    ledger.book("failed/reward", 2)
    with pytest.raises(WhetError, match="failed/reward 2"):
        ledger.balance()
    with pytest.raises(ValueError, match="counts cannot decrease"):
        ledger.trained(-1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["asked", "trained", "rejected", "failed", "end"]), st.integers(0, 99))
    )
)
def test_a_ledger_from_its_state_goes_on_as_the_same(events):
    def play(ledger: Ledger, events) -> list:
        seen = []
        for name, n in events:
            if name == "end":
                seen.append(ledger.end_step())
            else:
                ledger.book(f"{name}/why" if name in ("rejected", "failed") else name, n)
        return [*seen, ledger.state(), ledger.pending]

    half = len(events) // 2
    whole, cut = Ledger(), Ledger()
    want = play(whole, events[:half])[:-2] + play(whole, events[half:])
    got = play(cut, events[:half])[:-2]
    got += play(Ledger.from_state(json.loads(json.dumps(cut.state()))), events[half:])
    assert got == want
    sums = {a: sum(n for e, n in events if e == a) for a in ("asked", "trained", "rejected", "failed")}
    assert want[-1] == sums["asked"] - sums["trained"] - sums["rejected"] - sums["failed"]


@pytest.mark.parametrize(
    ("book", "said", "advice"),
    [
        ({"rejected/uniform": 8, "failed/reward": 4}, "failed/reward 4, rejected/uniform 8", "equal rewards"),
        ({"failed/reward": 4}, "failed/reward 4", "run.log has the reasons"),
        ({}, "none", "equal rewards"),
    ],
)
def test_a_step_that_is_not_filled_names_what_became_of_its_rollouts(
    book: dict[str, int], said: str, advice: str
) -> None:
    """Not of those of the step before; and advice for uniform groups only where there may be some."""
    ledger = Ledger({"asked": 99, "rejected/stale": 5})
    for account, n in book.items():
        ledger.book(account, n)
    text = str(ledger.unfilled(7, asked=3, there=1, needed=2))
    assert text.startswith("step 7 could not be filled: of 3 tasks only 1 gave a group")
    assert f"that were not trained on: {said}. " in text
    assert advice in text
    assert ("equal rewards" in text) == (advice == "equal rewards")


def test_wait_gives_the_result_or_the_error():
    async def work(value):
        await asyncio.sleep(0)
        if value is None:
            raise KeyError("inside")
        return value

    async def main():
        assert await wait(work(5), owner="loop", what="work", timeout_s=5) == 5
        with pytest.raises(KeyError, match="inside"):
            await wait(work(None), owner="loop", what="work", timeout_s=5)

    asyncio.run(main())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Jumping:
    """Of `wait`, too, which reads the time by itself."""
    made = Jumping()
    monkeypatch.setattr("whet.guard.watch.time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_wait_names_owner_and_cause_logs_stacks_and_cancels(caplog, clock):
    seen = []

    async def never_ending_business():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main():
        with pytest.raises(WhetError, match=r"buffer waited 0\.12 s for room"):
            await wait(never_ending_business(), owner="buffer", what="room", timeout_s=0.12, report_s=0.05)
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        go(main(), clock=clock)
    reports = [r.getMessage() for r in caplog.records if "waiting for room by buffer" in r.getMessage()]
    assert [re.findall(r"since (\S+) s", report)[0] for report in reports] == ["0.1", "0.1", "0.1"]
    assert "never_ending_business" in reports[0]
    assert seen == ["cancelled"]


def test_a_wait_that_is_not_in_vain_goes_on(clock: Jumping) -> None:
    """Its time runs anew with every change, and ends so long after the last one."""

    def come() -> int:
        return min(3, int(clock.now / 0.1 + 1e-9))

    async def main() -> None:
        with pytest.raises(WhetError, match=r"waited 0\.2 s for groups"):
            await wait(
                asyncio.Event().wait(), owner="a", what="groups", timeout_s=0.2, report_s=0.05, progress=come
            )

    go(main(), clock=clock)
    assert clock.now == pytest.approx(0.5)


def test_a_cancelled_wait_cancels_what_it_waits_for():
    async def main():
        inner = asyncio.ensure_future(asyncio.Event().wait())
        outer = asyncio.ensure_future(wait(inner, owner="a", what="b", timeout_s=9))
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        await asyncio.sleep(0)
        assert inner.cancelled()

    asyncio.run(main())


def test_the_watch_reports_a_call_that_does_not_return(caplog):
    def stuck_in_here():
        end = time.monotonic() + 60
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)

    before = {*threading.enumerate()}
    with caplog.at_level(logging.WARNING), Watch(quiet_s=0.1) as watch:
        watch.beat("the update")
        stuck_in_here()
    text = caplog.records[0].getMessage()
    assert "in the update" in text
    assert "stuck_in_here" in text
    assert "whet-watch" not in [thread.name for thread in {*threading.enumerate()} - before]


def test_the_watch_is_silent_while_the_run_lives(caplog):
    with caplog.at_level(logging.WARNING), Watch(quiet_s=5.0) as watch:
        watch.beat("a")
        time.sleep(0.05)
    assert not caplog.records
