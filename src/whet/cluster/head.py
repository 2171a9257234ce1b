"""The head of a cluster that this process has started. All cluster processes depend on this one process. Ray itself
waits one minute for a new head, then ends this process and leaves others running."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

import psutil

from whet.guard.processes import LOOK_S, process
from whet.secrets import redact

log = logging.getLogger(__name__)

NAME = "gcs_server"


class HeadNode:
    """Watches it in a thread, until it is left."""

    def __init__(self, who: tuple[int, int], lost: Callable[[str], object]) -> None:
        """lost: called with what to say when it has ended."""
        self.who, self.lost = who, lost
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="whet-head", daemon=True)
        self._thread.start()
        atexit.register(self.leave)  # before Ray's own, which ends the cluster

    def leave(self) -> None:
        """From now on it may end."""
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._left.wait(LOOK_S):
            if process(self.who[0]) != self.who:
                self.lost(
                    f"the head of this run's Ray cluster ({NAME}, process {self.who[0]}) has ended, and the cluster "
                    "with it: this process ends, too; run the same command again to resume from the last checkpoint"
                )
                return


def watched() -> HeadNode | None:
    """The head among the processes that this one has started."""
    for child in psutil.Process().children():
        if child.name() == NAME and process(child.pid)[1]:
            return HeadNode(process(child.pid), give_up)
    return None


def give_up(message: str) -> None:
    """Say why, and end this process and all that it has started: most of them would not notice."""
    log.error("%s", message)
    os.write(2, redact(f"whet: {message}\n").encode())
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)
