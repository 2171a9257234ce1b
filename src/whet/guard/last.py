"""A process that outlives its parent for a moment, and ends what the parent has started: its process group, and
whatever has the mark of the parent in its environment.

A killed process cannot clean up, and what it has started then belongs to nobody. The mark finds daemons, which have a
session of their own, and so have left the group. Run as a file by `outlive`: it imports nothing of whet.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

MARK = "WHET_LINE"
"""The variable that a process must have had from its start on; each has another value (`guard.line`)."""
LOOK_S = 0.2
"""Seconds between two looks at whether the parent still lives."""
_PR_SET_PDEATHSIG = 1
_SWEEP_S = 2.0
"""Longest search for programs with the mark: new ones may start meanwhile."""


def outlive() -> None:
    """Start it for this process, which leads a process group of its own and has a mark: however this process ends, so
    do its group and all programs that it has started with its environment.

    What leaves the group and has another environment, too, is not found. One that is killed is replaced.
    """
    threading.Thread(target=_replace, args=(_start(),), name="whet-last", daemon=True).start()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _replace(last: subprocess.Popen[bytes]) -> None:
    """It ends before this process only if somebody ends it."""
    while True:
        last.wait()
        with suppress(OSError):  # no room for a process now: the next round tries again
            last = _start()
        time.sleep(LOOK_S)


def main(group: int) -> None:
    if sys.platform == "linux":  # stopped or not, it runs when its parent ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    while os.getppid() == group:
        time.sleep(LOOK_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    end, mark = time.monotonic() + _SWEEP_S, f"{MARK}={os.environ.get(MARK, '')}".encode()
    while (left := marked(mark)) and time.monotonic() < end:
        # all are stopped first, so that none starts another one
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.01)


def marked(mark: bytes) -> list[int]:
    """Processes of this user whose environment has this line, but for this one and those that have ended."""
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/environ", "rb") as file:
            if int(name) != os.getpid() and mark in file.read().split(b"\0"):
                found.append(int(name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
