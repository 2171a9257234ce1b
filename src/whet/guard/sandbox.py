"""A process in a permanent sandbox, whatever code runs in it: Linux's Landlock and seccomp.

After `enter` it can read the files that Python itself needs, and nothing else: not the home folder, not the data. It
cannot write a file, open a connection or start a program or process, and it can signal only itself. It can still
compute, print, and answer. Neither mechanism needs privileges; a process that has privileges loses them here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from whet.guard import confine

_libc = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE = 1, 1 << 2, 1 << 3, 1 << 1
_MAKE_FILE, _TRUNCATE = 1 << 8, 1 << 14
_FILES_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
"""Kinds of access to files that an ABI of Landlock knows; from 5 on there are 16."""
_ALL_TCP, _ALL_SCOPES, _SCOPE_SIGNALS = 3, 3, 2
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_CAPSET_VERSION, _CAPSET_KEPT = 0x20080522, 0b110
"""Kept are those by which files of other users are read; Landlock says which files."""

_PACKAGES = ("site-packages", "dist-packages")
_MOST_FILES = 256
"""Files, sockets and pipes that a confined process may open at once, beside those that it has."""
_NEW = 424
"""Linux numbers system calls alike on all machines from here on. None is needed but these."""
_NEW_ALLOWED = (436, 439)  # close_range, faccessat2

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Those whose system calls are written down here, as seccomp calls them."""

DENIED = """
execve 59 221, execveat 322 281, fork 57 -, vfork 58 -, unshare 272 97, setns 308 268, chroot 161 51,
pivot_root 155 41, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, tkill 200 130,
socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, sendmsg 46 211,
sendmmsg 307 269, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -,
fchownat 260 54, truncate 76 45, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
open_by_handle_at 304 265, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
keyctl 250 219, add_key 248 217, request_key 249 218, mq_open 240 180, mq_unlink 241 181,
shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192,
msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187,
setpriority 141 140, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239
"""
"""System calls with their numbers on these machines. Landlock answers for opening, making and removing files."""

BY_ARGUMENT = (
    "clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, fcntl 72 25, ioctl 16 29, sendto 44 206"
)
CAPSET = "capset 126 91"
SECCOMP = "seccomp 317 277"
OPENING = "open 2 -, openat 257 56"
FORKING = "clone 56 220, fork 57 -, vfork 58 -"
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OF_PROGRAMS = ("execve", "fork", "vfork")
"""What a process needs that starts programs; Landlock says which."""

_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000
_OWNERS = (8, 15), (0x8901, 0x8902)
"""F_SETOWN and F_SETOWN_EX of fcntl, FIOSETOWN and SIOCSPGRP of ioctl: they have signals sent to others."""


def lacking() -> str:
    """Why this system cannot confine a process, or ''."""
    if sys.platform != "linux":
        return "a sandbox needs Linux"
    if platform.machine() not in MACHINES or struct.calcsize("P") != 8:
        return f"the system calls of {platform.machine()} are not known to whet"
    if _abi() < 1:
        return "this kernel or its container has no Landlock (Linux >= 5.13)"
    _libc.prctl(_PR_SET_SECCOMP, _FILTER, None, 0, 0)  # EFAULT: it would have read a filter
    return "" if ctypes.get_errno() == errno.EFAULT else "this kernel or its container has no seccomp filters"


def enter() -> None:
    """Confine this process, for good. OSError where the system refuses."""
    _bound_files()
    _give_up_privileges()
    _restrict_files([(path, _READ_FILE | (_READ_DIR if path.is_dir() else 0)) for path in readable()])
    _load_filter(_steps(os.getpid()))


def read_only() -> None:
    """From now on this thread, and those that it starts, can read files, and neither write any nor open a connection of
    TCP (Linux >= 6.7). OSError where the system refuses."""
    _give_up_privileges()
    _restrict_files([(Path("/"), _READ_FILE | _READ_DIR)])


def enter_programs(programs: Sequence[Path], folder: Path, hand_over: Callable[[int], object]) -> None:
    """Confine this process and all below it, which may read any file and start these programs alone, for good.

    Files are written in `folder` alone. `hand_over` is given a descriptor on which the kernel asks another process
    about each file that is opened for writing and each process that is begun (`seccomp_unotify(2)`). OSError where the
    system refuses.
    """
    _give_up_privileges()
    writes = _WRITE_FILE | _MAKE_FILE | (_TRUNCATE if _abi() >= 3 else 0)
    executed = [(path, _EXECUTE) for path in programs]
    _restrict_files([(Path("/"), _READ_FILE | _READ_DIR), (folder, writes), *executed])
    hand_over(_load_filter(_asking_steps(), asks=True))
    _load_filter(_steps(os.getpid(), programs=True))


def _bound_files() -> None:
    """The kernel keeps what is written into a socket or pipe, beside the memory of the process: so there are few."""
    confine.bound(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + _MOST_FILES)


def _give_up_privileges() -> None:
    if why := lacking():
        raise OSError(errno.ENOSYS, why)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _drop_privileges()


def scope_signals() -> bool:
    """From now on this process can signal only itself and its descendants (Landlock, Linux >= 6.12). False: not
    here."""
    if sys.platform != "linux" or _abi() < 6:
        return False
    try:
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        with _ruleset(0, 0, _SCOPE_SIGNALS):
            pass
    except OSError:
        return False
    return True


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _abi() -> int:
    return int(_libc.syscall(_CREATE_RULESET, None, 0, 1))


def _drop_privileges() -> None:
    status = Path("/proc/self/status").read_text()
    had = int(status.partition("CapPrm:")[2].split()[0], 16) & _CAPSET_KEPT
    header = (ctypes.c_uint32 * 2)(_CAPSET_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(had, had, 0, 0, 0, 0)
    _check(_libc.syscall(numbers(CAPSET)["capset"], header, data), "capset")


# ---------------------------------------------------------------- files


@cache
def readable() -> tuple[Path, ...]:
    """What Python needs: itself, the packages that are installed, also in a folder of their own (`pip install
    --target`), this one, and the system's libraries."""
    packages = [p for p in sys.path if Path(p).name in _PACKAGES or any(Path(p).glob("*.dist-info"))]
    own = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom"]
    found = {Path(p).resolve() for p in (str(Path(__file__).parents[1]), *own, *packages, *system)}
    return tuple(sorted(p for p in found if p.exists() and not found & set(p.parents)))


def _restrict_files(allowed: Iterable[tuple[Path, int]]) -> None:
    abi = _abi()
    handled = (1 << _FILES_BY_ABI.get(abi, 16)) - 1
    with _ruleset(handled, _ALL_TCP if abi >= 4 else 0, _ALL_SCOPES if abi >= 6 else 0) as ruleset:
        for path, access in allowed:
            _allow(ruleset, path, access)
        _allow(ruleset, Path(os.devnull), _READ_FILE | _WRITE_FILE)


@contextmanager
def _ruleset(files: int, tcp: int, scopes: int) -> Iterator[int]:
    """Rules of Landlock for these kinds of access. What is allowed is added inside; this process has them from then
    on."""
    abi = _abi()
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    attributes = (ctypes.c_uint64 * 3)(files, tcp, scopes)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, size, 0), "Landlock")
    try:
        yield ruleset
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", access, at)
    _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock: {path}")
    os.close(at)


# ---------------------------------------------------------------- system calls

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_SET_FILTER, _NEW_LISTENER = 1, 8
_NUMBER, _MACHINE = 0, 4
"""Where a filter finds the number of the call and the machine; the arguments, 64 bits each, come behind."""

Step = tuple[int, int, int, int]
"""Code, steps to skip if it holds, steps to skip if not, operand."""


def _load_filter(steps: Iterable[Step], *, asks: bool = False) -> int:
    """From now on this filter, too, decides on each call. `asks`: the descriptor by which it asks."""
    packed = [struct.pack("=HBBI", *step) for step in steps]
    held = ctypes.create_string_buffer(b"".join(packed), 8 * len(packed))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(packed), ctypes.addressof(held)))
    flags = _NEW_LISTENER if asks else 0
    return _check(_libc.syscall(numbers(SECCOMP)["seccomp"], _SET_FILTER, flags, head), "seccomp")


def numbers(table: str) -> dict[str, int]:
    column = 1 + list(MACHINES).index(platform.machine())
    rows = [entry.split() for entry in table.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _asking_steps() -> Iterator[Step]:
    """The filter that asks where a file is opened for writing, or a process begun."""
    yield (_LOAD, 0, 0, _NUMBER)
    for number in numbers(FORKING).values():
        yield from _answer((_EQUAL, 0, 1, number), _ASK)
    known = numbers(OPENING)
    for name, n in (("open", 1), ("openat", 2)):
        if name in known:
            yield (_EQUAL, 0, 4, known[name])
            yield from ((_LOAD, 0, 0, _argument(n)), (_ANY_OF, 0, 1, _FOR_WRITING))
            yield from ((_RETURN, 0, 0, _ASK), (_RETURN, 0, 0, _ALLOW))
    yield (_RETURN, 0, 0, _ALLOW)


def _argument(n: int) -> int:
    return 16 + 8 * n


def _steps(pid: int, *, programs: bool = False) -> Iterator[Step]:
    """The filter: what it does not name is allowed."""
    refused = _ERRNO | errno.EPERM
    yield from (
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, MACHINES[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
    )
    yield (_LOAD, 0, 0, _NUMBER)
    for number in _NEW_ALLOWED:
        yield from _answer((_EQUAL, 0, 1, number), _ALLOW)
    yield from _answer((_AT_LEAST, 0, 1, _NEW), _ERRNO | errno.ENOSYS)
    for name, number in numbers(DENIED).items():
        if not (programs and name in _OF_PROGRAMS):
            yield from _answer((_EQUAL, 0, 1, number), refused)
    known = numbers(BY_ARGUMENT)
    for name, argument, tests in _conditions(pid, programs=programs):
        inner = [(_LOAD, 0, 0, argument), *tests, (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW)]
        yield (_EQUAL, 0, len(inner), known[name])
        yield from inner
    yield (_RETURN, 0, 0, _ALLOW)


def _answer(test: Step, answer: int) -> tuple[Step, Step]:
    return test, (_RETURN, 0, 0, answer)


def _conditions(pid: int, *, programs: bool) -> Iterator[tuple[str, int, list[Step]]]:
    """(call, where the argument is, tests). A test goes on to refuse, or skips that."""
    own = [(_EQUAL, 1, 0, pid)]
    threads, processes = (_ANY_OF, 1, 0, _CLONE_THREAD), (_ANY_OF, 0, 1, _CLONE_NAMESPACES)
    yield "clone", _argument(0), [processes if programs else threads]
    yield "kill", _argument(0), own
    yield "tgkill", _argument(0), own
    yield "prlimit64", _argument(0), [(_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, pid)]
    yield "fcntl", _argument(1), [(_EQUAL, 1, 0, _OWNERS[0][0]), (_EQUAL, 0, 1, _OWNERS[0][1])]
    yield "ioctl", _argument(1), [(_EQUAL, 1, 0, _OWNERS[1][0]), (_EQUAL, 0, 1, _OWNERS[1][1])]
    # an address is given, in either half of the pointer
    yield "sendto", _argument(4), [(_EQUAL, 0, 2, 0), (_LOAD, 0, 0, _argument(4) + 4), (_EQUAL, 1, 0, 0)]
