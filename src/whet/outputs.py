"""Files that take the place of others, and whether they can."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_place(path: Path) -> None:
    """OSError where no file or folder can be put at `path`, before the work that makes it. Makes the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.resolve().parent):
        pass


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to. When the block ends, what is there takes the place of `path` in one rename;
    when it fails, `path` is as it was. durable: the rename waits for the disk."""
    part = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        yield part
        if durable:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
