"""`pause` and `update_weights` for an engine that serves each request by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from whet.types import WhetError


class Door:
    """Open, or closed until it is opened again."""

    def __init__(self) -> None:
        self.opened: asyncio.Event | None = None
        """None: it is open."""

    def shut(self) -> None:
        if self.opened is None:
            self.opened = asyncio.Event()

    def open(self) -> None:
        if self.opened is not None:
            self.opened.set()
            self.opened = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Shut inside it."""
        self.shut()
        try:
            yield
        finally:
            self.open()

    async def wait(self) -> None:
        while self.opened is not None:
            await self.opened.wait()


class News:
    """Wakes those who wait for something to become true."""

    def __init__(self) -> None:
        self.waiting: set[asyncio.Future[None]] = set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Looks now and after each `tell`. What `holds` raises is raised."""
        while not holds():
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.add(told)
            try:
                await told
            finally:
                self.waiting.discard(told)

    def tell(self) -> None:
        for told in self.waiting:
            if not told.done():
                told.set_result(None)


class Gate:
    """Requests come in through `passing` and ask `step` before each piece of work. version: of the weights."""

    def __init__(self, version: Callable[[], int]) -> None:
        self.entry, self.work = Door(), Door()
        self.inside: set[asyncio.Future[None]] = set()
        self.closed: str | None = None
        """Why nobody is served."""
        self.version = version
        self.news = News()
        """There is another version, or none will come."""

    @asynccontextmanager
    async def passing(self, least_version: int | None = None) -> AsyncIterator[None]:
        """One request, from its start to its end. It begins once the weights are at least of this version."""
        if least_version is not None:
            await self.news.until(lambda: self._reached(least_version))
        await self.entry.wait()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.inside.add(ended)
        try:
            await self.step()
            yield
        finally:
            self.inside.discard(ended)
            ended.set_result(None)

    async def step(self) -> None:
        """Let others run; wait while work is stopped. Raises WhetError once closed."""
        await asyncio.sleep(0)
        await self.work.wait()
        if self.closed is not None:
            raise WhetError(self.closed)

    def _reached(self, least: int) -> bool:
        if self.closed is not None:
            raise WhetError(self.closed)
        return self.version() >= least

    async def pause(self, finish: bool) -> bool:
        """Let nobody in; wait for those who are inside (`finish`), or stop them where they are. False: it was resumed
        or closed meanwhile, and nothing is stopped."""
        self.entry.shut()
        if finish:
            shut = self.entry.opened
            self.work.open()
            while self.inside:
                await asyncio.wait(self.inside)
            if self.entry.opened is not shut:
                return False
        self.work.shut()
        return True

    def resume(self) -> None:
        self.work.open()
        self.entry.open()
        self.news.tell()

    def updated(self) -> None:
        """There are new weights: go on with them."""
        self.closed = None
        self.resume()

    def close(self, reason: str) -> None:
        """Everyone inside, waiting or yet to come fails with this."""
        self.closed = reason
        self.resume()
