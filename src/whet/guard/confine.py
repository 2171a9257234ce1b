"""The operating system's part of the jail: limits, signals, and finding every process below this one.

Linux supports all of it. On other systems the calls here do nothing, and `missing` describes what is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Literal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SWEEP_S = 2.0
_MEANT_FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """What this system cannot do for the jail, or ''."""
    if not _LINUX:
        return (
            "no prctl, no /proc: the memory of rewards is not limited, and their leftover processes may stay"
        )
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "/proc has no lists of child processes here: leftover processes of rewards may stay"
    return ""


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process, so none gets out of sight."""
    if _LINUX:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """The kernel kills this process when `parent`, its parent, ends."""
    if _LINUX:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def process_end(pid: int) -> Iterator[list[int]]:
    """File descriptors that become readable when process `pid` ends: one, or none on systems without such.

    A closed socket tells less: a copy of it may live on in a child of that process.
    """
    if not hasattr(os, "pidfd_open"):
        yield []
        return
    fd = os.pidfd_open(pid)
    try:
        yield [fd]
    finally:
        os.close(fd)


def bound(kind: int, most: int) -> None:
    """Set a limit of this process for good (resource.RLIMIT_...), to less where it may not have that much."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def limit(memory_mb: int) -> None:
    """At most `memory_mb` of address space more than now, no core dumps, first to go when memory is short."""
    bound(resource.RLIMIT_CORE, 0)
    if not _LINUX:
        return
    with open("/proc/self/statm", "rb") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    bound(resource.RLIMIT_AS, now + memory_mb * 2**20)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def detach() -> None:
    """Own session; deaf to the signals that are meant for the run; nothing of the parent's event loop is touched."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    deafen()


def deafen() -> None:
    """The signals that are meant for the run do nothing here. Who ends a job (Slurm, systemd) sends them to all of its
    processes; the run then saves, and needs the others for it."""
    for number in _MEANT_FOR_THE_RUN:
        signal.signal(number, deaf)  # not SIG_IGN, which programs started from here would inherit


def deaf(number: int, frame: object) -> None:
    """A handler that does nothing."""


def let_forks_hear() -> None:
    """Processes that are forked from here from now on are not deaf: `terminate` of multiprocessing sends SIGTERM, and
    `join` waits until it has ended them. A signal that comes before they have their own handlers waits, too."""
    mask = threading.local()

    def hold() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _MEANT_FOR_THE_RUN)

    def resume() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def hear() -> None:
        for number in _MEANT_FOR_THE_RUN:
            if signal.getsignal(number) is deaf:
                signal.signal(number, signal.SIG_DFL)
        resume()

    os.register_at_fork(before=hold, after_in_parent=resume, after_in_child=hear)


def shut(keep: set[int], files: Literal["keep", "read", "close"] = "keep") -> None:
    """Replace inherited pipes, sockets and the like by /dev/null, but for stdout, stderr and `keep`.

    files: what becomes of files and devices: all stay, or those that cannot be written, or none. A terminal is one that
    can. Replaced, not closed: inherited Python objects still own the numbers, and would close what took them next.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for fd in [int(name) for name in os.listdir("/dev/fd")]:
        if fd <= 2 or fd in keep:
            continue
        if files == "close" or _is_channel(fd) or (files == "read" and _is_written(fd)):
            with contextlib.suppress(OSError):  # the number of the directory just listed
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _is_written(fd: int) -> bool:
    try:
        return os.isatty(fd) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def _is_channel(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # the number of the directory just listed
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode))


def children(pid: int) -> set[int]:
    """Process ids of the direct children of `pid`, zombies among them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as f:
                found.update(map(int, f.read().split()))
    return found


def descendants(pid: int, spare: set[int] | frozenset[int] = frozenset()) -> set[int]:
    """All processes below `pid`, without those in `spare` and what is below them."""
    found: set[int] = set()
    new = children(pid) - spare
    while new:
        found |= new
        new = {child for parent in new for child in children(parent)} - found - spare
    return found


def resident_bytes(pids: set[int]) -> int:
    """The memory that processes hold now; what they share counts for each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as f:
            pages += int(f.read().split()[1])
    return pages * resource.getpagesize()


def sweep(spare: set[int], exits: dict[int, int]) -> None:
    """Kill all that runs below this process but the trees of `spare`. Exit statuses go to `exits`.

    Everything is stopped before anything is killed, or a fork bomb would refill the room each kill makes.
    """
    end = time.monotonic() + _SWEEP_S
    while time.monotonic() < end:
        stopped: set[int] = set()
        while new := descendants(os.getpid(), spare) - stopped:
            for pid in new:
                send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            send(pid, signal.SIGKILL)
        reap(exits)
        if not stopped:
            return
        time.sleep(0.0005)


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def reap(exits: dict[int, int]) -> None:
    """Collect the exit status of every child that has ended: the code, or minus the signal."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            exits[pid] = os.waitstatus_to_exitcode(status)
