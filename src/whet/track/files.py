"""Atomic files: written beside their final path, synced, renamed.

A kill at any moment leaves at most a hidden `.NAME.new-*` or `.NAME.old-*` beside a file; `tidy` mends both. Who writes
a folder NAME anew removes those of its name before it, and what `NAME` was.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from safetensors import SafetensorError

from whet.guard.temporary import HeldFolder, named
from whet.types import CheckpointError, Json, WhetError

_CAUSES = {
    errno.ENOSPC: "the disk is full; free space there, or give {other}",
    errno.EDQUOT: "your disk quota is used up; free space there, or give {other}",
    errno.EFBIG: "the file is larger than the system or a limit (ulimit -f) allows",
    errno.EROFS: "the file system is read-only; give {other}, on a writable file system",
    errno.EACCES: "permission denied; correct owner and mode there, or give {other}",
    errno.EPERM: "not permitted; correct owner and mode there, or give {other}",
    errno.EEXIST: "a file stands where a folder is needed; move it away, or give {other}",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away, or give {other}",
    errno.ENOENT: "there is no such folder: none can be made there, or another process removed it during the write; "
    "give {other}",
    errno.ELOOP: "a symbolic link stands where whet writes a file of its own; move it away, or give {other}",
    errno.ENXIO: "a FIFO, a socket or a device stands where a file is needed; move it away, or give {other}",
    errno.EIO: "the device reports an input/output error; check the disk",
}


RUN_DIR = "another run_dir"
"""What to give in place of where a run writes."""


def file_error(error: OSError, path: Path, *, other: str = RUN_DIR) -> WhetError:
    """The message for an OSError: the path, the cause, what to do. other: what to give in place of where `path` is."""
    cause = _CAUSES.get(error.errno or 0)
    cause = (error.strerror or str(error)) if cause is None else cause.format(other=other)
    return WhetError(f"cannot write {path}: {cause}")


def write_bytes(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Replace `path` by `data`, whole or in pieces, in one rename. `durable` waits for the disk: no power cut can undo
    it.

    Raises WhetError; `path` is then as it was and nothing half-written is left.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.new-", dir=path.parent)
    except OSError as e:
        raise file_error(e, path) from e
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(name, path)
        if durable:
            sync_path(path.parent)
    except BaseException as e:
        Path(name).unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise file_error(e, path) from e
        raise


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode(), durable=durable)


def write_json(path: Path, value: Json, *, durable: bool = True) -> None:
    """`write_bytes` of indented JSON in the order given. NaN and infinity are refused (ValueError)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", durable=durable)


@contextmanager
def atomic_folder(path: Path, *, durable: bool = True, other: str = RUN_DIR) -> Iterator[Path]:
    """A new, empty folder to fill; it takes the place of `path` when the block ends without an error.

    `durable`: every file is synced before the rename. On an error the new folder is removed and `path` is untouched.
    Raises CheckpointError for an OSError or SafetensorError, in the block too; others pass through. other: as for
    `file_error`.
    """
    held: HeldFolder | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = HeldFolder(f".{path.name}.new-", path.parent)
        new = held.path
        yield new
        for folder, _, files in os.walk(new):
            for name in files:
                Path(folder, name).chmod(0o644)  # as `write_bytes`; safetensors lets the owner alone read
                if durable:
                    sync_path(Path(folder, name))
            if durable:
                sync_path(Path(folder))
        new.chmod(0o755)  # until here what a kill leaves is told by its mode, too
        if durable:
            sync_path(new)
        _take_place(new, path)
    except BaseException as e:
        if isinstance(e, SafetensorError):
            raise CheckpointError(str(file_error(_os_error(e), path, other=other))) from e
        if isinstance(e, OSError):
            raise CheckpointError(str(file_error(e, path, other=other))) from e
        raise
    finally:
        if held is not None:
            held.close()


def _os_error(error: SafetensorError) -> OSError:
    """safetensors gives the operating system's error as text: '... (os error 28)'."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]) if number else 0, str(error))


def _take_place(new: Path, path: Path) -> None:
    """Rename a folder over another. One rename cannot replace a folder, so the old one steps aside."""
    old = path.with_name(f".{path.name}.old-{new.name.rpartition('-')[2]}") if path.exists() else None
    if old is not None:
        os.rename(path, old)
    try:
        os.rename(new, path)
    except BaseException:
        if old is not None:
            os.rename(old, path)
        raise
    sync_path(path.parent)
    for left in named(re.escape(f".{path.name}.old-"), path.parent):
        shutil.rmtree(left, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Mend what a kill left behind: an old folder whose successor never came returns, the rest is removed.

    Only for a folder that nobody is writing in (hold the run's lock).
    """
    for left in sorted(folder.glob(".*.old-*")):
        home = folder / left.name[1:].rpartition(".old-")[0]
        if home.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            os.rename(left, home)
    for left in folder.glob(".*.new-*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()


def drop_folder(folder: Path) -> None:
    """Remove a folder in one rename, so that no reader finds half of it; a kill leaves what `tidy` removes."""
    aside = folder.with_name(f".{folder.name}.new-drop")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def drop_unfinished(paths: Iterable[Path]) -> None:
    """Remove what a kill left of `write_bytes` of these files. Only for files that nobody is writing."""
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    for folder, own in names.items():
        for left in folder.glob(".*.new-*"):
            if left.name[1:].rpartition(".new-")[0] in own and left.is_file():
                left.unlink()


def not_linked(path: str | Path, flags: int) -> int:
    """An `opener` of files that whet goes on writing: an OSError where a link or anything but a file stands there. The
    folder may come from elsewhere, and a link in it lead to any file of this user."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)  # a FIFO would block
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), str(path))


def own_folder(path: Path) -> Path:
    """`path`, a folder that nobody else may enter, made where it is missing: for places where everyone may write.
    Raises PermissionError where it is another user's, a link, or others could write to it; OSError where it cannot be
    made."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = path.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o022:
        raise PermissionError(errno.EPERM, f"{path} is not a private folder of this user; remove it")
    path.chmod(0o700)
    return path


def is_private(path: Path) -> bool:
    """Whether `path` is there, a file or folder that nobody but this user and root can write to, in a place where
    nobody else can put another one: what is loaded as code has to be."""
    try:
        seen, above = path.lstat(), [folder.stat() for folder in path.absolute().parents]
    except OSError:
        return False
    plain = stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)
    own = plain and seen.st_uid in (0, os.getuid()) and not seen.st_mode & 0o022
    return own and not any(each.st_mode & 0o002 and not each.st_mode & stat.S_ISVTX for each in above)


@contextmanager
def reading(
    where: Path | str, *, error: type[WhetError] = CheckpointError, advice: str = "use an older checkpoint"
) -> Iterator[None]:
    """Turn errors from reading values of a file into an `error` that names the file, and says what to do.

    Use it only around code that takes values out of the file: a bug of whet must not be reported as damage.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as e:
        raise error(
            f"{where}: cannot be read ({type(e).__name__}: {e!s:.500}); it is damaged, or another version of whet "
            f"wrote it; {advice}"
        ) from e


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MOST_HOLDER_BYTES = 500
"""Of the pid and host in a lock file."""
_LOOKS, _LOOK_S = 20, 0.01
"""How often, and after which pause, a run's lock is tried before it is another run's."""


class RunLock:
    """One writer in a run directory: an flock on the directory itself and on `RUN/lock`, with the holder's pid and host
    inside.

    The kernel drops the locks with their process, so a dead run never blocks. A forked child closes its copies,
    or it would hold the locks of a dead parent. Who deletes the file lets nobody in: the directory is locked, too, save
    on file systems that lock only files (NFS). Raises WhetError naming the holder if the directory is in use.
    """

    _held: ClassVar[set[int]] = set()

    def __init__(self, run_dir: Path, *, other: str = RUN_DIR) -> None:
        path = run_dir / "lock"
        self._handles: list[int] = []
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._handles = lock_handles(path)
            _lock_soon(self._handles)
            os.ftruncate(self._handles[1], 0)
            os.pwrite(self._handles[1], f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as e:
            for handle in self._handles:
                os.close(handle)
            if e.errno == errno.EAGAIN or (e.errno == errno.EACCES and self._handles):
                raise WhetError(_in_use(run_dir)) from e
            raise file_error(e, path, other=other) from e
        RunLock._held.update(self._handles)

    def release(self) -> None:
        """Let others in. Safe to call twice."""
        handles, self._handles = self._handles, []  # the numbers may be those of another lock's files by then
        if RunLock._held.issuperset(handles):
            RunLock._held.difference_update(handles)
            for handle in handles[1:]:
                os.ftruncate(handle, 0)
            for handle in handles:
                os.close(handle)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @staticmethod
    def _after_fork() -> None:
        for handle in RunLock._held:
            os.close(handle)
        RunLock._held.clear()


os.register_at_fork(after_in_child=RunLock._after_fork)


def lock_handles(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> list[int]:
    """A lock file and the folder around it, opened for `lock`. Who closes them lets others in.

    The folder is locked, too, for a file can be deleted while its lock is held, and another made in its place.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return [folder, not_linked(path, flags)]
    except OSError:
        os.close(folder)
        raise


def lock(handles: Sequence[int], how: int = fcntl.LOCK_EX) -> None:
    """Lock what `lock_handles` opened. BlockingIOError if another process has."""
    folder, file = handles
    _lock_folder(folder, how)
    fcntl.flock(file, how | fcntl.LOCK_NB)


def _lock_soon(handles: Sequence[int]) -> None:
    """The same; who only looks whether a run lives (`is_running`) has the lock for a moment."""
    for _ in range(_LOOKS):
        with suppress(BlockingIOError):
            return lock(handles)
        time.sleep(_LOOK_S)
    return lock(handles)


@contextmanager
def lock_opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[list[int]]:
    """The handles of a lock as long as it lasts; leaving lets others in."""
    handles = lock_handles(path, flags)
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def _lock_folder(handle: int, how: int) -> None:
    """Lock a folder that is open, where its file system can do that. BlockingIOError if another process has."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as e:
        if e.errno not in (
            errno.EBADF,
            errno.EINVAL,
            errno.EISDIR,
            errno.ENOLCK,
            errno.ENOTSUP,
            errno.ENOSYS,
        ):
            raise


def holder(run_dir: Path) -> tuple[int, str] | None:
    """(pid, host) of the process that holds the run's lock or died with it; None after an orderly end."""
    try:
        with open(run_dir / "lock", "rb", opener=not_linked) as file:
            words = file.read(MOST_HOLDER_BYTES).decode(errors="replace").split()
    except OSError:
        return None
    return (int(words[0]), words[1]) if len(words) == 2 and words[0].isdigit() else None


def is_running(run_dir: Path) -> bool | None:
    """Whether the run's process lives: whether its lock is held, for the number in the file may be that of a process
    that has ended and that nobody waited for, or of another one by now. None: unknown, because it runs on another host,
    or its lock cannot be looked at."""
    who = holder(run_dir)
    if who is None:
        return False
    if who[1] != socket.gethostname():
        return None
    try:
        with lock_opened(run_dir / "lock", os.O_RDONLY) as handles:
            lock(handles, fcntl.LOCK_SH)  # two who look do not find each other
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def runs_here(run_dir: Path) -> int | None:
    """The process of this machine that holds the run's lock."""
    who = holder(run_dir)
    return who[0] if who is not None and is_running(run_dir) else None


def _in_use(run_dir: Path) -> str:
    who = holder(run_dir)
    by = f"process {who[0]} on {who[1]}" if who else "another process"
    return f"run directory {run_dir} is in use by {by}; wait for it, stop it, or give another run_dir"
