"""Temporary folders that go with their process.

A process that is killed leaves its folder behind. A folder is locked for as long as the process that made it lives, or
one forked from it, so the next process of the same user that makes one of its kind finds those of the dead and removes
them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_ATTEMPTS = 3


class OwnFolder:
    """A new folder `whet-KIND-...` below `above`, or where temporary files are. OSError where none can be made. `with`
    gives its path, and removes it at the end."""

    def __init__(self, kind: str, above: Path | None = None) -> None:
        prefix, above = f"whet-{kind}-", above or Path(tempfile.gettempdir())
        sweep(prefix, above)
        self.path, self._lock = _made(prefix, above)

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def _made(prefix: str, above: Path) -> tuple[Path, int]:
    """A new folder and its lock (-1 where the file system has none, so that nobody sweeps it). Another process may
    sweep in the moment before it is locked: then one more is made."""
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
        try:
            lock = _locked(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:
            return path, -1
        if path.exists():
            return path, lock
        os.close(lock)
    raise OSError(f"no folder could be kept in {above}: other processes remove it at once")


def _locked(path: Path) -> int:
    """The descriptor that holds the lock. BlockingIOError where another process has it, FileNotFoundError where the
    folder is gone, another OSError where the file system has no locks."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def sweep(prefix: str, above: Path) -> None:
    """Remove the folders of this kind that processes of this user have left behind when they were killed."""
    for path in above.glob(f"{prefix}*"):
        with suppress(OSError):  # another process has it, or has just removed it
            if path.lstat().st_uid == os.getuid():
                lock = _locked(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
