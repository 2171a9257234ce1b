"""A zoo of reward functions that misbehave: what each does, and the failure the jail must lay to it.

`value` tells the calls apart; innocents return it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np

from whet.guard import worker

MARK = "whet-hostile-daemon"
"""Command line of every process that the zoo leaves behind."""


def innocent(value):
    return value


def stochastic(value):
    return {"score": random.random(), "numpy": np.random.random(), "given": value}


def product(value):
    import torch

    ones = torch.ones(512, 512)
    return {"score": (ones @ ones).mean().item() - 512 + value, "threads": torch.get_num_threads()}


def surroundings(value):
    """What a call can see of what earlier calls did to the process."""
    mask = os.umask(0)
    os.umask(mask)
    print("still heard", flush=True)
    return {
        "score": value,
        "folder": float(os.getcwd() == START_FOLDER),
        "environment": float("HOSTILE" not in os.environ and "PATH" in os.environ),
        "mask": mask,
        "threads": threading.active_count(),
        "recursion": sys.getrecursionlimit(),
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
        "handlers": float(signal.getsignal(signal.SIGALRM) is signal.SIG_DFL),
        "sum": sum([1.0]),
    }


START_FOLDER = os.getcwd()


def raises(value):
    raise ValueError("no reward today")


def raises_group(value):
    raise ExceptionGroup("many", [ValueError("a"), KeyError("b")])


def raises_unspeakable(value):
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

        __repr__ = __str__

    raise Unspeakable


def raises_novel(value):
    raise ValueError("x" * 10_000_000)


def system_exit(value):
    sys.exit(0)


def keyboard_interrupt(value):
    raise KeyboardInterrupt


def exit_0(value):
    os._exit(0)


def exit_1(value):
    os._exit(1)


def segfault(value):
    ctypes.string_at(0)


def abort(value):
    os.abort()


def kills_itself(value):
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_group(value):
    os.killpg(0, signal.SIGKILL)


def stops_itself(value):
    os.kill(os.getpid(), signal.SIGSTOP)


def endless_loop(value):
    while True:
        pass


def endless_regex(value):
    re.match(r"(a+)+$", "a" * 60 + "b")


def endless_in_c(value):
    return 7 ** (10**9) % 5


def sleeps(value):
    time.sleep(1000)


def swallows_everything(value):
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


def allocates_10_gb(value):
    return len(bytearray(10 * 2**30))


def allocates_bit_by_bit(value):
    heap = []
    while True:
        heap.append(bytearray(50 * 2**20))


def hoards(value, heap=[]):  # noqa: B006
    """Keeps what it takes: the tenth call dies of the first nine, and is not to blame."""
    heap.append(bytearray(40 * 2**20))
    return value


def deep_recursion(value):
    return deep_recursion(value) + 1


def deepest_recursion(value):
    sys.setrecursionlimit(10**9)
    resource.setrlimit(resource.RLIMIT_STACK, (8 * 2**20, resource.RLIM_INFINITY))

    class Deep:
        def __del__(self):
            pass

        def __eq__(self, other):
            return [self] == [other]

    return Deep() == Deep()


def returns_nan(value):
    return math.nan


def returns_inf(value):
    return -math.inf


def returns_none(value):
    return None


def returns_text(value):
    return "1.0"


def returns_complex(value):
    return 1j


def returns_array(value):
    return np.zeros(3)


def returns_huge_int(value):
    return 10**400


def returns_dict_with_nan(value):
    return {"score": 1.0, "other": math.nan}


def returns_dict_with_number_keys(value):
    return {1: 1.0}


def returns_huge_dict(value):
    return {str(i): 1.0 for i in range(10**5)}


def returns_nested(value):
    nest: list = []
    for _ in range(10**5):
        nest = [nest]
    return {"score": nest}


def returns_liar(value):
    class Liar(float):
        def __float__(self):
            raise SystemExit

    return Liar(1.0)


def returns_trap(value):
    class Trap(dict):
        def __len__(self):
            os._exit(3)

    return Trap()


def prints_100_mb(value):
    line = "x" * 2**20
    for _ in range(100):
        print(line)
    return value


def prints_binary(value):
    os.write(1, bytes(range(256)))
    return value


def fork_bomb(value):
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(1000)
    return value


def big_fork_bomb(value):
    for _ in range(150):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def tree_bomb(value):
    for _ in range(7):
        os.fork()
    time.sleep(1000)


def fork_and_return_twice(value):
    os.fork()
    return value


def leaves_a_daemon(value):
    """Double fork, own session: out of the group, and not a child of the worker any more."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", MARK])
        os._exit(0)
    os.wait()
    return value


def leaves_a_subprocess(value):
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)", MARK], start_new_session=True, close_fds=False
    )
    return value


def daemon_then_crash(value):
    leaves_a_daemon(value)
    os._exit(1)


def leaves_a_thread(value):
    threading.Thread(target=lambda: (time.sleep(0.5), os._exit(9))).start()
    return value


def leaves_an_alarm(value):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    return value


def closes_all_files(value):
    os.closerange(0, 1000)
    return value


def closes_output(value):
    os.close(1)
    os.close(2)
    return value


def replaces_streams(value):
    sys.stdout = sys.stderr = sys.stdin = None
    return value


def moves_house(value):
    os.chdir("/")
    os.environ.clear()
    os.environ["HOSTILE"] = "1"
    os.umask(0o777)
    sys.setrecursionlimit(77)
    return value


def scribbles_on_channels(value):
    for fd in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(fd, b"garbage " * 20)
    return value


def scribbles_empty_messages(value):
    for fd in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(fd, bytes(4096))
    return value


def forges_nonsense(value):
    """A well-formed message with another call's number."""
    body = b'{"parts": {"score": 1e999}, "fit": true}'
    for fd in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(fd, struct.pack("!QI", 1, len(body)) + body)
    return value


def leaks_files(value, kept=[]):  # noqa: B006
    """More open files than a process may have, after some calls; none of them is to blame."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (250, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept += [open(os.devnull) for _ in range(100)]  # noqa: SIM115
    return value


def needs_files(value):
    return [open(os.devnull) for _ in range(10**6)]


def says_the_disk_is_full(value):
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ValueError("it cannot be written") from error


def patches_what_all_use(value):
    builtins.sum = lambda *_: 7.0
    math.isfinite = lambda x: True
    worker.describe = None
    sys.modules["json"] = None
    return value


def leaves_a_handler(value):
    signal.signal(signal.SIGALRM, lambda *_: os._exit(5))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return value


def speaks_to_the_terminal(value):
    """A title, colours, and a line that looks like the run's; then the same in what it raises."""
    said = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\rstep 9 reward 1.000\n"
    print(said)
    raise ValueError(said)


ZOO = {
    needs_files: ("resources", "Too many open files"),
    says_the_disk_is_full: ("resources", "it cannot be written"),
    speaks_to_the_terminal: ("raised", r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\rstep 9 reward 1.000\n"),
    raises: ("raised", "ValueError: no reward today (hostile.py:"),
    raises_group: ("raised", "ExceptionGroup"),
    raises_unspeakable: ("raised", "Unspeakable: (its text cannot be read)"),
    raises_novel: ("raised", "ValueError: xxxx"),
    system_exit: ("raised", "SystemExit: 0"),
    keyboard_interrupt: ("raised", "KeyboardInterrupt"),
    exit_0: ("crashed", "exited with code 0"),
    exit_1: ("crashed", "exited with code 1"),
    segfault: ("crashed", "SIGSEGV"),
    abort: ("crashed", "SIGABRT"),
    kills_itself: ("crashed", "SIGKILL"),
    kills_its_group: ("crashed", "SIGKILL"),
    stops_itself: ("timeout", "no result in 0.4 s"),
    endless_loop: ("timeout", "no result in 0.4 s"),
    endless_regex: ("timeout", "no result in 0.4 s"),
    endless_in_c: ("timeout", "no result in 0.4 s"),
    sleeps: ("timeout", "no result in 0.4 s"),
    swallows_everything: ("timeout", "no result in 0.4 s"),
    allocates_10_gb: ("memory", "MemoryError"),
    allocates_bit_by_bit: ("memory", "MemoryError"),
    deep_recursion: ("raised", "RecursionError"),
    deepest_recursion: ("crashed", "SIGSEGV"),
    returns_nan: ("bad_value", "nan"),
    returns_inf: ("bad_value", "-inf"),
    returns_none: ("bad_value", "None (is a `return` missing?)"),
    returns_text: ("bad_value", "the text '1.0'"),
    returns_complex: ("bad_value", "complex"),
    returns_array: (
        "bad_value",
        "ndarray: can only convert an array of size 1 to a Python scalar; expected a finite",
    ),
    returns_huge_int: ("bad_value", "too large"),
    returns_dict_with_nan: ("bad_value", "nan at 'other'"),
    returns_dict_with_number_keys: ("bad_value", "key of type int"),
    returns_huge_dict: ("bad_value", "100000 entries"),
    returns_nested: ("bad_value", "list at 'score'"),
    returns_liar: ("bad_value", ""),
    returns_trap: ("crashed", "code 3"),
    big_fork_bomb: ("processes", "at most 64"),
    tree_bomb: ("processes", "at most 64"),
    daemon_then_crash: ("crashed", "code 1"),
    closes_all_files: ("crashed", ""),
    scribbles_on_channels: ("output", "result channel"),
    scribbles_empty_messages: ("output", "result channel"),
    forges_nonsense: ("output", "result channel"),
}
"""Those that fail, with kind and a piece of the detail."""

MESSY = [
    patches_what_all_use,
    leaves_a_handler,
    prints_100_mb,
    prints_binary,
    fork_bomb,
    fork_and_return_twice,
    leaves_a_daemon,
    leaves_a_subprocess,
    leaves_a_thread,
    leaves_an_alarm,
    closes_output,
    replaces_streams,
    moves_house,
]
"""Those that return their value and leave a mess."""
