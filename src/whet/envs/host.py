"""A process that plays environments for another one, many at once, and hears of them over a line (`guard.line`).

All messages are JSON of bounded size. The user's code runs in this process, so nothing that it says is trusted at the
other end. Each call has a deadline, which stands still while the environment waits for the run: for a reply of the
policy, a score, a program.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from whet.envs.calls import CANCEL_S, MOST_AT_ONCE, CallContext
from whet.envs.env import (
    Path,
    ReplyScore,
    World,
    as_messages,
    as_step,
    as_tools,
    bound,
    check_arguments,
    pack_messages,
    pack_step,
    prepare,
    unpack_step,
)
from whet.envs.marks import GAP_S, TICK_S, LoopClock, Marked, Marks
from whet.guard import confine
from whet.guard.foreign import describe
from whet.guard.imports import import_all
from whet.guard.last import outlive
from whet.guard.line import messages
from whet.guard.printed import bytes_of
from whet.guard.program import ProgramOutcome
from whet.guard.traces import Traces, written
from whet.secrets import redact
from whet.tables import load_object
from whet.types import Json, Message, Task, WhetError

MODULE = "whet.envs.host"
CLOSE_S = 5.0
"""Longest time of `close`."""
PERIOD_S = 10.0
MOST_PRINTED = 65536
"""Characters that the environments of a host may print in a period."""
LINE = 2000
"""Characters of one line of them in the log."""
MOST_BYTES = 32 * 2**20
"""Longest message of a host: two texts of `env.MOST_TEXT` characters, escaped (12 bytes each at most)."""

BETWEEN = "a call of the environment has returned; ask in `first` or `step`, and await the answer there"
OVER = "the episode has ended"
"""Why the run is asked nothing."""

Say = Callable[..., None]
"""Sends a message. Raises one of UNSAYABLE for what is not JSON, or has more than MOST_BYTES."""
UNSAYABLE = (TypeError, ValueError, RecursionError)


class CallFailed(Exception):
    """A call has no result; the text says why."""


class Stuck(CallFailed):
    """A call does not end, and only the end of this process ends it."""


# ---------------------------------------------------------------- one episode


@dataclass
class Playing:
    """One environment and its call under way."""

    number: int
    slot: int
    world: HostWorld
    env: Any = None
    pool: ThreadPoolExecutor | None = None
    """One thread, for all plain methods of the environment."""
    task: asyncio.Task[None] | None = None
    """The call under way."""

    def thread(self) -> ThreadPoolExecutor:
        self.pool = self.pool or ThreadPoolExecutor(1, thread_name_prefix=f"env-{self.number}")
        return self.pool


@dataclass(frozen=True)
class RunCall:
    """A call of the run that is under way."""

    name: str
    answer: Future[Any]


READ: dict[str, Callable[[Json], Any]] = {
    "chat": Message.from_json,
    "score": lambda value: ReplyScore(**value),
    "program": lambda value: ProgramOutcome(**value),
}
"""What the driver answers to each call of a world."""


class HostWorld(World):
    """The world of an environment here: what it asks of the run goes over the line."""

    def __init__(self, key: int, number: int, slot: int, host: EnvHost, *, index: int, attempt: int) -> None:
        super().__init__(key, self._chat, work=HostWork(self.send), index=index, attempt=attempt)
        self.number, self.slot, self.host = number, slot, host
        self.waiting: dict[int, RunCall] = {}
        self.refused: str | None = None
        """Why nothing may be asked now. None: it may, and is answered before the environment's call returns."""
        self._lock = threading.Lock()
        self._since = 0.0
        self._paused_s = 0.0
        marks = host.marks
        self.call_context = CallContext(
            host.clock.now,
            lambda: marks.running(slot, number),
            lambda waits: Marked(waits, marks, slot, number),
            host.places,
        )

    def paused_s(self, now: float) -> float:
        """Seconds that were waited for the run."""
        with self._lock:
            return self._paused_s + (max(0.0, now - self._since) if self.waiting else 0.0)

    def answered(self, call: int, value: Json, why: str | None = None) -> None:
        """The answer to one call of the run, or why there is none."""
        with self._lock:
            asked = self.waiting.pop(call, None)
            if asked is not None and not self.waiting:
                self._paused_s += max(0.0, self.host.clock.now() - self._since)
        if asked is None or not asked.answer.set_running_or_notify_cancel():
            return  # the environment has cancelled its wait for it
        if why is not None:
            asked.answer.set_exception(RuntimeError(f"world.{asked.name}: {why}"))
        else:
            asked.answer.set_result(READ[asked.name](value))

    def abandon(self, why: str) -> None:
        """Nobody answers any more: neither what is asked now, nor what threads and tasks ask later."""
        with self._lock:
            self.refused = why
        for call in list(self.waiting):
            self.answered(call, None, why)

    def unanswered(self) -> str:
        """The calls under way, by name; '' for none."""
        return ", ".join(sorted({f"world.{asked.name}" for asked in list(self.waiting.values())}))

    def _chat(self, path: Path, messages: list[Message], sampling: Mapping[str, Json]) -> Any:
        return self.send("chat", path, pack_messages(messages), dict(sampling))

    def send(self, name: str, *what: Json) -> Any:
        """Ask the run: the answer, for a plain method, or else what is awaited for it."""
        call, future = next(self.host.calls), Future[Any]()
        with self._lock:
            if self.refused is not None:
                raise RuntimeError(f"world.{name}: {self.refused}")
            if not self.waiting:
                self._since = self.host.clock.peek()
            self.waiting[call] = RunCall(name, future)
        try:
            self.host.say(name, self.number, call, *what)
        except UNSAYABLE as error:
            self.answered(call, None, f"it cannot be asked: {error}")
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a plain method, in its thread
            self.host.marks.leave(self.slot)
            try:
                return future.result()
            finally:
                self.host.marks.enter(self.slot, self.number)
        return asyncio.wrap_future(future)


@dataclass(frozen=True)
class HostWork:
    """`Work` that the driver does."""

    send: Callable[..., Any]

    def score(self, given: Json) -> Awaitable[ReplyScore]:
        found: Awaitable[ReplyScore] = self.send("score", given)
        return found

    def program(self, given: Json) -> Awaitable[ProgramOutcome]:
        found: Awaitable[ProgramOutcome] = self.send("program", given)
        return found


# ---------------------------------------------------------------- the process


@dataclass
class EnvHost:
    """All environments of this process."""

    make: Callable[..., Any]
    arguments: Mapping[str, Json]
    timeout_s: float
    marks: Marks
    say: Say
    playing: dict[int, Playing] = field(default_factory=dict)
    calls: count[int] = field(default_factory=count)
    clock: LoopClock = field(default_factory=LoopClock)
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AT_ONCE))
    traces: Traces = field(default_factory=Traces)

    def heard(self, kind: str, number: int, *what: Json) -> None:
        """One message of the driver."""
        if kind == "first":
            slot = self.marks.take()
            world = HostWorld(what[1], number, slot, self, index=what[2], attempt=what[3])
            self.playing[number] = playing = Playing(number, slot, world)
            playing.task = asyncio.create_task(self._answer(playing, self._first(playing, what[0])))
        elif (known := self.playing.get(number)) is None:
            return  # it has ended here meanwhile
        elif kind == "step":
            known.task = asyncio.create_task(
                self._answer(known, self._step(known, Message.from_json(what[0])))
            )
        elif kind == "resume":
            known.task = asyncio.create_task(self._answer(known, self._resume(known, what[0])))
        elif kind == "reply":
            known.world.answered(what[0], what[1])
        elif kind == "refused":
            known.world.answered(what[0], None, what[1])
        elif kind == "close":
            task = asyncio.create_task(self.close(self.playing.pop(number)))
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)

    async def _answer(self, playing: Playing, work: Awaitable[Json]) -> None:
        """Tell the driver what came of a call."""
        try:
            self.say("done", playing.number, await work)
        except Stuck as error:
            self.say("stuck", playing.number, str(error))
        except CallFailed as error:
            self.say("failed", playing.number, str(error))
        except UNSAYABLE as error:
            self.say("failed", playing.number, f"bad value: {error}")

    async def _first(self, playing: Playing, packed: Json) -> Json:
        make = bound(self.make, Task.from_json(packed), playing.world, self.arguments)

        def made() -> Any:
            """A thread cannot be cancelled: what it makes after its episode has ended is closed, too."""
            env = make()
            playing.env = None if inspect.isawaitable(env) else env
            return env

        work = make if inspect.iscoroutinefunction(self.make) else made
        playing.env = await self._call(playing, "rollout.env.make", work)
        if wrong := misfit(playing.env):
            raise CallFailed(f"bad value: rollout.env.make returned {wrong}")
        if playing.pool is not None and all(map(inspect.iscoroutinefunction, methods(playing.env))):
            playing.pool.shutdown(wait=False)
            playing.pool = None
        told = await self._call(playing, "first", playing.env.first)
        return {
            "messages": self._checked(playing, lambda: pack_messages(as_messages(told, "first"))),
            "tools": self._checked(
                playing, lambda: [tool.to_json() for tool in as_tools(getattr(playing.env, "tools", ()))]
            ),
            "resumes": self._checked(playing, lambda: callable(getattr(playing.env, "resume", None))),
        }

    async def _resume(self, playing: Playing, packed: Json) -> None:
        turns = [(Message.from_json(reply), unpack_step(step)) for reply, step in packed]
        for _ in turns:
            playing.world.begin_turn()
        await self._call(playing, "resume", partial(playing.env.resume, turns))

    async def _step(self, playing: Playing, reply: Message) -> Json:
        playing.world.begin_turn()
        answer = await self._call(playing, "step", partial(playing.env.step, reply))
        return self._checked(playing, lambda: pack_step(as_step(answer)))

    async def close(self, playing: Playing) -> None:
        """End one episode, whatever it does; its `close` has CLOSE_S."""
        playing.world.abandon(OVER)
        cut = playing.task is not None and not playing.task.done()
        if playing.task is not None and cut:
            playing.task.cancel()
            await asyncio.wait({playing.task}, timeout=CANCEL_S)
        try:
            if cut and playing.env is None and playing.pool is not None:  # the thread may still make it
                await self._call(playing, "rollout.env.make", lambda: None)
            if callable(shut := getattr(playing.env, "close", None)):
                await self._call(playing, "close", shut, min(CLOSE_S, self.timeout_s))
        except Stuck as error:
            self.say("stuck", playing.number, str(error))
        except CallFailed as error:
            self.say("said", str(error), 0)
        if left := set(playing.world.call_context.left):
            await asyncio.wait(left, timeout=CLOSE_S)
            if playing.world.call_context.left:
                self.say(
                    "stuck", playing.number, "timeout: a tool exceeded its time limit and is still running"
                )
        if playing.pool is not None:
            playing.pool.shutdown(wait=False)
        self.marks.give(playing.slot)
        self.say("closed", playing.number)

    # -- calls of foreign code

    def _checked(self, playing: Playing, check: Callable[[], Json]) -> Json:
        """A value of the right type, packed. CallFailed if it is none. A value is foreign code, too: `__float__`,
        `.item()`, `__len__`."""
        self.marks.on_loop = playing.number
        try:
            with self.marks.running(playing.slot, playing.number):
                return check()
        except BaseException as error:  # noqa: BLE001  SystemExit included
            raise CallFailed(f"bad value: {describe(error, name=False)}") from None
        finally:
            self.marks.on_loop = None

    async def _call(
        self, playing: Playing, name: str, function: Callable[[], Any], limit_s: float | None = None
    ) -> Any:
        """What it returns. CallFailed if it raises or is late, Stuck if it then goes on nevertheless."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        world, begun = playing.world, self.clock.now()
        waited = world.paused_s(begun)
        work = asyncio.create_task(self._run(playing, function))
        try:
            while not work.done():
                now = self.clock.now()
                left_s = limit_s - (now - begun - (world.paused_s(now) - waited))
                if left_s <= 0:
                    raise await self._late(work, f"timeout: {name} took more than {limit_s:g} s")
                await asyncio.wait({work}, timeout=min(left_s, 60.0))
            return self._result(work, name)
        finally:
            if not work.done():
                work.cancel()

    def _result(self, work: asyncio.Task[Any], name: str) -> Any:
        if work.cancelled():
            raise CallFailed(f"raised CancelledError in {name}")
        value, error, unanswered = work.result()
        if error is not None and self.traces.first(error):
            self.say("said", written(error), 0)
        if isinstance(error, MemoryError):  # what took it may hold it for ever
            raise Stuck(f"raised {describe(error)} in {name}")
        if error is not None:
            raise CallFailed(f"raised {describe(error)} in {name}")
        if unanswered:
            raise CallFailed(f"bad value: {name} returned before its calls of {unanswered} were answered")
        return value

    @staticmethod
    async def _late(work: asyncio.Task[Any], why: str) -> CallFailed:
        """The error for a call that is late: it is cancelled, if it can be."""
        work.cancel()
        await asyncio.wait({work}, timeout=CANCEL_S)
        return CallFailed(why) if work.done() else Stuck(f"{why}, and is still running")

    async def _run(
        self, playing: Playing, function: Callable[[], Any]
    ) -> tuple[Any, BaseException | None, str]:
        """(its value, None) or (None, what it raised), and which calls of the run had no answer when it returned; they
        are abandoned. Async code runs here, other code in the episode's thread."""
        mark = (self.marks, playing.slot, playing.number)
        if playing.number in self.playing:  # else it is `close` that is called
            playing.world.refused = None
        try:
            bare = function.func if isinstance(function, partial) else function
            value = function() if inspect.iscoroutinefunction(bare) else await self._thread(playing, function)
            value = await Marked(value, *mark) if inspect.isawaitable(value) else value
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code, SystemExit included
            return None, error, ""
        unanswered = playing.world.unanswered()  # now: a moment later the answer may be there
        playing.world.abandon(BETWEEN)
        return value, None, unanswered

    async def _thread(self, playing: Playing, function: Callable[[], Any]) -> Any:
        """Its value, from a thread. A thread cannot be cancelled: neither can this, as long as it works."""

        def work() -> tuple[Any, BaseException | None]:
            with self.marks.running(playing.slot, playing.number):
                try:
                    return function(), None
                except BaseException as error:  # noqa: BLE001  foreign code, SystemExit included
                    return None, error

        running = asyncio.get_running_loop().run_in_executor(playing.thread(), work)
        try:
            value, error = await asyncio.shield(running)
        except asyncio.CancelledError:
            await running
            raise
        if error is not None:
            raise error
        return value


def misfit(env: Any) -> str:
    """Which method of an environment is missing, or cannot be called as it will be; '' for none."""
    kind = type(env).__name__
    for name, given in (("first", ()), ("step", ("reply",))):
        method = getattr(env, name, None)
        if not callable(method):
            return f"{kind} without `{name}`; expected an Env"
        # some callables of C have no signature
        with suppress(ValueError):
            takes = inspect.signature(method)
            try:
                takes.bind(*given)
            except TypeError as error:
                named = ", ".join(takes.parameters)
                return f"{kind} whose `{name}` takes ({named}): {error}; expected {name}({', '.join(given)})"
    return ""


def methods(env: Any) -> list[Any]:
    """Those of an environment that the host calls."""
    names = ("first", "step", "resume", "close")
    return [method for name in names if (method := getattr(env, name, None)) is not None]


# ---------------------------------------------------------------- served


class PrintedLines(io.TextIOBase):
    """What the environments print, as lines for the run's log: so many characters in a time, the rest is counted.

    Its descriptor is that of what programs print, so that one may be given to a program as its output.
    """

    def __init__(self, say: Say, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.clock, self.line = say, clock, ""
        self.since, self.left, self.cut = clock(), MOST_PRINTED, 0
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, text: str) -> int:
        with self._lock:
            if (now := self.clock()) - self.since >= PERIOD_S:
                self.since, self.left = now, MOST_PRINTED
            whole = redact(text)  # a cut may be in the middle of a secret
            kept = whole[: self.left]
            self.left -= len(kept)
            self.cut += bytes_of(whole[len(kept) :])
            *lines, rest = (self.line + kept).split("\n")
            self.line = rest[:LINE]
            self.cut += bytes_of(rest[LINE:])
            for line in lines:
                self._say(line)
        return len(text)

    def end(self) -> None:
        """Say what has no end of its line yet."""
        with self._lock:
            if self.line or self.cut:
                self._say(self.line)
            self.line = ""

    def _say(self, line: str) -> None:
        self.say("said", line[:LINE], self.cut + bytes_of(line[LINE:]))
        self.cut = 0


def serve(connection: Connection) -> None:
    """Says ("ready",), or ("refused", why); then plays what it hears of. See `hosts` for the messages."""
    lock = threading.Lock()

    def say(kind: str, *what: Json) -> None:
        data = json.dumps([kind, *what]).encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"{len(data)} bytes as JSON; at most {MOST_BYTES} are allowed")
        with lock, suppress(OSError):  # nobody listens: who reads the connection hears it
            connection.send_bytes(data)

    try:
        asked = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return
    sys.stdout = sys.stderr = output = PrintedLines(say)
    os.register_at_fork(after_in_child=lambda: leave(connection))
    outlive()  # before any code of the user's, which may start programs
    try:
        import_all(asked["imports"])
        make = load_object(asked["make"], what="rollout.env.make", asked=True)
        check_arguments(make, asked["arguments"])
        prepare(make, asked["arguments"])
    except BaseException as error:  # noqa: BLE001  the user's module runs here for the first time
        ours = isinstance(error, WhetError)
        say("refused", str(error) if ours else f"rollout.env.make {asked['make']!r}: {describe(error)}")
        return
    if asked["memory_mb"] is not None:
        confine.limit(asked["memory_mb"])
    host = EnvHost(make, asked["arguments"], asked["timeout_s"], Marks(asked["marks"]), say)
    say("ready")
    code = 3
    with suppress(BaseException):  # what the user's own tasks raise ends the process
        asyncio.run(_play(host, connection))
        code = 0
    output.end()
    os._exit(code)  # threads that hang would hold it


def leave(connection: Connection) -> None:
    """In a process that code of an episode has forked: the line is the host's alone, and so is what it says there."""
    connection.close()
    printed = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stdout = sys.stderr = printed


async def _play(host: EnvHost, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    threading.Thread(target=watch_loop, args=(host, loop), daemon=True).start()
    async for message in messages(connection):
        host.heard(*json.loads(message))
    ends = [asyncio.create_task(host.close(playing)) for playing in host.playing.values()]
    host.playing.clear()
    if ends := [*ends, *host.closing]:
        await asyncio.wait(ends, timeout=CLOSE_S)


def watch_loop(host: EnvHost, loop: asyncio.AbstractEventLoop) -> None:
    """A thread: heartbeats, and a word to the driver when the event loop hangs. While the process as a whole stands
    still, as on a machine that does, nobody holds its event loop."""
    while True:
        looked, computed = time.monotonic(), time.process_time()
        time.sleep(TICK_S)
        stood_s = time.monotonic() - looked - (time.process_time() - computed)
        host.say("beat")
        with suppress(RuntimeError):  # the loop has ended: so does the process
            loop.call_soon_threadsafe(host.clock.now)
        if host.clock.quiet_s > host.timeout_s + GAP_S and stood_s < GAP_S:
            why = f"timeout: code in an async method held the event loop for more than {host.timeout_s:g} s"
            host.say("hung", host.marks.on_loop or 0, why)
            return
