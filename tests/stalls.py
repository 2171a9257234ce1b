"""A command on a machine that stands still at times: it and all its processes stop together, and then go on.

    python tests/stalls.py [--seconds 4] [--every 15] [--seed 0] [--one] COMMAND ...

A virtual machine does this when its host is busy. `make test-stalls` runs the suite so: a limit within which a test
expects something to *happen* has to leave room for it, and a promise that depends on no second passing unseen fails.

With --one a single process stops, drawn anew each time, while the others go on, as under a busy scheduler
(`--one --seconds 0.3 --every 0.2`): what takes for granted how far another process has come by now fails.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

QUIET_S = 0.05
"""Pause between two looks for new processes."""


def stop(root: psutil.Process, stopped: dict[psutil.Process, None]) -> None:
    """Stop a process and its descendants, from above, so that none starts another. stopped: filled with those that ran
    before, also where this is interrupted."""
    while found := [p for p in (root, *root.children(recursive=True)) if p not in stopped and runs(p)]:
        for process in found:
            stopped[process] = None
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)


def stop_one(root: psutil.Process, stopped: dict[psutil.Process, None], draw: random.Random) -> None:
    """Stop one process that runs, of a process and its descendants."""
    if found := [p for p in (root, *root.children(recursive=True)) if runs(p)]:
        stopped[draw.choice(found)] = None
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def go_on(stopped: dict[psutil.Process, None]) -> None:
    """From below: a parent that wakes finds children that run."""
    for process in reversed(stopped):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long it stands still")
    parser.add_argument("--every", type=float, default=15.0, help="mean seconds between two stalls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="one process at a time, not all together")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    draw, began, stalls = random.Random(asked.seed), time.monotonic(), 0
    command = subprocess.Popen(asked.command)
    root = psutil.Process(command.pid)
    while command.poll() is None:
        until = time.monotonic() + draw.uniform(0.5, 1.5) * asked.every
        while command.poll() is None and time.monotonic() < until:
            time.sleep(QUIET_S)
        stopped: dict[psutil.Process, None] = {}
        try:
            with suppress(psutil.NoSuchProcess):
                if asked.one:
                    stop_one(root, stopped, draw)
                else:
                    stop(root, stopped)
                time.sleep(asked.seconds)
                stalls += 1
        finally:
            go_on(stopped)
    print(f"{stalls} stalls of {asked.seconds:g} s in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
