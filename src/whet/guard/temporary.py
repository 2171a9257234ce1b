"""Temporary folders that go with their process.

A process that is killed leaves its folder behind. A folder is locked for as long as the process that made it lives, or
one forked from it, so others of the same user find those of the dead and remove them: the next process that makes one
of its kind in its place, and each command of whet as it ends (`sweep_all`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

Kind = Literal[
    "build", "engine", "export", "hub", "index", "processes", "ranks", "rehearsal", "replay", "rewards", "studio",
    "tokenizer", "weights",
]  # fmt: skip
MEMORY = Path("/dev/shm")
"""Files here are pages of memory."""
_ATTEMPTS = 3
_ENDS = "[a-z0-9_]{8}"
"""What mkdtemp puts behind a prefix."""


class HeldFolder:
    """A new folder below `above` whose name has this prefix. OSError where none can be made. `with` gives its path, and
    removes it at the end."""

    def __init__(self, prefix: str, above: Path) -> None:
        sweep(re.escape(prefix), above)
        self.path, self._lock = _made(prefix, above)

    def close(self) -> None:
        """Remove the folder, unless it has another name by now. Safe to call twice."""
        if self.path.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


class OwnFolder(HeldFolder):
    """`whet-KIND-...` below `above`, or where temporary files are."""

    def __init__(self, kind: Kind, above: Path | None = None) -> None:
        super().__init__(f"whet-{kind}-", above or Path(tempfile.gettempdir()))


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


def sweep(prefixes: str, above: Path) -> None:
    """Remove the folders below `above` that processes of this user have left behind when they were killed. prefixes: a
    regular expression. What a user has named alike is open to others, or has another ending."""
    found: list[Path] = []
    with suppress(OSError):  # it cannot be listed
        found = named(prefixes, above)
    for path in found:
        with suppress(OSError):  # another process has it, or has just removed it
            seen = path.lstat()
            if seen.st_uid == os.getuid() and stat.S_IMODE(seen.st_mode) == stat.S_IRWXU:
                lock = _locked(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def named(prefixes: str, above: Path) -> list[Path]:
    """What stands below `above` with such a prefix, and behind it what a temporary name ends with."""
    wanted = re.compile(f"(?:{prefixes}){_ENDS}")
    return [path for path in above.iterdir() if wanted.fullmatch(path.name)] if above.is_dir() else []


def sweep_all() -> None:
    """The same for all kinds, where temporary files are and in memory."""
    for above in (Path(tempfile.gettempdir()), MEMORY):
        sweep(f"whet-(?:{'|'.join(get_args(Kind))})-", above)
