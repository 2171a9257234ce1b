"""Signs of life of whatever takes long in this process: something has been got done, and what.

Who works says `beat`, wherever it is in the package; who listens (`Watch`, or the driver of a rank) hears it. Nobody
does so from a clock: a call that hangs is silent. A thread that works beside the run, such as an upload, is heard, too;
its work has an end.
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
