"""Calls of foreign code that cannot kill, stall or corrupt the run.

A call runs in a separate process (`guard/worker.py`) with limits on time, memory, output and processes. Whatever
happens there, every call gets its own `CallResult`, and no other call loses one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast, get_args

from whet.guard import confine, foreign, frames, nursery, pulse
from whet.guard.processes import GO_ON, state
from whet.guard.worker import MAX_ANSWER
from whet.secrets import redact
from whet.types import ConfigError, WhetError

log = logging.getLogger(__name__)

FailureKind = Literal[
    "raised", "timeout", "crashed", "memory", "resources", "processes", "bad_value", "output"
]
"""`raised`: an exception; `crashed`: the process ended; `memory`, `processes`: the limit was met; `resources`: that of
files, threads or space on the disk; `bad_value`: no finite number, or one that is too large; `output`: bytes on the
channel of results."""

_MOST_DETAIL = 1000
_MOST_NAME = 200
_LOAD_S = 300.0
CONNECT_S = 10.0
"""Longest wait for the channel to a new nursery."""
_CLOSE_S = 5.0
_MAX_DEATHS = 5
_TRIES_ALONE = 3
_LONG_S = 0.1
"""A call that takes longer had no others behind it: of such calls each worker had one."""
_NO_NURSERY = f"the processes that guard the rewards ended; {GO_ON}"
_STOPPED = "the processes that guard the rewards are stopped (SIGSTOP); the same command resumes the run"


class JailBroken(WhetError):
    """No call has a result any more: the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """One call of a function of the jail."""

    function: str
    arguments: str
    """The keyword arguments, as the text of a JSON object: equal arguments of many calls are encoded once."""
    key: int = 0
    """Seed of `random` and `numpy.random` in this call, 64 bits."""
    timeout_s: float | None = None
    """Default: the jail's."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no value."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.kind != "raised" else f"raised {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call gave: finite numbers by name ("score" for a bare number), or a failure."""

    parts: dict[str, float] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    """What it found in the reply, for voting: by "answer", of a batch by "0/answer"."""
    failure: Failure | None = None
    output: str = ""
    """What it printed, up to the limit."""
    dropped_bytes: int = 0
    """How much more it printed."""
    seconds: float = field(default=0.0, compare=False)
    """From the moment when a process had the call to its answer."""


@dataclass(slots=True)
class _Batch:
    """The calls of one `call_many`."""

    done: asyncio.Future[None]
    left: int
    results: list[CallResult]


@dataclass(frozen=True, slots=True)
class _Pending:
    message: bytes
    batch: _Batch
    place: int


class Jail:
    """Foreign functions in sandboxed processes. Create it early: it forks, and its children keep the current state of
    this process.

    `functions` maps a name to a loader: a function without arguments that returns the foreign function. Loaders run in
    a child, so the foreign code is never imported here, and closures need no pickling. ConfigError when one fails. Use
    it as a context manager, or `close` it: no process is left in any case.
    """

    def __init__(
        self,
        functions: Mapping[str, nursery.Loader],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        max_output_bytes: int = 65536,
        patience_s: float = 10.0,
        prepare: Callable[[], None] = lambda: None,
        titles: Mapping[str, str] | None = None,
    ) -> None:
        """`patience_s`: longest time without a message from the forkserver (nursery), which reports every second,
        before it is replaced.

        `prepare` runs in the child before the loaders do; a WhetError of it becomes a ConfigError here. `titles`: what
        errors of loading call a function.
        """
        if not hasattr(os, "fork"):
            raise ConfigError(
                "rewards run in forked processes, and this system has no fork; use Linux, macOS or WSL"
            )
        if word := confine.missing():
            log.warning("rewards are only partly sandboxed: %s", word)
        self.functions = {name: place for place, name in enumerate(functions)}
        self._titles = titles or {}
        self.workers, self.timeout_s, self.patience_s = workers, timeout_s, patience_s
        self._pending: dict[int, _Pending] = {}
        self._unsent: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self.alone: int | None = None
        """The suspect that runs now, and no other call beside it."""
        self._tries = 0
        self._deaths = 0
        self._closed = False
        self._inbox = bytearray()
        self._reply_limit = frames.MAX_REPLY_BYTES + 8 * max_output_bytes
        self._pump: asyncio.Task[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        limits = nursery.WorkerLimits(workers=workers, memory_mb=memory_mb, max_output_bytes=max_output_bytes)
        self._control, theirs = socket.socketpair()
        self.keeper = nursery.fork(
            partial(nursery.keep, theirs, os.getpid(), loaders=functions, limits=limits, prepare=prepare)
        )
        """The process that starts nurseries; it ends with this one."""
        theirs.close()
        try:
            self._channel = self._start()
        except BaseException:
            self._end_keeper()
            raise

    def __enter__(self) -> Jail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> socket.socket:
        self._control.settimeout(_LOAD_S)
        number, what = nursery.LOADING, "the code that `imports` names"
        try:
            while number == nursery.LOADING:
                number, body = frames.receive(self._control)
                problem = json.loads(body)
                what = self._titles.get(problem, f"reward {problem!r}") if number else what
        except EOFError:
            raise ConfigError(
                f"{what} ended the process that loads it (os._exit, or a crash); see its output above"
            ) from None
        except TimeoutError:
            raise ConfigError(f"{what}: loading it took more than {_LOAD_S:g} s") from None
        if problem:
            raise ConfigError(problem)
        return self._connect()

    # ------------------------------------------------------------ calls

    async def call_many(self, calls: Sequence[RewardCall]) -> list[CallResult]:
        """The results of all calls, in order. JailBroken if the jail is closed or cannot be kept alive."""
        if not calls:
            return []
        # those of one function together: each process has one, and goes on without a pause
        first = {call.function: place for place, call in reversed([*enumerate(calls)])}
        order = sorted(range(len(calls)), key=lambda place: first[calls[place].function])
        messages = [(place, *self._message(calls[place])) for place in order]
        batch = _Batch(asyncio.get_running_loop().create_future(), len(calls), [CallResult()] * len(calls))
        for place, number, message in messages:
            self._pending[number] = _Pending(message, batch, place)
            self._unsent.append(number)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._run())
            self._pump.add_done_callback(self._give_up)
        self._send()
        await batch.done
        return batch.results

    def _message(self, call: RewardCall) -> tuple[int, bytes]:
        """Its number, which only a process that has the call can answer, and what is sent."""
        if call.function not in self.functions:
            raise WhetError(
                f"the jail has no function {call.function!r}; it has {', '.join(sorted(self.functions))}"
            )
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        body = f"[{call.key},{call.arguments}]".encode()
        if len(body) > frames.MAX_CALL_BYTES // 2:
            raise WhetError(
                f"arguments of {len(body)} bytes for {call.function!r}; the limit is half of {frames.MAX_CALL_BYTES}"
            )
        head = nursery.CALL.pack(timeout_s, self.functions[call.function])
        number = int.from_bytes(os.urandom(8)) or 1
        return number, frames.pack(number, head + body)

    def _send(self) -> None:
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._push())

    async def _push(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the nursery ended: `_run` hears it, and has all sent again
            while messages := self._take():
                await loop.sock_sendall(self._channel, b"".join(messages))

    def _take(self) -> list[bytes]:
        """What to send now: after a death of the nursery the suspects, one by one; else all that is new."""
        if self.alone is not None:
            return []
        if self._suspects:
            self.alone = self._suspects.popleft()
            self._tries += 1
            return [self._pending[self.alone].message]
        messages = [self._pending[number].message for number in self._unsent]
        self._unsent.clear()
        return messages

    async def _run(self) -> None:
        """Hear answers until all calls have one."""
        loop = asyncio.get_running_loop()
        while self._pending:
            try:
                async with asyncio.timeout(self.patience_s):
                    data = await loop.sock_recv(self._channel, frames.READ_BYTES)
            except TimeoutError:
                self._control.send(nursery.KILL)
                data = b""
            except OSError:
                data = b""
            if not data:
                await self._revive()
            self._inbox += data
            for number, body in frames.unpack(self._inbox, self._reply_limit):
                self._deaths = 0
                if number in self._pending:
                    self._finish(number, read_result(body))
            if self._unsent or self._suspects:
                self._send()

    def _finish(self, number: int, result: CallResult) -> None:
        pulse.beat("scoring")
        if number == self.alone:
            self.alone, self._tries = None, 0
            # Alone, one after the other, long calls would take as long as all together.
            while result.seconds > _LONG_S and len(self._suspects) > self.workers:
                self._unsent.appendleft(self._suspects.pop())
        pending = self._pending.pop(number)
        batch = pending.batch
        batch.results[pending.place] = result
        batch.left -= 1
        if not batch.left and not batch.done.done():
            batch.done.set_result(None)

    async def _revive(self) -> None:
        """Go on with a new nursery. A call is to blame when each time it ran alone the nursery ended."""
        self._deaths += 1
        if self._closed or self._deaths > _MAX_DEATHS:
            raise JailBroken("the jail was closed while calls were running" if self._closed else _NO_NURSERY)
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        self._channel.close()
        self._channel = await asyncio.to_thread(self._connect)
        self._inbox.clear()
        if self.alone is None:
            known = {*self._unsent, *self._suspects}
            sent = [number for number in self._pending if number not in known]
            # Calls start in order: it was one of those that workers had.
            self._suspects.extend(sent[: self.workers * nursery.AHEAD])
        elif self._tries < _TRIES_ALONE:
            self._suspects.appendleft(self.alone)
            self.alone = None
        else:
            failure = Failure("crashed", "the process that guards the rewards ends at every attempt")
            self._finish(self.alone, CallResult(failure=failure))
        suspects = set(self._suspects)
        self._unsent = deque(number for number in self._pending if number not in suspects)

    def _connect(self) -> socket.socket:
        """The channel to the newest nursery, from the keeper."""
        self._control.settimeout(CONNECT_S)
        try:
            channel = _receive_socket(self._control)
            self._control.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    newer = _receive_socket(self._control)
                    channel.close()
                    channel = newer
        except (OSError, EOFError) as error:
            stopped = state(self.keeper) == "T"
            raise JailBroken(_STOPPED if stopped else _NO_NURSERY) from error
        channel.setblocking(False)
        return channel

    def _give_up(self, pump: asyncio.Task[None]) -> None:
        """The pump ended before its time: so do all calls, and the half-used channel with them."""
        error = None if pump.cancelled() else pump.exception()
        if error is None and not pump.cancelled():
            return
        for batch in {id(p.batch): p.batch for p in self._pending.values()}.values():
            if error is not None and not batch.done.done():
                batch.done.set_exception(error)
            batch.done.cancel()
        self._pending.clear()
        self._unsent.clear()
        self._suspects.clear()
        self._inbox.clear()
        self.alone, self._tries = None, 0
        with contextlib.suppress(OSError, WhetError):
            self._control.send(nursery.KILL)
            self._channel.close()
            self._channel = self._connect()

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End all processes of the jail. Running calls raise WhetError."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        if self._pump is None or self._pump.done():  # else the event loop waits for it: `_run` hears the end
            self._channel.close()
        self._end_keeper()

    def _end_keeper(self) -> None:
        self._control.close()
        end = time.monotonic() + _CLOSE_S
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(self.keeper, os.WNOHANG)[0]:
                if time.monotonic() > end:
                    confine.send(self.keeper, signal.SIGKILL)
                time.sleep(0.002)


def read_result(body: bytes) -> CallResult:
    """A worker's answer, not trusted: anything but a set of finite numbers is a failure, and text is sanitised."""
    reply = json.loads(body)
    about = {
        "output": foreign.plain(redact(reply["output"])),
        "dropped_bytes": reply["dropped"],
        "seconds": reply["seconds"],
    }
    match reply:
        case {"failure": [str(kind), str(detail)]} if kind in get_args(FailureKind):
            failure = Failure(
                cast(FailureKind, kind), foreign.words(detail, _MOST_DETAIL).replace("\n", "\\n")
            )
        case {"parts": dict(parts), "answers": dict(answers)} if _all_floats(parts) and _all_texts(answers):
            try:
                named = _named(parts)
            except ValueError as error:
                failure = Failure("bad_value", str(error))
            else:
                found = {name: foreign.words(text, MAX_ANSWER) for name, text in answers.items()}
                return CallResult(parts=named, answers=found, **about)
        case _:
            failure = Failure("output", "on the result channel: values that a reward cannot return")
    return CallResult(failure=failure, **about)


def _all_floats(parts: Mapping[str, object]) -> bool:
    return all(type(value) is float and math.isfinite(value) for value in parts.values())


def _all_texts(answers: Mapping[str, object]) -> bool:
    return all(type(text) is str for text in answers.values())


def _named(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts by names that can be written down. ValueError on one that is too large, or on two with one name."""
    pairs = [(foreign.words(key, _MOST_NAME), value) for key, value in parts.items()]
    out = {name: foreign.number(value, f" at {name!r}") for name, value in pairs}
    if len(out) < len(pairs):
        raise ValueError("a dict has two keys that become equal when they are encoded as text")
    return out


def _receive_socket(control: socket.socket) -> socket.socket:
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not data:
        raise EOFError
    os.set_inheritable(fds[0], False)
    return socket.socket(fileno=fds[0])
