"""Foreign code of an episode that runs beside its environment: with a deadline, and in no way that ends the process."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_S = 1.0
"""How long async code may take to end once it is cancelled."""
MOST_AT_ONCE = 256
"""Threads of one process that run foreign code; further calls wait, which is no time of theirs."""


@dataclass(frozen=True)
class Ended:
    """What came of a call."""

    value: Any = None
    error: BaseException | None = None
    """What it raised, SystemExit included."""
    late: bool = False
    """It took longer than it may."""


@dataclass(eq=False)
class CallContext:
    """How code of one episode is run."""

    clock: Callable[[], float]
    """Seconds in which the event loop could run."""
    running: Callable[[], AbstractContextManager[None]]
    """Holds while code of the episode runs in a thread."""
    marked: Callable[[Awaitable[Any]], Awaitable[Any]]
    """The same awaitable, known as code of the episode wherever it runs."""
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AT_ONCE))
    """For threads; all episodes of a process share one."""
    left: set[asyncio.Future[Any]] = field(default_factory=set)
    """Late code that goes on."""


async def run(context: CallContext, function: Callable[[], Any], limit_s: float, *, is_async: bool) -> Ended:
    """What comes of an async function here, or of a plain one in a thread of its own, within limit_s seconds.

    A plain function that returns an awaitable is awaited here. RuntimeError if no thread can be started.
    """
    if is_async:
        return await _within(context, asyncio.ensure_future(_outcome(context, function, None)), limit_s)
    async with context.places:
        thread = _in_thread(function, context.running)
        return await _within(
            context, asyncio.ensure_future(_outcome(context, function, thread)), limit_s, thread
        )


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, in their order. Where one raises, the others are cancelled: the episode has no use for
    them."""
    work = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*work)
    finally:
        for each in work:
            each.cancel()


async def _within(
    context: CallContext,
    work: asyncio.Future[Ended],
    limit_s: float,
    thread: asyncio.Future[Ended] | None = None,
) -> Ended:
    begun = context.clock()
    try:
        while not work.done():
            left_s = limit_s - (context.clock() - begun)
            if left_s <= 0:
                work.cancel()
                if thread is None or thread.done():
                    await asyncio.wait({work}, timeout=CANCEL_S)
                return Ended(late=True)
            await asyncio.wait({work}, timeout=min(left_s, 60.0))
        return Ended(error=asyncio.CancelledError()) if work.cancelled() else work.result()
    finally:
        work.cancel()
        for part in (work, thread):
            if part is not None and not part.done():
                context.left.add(part)
                part.add_done_callback(context.left.discard)


async def _outcome(
    context: CallContext, function: Callable[[], Any], thread: asyncio.Future[Ended] | None
) -> Ended:
    """Of a function that is called here, or that runs in a thread already."""
    try:
        outcome = Ended(function()) if thread is None else await asyncio.shield(thread)
        if inspect.isawaitable(outcome.value):
            return Ended(await context.marked(outcome.value))
        return outcome
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  foreign code, SystemExit included
        return Ended(error=error)


def _in_thread(
    function: Callable[[], Any], running: Callable[[], AbstractContextManager[None]]
) -> asyncio.Future[Ended]:
    """A thread that holds up nobody, neither other code nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Ended] = loop.create_future()

    def settle(outcome: Ended) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        with running():
            try:
                outcome = Ended(function())
            except BaseException as error:  # noqa: BLE001  foreign code, SystemExit included
                outcome = Ended(error=error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="whet-call", daemon=True).start()
    return future
