"""Tracebacks of foreign code, for the log: one for each place that errors come from, however many come."""

from __future__ import annotations

import traceback

from whet.guard.foreign import describe
from whet.tables import is_foreign, raised_at

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
    """The traceback from the first line of foreign code on, with those of its causes; bounded, whatever the exception's
    own methods do."""
    trace = error.__traceback__
    while trace is not None and not is_foreign(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    try:
        whole = traceback.format_exception(
            type(error), error, trace or error.__traceback__, limit=-MOST_FRAMES
        )
        return "".join(whole)[-MOST_TRACE:]
    except BaseException:  # noqa: BLE001  foreign code
        return describe(error)
