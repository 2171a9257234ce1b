"""Short calls are sent before the ones before them are answered: each keeps its own value, failure and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hostile
from whet.guard import confine, frames, nursery, pulse
from whet.guard.jail import CallResult, Jail, RewardCall
from whet.guard.output import OutputPipe
from whet.guard.worker import Guarded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the full jail needs Linux")

SLOW_TO_TELL = {hostile.tree_bomb, hostile.big_fork_bomb, hostile.fork_bomb, hostile.allocates_bit_by_bit}
OF_EACH_KIND = {
    *("segfault", "returns_nan", "scribbles_on_channels", "sleeps", "raises", "needs_files", "prints_100_mb"),
    *("closes_all_files", "leaves_a_thread", "replaces_streams"),
}
BEASTS = {f.__name__: f for f in (*hostile.ZOO, *hostile.MESSY) if f not in SLOW_TO_TELL}


def mixed(value: float, beast: str = "", log: str = "") -> Any:
    """One function, so that its calls share processes; its calls are short, but for the beasts."""
    if log:
        with open(log, "a") as file:
            file.write(f"{value:g}\n")
    return BEASTS[beast](value) if beast else value


def prints(value: float, count: int, raw: bool) -> float:
    text = f"{value:g}," * count
    if raw:
        os.write(1, text.encode())
    else:
        print(text, end="")
    return value


def ask(jail: Jail, function: str, arguments: list[dict[str, Any]], **more: Any) -> list[CallResult]:
    calls = [
        RewardCall(function=function, arguments=json.dumps(a), key=n, **more) for n, a in enumerate(arguments)
    ]
    return asyncio.run(jail.call_many(calls))


@pytest.mark.parametrize(
    "beast",
    [pytest.param(name, marks=[] if name in OF_EACH_KIND else [pytest.mark.sweep]) for name in BEASTS],
)
def test_a_beast_among_short_calls_of_its_own_function_harms_none_of_them(beast: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [{"value": float(n), "log": str(log)} for n in range(200)]
    for place in (90, 150):
        arguments[place]["beast"] = beast
    calls = [RewardCall(function="mixed", arguments=json.dumps(a), key=n) for n, a in enumerate(arguments)]
    kind = hostile.ZOO.get(BEASTS[beast], ("", ""))[0]
    if kind == "timeout":
        for place in (90, 150):
            calls[place] = RewardCall(function="mixed", arguments=calls[place].arguments, timeout_s=0.4)
    with Jail({"mixed": lambda: mixed}, timeout_s=30.0, memory_mb=400, max_output_bytes=1000) as jail:
        results = asyncio.run(jail.call_many(calls))
    for n, result in enumerate(results):
        if n in (90, 150):
            assert (result.failure.kind if result.failure else "") == kind
        else:
            assert (result.failure, result.parts) == (None, {"score": float(n)})
    ran = Counter(log.read_text().split())
    assert set(ran) == {str(n) for n in range(200)}
    again = Counter(n for n in ran if ran[n] > 1 and n not in ("90", "150"))
    assert not again or kind == "output"  # a process that speaks out of turn runs on until it is heard
    assert max(ran.values()) <= 2


@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_call_prints_is_its_own(workers: int) -> None:
    counts = [0, 1, 3, 0, 700, 40_000, 2, 2, 0, 5] * 30
    arguments = [{"value": n % 100, "count": count, "raw": n % 3 == 0} for n, count in enumerate(counts)]
    with Jail({"prints": lambda: prints}, workers=workers, max_output_bytes=1000) as jail:
        results = ask(jail, "prints", arguments)
    for n, (count, result) in enumerate(zip(counts, results, strict=True)):
        text = f"{n % 100}," * count
        assert (result.output, result.dropped_bytes) == (text[:1000], len(text[1000:])), n


def fills_a_pipe_that_does_not_block(value: float) -> float:
    if value == 5:
        os.set_blocking(1, False)
        for piece in (b"x" * 4096, b"x"):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(1, piece)
    return value


def test_a_call_that_leaves_no_room_for_its_mark_has_its_value() -> None:
    with Jail({"fills": lambda: fills_a_pipe_that_does_not_block}) as jail:
        results = ask(jail, "fills", [{"value": float(n)} for n in range(20)])
    assert [(r.failure, r.parts) for r in results] == [(None, {"score": float(n)}) for n in range(20)]
    assert [n for n, r in enumerate(results) if r.output] == [5]


class Lane:
    """A forkserver without processes, and the far end of its one worker."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, once: bool = False) -> None:
        self.run, self.ours = socket.socketpair()
        limits = nursery.WorkerLimits(workers=1, memory_mb=64, max_output_bytes=64)
        self.guard = nursery.Nursery(self.run, [Guarded(lambda: 0.0, once=once)], limits, str(folder))
        near, self.far = socket.socketpair()
        self.far.setblocking(False)
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[0], False)
        self.worker = nursery.Worker(1 << 22, 0, near, OutputPipe(self.pipe[0], 64, b"mark"))
        # a machine that stands still for a moment makes no call long
        self.now = 1000.0
        monkeypatch.setattr(nursery, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(self.guard, "spawn", self.spawn)
        monkeypatch.setattr(self.guard, "unhoused", lambda _: False)

    def spawn(self, _: int) -> nursery.Worker:
        self.guard.workers.append(self.worker)
        return self.worker

    def queue(self, count: int, **more: Any) -> None:
        first = len(self.guard.queue)
        self.guard.queue.extend(
            nursery.PendingCall(1 + first + n, 10.0, 0, b"[0,{}]", **more) for n in range(count)
        )

    def heard(self) -> list[int]:
        """The calls that the worker has got since."""
        self.guard.dispatch()
        self.guard.ahead()
        got = bytearray()
        while True:
            try:
                got += self.far.recv(1 << 16)
            except BlockingIOError:
                return [number for number, _ in frames.unpack(got, 1 << 20)]

    def answer(self, *numbers: int, after_s: float = 0.0) -> None:
        self.worker.began = self.now - after_s
        for number in numbers:
            os.write(self.pipe[1], b"mark")
            self.far.send(frames.pack(number, b'{"parts": {"score": 1.0}, "answers": {}, "fit": true}'))
        self.guard.hear(self.worker)


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    lane = Lane(tmp_path, monkeypatch)
    yield lane
    lane.guard.selector.close()
    for end in (lane.run, lane.ours, lane.far):
        end.close()


def test_calls_are_sent_ahead_where_those_before_them_were_short(lane: Lane) -> None:
    lane.queue(100)
    assert lane.heard() == [1]  # how long they take is not known
    lane.answer(1)
    assert lane.heard() == [2, 3]
    lane.answer(2)
    assert lane.heard() == [4, 5, 6]  # four at once: twice as many as before
    for number in range(3, 8):
        lane.answer(number)
        more = lane.heard()
    assert more[-1] == 7 + nursery.AHEAD
    lane.answer(8, 9, 10)
    assert lane.heard() == [40, 41, 42]
    lane.answer(11, after_s=1.0)  # a long one: those behind it would have waited
    assert lane.heard() == []


def test_long_calls_are_sent_one_by_one(lane: Lane) -> None:
    lane.queue(9)
    for number in range(1, 10):
        assert lane.heard() == [number]
        lane.answer(number, after_s=0.1)


def test_a_call_that_runs_alone_and_a_large_one_are_not_sent_ahead(lane: Lane) -> None:
    lane.queue(1)
    assert lane.heard() == [1]
    lane.answer(1)
    lane.guard.queue.append(nursery.PendingCall(2, 10.0, 0, b"[0,{}]"))
    lane.guard.queue.append(nursery.PendingCall(3, 10.0, 0, bytes(1 << 16)))
    assert lane.heard() == [2]
    lane.answer(2)
    assert lane.guard.queue[0].number == 3


def test_an_idle_worker_gets_no_call_while_as_many_as_may_be_at_work_are(lane: Lane) -> None:
    lane.queue(1)
    lane.heard()
    lane.answer(1)
    near, far = socket.socketpair()
    other = nursery.Worker((1 << 22) + 1, 1, near, OutputPipe(lane.pipe[0], 64, b"mark"))
    other.calls.append(nursery.PendingCall(2, 10.0, 1, b"[0,{}]"))
    lane.guard.workers.append(other)
    lane.guard.queue.append(nursery.PendingCall(3, 10.0, 0, b"[0,{}]"))
    assert lane.heard() == []
    other.calls.clear()
    lane.now += 60.0
    assert lane.heard() == [3]
    assert lane.worker.began == lane.now  # its time begins now, not when it was last at work
    near.close()
    far.close()


def test_what_a_worker_that_ends_has_not_answered_is_next_again(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane.guard, "exit_of", lambda _: "ended")
    monkeypatch.setattr(nursery.confine, "sweep", lambda *_: None)
    lane.queue(50)
    lane.heard()
    lane.answer(1)
    lane.heard()
    lane.far.close()
    lane.guard.hear(lane.worker)
    assert [call.number for call in lane.guard.queue] == list(range(2, 51))
    assert [call.alone for call in lane.guard.queue] == [True] + [False] * 48
    lane.far = socket.socket()


def test_a_channel_holds_what_is_sent_ahead(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = socket.socketpair()
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(nursery.socket, "socketpair", lambda: pair)
    monkeypatch.setattr(nursery, "fork", lambda _: 1 << 22)
    w = nursery.Nursery.spawn(lane.guard, 0)
    assert w.channel.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 4 * nursery.AHEAD_BYTES
    w.channel.close()
    os.close(w.output.fd)


def test_a_channel_that_took_half_a_message_is_not_used_again(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery.confine, "sweep", lambda *_: None)
    lane.worker.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    lane.worker.channel.settimeout(0.05)
    lane.queue(1)
    lane.heard()
    lane.answer(1)
    lane.guard.queue.extend(nursery.PendingCall(2 + n, 10.0, 0, bytes(1000)) for n in range(30))
    lane.worker.room = nursery.AHEAD
    lane.guard.dispatch()
    lane.guard.ahead()
    assert lane.guard.workers == []
    assert [call.number for call in lane.guard.queue] == list(range(2, 32))
    lane.guard.outbox.clear()
    assert lane.guard.patience_s() == 0.0  # nobody is at work whose end would wake the nursery


def forges(value: float) -> float:
    """Answers the calls after its own, by the numbers that it would give them."""
    for fd in range(3, 64):
        try:
            channel = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        me = sys._getframe(2).f_locals.get("call", 0)
        body = b'{"parts": {"score": 1e6}, "answers": {}, "fit": true}'
        if value == 40:
            channel.send(struct.pack("!QI", me + 1, len(body)) + body)
        channel.close()
    return value


def test_no_call_answers_another_one() -> None:
    with Jail({"forges": lambda: forges}) as jail:
        results = ask(jail, "forges", [{"value": float(n)} for n in range(100)])
    assert results[40].failure is not None
    assert [r.parts for n, r in enumerate(results) if n != 40] == [
        {"score": float(n)} for n in range(100) if n != 40
    ]


@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(st.binary(max_size=30), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 40), min_size=1),
    most=st.integers(0, 20),
)
def test_output_is_cut_at_its_marks_however_it_is_read(
    calls: list[bytes], cuts: list[int], most: int
) -> None:
    mark = b"ababc"
    calls = [call.replace(mark, b"") for call in calls]
    assume(not any(mark in call for call in calls))
    out, into = os.pipe()
    os.set_blocking(out, False)
    pipe = OutputPipe(out, most, mark)
    data = b"".join(call + mark for call in calls) + b"ab"
    at = 0
    while at < len(data):
        for cut in cuts:
            os.write(into, data[at : at + cut] or b"")
            at += cut
            pipe.read()
    want = [(call[:most], len(call[most:])) for call in calls]
    found = [pipe.take(marked=True) for _ in calls]
    rest = pipe.take(marked=False)
    os.close(into)
    os.close(out)
    assert (found, rest) == (want, (b"ab"[:most], len(b"ab"[most:])))


def naps(value: float, nap: float) -> float:
    time.sleep(nap)
    return value


def kill_nursery(jail: Jail) -> None:
    """Returns when it has ended."""
    (pid,) = confine.children(jail.keeper)
    os.kill(pid, signal.SIGKILL)
    while pid in confine.children(jail.keeper):
        time.sleep(0.001)


def suspected(jail: Jail, *, calls: int, nap: float, kill_again: bool = False) -> list[int]:
    """Kill the nursery while it has these calls. The numbers of those that then ran alone."""
    alone: list[int] = []

    def scored(what: str) -> None:
        if jail.alone is not None:
            alone.append(jail.alone)
        if kill_again and len(alone) == 1:
            kill_nursery(jail)

    async def main() -> list[CallResult]:
        arguments = [json.dumps({"value": float(n), "nap": nap}) for n in range(calls)]
        asked = asyncio.ensure_future(
            jail.call_many([RewardCall(function="naps", arguments=a) for a in arguments])
        )
        await asyncio.sleep(0.1)
        kill_nursery(jail)
        async with asyncio.timeout(30):
            return await asked

    with pulse.heard_by(scored):
        results = asyncio.run(main())
    assert [(r.failure, r.parts) for r in results] == [(None, {"score": float(n)}) for n in range(calls)]
    return alone


def test_a_nursery_that_ends_between_two_suspects_suspects_none_twice() -> None:
    with Jail({"naps": lambda: naps}) as jail:
        alone = suspected(jail, calls=20, nap=0.02, kill_again=True)
    assert len(set(alone)) == len(alone)


def test_after_the_end_of_a_nursery_few_long_calls_run_alone() -> None:
    with Jail({"naps": lambda: naps}, workers=2) as jail:
        assert len(suspected(jail, calls=14, nap=0.15)) <= 1 + jail.workers


def test_who_writes_marks_without_end_takes_no_memory_of_the_nursery() -> None:
    out, into = os.pipe()
    os.set_blocking(out, False)
    pipe = OutputPipe(out, 4, b"mark")
    for _ in range(100):
        os.write(into, b"marks" * 1000)
        pipe.read()
    os.close(into)
    taken = [pipe.take(marked=True)]
    while len(taken) < 100 and not taken[-1][1]:
        taken.append(pipe.take(marked=True))
    assert taken[:2] == [(b"", 0), (b"s", 0)]
    (kept, dropped), *_ = reversed(taken)
    assert kept == b"ssss"
    assert dropped > 90_000, "of the calls after the last one that is kept"
    os.close(out)
