"""System calls by their numbers, as no function of Python makes them: each that a sandbox denies fails in it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import platform
import re
from pathlib import Path

import pytest

from whet.guard import sandbox
from whet.guard.jail import Jail, RewardCall
from whet.guard.worker import Guarded

needs_sandbox = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")

HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
TABLES = (
    sandbox.DENIED,
    sandbox.BY_ARGUMENT,
    sandbox.CAPSET,
    sandbox.SECCOMP,
    sandbox.OPENING,
    sandbox.FORKING,
)
_X32 = 0x40000000
"""Added to a number of x86_64, it is that of another table of calls."""
_MORE = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
}
"""The same on all machines. Libraries do without them where they are answered as by an older kernel."""


@pytest.mark.parametrize("machine", HEADERS)
def test_system_calls_have_the_numbers_of_the_kernel(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.is_file():
        pytest.skip(f"{header} is not here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    kernel = {name: int(number) for name, number in found}
    column = 1 + list(sandbox.MACHINES).index(machine)
    for words in (entry.split() for table in TABLES for entry in table.split(",")):
        number = None if words[column] == "-" else int(words[column])
        assert number == kernel.get(words[0]), words[0]


def calls() -> dict[str, tuple[int, ...]]:
    """A number and arguments by name: of what is denied, calls that do nothing or fail where they are allowed."""
    argued, other = sandbox.numbers(sandbox.BY_ARGUMENT), os.getppid()
    address = ctypes.addressof(ctypes.create_string_buffer(16))
    made = {name: (number, -1, 0, 0, 0, 0, 0) for name, number in sandbox.numbers(sandbox.DENIED).items()}
    made |= {
        "clone": (argued["clone"], 17),  # SIGCHLD: a process
        "kill": (argued["kill"], other, 0),
        "kill, a group": (argued["kill"], 0, 0),
        "kill, all": (argued["kill"], -1, 0),
        "tgkill": (argued["tgkill"], other, other, 0),
        "prlimit64": (argued["prlimit64"], other, 0, 0, 0),
        "fcntl, F_SETOWN": (argued["fcntl"], 1, 8, other),
        "fcntl, F_SETOWN_EX": (argued["fcntl"], 1, 15, address),
        "ioctl, FIOSETOWN": (argued["ioctl"], 1, 0x8901, address),
        "ioctl, SIOCSPGRP": (argued["ioctl"], 1, 0x8902, address),
        "sendto": (argued["sendto"], 1, address, 1, 0, address, 16),
        "sendto, an address of which one half is 0": (argued["sendto"], 1, address, 1, 0, 1 << 32, 16),
    }
    made |= {name: (number, -1, 0, 0, 0, 0, 0) for name, number in _MORE.items()}
    if platform.machine() == "x86_64":
        made |= {f"x32 {name}": (made[name][0] | _X32, -1, 0, 0) for name in ("fork", "execve", "socket")}
    return made


def tried(without: list[str]) -> dict[str, float]:
    """The error of each; 0 if it has done something."""
    libc = ctypes.CDLL(None, use_errno=True)
    me = os.getpid()
    found = {"score": 0.0}
    for name, (number, *arguments) in calls().items():
        if name in without:
            continue
        ctypes.set_errno(0)
        done = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
        if os.getpid() != me:  # it began a process
            os._exit(0)
        found[name] = float(ctypes.get_errno() if done == -1 else 0)
    return found


def errors(*, confined: bool, without: tuple[str, ...] = ()) -> dict[str, float]:
    with Jail({"tried": lambda: Guarded(tried, confined=confined)}, timeout_s=60.0) as jail:
        asked = RewardCall(function="tried", arguments=json.dumps({"without": without}))
        (result,) = asyncio.run(jail.call_many([asked]))
    assert result.failure is None, result.failure
    return {name: error for name, error in result.parts.items() if name != "score"}


@needs_sandbox
def test_each_call_that_a_sandbox_denies_fails_in_it() -> None:
    found = errors(confined=True)
    unknown = {name for name in found if name in _MORE or name.startswith("x32")}
    assert found == {name: errno.ENOSYS if name in unknown else errno.EPERM for name in calls()}


@needs_sandbox
def test_most_of_them_fail_otherwise_or_not_at_all_where_nothing_confines_them() -> None:
    """What makes that mean something. A container may deny some of them itself."""
    begin = ("clone", "fork", "vfork", *(name for name in calls() if name.startswith("x32")))
    found = errors(confined=False, without=begin)
    assert len(found) == len(calls()) - len(begin)
    assert sum(error == errno.EPERM for error in found.values()) < len(found) / 2
