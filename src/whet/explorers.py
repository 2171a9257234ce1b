"""Asynchronous explorers: each task is requested as soon as there is room for it, while the trainer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from whet.buffer.buffer import Buffer
from whet.types import Task

DrawTasks = Callable[[int], list[Task]]


class Explorers:
    """One asyncio task for each task in flight, so that no rollout waits for another's end.

    draw: returns so many new tasks, which are in flight from then on. explore: samples and scores tasks and puts them
    into the buffer. An error of any ends all: the buffer raises it to its waiting caller.
    """

    def __init__(
        self, buffer: Buffer, draw: DrawTasks, explore: Callable[[list[Task]], Coroutine[Any, Any, None]]
    ) -> None:
        self.buffer, self.draw, self.explore = buffer, draw, explore
        self.again: list[Task] = []
        """Under way when the checkpoint was written: asked before anything else. Their room is taken already."""
        self.playing: dict[int, asyncio.Task[None]] = {}
        """By task uid."""
        self.asking: asyncio.Task[None] | None = None

    def start(self, left: int) -> None:
        """Continue to request tasks, for `left` steps at most."""
        self.buffer.wanted = left * self.buffer.groups_per_step
        if self.asking is None:
            self._play(self.pop_again())
            self.asking = asyncio.create_task(self._ask(), name="whet-explorers")
            self.asking.add_done_callback(self._ended)

    def pop_again(self) -> list[Task]:
        """What was under way when the checkpoint was written, once."""
        again, self.again = self.again, []
        return again

    async def give_up(self, version: int) -> None:
        """End what would be too old for a trainer at `version`."""
        for uid in await self.buffer.give_up_stale(version):
            self.playing[uid].cancel()

    async def close(self) -> None:
        """Stop requesting and sampling; tasks in flight stay so in the buffer's state."""
        running = [t for t in (self.asking, *self.playing.values()) if t is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.asking = None

    async def _ask(self) -> None:
        while True:
            self._play(self.draw(await self.buffer.room(at_most=self.buffer.groups_per_step)))

    def _play(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            playing = self.playing[task.uid] = asyncio.create_task(self.explore([task]))
            playing.add_done_callback(partial(self._played, task.uid))

    def _played(self, uid: int, playing: asyncio.Task[None]) -> None:
        self.playing.pop(uid, None)
        self._ended(playing)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.buffer.fail(error)
