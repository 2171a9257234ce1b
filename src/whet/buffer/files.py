"""A store's log in a folder that several machines may see. A turn holds an flock on the folder and on the file
`lock`; the kernel drops them with their process.

QUEUE/lock                who may write; the holder's pid and host inside
QUEUE/current             number N of the last snapshot, replaced in one rename
QUEUE/snapshot-N.json     the state after command N
QUEUE/commands-N.jsonl    the commands since, a line each with its CRC-32: a line is what makes a turn count
QUEUE/groups/UID.arrow    the groups, written before the line that speaks of them and deleted after it

A process killed while it writes leaves half a line, which the next one cuts off, or a group that nothing speaks of,
which is written anew with the next put. So what is read is always whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whet.buffer.logs import LogTail, Transaction
from whet.track.files import file_error, lock, lock_opened, not_linked, sync_path, write_bytes
from whet.types import Json, WhetError

BUSY_S = 60.0
"""Seconds to wait for another process's turn; a turn takes milliseconds."""


class FilesLog:
    """One queue in a folder. On NFS it needs a server with locks (version 4, or 3 with lockd)."""

    def __init__(self, folder: Path, *, queue: str) -> None:
        self.where = f"the store files:///{folder}"
        self._folder = folder / re.sub(r"[^\w-]", lambda m: f"%{ord(m[0]):x}", queue)
        self._read: tuple[int, int, int] | None = None
        """(snapshot, bytes of its commands, number of the last): what this process has read."""

    @contextmanager
    def turn(self) -> Iterator[Transaction]:
        try:
            (self._folder / "groups").mkdir(parents=True, exist_ok=True)
            with lock_opened(self._folder / "lock") as handles:
                self._wait_for(handles)
                turn = _FilesTurn(self._folder, self.where, self._read)
                try:
                    turn.read_on()
                    yield turn
                finally:
                    turn.close()
                self._read = turn.read
        except BaseException as e:
            self._read = None
            if isinstance(e, OSError):
                advice = file_error(e, self._folder, other="buffer.url another path")
                raise WhetError(f"{self.where}: {advice}") from e
            raise

    def _wait_for(self, handles: Sequence[int]) -> None:
        end = time.monotonic() + BUSY_S
        while True:
            try:
                lock(handles)
                break
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() > end:
                holder = os.pread(handles[1], 200, 0).decode(errors="replace").strip()
                raise WhetError(
                    f"{self.where}: process {holder or 'unknown'} has held the lock for {BUSY_S:.0f} s; find and end "
                    "it (a stopped one holds its lock)"
                )
            time.sleep(0.002)
        holder = f"{os.getpid()} on {socket.gethostname()}".ljust(80) + "\n"
        os.pwrite(handles[1], holder.encode(), 0)

    def close(self) -> None:
        self._read = None


class _FilesTurn:
    def __init__(self, folder: Path, where: str, read: tuple[int, int, int] | None) -> None:
        self._folder, self._where = folder, where
        self._at = self._current()
        same = read is not None and read[0] == self._at
        self._size, self.newest = (read[1], read[2]) if read is not None and same else (0, self._at)
        self._file = not_linked(self._commands(self._at), os.O_RDWR | os.O_CREAT)
        self._fresh: list[Json] = []
        self._same = same

    def close(self) -> None:
        os.close(self._file)

    @property
    def read(self) -> tuple[int, int, int]:
        return self._at, self._size, self.newest

    def _commands(self, at: int) -> Path:
        return self._folder / f"commands-{at}.jsonl"

    def _current(self) -> int:
        path = self._folder / "current"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return 0
        if not text.strip().isdigit():
            raise self._damaged("its file 'current' does not contain a number")
        return int(text)

    def _damaged(self, what: str) -> WhetError:
        return WhetError(
            f"{self._where} is damaged: {what}; restart with an empty store from the last checkpoint"
        )

    def read_on(self) -> None:
        """Read the commands that this process has not read. Half a line at the end was never finished: it goes."""
        data = _read_from(self._file, self._size)
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            crc, _, text = data[at:end].partition(b" ")
            if crc != b"%08x" % zlib.crc32(text):
                raise self._damaged(
                    f"line {self.newest - self._at + 1} of {self._commands(self._at).name} has changed"
                )
            self._fresh.append(json.loads(text))
            at = end + 1
            self.newest += 1
        if at < len(data):
            os.ftruncate(self._file, self._size + at)
        self._size += at

    def news(self, seen: int) -> LogTail:
        if self._same:
            return LogTail(None, self._fresh)
        return LogTail(self._snapshot() if self._at else None, self._fresh)

    def _snapshot(self) -> Json:
        path = self._folder / f"snapshot-{self._at}.json"
        try:
            crc, _, text = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            raise self._damaged(f"{path.name} is missing") from None
        if crc != b"%08x" % zlib.crc32(text):
            raise self._damaged(f"{path.name} has changed")
        return json.loads(text)

    def append(self, command: Json) -> None:
        text = json.dumps(command).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            _write_all(self._file, line)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # the caller is told that it failed: it must not count later
            raise
        self._size += len(line)
        self.newest += 1

    def snapshot(self, state: Json) -> None:
        new = self.newest + 1
        text = json.dumps(state).encode()
        write_bytes(self._folder / f"snapshot-{new}.json", b"%08x\n%s" % (zlib.crc32(text), text))
        write_bytes(self._commands(new), b"")
        write_bytes(self._folder / "current", b"%d\n" % new)
        opened = os.open(self._commands(new), os.O_RDWR | os.O_CLOEXEC)
        os.close(self._file)  # only now: `close` must not close a number that is another file's by then
        self._file = opened
        self._at = self.newest = new
        self._size = 0
        self._sweep({f"{uid}.arrow" for uid, *_ in state["open"]})

    def _sweep(self, groups: set[str]) -> None:
        """Delete what is no longer spoken of, and what killed processes left."""
        ours = {"lock", "current", "groups", f"snapshot-{self._at}.json", f"commands-{self._at}.jsonl"}
        for folder, known in ((self._folder, ours), (self._folder / "groups", groups)):
            for path in folder.iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)

    def _group(self, uid: int) -> Path:
        return self._folder / "groups" / f"{uid}.arrow"

    def keep(self, uid: int, data: bytes) -> None:
        file = not_linked(self._group(uid), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        sync_path(self._folder / "groups")

    def fetch(self, uids: list[int]) -> list[bytes | None]:
        return [self._group(uid).read_bytes() if self._group(uid).exists() else None for uid in uids]

    def drop(self, uids: list[int]) -> None:
        for uid in uids:
            self._group(uid).unlink(missing_ok=True)


def _read_from(file: int, start: int) -> bytes:
    parts = []
    while part := os.pread(file, 1 << 20, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
