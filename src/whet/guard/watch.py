"""No silent hang: every wait has an owner and a deadline, and a stall is reported with stacks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from whet.guard import pulse, stacks
from whet.secrets import redact
from whet.types import WhetError

T = TypeVar("T")
START = "its start"
"""What a process does before it has said what it begins."""
AGAIN_S = 5.0
"""Seconds between two interruptions of what does not return."""


async def wait(
    awaitable: Awaitable[T],
    *,
    owner: str,
    what: str,
    timeout_s: float,
    report_s: float = 60.0,
    progress: Callable[[], object] = lambda: None,
    limit: str = "",
) -> T:
    """The result of `awaitable`; every `report_s` seconds the log names the wait and its owner, with all stacks.

    Raises WhetError after `timeout_s`, and cancels the awaitable, as it does when it is cancelled itself. progress: a
    value that changes while work is done; every change restarts the timeout. limit: the keys that set the timeout, with
    their values, for the error.
    """
    clock = asyncio.get_running_loop().time
    start, last = clock(), progress()
    work = asyncio.ensure_future(awaitable)
    try:
        while not work.done():
            if (now := progress()) != last:
                start, last = clock(), now
            left_s = start + timeout_s - clock()
            if left_s <= 0:
                made_of = f" {limit} set{'' if ',' in limit else 's'} this limit." if limit else ""
                raise WhetError(
                    f"{owner} waited {timeout_s:g} s for {what} and timed out. The log has the stacks.{made_of}"
                )
            await asyncio.wait({work}, timeout=min(report_s, left_s))
            if not work.done():
                stacks.report(f"waiting for {what} by {owner} since {clock() - start:.1f} s")
    finally:
        if not work.done():
            work.cancel()
    return work.result()


@contextmanager
def interrupted_after(limit_s: float) -> Iterator[threading.Event]:
    """What is done inside is interrupted by TimeoutError, and again every AGAIN_S seconds where foreign code goes on.
    Gives an event that is set from then on: foreign code may raise another error instead, or return.

    Only in the main thread of a system with timers; elsewhere nothing bounds it but the watch. Code that does not let
    Python handle signals is interrupted when it returns.
    """
    late = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield late
        return

    def interrupt(number: int, frame: object) -> None:
        late.set()
        raise TimeoutError(f"not within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
        yield late
    finally:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        finally:  # the timer may have rung just before
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


class Watch:
    """A thread that logs the stacks of all processes when no `beat` has come for `quiet_s` seconds: some call hangs.

    After `limit_s` it ends this process with exit code 1: the call will not return, and another thread cannot interrupt
    it. Time in which this process was stopped (Ctrl-Z, a closed laptop) does not count. As a context manager it also
    receives `pulse.beat`.
    """

    def __init__(self, quiet_s: float = 60.0, limit_s: float = 3600.0) -> None:
        self.quiet_s, self.limit_s = quiet_s, limit_s
        self._last = (time.monotonic(), START)
        self._end, self._hearing = threading.Event(), ExitStack()
        self._thread = threading.Thread(target=self._look, name="whet-watch", daemon=True)
        self._thread.start()

    def beat(self, what: str) -> None:
        """The run is alive and now begins `what`."""
        self._last = (time.monotonic(), what)

    def last(self) -> tuple[str, float]:
        """What was begun last, and seconds since."""
        since, what = self._last
        return what, time.monotonic() - since

    def _look(self) -> None:
        tick = self.quiet_s / 4
        reported = stopped = 0.0
        seen, looked = self._last, time.monotonic()
        while not self._end.wait(tick):
            now = time.monotonic()
            if self._last != seen:
                seen, stopped = self._last, 0.0
            if now - looked > 2 * tick:
                stopped += now - looked - tick
            looked = now
            since, what = seen
            quiet = now - since - stopped
            if quiet >= self.limit_s:
                self._give_up(quiet, what)
            if min(quiet, now - reported) >= self.quiet_s:
                reported = now
                stacks.report(f"no progress for {quiet:.1f} s, in {what}")

    def _give_up(self, quiet: float, what: str) -> None:
        message = (
            f"no progress for {quiet:.0f} s, in {what}: this process (pid {os.getpid()}) hangs and is ended; run the "
            "same command again to resume from the last checkpoint. If it was only slow, raise "
            f"machine.watchdog_timeout_s, which is {self.limit_s:g}"
        )
        stacks.report(message, logging.ERROR)
        os.write(2, redact(f"whet: {message}. The log has the stacks.\n").encode())
        os._exit(1)

    def close(self) -> None:
        """End the thread."""
        self._hearing.close()
        self._end.set()
        self._thread.join()

    def __enter__(self) -> Watch:
        self._hearing.enter_context(pulse.heard_by(self.beat))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def own_signals() -> Generator[None]:
    """Foreign code inside puts handlers of its own on Ctrl-C and SIGTERM (Ray, SwanLab): those of the run are put back,
    which end the step and save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
