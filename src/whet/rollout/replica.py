"""One of several engines behind a `Router`: its requests, and whether it makes progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.rollout.engine import RolloutEngine
from whet.rollout.requests import torn
from whet.types import Completion, WhetError

log = logging.getLogger(__name__)

State = Literal["joining", "serving", "leaving", "gone"]
"""joining: gets its weights; leaving: ends what it has been asked; gone: dropped or closed, never asked again."""

Work = asyncio.Task[Any]
"""A call of `generate` or `score`."""


class Late(WhetError):
    """The deadline has passed."""


@dataclass(eq=False)
class Replica:
    """A separate engine, in this process or elsewhere."""

    name: str
    """Its place among the replicas: one that takes the place of a dropped one has the same name."""
    engine: RolloutEngine
    end: Callable[[], Awaitable[None]] | None = None
    """End it at once, whatever state it is in. None: `close` the engine."""

    state: State = "joining"
    order: int = 0
    """Of two equally loaded replicas, the one with the smaller number is asked."""
    asked: dict[Work, asyncio.Future[Work | None]] = field(default_factory=dict)
    """Requests in flight, each with the future that its caller waits for; None there: ask again elsewhere."""
    seen: tuple[int, int] = (-1, -1)
    """Requests and tokens of its health when it was last asked."""
    since: float = field(init=False)
    """When these were new, or when its work began."""
    changed: Callable[[Replica], object] = lambda replica: None
    """Called when its load has changed."""

    def __post_init__(self) -> None:
        self.rest()

    @property
    def load(self) -> int:
        return len(self.asked)

    def ask(self, call: Coroutine[Any, Any, Any]) -> asyncio.Future[Work | None]:
        """Begin a call of its engine. The result of the future is its ended task, or None once the replica is gone."""
        if not self.asked:
            self.rest()
        answer: asyncio.Future[Work | None] = asyncio.get_running_loop().create_future()
        work: Work = asyncio.ensure_future(call)
        self.asked[work] = answer
        self.changed(self)
        work.add_done_callback(self._ended)
        # nobody waits for it any more; nothing if it has ended
        answer.add_done_callback(lambda _: work.cancel())
        return answer

    def _ended(self, work: Work) -> None:
        answer = self.asked.pop(work, None)
        self.changed(self)
        if not work.cancelled():
            work.exception()  # it is looked at by whoever waits, if anyone still does
        if answer is not None and not answer.done():
            answer.set_result(work)

    def let_go(self) -> int:
        """Its requests are asked elsewhere. Returns how many."""
        asked, self.asked = self.asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_result(None)
        return len(asked)

    def fail(self, error: BaseException) -> None:
        """Everyone who waits for it gets this error."""
        asked, self.asked = self.asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error)

    def rest(self) -> None:
        """It has no reason to get on before now."""
        self.since = time.monotonic()

    async def answers(self, *, timeout_s: float) -> bool:
        """Whether its engine tells its health in time. What `health` raises is raised."""
        return await self._health(timeout_s) is not None

    async def quiet_s(self, *, timeout_s: float) -> float:
        """Seconds since it last got on. `health` has so long to answer; what it raises is raised."""
        counts = await self._health(timeout_s)
        if counts is not None and counts != self.seen:
            self.seen = counts
            self.rest()
        return time.monotonic() - self.since

    async def _health(self, timeout_s: float) -> tuple[int, int] | None:
        """Requests and tokens so far. None: no answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                health = await self.engine.health()
        except TimeoutError:
            return None
        return health.requests, health.tokens


def wrong(done: Completion, *, since: int, latest: int) -> str | None:
    """Why a completion cannot be taken from an engine whose version was `since` to `latest` meanwhile, if so."""
    versions = {span.version for span in done.spans}
    if versions and not since <= min(versions) <= max(versions) <= latest:
        return f"its tokens have versions {sorted(versions)}, expected {since} to {latest}"
    return torn(done)


def trace(name: str, error: BaseException | None) -> None:
    """Log the traceback of a replica's error. An error of whet's own needs none: its message is complete."""
    if error is not None and error.__traceback__ is not None and not isinstance(error, WhetError):
        log.info("traceback of replica %s:", name, exc_info=error)
