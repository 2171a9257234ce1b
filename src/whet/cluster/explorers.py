"""Explorers in the cluster, for a trainer in this process. Each does the work of `whet train FILE mode=explore` and is
replaced under its name when it dies or hangs. Explorers find the trainer by its run directory and by the store at
buffer.url."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from whet.cluster.lines import Far
from whet.cluster.nodes import bundle_of, place
from whet.config.load import Loaded
from whet.config.schema import Config
from whet.config.sections.cluster import ClusterConfig
from whet.guard.hangs import Seen
from whet.guard.line import Line, Lines, end, how_it_ended
from whet.guard.watch import START
from whet.types import WhetError

log = logging.getLogger(__name__)

MODULE = "whet.cluster.explorer"
SILENCE_S = 60.0
"""Longest silence of an explorer, which says every two seconds that it lives."""
MARGIN_S = 60.0
"""Over the longest wait that an explorer has of its own."""
STACK_S = 0.5
"""For a stack to be written."""
SETTLE_S = 10.0
"""Longest time that explorers have to see that the trainer has ended."""


class Crew:
    """The explorers of a run."""

    def __init__(
        self, loaded: Loaded, lines: Lines, *, restarts: int, patience_s: float, silence_s: float = SILENCE_S
    ) -> None:
        """restarts: how often an explorer is replaced. patience_s: longest time without progress; silence_s: longest
        time without a heartbeat."""
        self.loaded, self.lines, self.restarts = loaded, lines, restarts
        self.patience_s, self.silence_s = patience_s, silence_s
        self.lost: Future[None] = Future()
        """Has the error when none is left."""
        self.lost.set_running_or_notify_cancel()  # who no longer waits for it does not end it
        self._left = len(lines.lines)
        self._closed = False
        self.watching: list[threading.Thread] = []
        """A thread for each explorer, which ends when that is lost for good."""
        self._lock = threading.Lock()
        for number, line in enumerate(lines.lines):
            self._begin(number, line)
            watching = threading.Thread(
                target=self._watch, args=(number,), name=f"whet-{name_of(number)}", daemon=True
            )
            watching.start()
            self.watching.append(watching)

    def settle(self) -> None:
        """Give them a moment to end by themselves, now that the trainer has."""
        until = time.monotonic() + SETTLE_S
        for watching in self.watching:
            watching.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End them, whatever they do; what they had is asked of who comes under their name."""
        self._closed = True
        end(self.lines)

    # -- inside

    def _begin(self, number: int, line: Line) -> None:
        line.connection.send_bytes(pickle.dumps(explorer_of(self.loaded, name_of(number)), protocol=5))

    def _watch(self, number: int) -> None:
        """One explorer and those that replace it, until the last of them has ended."""
        why = ""
        for attempt in range(self.restarts + 1):
            try:
                if attempt:
                    self._begin(number, self.lines.again(number))
                    log.info("%s is exploring again", name_of(number))
                line = self.lines.lines[number]
                ended, why = self._last_word(line)
                if ended:
                    log.info("%s ended with the trainer", name_of(number))
                    return
            except (EOFError, OSError):
                why = how_it_ended(self.lines.lines[number])
            except WhetError as error:
                why = str(error)
            if self._closed:
                return
            log.warning("%s lost: %s", name_of(number), why)
        self.lines.lines[number].hang_up()  # it may hang
        self.lines.lines[number].kill()
        with self._lock:
            self._left -= 1
            if not self._left:
                self.lost.set_exception(
                    WhetError(
                        f"no explorer is left: each was replaced cluster.restarts={self.restarts} times; "
                        f"the last error: {why.splitlines()[0] if why else 'it ended'}"
                    )
                )

    def _last_word(self, line: Line) -> tuple[bool, str]:
        """Waits for the end of an explorer. Returns whether it was to end, else what it says itself, or that it hangs.
        EOFError, OSError where it ends without a word."""
        doing = START
        while line.connection.poll(self.silence_s):
            kind, said = pickle.loads(line.connection.recv_bytes())
            if kind != "beat":
                return kind == "done", str(said)
            doing, quiet_s = said
            if quiet_s >= self.patience_s and doing != START:  # a model may take long to load
                return False, hangs(line, f"no progress for {quiet_s:.0f} s, in: {doing}")
        return False, hangs(line, f"no heartbeat for {self.silence_s:g} s; the last one was sent in: {doing}")


def hangs(line: Line, since: str) -> str:
    """What is told of a process that hangs: since when, what it did, and its stack."""
    line.dump()
    time.sleep(STACK_S)
    trouble = Seen("", line.state(), "").trouble
    return f"{f'it {trouble}; ' if trouble else ''}{since}\n{line.stack()}"


def patience_of(cfg: Config) -> float:
    """Longest time that an explorer's loop may be in one call: it waits for a rollout or for weights, never longer."""
    return max(cfg.rollout.timeout_s, cfg.sync.timeout_s) + MARGIN_S


def name_of(number: int) -> str:
    return f"explorer-{number}"


def explorer_of(loaded: Loaded, name: str) -> Loaded:
    """The trainer's config as an explorer's."""

    def changed(cfg: Config) -> Config:
        buffer = cfg.buffer.model_copy(update={"explorer_name": name})
        rollout = cfg.rollout.model_copy(update={"replicas": 0})
        track = cfg.track.model_copy(update={"trackers": ["jsonl"]})
        update = {
            "mode": "explore",
            "buffer": buffer,
            "rollout": rollout,
            "track": track,
            "cluster": ClusterConfig(),
        }
        return cfg.model_copy(update=update)

    given = None if loaded.given is None else changed(loaded.given)
    stages = tuple(map(changed, loaded.stages))
    return replace(loaded, config=changed(loaded.config), stages=stages, given=given, translation=None)


def open_crew(loaded: Loaded, *, cuda: bool) -> Crew:
    """Start cluster.explorers of them."""
    c = loaded.config.cluster
    bundle, asked = bundle_of(c, cuda=cuda), f"cluster.explorers={c.explorers}"
    group = place(bundle, c.explorers, strategy=c.placement, start_timeout_s=c.start_timeout_s, asked=asked)
    lines = Far(
        c.explorers, c.cpus, module=MODULE, group=group, folder=os.getcwd(), start_timeout_s=c.start_timeout_s
    )
    patience_s = max(map(patience_of, loaded.stages))
    return Crew(loaded, lines, restarts=c.restarts, patience_s=patience_s)


async def beside(crew: Crew, main: Coroutine[Any, Any, None]) -> None:
    """Run `main`, for as long as an explorer is left. Raises what says why none is."""
    running, lost = asyncio.ensure_future(main), asyncio.wrap_future(crew.lost)
    await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        lost.result()
    lost.cancel()
    running.result()
    await asyncio.to_thread(crew.settle)
