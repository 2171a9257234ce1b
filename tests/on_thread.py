"""A server of tests on a port of this machine, on a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading


class OnThread:
    """Answers from `begin` until `stop`. A subclass has `_start`, which sets `_up`, and `_end`."""

    def begin(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def stop(self) -> None:
        """Every connection breaks."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError
