"""What a reward process prints, call by call: it writes a mark into the same pipe after each call."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress

MARK_BYTES = 16
"""Random ones, of one process alone: what a call prints does not have them by chance. Written at once, they lie
together in the pipe, whatever else writes to it."""
_BLOCK = 1 << 16
_BLOCKS = 64
"""In one go, 4 MB: who prints without end must not hold up the others."""

_MOST_WHOLE = 64
"""Calls whose output has been read before their answers: more than a worker has. Code that finds its mark can write it
without end."""


class OutputPipe:
    """The reading end. Of each call it keeps the first `most` bytes, and counts the others."""

    def __init__(self, fd: int, most: int, mark: bytes) -> None:
        self.fd, self.most, self.mark = fd, most, mark
        self.ended = False
        self._whole: deque[tuple[bytes, int]] = deque()
        self._kept = bytearray()
        self._dropped = 0
        self._tail = b""  # the beginning of a mark, perhaps

    def read(self) -> None:
        """Take what is there."""
        with suppress(BlockingIOError):
            for _ in range(_BLOCKS):
                data = os.read(self.fd, _BLOCK)
                if not data:
                    self.ended = True
                    return
                self._cut(data)

    def take(self, *, marked: bool) -> tuple[bytes, int]:
        """The oldest call's first bytes, and how many more it printed. marked: its mark has been written; else all that
        is there is the call's."""
        if not (marked and self._whole):
            self.read()
        if not (marked and self._whole):
            self._keep(self._tail)
            self._tail = b""
            self._close()
        return self._whole.popleft()

    def _cut(self, data: bytes) -> None:
        data = self._tail + data
        *calls, rest = data.split(self.mark)
        for call in calls:
            self._keep(call)
            self._close()
        longest = min(len(rest), len(self.mark) - 1)
        begun = next((n for n in range(longest, 0, -1) if rest.endswith(self.mark[:n])), 0)
        self._keep(rest[: len(rest) - begun])
        self._tail = rest[len(rest) - begun :]

    def _keep(self, data: bytes) -> None:
        room = max(0, self.most - len(self._kept))
        self._kept += data[:room]
        self._dropped += max(0, len(data) - room)

    def _close(self) -> None:
        if len(self._whole) == _MOST_WHOLE:
            return
        self._whole.append((bytes(self._kept), self._dropped))
        self._kept.clear()
        self._dropped = 0
