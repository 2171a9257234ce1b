"""Whose code a host of environments runs at each moment, and how long the event loop could run."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

TICK_S = 0.25
"""Between two looks at whether the event loop runs; each is a heartbeat for the driver."""
GAP_S = 1.0
"""A longer pause between two ticks is no time of a call: another episode had the event loop."""
SLOTS = 65536
"""Episodes of a host at once."""
_NUMBER = struct.Struct("q")


class Marks:
    """Which episodes run code at this moment: numbers in a file, which outlives the process."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), SLOTS * _NUMBER.size)
        self._free = list(range(SLOTS))
        self._runs: Counter[int] = Counter()
        """Threads and pieces of async code that run for a slot."""
        self._given: set[int] = set()
        """Slots of episodes that are over, whose code goes on."""
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.on_loop: int | None = None
        """The episode whose async code has the event loop."""

    @staticmethod
    def create(path: str) -> None:
        with open(path, "wb") as file:
            file.write(bytes(SLOTS * _NUMBER.size))

    @staticmethod
    def read(path: str) -> set[int]:
        """Numbers of the episodes that ran code when the process ended; they count from 1."""
        with open(path, "rb") as file:
            return {number for (number,) in _NUMBER.iter_unpack(file.read())} - {0}

    def take(self) -> int:
        """A slot for an episode."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """The episode is over; its slot is free once no code of it runs."""
        with self._lock:
            self._given.add(slot)
            self._settle(slot)

    def enter(self, slot: int, number: int) -> None:
        """Code of the episode begins to run."""
        with self._lock:
            self._runs[slot] += 1
            _NUMBER.pack_into(self._table, slot * _NUMBER.size, number)

    def leave(self, slot: int) -> None:
        """Code of the episode has ended, or waits. A copy of the process, which that code has forked, ends here: it
        would go on with all episodes of the host."""
        if os.getpid() != self._process:
            os._exit(0)
        with self._lock:
            self._runs[slot] -= 1
            self._settle(slot)

    def _settle(self, slot: int) -> None:
        if self._runs[slot] > 0:
            return
        del self._runs[slot]
        _NUMBER.pack_into(self._table, slot * _NUMBER.size, 0)
        if slot in self._given:
            self._given.remove(slot)
            self._free.append(slot)

    @contextmanager
    def running(self, slot: int, number: int) -> Iterator[None]:
        """Code of the episode runs in this thread."""
        self.enter(slot, number)
        try:
            yield
        finally:
            self.leave(slot)


class Marked(Awaitable[Any]):
    """An awaitable of the user's, with the mark of its episode wherever its code runs."""

    def __init__(self, inner: Awaitable[Any], marks: Marks, slot: int, number: int) -> None:
        self.inner, self.marks, self.slot, self.number = inner, marks, slot, number

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.inner.__await__()
        go_on: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                waits_for = self._run(go_on)
            except StopIteration as stop:
                return stop.value
            try:
                got = yield waits_for
                go_on = partial(steps.send, got) if hasattr(steps, "send") else partial(next, steps)
            except BaseException as error:  # a cancellation, for one, is the user's to see
                if not hasattr(steps, "throw"):
                    raise
                go_on = partial(steps.throw, error)

    def _run(self, go_on: Callable[[], Any]) -> Any:
        """The user's code, up to where it waits."""
        self.marks.on_loop = self.number
        self.marks.enter(self.slot, self.number)
        try:
            return go_on()
        finally:
            self.marks.on_loop = None
            self.marks.leave(self.slot)


class LoopClock:
    """Seconds in which the event loop could run."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._lost = 0.0

    def now(self) -> float:
        """Read at least every TICK_S."""
        now = time.monotonic()
        if now - self._last > GAP_S:
            self._lost += now - self._last - TICK_S
        self._last = now
        return now - self._lost

    def peek(self) -> float:
        """The same, from another thread: it is no sign that the loop runs."""
        return time.monotonic() - self._lost

    @property
    def quiet_s(self) -> float:
        """Since it was read last."""
        return time.monotonic() - self._last
