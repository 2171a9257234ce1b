"""Inside a reward process: receive a call, run foreign code, check its result, answer.

Everything here runs in a process that may be killed at any moment and is not trusted: the forkserver bounds its time,
counts its processes, and checks its messages.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import math
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

from whet.guard import confine, foreign, frames, sandbox, traces
from whet.guard.foreign import describe, is_number, number, words
from whet.guard.traces import Traces, written
from whet.tables import raised_at
from whet.types import WhetError

Function = Callable[..., object]
"""Foreign code: takes the keyword arguments of a call, returns a number or a dict of numbers. The dict may hold other
values, too: the answer found in the reply under "answer" or "pred", and what is left out."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A function and what its process may do."""

    call: Function
    confined: bool = False
    """It runs in a `sandbox`. Where the system has none, it runs without; who cannot have that asks before."""
    once: bool = False
    """Its process ends after one call: what a reply has changed there judges no other reply."""


MARKED, UNMARKED = b"m", b"u"
"""Head of a call: whether a mark ends what it prints. The rest is the key and the arguments, as JSON."""
MAX_ANSWER = 2000
"""Characters of an answer."""
_MAX_PARTS = 4096
"""Entries of a dict: 32 of each rollout, of 128 that are scored in one call."""
_SPARE_FILES = 256
"""Files that calls may leave open before their process is replaced."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
"""Errors of a process that has used up what it may have: another one may have it still."""
_WATCHED = (builtins, math, random, json, foreign, frames, traces)
"""Modules that every call relies on; with this one."""
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""This package."""
_SIGNALS = (signal.SIGALRM, signal.SIGCHLD)
"""Those whose handlers code sets for a while, and may forget."""


def serve(
    channel: socket.socket, function: Guarded, memory_mb: int, max_output_bytes: int, mark: bytes
) -> None:
    """Answer calls from `channel`, one after the other, until it closes. Stdout and stderr already lead to the nursery,
    which keeps the first `max_output_bytes` of a call; `mark` is written there after a call that asks for it."""
    me = os.getpid()
    os.register_at_fork(
        after_in_child=channel.close
    )  # else a child keeps the channel open when this process dies
    confine.adopt_orphans()
    confine.let_forks_hear()
    confine.limit(memory_mb)
    refused = shut_in(function)
    home = ProcessState(max_output_bytes)
    while True:
        try:
            call, body = frames.receive(channel)
        except EOFError:
            return
        reply = refused or run(function.call, body[1:], memory_mb=memory_mb, tell=home.tell)
        if os.getpid() != me:  # foreign code forked, and its copy came back here
            os._exit(0)
        reply["fit"] = fit = home.restore() and (body[:1] == UNMARKED or written_at_once(mark))
        reply["cut"] = sum(stream.take_cut() for stream in home.outputs)
        channel.sendall(frames.pack(call, json.dumps(reply).encode()))
        if not fit or out_of_resources(reply):  # the calls that were sent ahead are for another process
            return


def written_at_once(mark: bytes) -> bool:
    """Whether the mark is in the pipe of what is printed. A call may have made that non-blocking, and filled it."""
    try:
        return os.write(1, mark) == len(mark)
    except OSError:
        return False


def shut_in(function: Guarded) -> dict[str, object] | None:
    """Confine this process as far as the function asks for it. The answer to every call, if that fails."""
    if not function.confined or sandbox.lacking():
        sandbox.scope_signals()
        return None
    try:
        sandbox.enter()
    except OSError as error:
        return {"failure": ["crashed", f"its process could not be confined: {error}"]}
    return None


def run(
    function: Function, body: bytes, *, memory_mb: int, tell: Callable[[BaseException], None]
) -> dict[str, object]:
    """{"parts": {...}, "answers": {...}} or {"failure": [kind, detail]} of one call. `tell` gets what it raised."""
    try:
        key, arguments = json.loads(body)
        random.seed(key)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(key & 0xFFFFFFFF)  # may load a library first
    except (MemoryError, ImportError, OSError) as error:
        about = f"before the call: {describe(error)}; reward_workers.memory_mb={memory_mb} may be too small"
        return {"failure": ["memory", about]}
    try:
        value = function(**arguments)
    except BaseException as error:  # noqa: BLE001  foreign code: every way to fail is an answer
        kind = kind_of(error)
        if kind == "raised" and not isinstance(error, WhetError):  # that tells by its text
            tell(error)
        limit = f" (reward_workers.memory_mb={memory_mb})" if kind == "memory" else ""
        return {"failure": [kind, f"{describe(error)}{limit}"]}
    try:
        return {"parts": parts(value), "answers": answers(value) if isinstance(value, dict) else {}}
    except BaseException as error:  # noqa: BLE001  a value is foreign code, too: __float__, .item(), __len__
        return {"failure": ["bad_value", describe(error, name=False)]}


def out_of_resources(reply: Mapping[str, object]) -> bool:
    """Whether a call ended for lack of what another process may have."""
    failure = reply.get("failure")
    return isinstance(failure, list) and failure[:1] in (["memory"], ["resources"])


def kind_of(error: BaseException) -> str:
    """`memory` or `resources` if the process has no more of them, though others may say so for it; else `raised`."""
    for cause in _causes(error):
        if isinstance(cause, MemoryError):
            return "memory"
        if isinstance(cause, OSError) and cause.errno in _SHORT:
            return "resources"
        if type(cause) is RuntimeError and cause.args == ("can't start new thread",):
            return "resources"
    return "raised"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def parts(value: object) -> dict[str, float]:
    """The checked value of a reward: a number is {"score": number}. ValueError says what else it was.

    Beside the score, what is no number is left out: verl's functions return texts there, which it only records.
    """
    if not isinstance(value, dict):
        return {"score": number(value)}
    if len(value) > _MAX_PARTS:
        raise ValueError(f"a dict of {len(value)} entries, at most {_MAX_PARTS} are allowed")
    for key in value:
        if type(key) is not str or len(key) > 100:
            raise ValueError(f"a dict with a key of type {type(key).__name__}; keys are short str")
    numbers = {key: entry for key, entry in value.items() if key == "score" or is_number(entry)}
    return {key: number(entry, f" at {key!r}") for key, entry in numbers.items()}


def answers(value: dict[str, object]) -> dict[str, str]:
    """The answers that a reward found, of bounded length: {"answer": text}, of a batch {"0/answer": text}.

    A number is an answer, too. verl's majority voting compares "pred"; here that is read where there is no "answer".
    """
    out: dict[str, str] = {}
    for name in ("pred", "answer"):
        for key, entry in value.items():
            place, slash, last = key.rpartition("/")
            if last == name and (isinstance(entry, str) or is_number(entry)):
                out[f"{place}{slash}answer"] = words(str(entry), MAX_ANSWER)
    return out


class Output(io.TextIOWrapper):
    """Standard output or error of a call: what nobody would keep is not written, but counted, so it costs no time."""

    def __init__(self, fd: int, most: int) -> None:
        super().__init__(open(fd, "wb", closefd=False), errors="replace", line_buffering=True)  # noqa: SIM115
        self.most = self.left = most
        self.cut = 0

    def write(self, text: str) -> int:
        if type(text) is not str or self.left > 0:
            done = super().write(text)  # the nursery counts what is too much of it
            self.left -= done
            return done
        self.cut += len(text) if text.isascii() else len(text.encode(errors="replace"))
        return len(text)

    def take_cut(self) -> int:
        """The bytes of the call that were not written; then the next call begins."""
        cut, self.cut, self.left = self.cut, 0, self.most
        return cut


class ProcessState:
    """The state of the process before foreign code ran, for putting it back."""

    def __init__(self, max_output_bytes: int) -> None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        self.outputs = (Output(1, max_output_bytes), Output(2, max_output_bytes))
        sys.stdout, sys.stderr = self.outputs
        self.streams = (sys.stdin, sys.stdout, sys.stderr)
        self.pipe = os.fstat(1).st_ino
        self.folder = os.open(
            ".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC
        )  # to come back to, not to read
        self.environment = variables().copy()
        self.mask = os.umask(0)
        os.umask(self.mask)
        self.recursion = sys.getrecursionlimit()
        self.handlers = {n: signal.getsignal(n) for n in _SIGNALS}
        self.modules = [(m, dict(vars(m))) for m in (*_WATCHED, sys.modules[__name__])]
        self.files = _lowest_free(self.folder)
        self.traces = Traces()

    def tell(self, error: BaseException) -> None:
        """The traceback of an error stands where the call has printed, once for each place that errors come from. What
        built-in functions raise is told by its text."""
        at = raised_at(error)
        if not (at and at[0].startswith(_OWN)) and self.traces.first(error):
            with suppress(OSError, ValueError):  # foreign code may have closed it
                self.outputs[1].write(written(error))

    def restore(self) -> bool:
        """Undo what a call changed. False: it left something that only the end of this process undoes."""
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdin, sys.stdout, sys.stderr = self.streams
            os.fchdir(self.folder)
            if variables() != self.environment:
                os.environb.clear()
                os.environb.update(self.environment)
            os.umask(self.mask)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.setrecursionlimit(self.recursion)
            for number, handler in self.handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
            same_output = os.fstat(1).st_ino == os.fstat(2).st_ino == self.pipe
            few_files = _lowest_free(self.folder) < self.files + _SPARE_FILES
            intact = _still(self.modules)
        except BaseException:  # noqa: BLE001  foreign stream objects; a closed file; a folder that is gone
            return False
        alone = len(sys._current_frames()) == 1 and not _has_children()
        return same_output and few_files and intact and alone


def variables() -> dict[bytes, bytes]:
    """Those of this process, as bytes. What `os.environb` holds, compared after every call: a copy by its methods takes
    40 us, a fifth of a call."""
    found: dict[bytes, bytes] = os.environb._data  # type: ignore[attr-defined]
    return found


def _lowest_free(fd: int) -> int:
    """The number that the next file gets."""
    found = os.dup(fd)
    os.close(found)
    return found


def _still(modules: list[tuple[ModuleType, dict[str, object]]]) -> bool:
    """Whether all that the modules had is there; they may have more, for others import their parts.

    Written without builtins, which are among what is looked at.
    """
    for module, before in modules:
        now = module.__dict__
        if sys.modules.get(module.__name__) is not module:
            return False
        if now != before:
            for name in before:
                if name not in now or now[name] is not before[name]:
                    return False
    return True


def _has_children() -> bool:
    """Whether any descendant still runs: orphans below this process are its children, too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
