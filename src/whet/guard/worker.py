"""Inside a reward process: take a call, run foreign code, check what it returned, answer.

Everything here runs in a process that may be killed at any moment and whose word is not trusted: the nursery
bounds its time, counts its processes, and checks its messages.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from whet.guard import confine, frames
from whet.guard.foreign import number, said, words

Function = Callable[..., object]
"""Foreign code: takes the keyword arguments of a call, returns a number or a dict of numbers. The dict may
hold the answer found in the reply, too, as text under "answer"."""

MAX_ANSWER = 2000
"""Characters of an answer."""
_MAX_PARTS = 256


def serve(channel: socket.socket, functions: Mapping[str, Function], memory_mb: int) -> None:
    """Answer calls from `channel` until it closes. Stdout and stderr already lead to the nursery."""
    me = os.getpid()
    os.register_at_fork(
        after_in_child=channel.close
    )  # else a child keeps the channel open when this process dies
    confine.adopt_orphans()
    confine.scope_signals()
    confine.limit(memory_mb)
    home = Home()
    while True:
        try:
            call, body = frames.receive(channel)
        except EOFError:
            return
        reply = run(functions, body)
        if os.getpid() != me:  # foreign code forked, and its copy came back here
            os._exit(0)
        reply["fit"] = home.restore()
        channel.sendall(frames.pack(call, json.dumps(reply).encode()))


def run(functions: Mapping[str, Function], body: bytes) -> dict[str, object]:
    """{"parts": {...}, "answer": ...} or {"failure": [kind, detail]} of one call."""
    name, key, arguments = json.loads(body)
    random.seed(key)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(key & 0xFFFFFFFF)
    try:
        value = functions[name](**arguments)
    except MemoryError as error:
        return {"failure": ["memory", describe(error)]}
    except BaseException as error:  # noqa: BLE001  foreign code: every way to fail is an answer
        return {"failure": ["raised", describe(error)]}
    try:
        answer = None
        if type(value) is dict and "answer" in value:
            value = dict(value)  # the function may return the same object again
            answer = text(value.pop("answer"))
        return {"parts": parts(value), "answer": answer}
    except BaseException as error:  # noqa: BLE001  a value is foreign code, too: __float__, .item(), __len__
        return {"failure": ["bad_value", describe(error, name=False)]}


def parts(value: object) -> dict[str, float]:
    """The checked value of a reward: a number is {"score": number}. ValueError says what else it was."""
    if not isinstance(value, dict):
        return {"score": number(value)}
    if len(value) > _MAX_PARTS:
        raise ValueError(f"a dict of {len(value)} entries, at most {_MAX_PARTS} are allowed")
    for key in value:
        if type(key) is not str or len(key) > 100:
            raise ValueError(f"a dict with a key of type {type(key).__name__}; keys are short str")
    return {key: number(entry, f" at {key!r}") for key, entry in value.items()}


def text(answer: object) -> str | None:
    """The answer a reward found in the reply, if any, of bounded length. ValueError on a non-str."""
    if answer is None:
        return None
    if type(answer) is not str:
        raise ValueError(f"{type(answer).__name__} at 'answer'; expected str")
    return words(answer, MAX_ANSWER)


def describe(error: BaseException, *, name: bool = True) -> str:
    """'ValueError: text (file.py:3)', bounded, whatever the exception's own methods do."""
    text = said(error)
    if not name:
        return text
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {text}{place}"


class Home:
    """The state of the process before foreign code ran, for putting it back."""

    def __init__(self) -> None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        self.streams = (sys.stdin, sys.stdout, sys.stderr)
        self.pipe = os.fstat(1).st_ino
        self.folder = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
        self.environment = os.environb.copy()  # as bytes: compared after every call
        self.mask = os.umask(0)
        os.umask(self.mask)
        self.recursion = sys.getrecursionlimit()

    def restore(self) -> bool:
        """Undo what a call changed. False: it left something that only the end of this process undoes."""
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdin, sys.stdout, sys.stderr = self.streams
            os.fchdir(self.folder)
            if os.environb.copy() != self.environment:
                os.environb.clear()
                os.environb.update(self.environment)
            os.umask(self.mask)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.setrecursionlimit(self.recursion)
            same_output = os.fstat(1).st_ino == os.fstat(2).st_ino == self.pipe
        except BaseException:  # noqa: BLE001  foreign stream objects; a closed file; a folder that is gone
            return False
        return same_output and len(sys._current_frames()) == 1 and not _has_children()


def _has_children() -> bool:
    """Whether any descendant still runs: orphans below this process are its children, too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
