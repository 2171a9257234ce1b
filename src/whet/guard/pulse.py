"""Progress reports of long work in this process: a part is done, and which.

Working code calls `beat`, anywhere in the package; a listener (`Watch`, or the driver of a rank) receives it. No beat
comes from a clock: a call that hangs sends none. A thread beside the run, such as an upload, also counts; its work has
an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], object]

_listeners: list[Listener] = []


def beat(what: str) -> None:
    """A part of `what` is done, or begins."""
    for listener in _listeners[-1:]:
        listener(what)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """As long as the block runs, beats go to `listener` and not to who heard them before."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
