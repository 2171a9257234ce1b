"""Runs a shell in a sandbox and reports its output: `python -m whet.guard.enclosed`.

Standard input is a `SandboxedProgram` as JSON, standard output the `Outcome`. The shell and its child processes can
read any file, start only the named programs, open no connection and signal no process. Files that they write are kept
in memory: their texts are part of the outcome. Processes that are left at the end are killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from whet.guard import confine, sandbox

_MOST_WRITTEN = 2**20
_MOST_FILES = 64
_MOST_ERROR = 2**16
_MOST_FORKS = 500
"""Processes in all: one after the other is begun, so few of them are there at a time."""
_MOST_PRINTED = 2000
_POLL_S = 0.02
_LEFT_S = 3.0
"""For what is still under way when it has ended."""
_RECEIVE, _ANSWER, _GIVE_FILE = 0xC0502100, 0xC0182101, 0x40182103
"""ioctl(2) of seccomp_unotify(2)."""
_GO_ON, _AND_ANSWER = 1, 2
_FORKS = set(sandbox.numbers(sandbox.FORKING).values()) if not sandbox.lacking() else set()
_KEPT = os.O_ACCMODE | os.O_APPEND | os.O_TRUNC


@dataclass(frozen=True, kw_only=True)
class SandboxedProgram:
    """A program to run, and its limits."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    """Where it may really write: small files, for who asks."""
    programs: list[str]
    """What may be started, itself and the dynamic loader among them."""
    confined: bool = True
    seconds: int = 15
    cpu_seconds: int = 10
    memory_mb: int = 512
    """Of each process; where it is confined, of all together."""


@dataclass(kw_only=True)
class Outcome:
    """The result of it."""

    refused: str = ""
    """Why nothing was run."""
    status: int = 0
    ended: str = ""
    """Why it was killed: 'time', 'processes' or 'memory'."""
    error: str = ""
    """The end of its standard error."""
    printed: str = ""
    """The end of its standard output."""
    written: dict[str, str] = field(default_factory=dict)
    """Path -> text."""


def main() -> None:
    request = SandboxedProgram(**json.load(sys.stdin))
    if request.confined and (why := sandbox.lacking()):
        outcome = Outcome(refused=why)
    else:
        outcome = run(request)
    json.dump(asdict(outcome), sys.stdout)


def run(request: SandboxedProgram) -> Outcome:
    """Run it to its end, or to the first limit that it reaches."""
    confine.die_with(os.getppid())
    confine.adopt_orphans()
    ours, theirs = socket.socketpair()
    # no pipe: the shell tells by that whether another program reads
    printed = tempfile.TemporaryFile()  # noqa: SIM115
    read, write = os.pipe()
    if not (child := os.fork()):
        _become(request, theirs, printed.fileno(), write)
    theirs.close()
    os.close(write)
    outcome, asked, exits = Outcome(), _Answers(request.folder), dict[int, int]()
    error, left = b"", False
    listener = -1
    try:
        listener = _listener(ours) if request.confined else -1
        os.set_blocking(read, False)
        end = time.monotonic() + request.seconds
        while not outcome.ended and (child not in exits or confine.children(os.getpid())):
            ready = select.select([read] + [listener] * (listener >= 0), [], [], _POLL_S)[0]
            if listener in ready:
                asked.answer(listener)
            error = (error + _available(read))[-_MOST_ERROR:] if read in ready else error
            confine.reap(exits)
            if child in exits:
                end = min(end, time.monotonic() + _LEFT_S) if not left else end
                left = True
            outcome.ended = _limit_met(request, asked.forks, end)
    finally:
        if listener >= 0:
            os.close(listener)  # from here on nothing can be begun
        confine.sweep(set(), exits)
    outcome.status = exits.get(child, -1)
    if outcome.status in (-signal.SIGKILL, -signal.SIGXCPU):
        outcome.ended = outcome.ended or "time"
    outcome.error = (error + _available(read))[-_MOST_ERROR:].decode("utf-8", "replace")
    size = os.fstat(printed.fileno()).st_size
    outcome.printed = os.pread(printed.fileno(), _MOST_PRINTED, max(size - _MOST_PRINTED, 0)).decode(
        "utf-8", "replace"
    )
    outcome.written = asked.texts()
    return outcome


def _limit_met(request: SandboxedProgram, forks: int, end: float) -> str:
    """Why it has to end now, or ''."""
    if forks > _MOST_FORKS:
        return "processes"
    held = confine.resident_bytes(confine.descendants(os.getpid())) if request.confined else 0
    if held > request.memory_mb * 2**20:
        return "memory"
    return "time" if time.monotonic() > end else ""


def _available(fd: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, _MOST_ERROR)
    return b""


def _listener(ours: socket.socket) -> int:
    """The descriptor on which files are asked for, once the child has entered its sandbox."""
    _, found, _, _ = socket.recv_fds(ours, 1, 1)
    return found[0] if found else -1


def _become(request: SandboxedProgram, ours: socket.socket, output: int, error: int) -> None:
    """In the child: give up what is not needed, then run the program. Does not return."""
    try:
        confine.die_with(os.getppid())
        null = os.open(os.devnull, os.O_RDWR)
        for at, source in enumerate((null, output, error)):
            os.dup2(source, at)
        os.setsid()
        for kind, most in (
            (resource.RLIMIT_CPU, request.cpu_seconds),
            (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, request.memory_mb * 2**20),
        ):
            confine.bound(kind, most)
        if request.confined:
            programs = [Path(program) for program in request.programs]
            sandbox.enter_programs(
                programs, Path(request.folder), lambda fd: socket.send_fds(ours, [b"."], [fd])
            )
        os.closerange(3, 256)
        os.execve(request.words[0], request.words, request.environment)
    except BaseException as e:  # noqa: BLE001  (nothing is above)
        os.write(2, f"{type(e).__name__}: {e}\n".encode())
    finally:
        os._exit(126)


class _Answers:
    """What the sandbox asks: each path that is written has a file in memory, and processes are counted."""

    def __init__(self, folder: str) -> None:
        self.folder = folder + "/"
        self.fds: dict[str, int] = {}
        self.forks = 0

    def answer(self, listener: int) -> None:
        """Take one question and answer it. Who asked may be gone by now."""
        question = bytearray(80)
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _RECEIVE, question)
            number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", question)
            opens_at = call == sandbox.numbers(sandbox.OPENING)["openat"]
            if call in _FORKS:
                self.forks += 1
                refused = -errno.EAGAIN if self.forks > _MOST_FORKS else 0
                fcntl.ioctl(
                    listener, _ANSWER, struct.pack("=QqiI", number, 0, refused, _GO_ON * (not refused))
                )
                return
            base, path, flags = arguments[:3] if opens_at else (0, *arguments[:2])
            named = _path(pid, _signed(base) if opens_at else -100, path)
            if named.startswith(("/dev/", "/proc/", self.folder)):
                fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", number, 0, 0, _GO_ON))
                return
            given = self.open(named, flags)
            try:
                answer = struct.pack("=QIIII", number, _AND_ANSWER, given, 0, flags & os.O_CLOEXEC)
                fcntl.ioctl(listener, _GIVE_FILE, answer)
            finally:
                os.close(given)

    def open(self, path: str, flags: int) -> int:
        if path not in self.fds:
            if len(self.fds) >= _MOST_FILES:
                return os.open(os.devnull, os.O_RDWR)
            self.fds[path] = os.memfd_create("written")
        return os.open(f"/proc/self/fd/{self.fds[path]}", flags & _KEPT)

    def texts(self) -> dict[str, str]:
        return {
            path: os.pread(fd, _MOST_WRITTEN, 0).decode("utf-8", "replace") for path, fd in self.fds.items()
        }


def _signed(number: int) -> int:
    return struct.unpack("=i", struct.pack("=I", number & 0xFFFFFFFF))[0]


def _path(pid: int, base: int, address: int) -> str:
    """The path that a call names, made absolute."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        text = memory.read(4096 - address % 4096)
        if b"\0" not in text:
            text += memory.read(4096)
    named = os.fsdecode(text.partition(b"\0")[0])
    around = f"/proc/{pid}/cwd" if base == -100 else f"/proc/{pid}/fd/{base}"
    return os.path.normpath(os.path.join(os.readlink(around), named))


if __name__ == "__main__":
    main()
