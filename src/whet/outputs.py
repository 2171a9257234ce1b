"""Files that take the place of others, and whether they can."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.guard.temporary import HeldFolder


def check_place(path: Path) -> None:
    """OSError where no file or folder can be put at `path`, before the work that makes it. Makes the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.resolve().parent):
        pass


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path to write to, in a folder of its own beside `path`. When the block ends, what is there takes the place of
    `path` in one rename; when it fails, `path` is as it was. The folder that a killed process leaves is removed by the
    next that writes `path`. durable: the rename waits for the disk."""
    with HeldFolder(f".{path.name}.new-", path.parent) as folder:
        part = folder / path.name
        yield part
        if durable:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
