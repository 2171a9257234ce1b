"""What foreign code prints, as lines of run.log: so many in a time, so much in all, and the rest counted."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from whet.guard.foreign import words
from whet.secrets import redact

log = logging.getLogger(__name__)

CONSOLE = "console"
"""Attribute of a log record that the display shows, too, whatever its level."""
FIRST_LINE = "first_line"
"""Attribute of a log record of which the display shows only the first line: the others are for run.log."""

PERIOD_S = 10.0
MOST_LINES = 50
"""Of one source in a period."""
MOST_BYTES = 16384
"""Of one source in a period."""
MOST_IN_ALL = 4 << 20
"""Bytes of one source in a run."""
FIRST_LINES = 10
"""Lines of one source that the console shows, too."""
LINE = 2000
"""Characters of one line."""
BLOCK = 65536
"""Bytes that are read from a pipe at once: what it holds."""
FLOOD_S = 0.01
"""Pause after a full pipe: whoever prints without end waits, and costs this process little."""


def bytes_of(text: str) -> int:
    """What a text takes in UTF-8; halves of a surrogate pair are one."""
    return len(text.encode(errors="replace"))


@dataclass
class _Source:
    """Of what one function prints."""

    since: float
    lines: int = 0
    bytes: int = 0
    """In this period."""
    all_lines: int = 0
    all_bytes: int = 0
    cut: int = 0
    """Bytes that are not in the log, and that the log has not told of."""


class Printed:
    """Takes texts from any thread and never waits. `close` tells what was left out last."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()

    def take(self, name: str, text: str, *, dropped_bytes: int = 0) -> None:
        """Log what a source has printed, as far as it has room. dropped_bytes: that it printed beside the text."""
        if not text and not dropped_bytes:
            return
        text = redact(text)  # a line may be cut in the middle of a secret
        with self._lock:
            now = self.clock()
            source = self._sources.setdefault(name, _Source(now))
            if now - source.since >= PERIOD_S:
                self._tell_cut(name, source)
                source.since, source.lines, source.bytes = now, 0, 0
            source.cut += dropped_bytes
            while text:
                line, _, text = text.partition("\n")
                source.cut += bytes_of(line[LINE:])
                line = line[:LINE]
                size = bytes_of(line) + 1
                if self._full(source, size):
                    source.cut += size + bytes_of(text)
                    return
                source.lines, source.bytes = source.lines + 1, source.bytes + size
                source.all_lines, source.all_bytes = source.all_lines + 1, source.all_bytes + size
                self._log(name, line, shown=source.all_lines)

    def close(self) -> None:
        """Tell what was left out. Safe to call twice."""
        with self._lock:
            for name, source in self._sources.items():
                self._tell_cut(name, source)

    @staticmethod
    def _full(source: _Source, size: int) -> bool:
        """Whether a line of `size` bytes has no room."""
        within = source.lines < MOST_LINES and source.bytes + size <= MOST_BYTES
        return not within or source.all_bytes + size > MOST_IN_ALL

    @staticmethod
    def _log(name: str, line: str, *, shown: int) -> None:
        log.info("%s: %s", name, words(line, LINE), extra={CONSOLE: shown <= FIRST_LINES})
        if shown == FIRST_LINES:
            log.info("%s: what it prints from here on is only in run.log", name, extra={CONSOLE: True})

    @staticmethod
    def _tell_cut(name: str, source: _Source) -> None:
        if source.cut:
            log.info("%s printed %d bytes more, which are not in this log", name, source.cut)
            source.cut = 0


class PrintingPipe:
    """A pipe for what processes print past Python: their `fd`. A thread reads it into a `Printed`; `close` it."""

    def __init__(self, printed: Printed, name: str) -> None:
        self.printed, self.name = printed, name
        self._read, self.fd = os.pipe()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="whet-printed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is in the pipe is logged; what is printed later is lost. Safe to call twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            os.close(self._read)
            os.close(self.fd)

    def _work(self) -> None:
        ended, there = False, select.poll()
        there.register(self._read, select.POLLIN)
        while not ended:
            ended = self._closed.is_set()  # one more look
            if not there.poll(0 if ended else 100):
                continue
            data = os.read(self._read, BLOCK)
            self.printed.take(self.name, data.decode(errors="replace"))
            if len(data) == BLOCK:
                time.sleep(FLOOD_S)
