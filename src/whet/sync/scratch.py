"""A folder for weights that pass between processes of one machine: in its memory, if there is room, else on disk.

A process that was killed leaves its folder behind. A folder is locked for as long as its process lives, so the next
process of the same user finds those of the dead and removes them.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from whet.track.files import RunLock
from whet.types import WhetError

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Files here are pages of memory."""
_ATTEMPTS = 3
_PREFIX = "whet-weights-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""A folder without a lock, younger than that, may get one at any moment."""


class Scratch:
    """An empty folder for `size` bytes, below `memory` or, where that has no room, at `disk`, whose content is removed.
    `close` removes it."""

    def __init__(self, disk: Path, *, size: int, memory: Path = MEMORY) -> None:
        sweep(memory)
        free = shutil.disk_usage(memory).free if memory.is_dir() else 0
        if free > size:
            self.path, self._lock = _made(memory)
        else:
            shutil.rmtree(disk, ignore_errors=True)
            self.path, self._lock = disk, RunLock(disk)
            log.info(
                "weights for replicas: %s has %d MiB free, %d MiB are needed; they go through %s",
                memory, free >> 20, size >> 20, disk,
            )  # fmt: skip

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _made(memory: Path) -> tuple[Path, RunLock]:
    """A new folder and its lock. Another process may sweep in the moment before it is locked: then one more is made."""
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=memory))
        with suppress(WhetError):
            lock = RunLock(path)
            if (path / _LOCK).exists():
                return path, lock
            lock.release()
    raise WhetError(f"no folder for weights could be kept in {memory}: other processes remove it at once")


def sweep(memory: Path = MEMORY) -> None:
    """Remove the folders that processes of this user have left behind when they were killed."""
    for path in memory.glob(f"{_PREFIX}*"):
        try:
            about = path.stat()
            young = time.time() - about.st_mtime < _YOUNG_S and not (path / _LOCK).exists()
            if about.st_uid != os.getuid() or young:
                continue
            with RunLock(path):
                shutil.rmtree(path, ignore_errors=True)
        except (OSError, WhetError):
            continue  # it lives, or another process has just removed it
