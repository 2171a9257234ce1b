"""A folder for weights that pass between processes of one machine: in its memory, if there is room, else on disk."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from whet.guard.temporary import MEMORY, OwnFolder

log = logging.getLogger(__name__)


def scratch(disk: Path, *, size: int, memory: Path = MEMORY) -> OwnFolder:
    """An empty folder for `size` bytes, below `memory` or, where that has no room, below `disk`. To be closed."""
    free = shutil.disk_usage(memory).free if memory.is_dir() else 0
    if free > size:
        return OwnFolder("weights", memory)
    log.info(
        "weights for replicas: %s has %d MiB free, %d MiB are needed; they go through %s",
        *(memory, free >> 20, size >> 20, disk),
    )
    disk.mkdir(parents=True, exist_ok=True)
    return OwnFolder("weights", disk)
