"""One of several engines behind a `Router`: its requests, and whether it makes progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from whet.rollout.engine import RolloutEngine
from whet.types import Completion, WhetError

log = logging.getLogger(__name__)

State = Literal["joining", "serving", "leaving", "gone"]
"""joining: gets its weights; leaving: ends what it has been asked; gone: dropped or closed, never asked again."""

Work = asyncio.Task[Completion]


@dataclass(eq=False)
class Replica:
    """A separate engine, in this process or elsewhere."""

    name: str
    """Its place among the replicas: one that takes the place of a dropped one has the same name."""
    engine: RolloutEngine
    progress: Callable[[], Awaitable[int]] | None = None
    """A number that grows as long as the engine gets on with its requests. It is answered whatever the engine does, as
    long as its process lives. None: finished requests are counted, and nobody can be asked."""
    end: Callable[[], Awaitable[None]] | None = None
    """End it at once, whatever state it is in. None: `close` the engine."""

    state: State = "joining"
    order: int = 0
    """Of two equally loaded replicas, the one with the smaller number is asked."""
    asked: dict[Work, asyncio.Future[Work | None]] = field(default_factory=dict)
    """Requests in flight, each with the future that its caller waits for; None there: ask again elsewhere."""
    finished: int = 0
    seen: int = -1
    """The last number that `progress` gave."""
    since: float = field(default_factory=time.monotonic)
    """When that number was new, or when its work began."""
    changed: Callable[[Replica], object] = lambda replica: None
    """Called when its load has changed."""

    @property
    def load(self) -> int:
        return len(self.asked)

    def ask(self, token_ids: list[int], sampling: object) -> asyncio.Future[Work | None]:
        """Begin one request. The result of the future is its ended task, or None once the replica is gone."""
        if not self.asked:
            self.rest()
        answer: asyncio.Future[Work | None] = asyncio.get_running_loop().create_future()
        work: Work = asyncio.ensure_future(self.engine.generate(token_ids, sampling))  # type: ignore[arg-type]
        self.asked[work] = answer
        self.changed(self)
        work.add_done_callback(self._ended)
        answer.add_done_callback(
            lambda _: work.cancel()
        )  # nobody waits for it any more; nothing if it has ended
        return answer

    def _ended(self, work: Work) -> None:
        answer = self.asked.pop(work, None)
        self.finished += 1
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
        """Whether its process gives a sign of life in time. What `progress` raises is raised."""
        if self.progress is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self.progress()
        except TimeoutError:
            return False
        return True

    async def quiet_s(self, *, timeout_s: float) -> float:
        """Seconds since it last got on. `progress` has so long to answer; what it raises is raised."""
        number = self.finished
        if self.progress is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    number = await self.progress()
            except TimeoutError:
                number = self.seen
        if number != self.seen:
            self.seen = number
            self.rest()
        return time.monotonic() - self.since


def trace(name: str, error: BaseException | None) -> None:
    """Log the traceback of a replica's error. An error of whet's own needs none: its message is complete."""
    if error is not None and error.__traceback__ is not None and not isinstance(error, WhetError):
        log.info("traceback of replica %s:", name, exc_info=error)
