"""Python stacks of every process of a run, for the log when a process hangs.

Each process of whet writes its stacks into its own file when it gets SIGUSR1 (faulthandler: this needs no Python code,
so it works inside C, too). The files are in one folder, `RUN/stacks/HOST`, named WHO.PID.BEGAN: the process that finds
a stall requests all of them. Forked processes inherit the folder; others are given it. Processes on other machines are
reached through the process that started them (`reach`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from whet.guard.printed import FIRST_LINE
from whet.guard.processes import process, state

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 2.0
"""How long a process may take to write its stacks."""
STEP_S = 0.02
SETTLED_S = 0.1
"""So long without a byte more: they have written. faulthandler writes line by line, and has no end mark."""
FAR_S = 5.0
"""How long those on other machines may take, all together."""
MOST_CHARS = 20_000
"""Of one process."""

_NEW = ".new"
"""The name of a process that does not listen yet: a signal would end it."""

Ask = Callable[[], Callable[[float], str]]
"""Asks a process elsewhere for its stacks, at once; the function that it returns waits so many seconds for them."""

_far: dict[str, Ask] = {}
"""Processes on other machines, by name."""

_folder: Path | None = None
"""Where the processes of this run write; None: nobody asked for it."""
_own: IO[bytes] | None = None
"""This process's file. faulthandler keeps its number, so it stays open."""
_announced: tuple[int, Path] | None = None
"""(pid, file) of a process that writes its stacks somewhere already; one that it forks does not."""


@contextmanager
def kept(run_dir: Path, who: str) -> Iterator[None]:
    """While the block runs, processes of this run say where they are when they are asked; this one, too."""
    global _folder, _own
    before, _folder = _folder, run_dir / "stacks" / socket.gethostname()
    try:
        with suppress(OSError):  # a full disk: the run says so where it matters
            _folder.mkdir(parents=True, exist_ok=True)
        _tidy()
        listen(who)
        yield
    finally:
        forget(os.getpid())
        if _own is not None and hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR1)
            _own.close()
            _own = None
        _tidy()
        for folder in (_folder, _folder.parent):
            with suppress(OSError):  # others are there still
                folder.rmdir()
        _folder = before


def folder() -> str | None:
    """Where the processes of this run write; for those that are no forks of this one."""
    return None if _folder is None else str(_folder)


def listen(who: str, where: str | None = None) -> None:
    """From now on this process writes its stacks when asked. who: a short name, for people."""
    global _folder, _own
    if where is not None:
        _folder = Path(where)
    if _folder is None or not hasattr(faulthandler, "register"):
        return
    if _announced is not None and _announced[0] == os.getpid():  # it writes into one file only
        announce(who, _announced[1], str(_folder))
        return
    pid, began = process(os.getpid())
    new = _folder / f"{_NEW}.{pid}.{began}"
    try:
        new.unlink(missing_ok=True)
        _own = os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
        faulthandler.register(signal.SIGUSR1, _own, all_threads=True)
        os.replace(new, _folder / f"{who}.{pid}.{began}")  # who finds it may send the signal
    except OSError as error:
        log.debug("%s writes no stacks: %s", who, error)


def announce(who: str, file: Path, where: str | None) -> None:
    """This process writes its stacks into `file` when it gets SIGUSR1, and may be asked by those of the run."""
    global _announced
    _announced = os.getpid(), file
    if where is not None:
        with suppress(OSError):
            (Path(where) / ".".join(map(str, (who, *process(os.getpid()))))).symlink_to(file.absolute())


def reach(who: str, ask: Ask) -> None:
    """From now on a process on another machine is asked, too."""
    _far[who] = ask


def lose(who: str) -> None:
    """The process is no longer asked for its stacks."""
    _far.pop(who, None)


def forget(pid: int) -> None:
    """Process `pid` ends."""
    if _folder is not None:
        for path in _folder.glob(f"*.{pid}.*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Other:
    who: str
    process: tuple[int, int]
    file: Path
    size: int
    """Of the file before it is asked."""

    @property
    def lives(self) -> bool:
        return process(self.process[0]) == self.process

    def said(self) -> str:
        """What it has written since it was asked."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.size)
                text = file.read(MOST_CHARS).decode(errors="replace")
        except OSError:
            return ""
        return _plain(text)


def _plain(text: str) -> str:
    """A process that runs foreign code may have written it."""
    return re.sub(r"[^\n\t -~]", "?", text)


def _others() -> list[_Other]:
    found: list[_Other] = []
    try:
        paths = sorted(_folder.iterdir()) if _folder is not None else []
    except OSError:  # nobody could make it
        return found
    for path in paths:
        who, pid, began = ["", "", *path.name.rsplit(".", 2)][-3:]
        if who and pid.isdigit() and began.isdigit() and int(pid) != os.getpid():
            found.append(_Other(who, (int(pid), int(began)), path, _size(path)))
    return found


def _size(path: Path) -> int:
    """0 for a file that is not there: its process may end at any moment, and remove it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tidy() -> None:
    """Remove what dead processes left."""
    for other in _others():
        if not other.lives:
            with suppress(OSError):
                other.file.unlink(missing_ok=True)


def others() -> str:
    """The stacks of all other processes of this run on this machine, and of those that do not answer, why."""
    asked = [other for other in _others() if other.lives and other.who != _NEW]
    for pid in {other.process[0] for other in asked}:  # once, also where it goes by two names
        with suppress(OSError):  # it has just ended, or is another user's
            os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + ANSWER_S
    sizes: list[int] = []
    settled = time.monotonic() + SETTLED_S
    while asked and time.monotonic() < until:  # until all have written, and nobody writes any more
        before, sizes = sizes, [len(o.said()) for o in asked]
        silent = [o for o, size in zip(asked, sizes) if not size and o.lives and state(o.process[0]) != "T"]
        if silent or before != sizes:
            settled = time.monotonic() + SETTLED_S
        elif time.monotonic() >= settled:
            break
        time.sleep(STEP_S)
    return "".join(
        f"process {other.process[0]}, {other.who}:\n{other.said() or silence(other.process[0])}\n"
        for other in asked
    )


STATES = {
    "T": "it is stopped, by SIGSTOP or a debugger; send SIGCONT to resume it",
    "D": "it waits in the kernel for a disk or a device",
    "Z": "it has ended",
    "": "it has ended",
}


def silence(pid: int) -> str:
    """Why a process does not write its stacks."""
    return f"(it does not answer: {STATES.get(state(pid), 'it runs')})"


def own() -> str:
    """The stacks of all threads, and of all tasks of the running event loop if there is one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    out = io.StringIO()
    for ident, frame in sys._current_frames().items():
        out.write(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs in this thread
        tasks = set()
    for task in tasks:
        task.print_stack(file=out)
    return out.getvalue()


def far() -> Iterator[str]:
    """The stacks of processes on other machines. They are asked with the first of these, and have FAR_S to answer."""
    until = time.monotonic() + FAR_S
    asked = {who: _tried(ask) for who, ask in list(_far.items())}
    yield ""
    for who, answer in asked.items():
        said = (
            answer if isinstance(answer, str) else _tried(partial(answer, max(0.0, until - time.monotonic())))
        )
        yield f"{who}:\n{_plain(str(said)[:MOST_CHARS])}\n"


def _tried(ask: Callable[[], T]) -> T | str:
    """A report on what hangs must not fail itself."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  whatever the way there is made of
        return f"(it does not answer: {type(error).__name__}: {error})"


def report(what: str, level: int = logging.WARNING) -> None:
    """Log what does not go on, and below it all stacks, which the display does not show."""
    log.log(level, "%s\n%s", what, everyone(), extra={FIRST_LINE: True})


def everyone() -> str:
    """This process and all others of the run."""
    elsewhere = far()
    next(elsewhere)
    return own() + others() + "".join(elsewhere)
