"""An event loop in which no time passes while anything runs: limits of time are exact, however slow the machine is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Jumping(selectors.DefaultSelector):
    """Its clock jumps where the loop would sleep. Not for what other threads or processes are to answer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0 if timeout else timeout)
        self.now += timeout if timeout and not found else 0.0
        return found


def go(work: Coroutine[Any, Any, T], *, clock: Jumping | None = None) -> T:
    """As `asyncio.run`. clock: for code that reads the time otherwise than from the loop."""
    jumping = clock or Jumping()
    loop = asyncio.SelectorEventLoop(jumping)
    loop.time = lambda: jumping.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)
