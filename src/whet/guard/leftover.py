"""Threads that foreign code has left when a command ends. Python waits for them without a limit and without a word, if
they are no daemons: a tracker that sends until it is told otherwise would keep the process for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from weakref import WeakKeyDictionary

from whet.secrets import redact

SAY_S = 5.0
"""After this time the threads that are waited for are named."""
WAIT_S = 60.0
"""After this time the process ends without them."""

_owners: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


@contextmanager
def owned(by: str) -> Iterator[None]:
    """Threads that begin inside are of `by`."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        for thread in threading.enumerate():
            if thread not in before:
                _owners.setdefault(thread, by)


def bound(status: int) -> None:
    """Call it last. This process ends with `status` WAIT_S seconds from now, if threads still keep it then."""
    with suppress(RuntimeError):  # there is no room for a thread: Python ends the process as it can
        threading.Thread(target=_wait, args=(status,), name="whet-leftover", daemon=True).start()


def _wait(status: int) -> None:
    time.sleep(SAY_S)
    _say(f"waiting {WAIT_S - SAY_S:g} s more for {left()}")
    time.sleep(WAIT_S - SAY_S)
    _say(f"ended with status {status}, without {left()}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _say(what: str) -> None:
    with suppress(OSError):
        os.write(2, redact(f"whet: the command is done; {what}\n").encode())


def left() -> str:
    """Names, owners and places of the threads that keep this process."""
    frames = sys._current_frames()
    told = [
        f"{thread.name}{_of(_owners.get(thread))}{_at(frames.get(thread.ident or 0))}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
    return (
        f"threads that do not end: {', '.join(told)}"
        if told
        else "what code has registered for the end of Python"
    )


def _of(owner: str | None) -> str:
    return f" of {owner}" if owner else ""


def _at(frame: FrameType | None) -> str:
    """Where the code of a thread begins: what it waits in is a library's."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            found = frame
        frame = frame.f_back
    return f" ({found.f_code.co_filename}:{found.f_lineno}, {found.f_code.co_name})" if found else ""
