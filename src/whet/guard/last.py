"""A process that outlives its parent for a moment, and ends what the parent has started: its process group.

A killed process cannot clean up, and what it has started then belongs to nobody. Run as a file by `outlive`: it imports
nothing of whet.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

LOOK_S = 0.2
"""Seconds between two looks at whether the parent still lives."""


def outlive() -> None:
    """Start it for this process, which leads a process group of its own: however this process ends, its group does.

    What leaves the group by a session of its own is not found.
    """
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(group: int) -> None:
    while os.getppid() == group:
        time.sleep(LOOK_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
