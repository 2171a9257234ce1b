"""Processes that have a permanent name, end on request, and do not outlive the process that they work for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
LOOK_S = 1.0
"""Seconds between two looks at whether the other process still lives."""

GO_ON = "the same command resumes the run. If nobody killed it, there was probably too little memory"
"""What to do where the death of a helper process ends the run."""


def process(pid: int) -> tuple[int, int]:
    """(pid, when it was started): names a process for good, where a pid is used again. 0: not known here."""
    fields = _stat(pid)
    return pid, 0 if not fields or fields[0] == "Z" else int(fields[19])


def state(pid: int) -> str:
    """One letter: R runs, S waits, D waits in the kernel, T is stopped, Z has ended; empty: not there, or not known."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; [] where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def until(holds: Callable[[], object], within_s: float, *, every_s: float = 0.02) -> bool:
    """Whether something holds within so many seconds; it is looked at that often, and once at the end."""
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= end:
            return False
        time.sleep(every_s)
    return True


def die_with(other: tuple[int, int] | None) -> None:
    """End this process when its parent ends (even if this one is stopped), or the other process of this machine."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if other is not None:
        threading.Thread(target=_follow, args=(other,), name="whet-follow", daemon=True).start()


def wake_with_parent() -> None:
    """Stopped or not, this process runs when the thread that started it ends, and may look whether its parent has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _follow(other: tuple[int, int]) -> None:
    while process(other[0]) == other:
        time.sleep(LOOK_S)
    os._exit(1)


def kill(target: tuple[int, int], after_s: float = 0.0) -> None:
    """End a process of this machine that has not ended by itself after so long. Works on a stopped one, too."""
    if not until(lambda: not target[1] or process(target[0]) != target, after_s):
        os.kill(target[0], signal.SIGKILL)
