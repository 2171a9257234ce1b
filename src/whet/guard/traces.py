"""Tracebacks of foreign code, for the log: one for each place that errors come from, however many come."""

from __future__ import annotations

import traceback

from whet.guard.worker import describe

MOST_FRAMES = 20
"""The innermost of an error, and of each of its causes."""
MOST_TRACE = 8000
"""Characters."""


class Traces:
    """Which errors have been seen, by kind and by the line that raised them."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()

    def first(self, error: BaseException) -> bool:
        """Whether no error of its kind has come from its place yet."""
        frames = traceback.extract_tb(error.__traceback__)
        place = (type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames[-1:]))
        known = place in self._seen
        self._seen.add(place)
        return not known


def written(error: BaseException) -> str:
    """The traceback, with those of its causes; bounded, whatever the exception's own methods do."""
    try:
        return "".join(traceback.format_exception(error, limit=-MOST_FRAMES))[-MOST_TRACE:]
    except BaseException:  # noqa: BLE001  foreign code
        return describe(error)
