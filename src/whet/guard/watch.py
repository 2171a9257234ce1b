"""No silent hang: every wait has an owner and a deadline, and a stall is reported with stacks."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

from whet.types import WhetError

log = logging.getLogger(__name__)

T = TypeVar("T")


async def wait(
    awaitable: Awaitable[T], *, owner: str, what: str, timeout_s: float, report_s: float = 60.0
) -> T:
    """The result of `awaitable`; every `report_s` seconds the log says who waits for what, with all stacks.

    Raises WhetError after `timeout_s`, and cancels the awaitable, as it does when it is cancelled itself.
    """
    start = time.monotonic()
    work = asyncio.ensure_future(awaitable)
    try:
        while not work.done():
            left_s = start + timeout_s - time.monotonic()
            if left_s <= 0:
                raise WhetError(
                    f"{owner} waited {timeout_s:g} s for {what}, in vain. The log has the stacks."
                )
            await asyncio.wait({work}, timeout=min(report_s, left_s))
            if not work.done():
                waited_s = time.monotonic() - start
                log.warning("waiting for %s by %s since %.1f s\n%s", what, owner, waited_s, stacks())
    finally:
        if not work.done():
            work.cancel()
    return work.result()


def stacks() -> str:
    """The stacks of all threads, and of all tasks of the running event loop if there is one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    out = io.StringIO()
    for ident, frame in sys._current_frames().items():
        out.write(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs in this thread
        tasks = set()
    for task in tasks:
        task.print_stack(file=out)
    return out.getvalue()


class Watch:
    """A thread that logs all stacks when no `beat` has come for `quiet_s` seconds: some call hangs."""

    def __init__(self, quiet_s: float = 60.0) -> None:
        self.quiet_s = quiet_s
        self._last = (time.monotonic(), "start")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="whet-watch", daemon=True)
        self._thread.start()

    def beat(self, what: str) -> None:
        """The run is alive and now begins `what`."""
        self._last = (time.monotonic(), what)

    def _look(self) -> None:
        reported = 0.0
        while not self._end.wait(self.quiet_s / 4):
            since, what = self._last
            now = time.monotonic()
            if now - max(since, reported) >= self.quiet_s:
                reported = now
                log.warning("no sign of life since %.1f s, in %s\n%s", now - since, what, stacks())

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
