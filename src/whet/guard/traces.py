"""Tracebacks of foreign code, for the log: one for each place that errors come from, however many come."""

from __future__ import annotations

import traceback

from whet.guard.foreign import describe, raised_at

MOST_FRAMES = 20
"""The innermost of an error, and of each of its causes."""
MOST_TRACE = 8000
"""Characters."""


class Traces:
    """Which errors have been seen, by kind and by the line that raised them."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, tuple[str, int] | None]] = set()

    def first(self, error: BaseException) -> bool:
        """Whether no error of its kind has come from its place yet."""
        seen = (type(error).__name__, raised_at(error))
        known = seen in self._seen
        self._seen.add(seen)
        return not known


def written(error: BaseException) -> str:
    """The traceback, with those of its causes; bounded, whatever the exception's own methods do."""
    try:
        return "".join(traceback.format_exception(error, limit=-MOST_FRAMES))[-MOST_TRACE:]
    except BaseException:  # noqa: BLE001  foreign code
        return describe(error)
