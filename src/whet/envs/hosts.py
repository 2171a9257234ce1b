"""Environments in host processes, as seen by the run that plays them.

A host plays many episodes at once. When it dies or hangs, the episode that was the cause ends as a fault, and its
other episodes begin anew in another host with the same random numbers. If the cause is not known for sure, an episode
that ran code when the host died is played again in a host of its own.

The driver sends ("first", number, task, key, index, attempt), ("resume", number, replies and steps), ("step", number,
reply), ("close", number), ("reply", number, call, answer) and ("refused", number, call, why). A host sends ("done",
number, value), ("failed", number, why), ("stuck", number, why), ("hung", number or 0, why), ("chat", number, call,
path, messages, sampling), ("score", number, call, given), ("program", number, call, given), ("closed", number),
("said", text, characters left out) and ("beat",). chat, score and program ask the run (`World`); reply and refused
answer them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import shutil
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from whet.config.schema import EnvironmentConfig
from whet.envs import host
from whet.envs.env import (
    EnvBroken,
    EnvFault,
    EnvRestarted,
    EnvStep,
    World,
    as_messages,
    as_tools,
    pack_messages,
    pack_step,
    unpack_messages,
    unpack_step,
    work_of,
)
from whet.envs.marks import Marks
from whet.guard import stacks
from whet.guard.foreign import said, words
from whet.guard.line import LocalLine, how_it_ended
from whet.guard.printed import Printed, PrintingPipe
from whet.guard.processes import until
from whet.guard.temporary import OwnFolder
from whet.rewards.bind import pack_task
from whet.secrets import redact_tree
from whet.types import ConfigError, DataError, Json, Message, Task, ToolSpec, WhetError

log = logging.getLogger(__name__)

LOAD_S = 300.0
"""Longest start of a host, the user's imports included."""
SILENT_S = 10.0
"""A host that has sent no heartbeat for this time, beyond the time limit of a call, is replaced."""
LOOK_S = 0.5
"""Between two looks at whether hosts live."""
MOST_DEATHS = 10
"""Of hosts in a row, without an answer of any, before the run ends."""
MOST_UNREAD = 256 * 2**20
"""Bytes of messages that a host may leave unread: it may ask on and on, and never read what it is told."""
MOST_UNHEARD = 64
"""Messages of a host that wait for the event loop; then it is heard no faster than it is answered."""
MOST_ERROR = 1000
MOST_ASKED = 256
"""Calls of the run that one episode waits for at once."""


@dataclass(eq=False)
class HostedEnv:
    """An `Env` that is played in a host."""

    hosts: EnvHosts
    task: Task
    world: World
    number: int = 0
    place: HostProcess | None = None
    answer: asyncio.Future[Json] | None = None
    """Of the call under way."""
    asked: set[asyncio.Task[None]] = field(default_factory=set)
    """What the environment asks of the run, under way."""
    tools: list[ToolSpec] = field(default_factory=list)
    resume: Callable[[Sequence[tuple[Message, EnvStep]]], Awaitable[None]] | None = None
    """What the environment has of this name; known after `first`."""

    async def first(self) -> list[Message]:
        self.place = await self.hosts.find(alone=self.world.alone)
        self.number = next(self.hosts.numbers)
        self.place.playing[self.number] = self
        packed = pack_task(self.task)
        try:
            world = self.world
            told = await self._call("first", packed, world.key, world.index, world.attempt)
        except TypeError as error:
            raise DataError(
                f"task {self.task.uid} of {self.task.source!r} cannot be sent to the environment: {error}; columns "
                "must be JSON values"
            ) from error
        self.tools = as_tools([ToolSpec.from_json(tool) for tool in told["tools"]])
        self.resume = self._resume if told["resumes"] else None
        return as_messages(unpack_messages(told["messages"]), "first")

    async def step(self, reply: Message) -> EnvStep:
        return unpack_step(await self._call("step", *pack_messages([reply])))

    async def _resume(self, turns: Sequence[tuple[Message, EnvStep]]) -> None:
        await self._call("resume", [[reply.to_json(), pack_step(step)] for reply, step in turns])

    async def close(self) -> None:
        """The host closes the environment; nobody waits for it."""
        for asking in self.asked:
            asking.cancel()
        if self.place is not None and self.place.playing.pop(self.number, None) is not None:
            self.place.closing.add(self.number)
            self.place.send("close", self.number)
            self.hosts.dismiss(self.place)

    async def _call(self, kind: str, *what: Json) -> Json:
        assert self.place is not None
        if self.place.dead is not None:
            raise self.lost(self.place)
        self.answer = asyncio.get_running_loop().create_future()
        self.place.send(kind, self.number, *what)
        return redact_tree(await self.answer)  # it is written down

    def lost(self, place: HostProcess) -> Exception:
        """What the death of its host is to this episode."""
        assert place.dead is not None
        if place.alone or self.number == place.culprit:
            return EnvFault(place.dead)
        return EnvRestarted(place.dead, suspect=self.number in place.running)

    def settle(self, value: Json = None, error: Exception | None = None) -> None:
        """The call under way has ended."""
        if self.answer is None or self.answer.done():
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)

    def ask(self, name: str, call: int, *what: Json) -> None:
        """The environment asks the run: `name` of its world."""
        assert self.place is not None
        if len(self.asked) >= MOST_ASKED:
            why = f"more than {MOST_ASKED} calls of the run at once in one episode; await some of them first"
            self.place.send("refused", self.number, call, why)
            return
        asking = asyncio.create_task(self._ask(name, call, *what))
        self.asked.add(asking)
        asking.add_done_callback(self.asked.discard)

    async def _ask(self, name: str, call: int, *what: Json) -> None:
        assert self.place is not None
        try:
            self.place.send("reply", self.number, call, await ASKED[name](self.world, *what))
        except EnvBroken as error:
            self.settle(error=error)
        except Exception as error:  # noqa: BLE001  the engine's or a reward's, which the environment may catch
            self.place.send("refused", self.number, call, said(error))


async def _chat(world: World, path: Sequence[int], messages: Json, sampling: dict[str, Json]) -> Json:
    told = as_messages(unpack_messages(redact_tree(messages)), "messages of world.chat")
    return (await world.ask(tuple(map(int, path)), told, sampling)).to_json()


async def _score(world: World, given: Json) -> Json:
    return asdict(await work_of(world).score(given))


async def _program(world: World, given: Json) -> Json:
    return asdict(await work_of(world).program(given))


ASKED: dict[str, Callable[..., Awaitable[Json]]] = {"chat": _chat, "score": _score, "program": _program}
"""What an environment may ask of the run, by the kind of its message."""


@dataclass(eq=False)
class HostProcess:
    """One process."""

    line: LocalLine
    marks: str
    alone: bool
    """It plays one episode that may have ended an earlier host."""
    retired: bool = False
    """Code in it does not end: it gets no more episodes, and is ended when it has none."""
    playing: dict[int, HostedEnv] = field(default_factory=dict)
    closing: set[int] = field(default_factory=set)
    """Episodes that have ended, but not yet here."""
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    unread: int = 0
    """Bytes of the outbox."""
    counting: threading.Lock = field(default_factory=threading.Lock)
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MOST_UNHEARD))
    """For messages that have come and are not heard yet."""
    heard: float = field(default_factory=time.monotonic)
    dead: str | None = None
    """How it ended."""
    culprit: int | None = None
    """The episode that is known to be the cause."""
    running: frozenset[int] = frozenset()
    """Episodes that ran code when it ended."""

    def send(self, kind: str, *what: Json) -> None:
        """Put a message into its outbox; TypeError for what is not JSON. A host that does not read is cut off."""
        message = json.dumps([kind, *what]).encode()
        with self.counting:
            self.unread += len(message)
            is_full = self.unread - len(message) > MOST_UNREAD
        if is_full:
            self.hang_up(socket.SHUT_RDWR)
        else:
            self.outbox.put(message)

    def write(self) -> None:
        """A thread: a host that does not read holds nobody up."""
        with suppress(OSError):
            while (message := self.outbox.get()) is not None:
                self.line.connection.send_bytes(message)
                with self.counting:
                    self.unread -= len(message)

    def hang_up(self, how: int) -> None:
        """Shut the connection down: a thread may be reading from it, so it is not closed."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.line.connection.fileno())) as connection:
            connection.shutdown(how)

    def kill(self) -> None:
        """End it, and the processes that environments have started in its group."""
        self.outbox.put(None)
        self.hang_up(socket.SHUT_RDWR)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.line.process.pid, signal.SIGKILL)
        self.line.kill()

    def end(self) -> None:
        """The same; its files go with it."""
        self.kill()
        shutil.rmtree(Path(self.marks).parent, ignore_errors=True)
        stacks.forget(self.line.process.pid)


class EnvHosts:
    """The host processes of one environment. `make` is a `MakeEnv`."""

    def __init__(self, cfg: EnvironmentConfig, *, imports: Sequence[str] = ()) -> None:
        """Starts them. ConfigError if the environment cannot be loaded there."""
        self.cfg, self.imports = cfg, tuple(imports)
        self.restarts = 0
        """Hosts that have been replaced."""
        self.restarted = 0
        """Episodes that begin anew because their host was lost."""
        self.numbers = count(1)
        self._deaths = 0
        self._broken: str | None = None
        self.printed = Printed()
        self._pipe = PrintingPipe(self.printed, "environment")
        """For what a host's native code and the programs that it starts print."""
        self._own = OwnFolder("processes")
        self._starts = count()
        self.processes: list[HostProcess] = []
        """The hosts that live."""
        self.starting: set[HostProcess] = set()
        """Processes that are not ready to play yet."""
        self._news = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            for _ in range(cfg.hosts):
                self._add(self._start(alone=False))
        except BaseException:
            self.close()
            raise

    def make(self, task: Task, world: World) -> HostedEnv:
        """An environment, to be played in a host."""
        return HostedEnv(self, task, world)

    async def find(self, *, alone: bool) -> HostProcess:
        """The host with the fewest episodes, or a new one for this episode alone."""
        self._attend()
        if alone:
            return await self._another(alone=True)
        while True:
            if self._broken is not None:
                raise EnvBroken(self._broken)
            if self._shared:
                return min(self._shared, key=lambda h: len(h.playing))
            self._news.clear()
            await self._news.wait()  # bounded by LOAD_S: a start that fails is news, too

    @property
    def _shared(self) -> list[HostProcess]:
        """Hosts that take any episode."""
        return [h for h in self.processes if not h.alone and not h.retired]

    def dismiss(self, place: HostProcess) -> None:
        """An episode is over, which may have been the last one of a host."""
        if (place.alone or place.retired) and not place.playing and place.dead is None:
            self._later(self._end(place))

    def close(self) -> None:
        """End all hosts; environments have a moment to close."""
        if self._watching is not None:
            self._watching.cancel()
        self._broken = self._broken or "the environment's hosts were closed"
        for place in self.processes:
            place.hang_up(socket.SHUT_WR)
        until(lambda: all(place.line.gone() for place in self.processes), host.CLOSE_S + host.CANCEL_S)
        for place in (*self.processes, *self.starting):
            place.kill()
        self.processes.clear()
        self._own.close()
        self._pipe.close()
        self.printed.close()

    # -- starting

    def _start(self, *, alone: bool) -> HostProcess:
        """A host that is ready to play. ConfigError if it cannot load the environment, _NotStarted if it has ended.
        Blocks."""
        folder = self._own.path / f"{next(self._starts)}"
        folder.mkdir()
        marks = str(folder / "marks")
        Marks.create(marks)
        line = LocalLine(host.MODULE, int(folder.name), folder=folder, threads=1, output=self._pipe.fd)
        place = HostProcess(line, marks, alone)
        self.starting.add(place)
        try:
            if self._broken is not None:
                raise EnvBroken(self._broken)
            self._greet(place)
        except BaseException as error:
            place.end()
            line.hang_up()
            if isinstance(error, EOFError | OSError):
                raise _NotStarted(
                    f"rollout.env.make={self.cfg.make}: its host did not start: {how_it_ended(line)}"
                ) from error
            raise
        finally:
            self.starting.discard(place)
        return place

    def _greet(self, place: HostProcess) -> None:
        """Tell a new host what it plays, and wait until it is ready. ConfigError if it cannot load that."""
        connection, deadline = place.line.connection, time.monotonic() + LOAD_S
        hello = {**self.cfg.model_dump(mode="json"), "imports": self.imports, "marks": place.marks}
        connection.send_bytes(json.dumps(hello).encode())
        kind = ""
        while kind != "ready":
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise ConfigError(
                    f"rollout.env.make={self.cfg.make}: its host took more than {LOAD_S:g} s to start"
                )
            kind, *what = json.loads(connection.recv_bytes(host.MOST_BYTES))
            if kind == "refused":
                raise ConfigError(words(str(what[0]), MOST_ERROR))
            self._said(kind, what)

    def _add(self, place: HostProcess) -> None:
        place.heard = time.monotonic()
        self.processes.append(place)
        for work in (place.write, lambda: self._read(place)):
            threading.Thread(target=work, name="whet-env-host", daemon=True).start()

    async def _another(self, *, alone: bool) -> HostProcess:
        """One more host, instead of those that are killed as they start. One that nobody waits for any more is ended by
        the thread that started it: the loop may have ended by then."""
        place: HostProcess | None = None
        tries = 0
        while place is None:
            starter = ThreadPoolExecutor(1, thread_name_prefix="whet-env-start")
            starting = starter.submit(self._start, alone=alone)
            starter.shutdown(wait=False)
            try:
                place = await asyncio.wrap_future(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_end_unwanted)
                raise
            except _NotStarted as error:
                tries += 1
                if self._broken is not None or not self._book(str(error)) or tries == MOST_DEATHS:
                    raise
        if self._broken is not None:
            _end_unwanted(starting)
            raise EnvBroken(self._broken)
        self._add(place)
        return place

    def _lost(self, why: str) -> None:
        """Book that a shared host is lost, and start another one, unless there have been too many."""
        if self._book(why):
            self._later(self._replace())

    def _book(self, why: str) -> bool:
        """Count a host that is lost. False: there have been too many, and the run ends."""
        log.warning("environment: %s", why)
        self._deaths += 1
        self.restarts += 1
        if self._deaths <= MOST_DEATHS:
            return True
        self._broken = f"rollout.env: {self._deaths} hosts in a row were lost; the last one: {why}"
        self._news.set()
        return False

    async def _replace(self) -> None:
        """Another shared host."""
        try:
            await self._another(alone=False)
        except WhetError as error:
            self._broken = self._broken or str(error)
        self._news.set()

    # -- watching

    def _attend(self) -> None:
        """Watch the hosts from the event loop that plays."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._news = loop, asyncio.Event()
            self._watching = loop.create_task(self._watch())
            for _ in range(
                len(self._shared), self.cfg.hosts
            ):  # an earlier loop ended before they were replaced
                self._later(self._replace())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _watch(self) -> None:
        """Find hosts that are silent. What this process slept through is nobody's silence."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            slept = now - looked > 4 * LOOK_S
            looked = now
            limit_s = self.cfg.timeout_s + SILENT_S
            for place in list(self.processes):
                if slept:
                    place.heard = max(place.heard, now - SILENT_S / 2)
                if now - place.heard > limit_s:
                    self._died(place, f"its host sent no heartbeat for {limit_s:g} s")

    def _read(self, place: HostProcess) -> None:
        """A thread: the messages of one host, up to its end."""
        why = ""
        try:
            while True:
                data = place.line.connection.recv_bytes(host.MOST_BYTES)
                place.heard = time.monotonic()
                message = json.loads(data)
                place.room.acquire(timeout=1.0)  # what a loop that has ended did not hear gives none back
                self._tell(self._heard, place, message)
        except (EOFError, ConnectionError):  # a reset, where it had not read all
            pass
        except (OSError, ValueError, RecursionError) as error:
            why = f"its host sent no message: {said(error)}" if place.dead is None else ""
        if place.unread > MOST_UNREAD:
            why = f"its host left more than {MOST_UNREAD >> 20} MiB of messages unread"
        self._tell(self._died, place, why or f"its host ended: {how_it_ended(place.line)}")
        place.line.hang_up()

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        while self._loop is None and self._broken is None:
            time.sleep(0.05)  # nothing is played yet
        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what, *arguments)

    def _heard(self, place: HostProcess, message: Json) -> None:
        place.room.release()
        if place.dead is not None:
            return
        try:
            if not isinstance(message, list):
                raise ValueError(f"{type(message).__name__}; expected a list")
            self._take(place, *message)
        except (TypeError, ValueError, LookupError) as error:
            self._died(place, f"its host sent an invalid message: {said(error)}")

    def _take(self, place: HostProcess, kind: str, *what: Json) -> None:
        """One message of a host, which is not trusted."""
        if kind in ("said", "beat"):
            self._said(kind, what)
            return
        number = what[0]
        if type(number) is not int:
            raise ValueError(f"an episode of number {number!r:.40}")
        playing = place.playing.get(number)
        if kind == "stuck":
            self._retire(place, number, words(str(what[1]), MOST_ERROR))
        elif kind == "hung":
            why = str(what[1])
            place.culprit = number or None
            self._died(place, why, marked=not number)
        elif kind == "closed":
            place.closing.discard(number)
        elif playing is not None:
            self._deaths = 0
            if kind == "done":
                playing.settle(what[1])
            elif kind == "failed":
                playing.settle(error=EnvFault(words(str(what[1]), MOST_ERROR)))
            elif kind in ASKED:
                playing.ask(kind, *what[1:])

    def _said(self, kind: str, what: Sequence[Json]) -> None:
        if kind == "said":
            text, cut = what
            self.printed.take(
                "environment", str(text), dropped_bytes=cut if type(cut) is int and cut > 0 else 0
            )

    def _retire(self, place: HostProcess, number: int, why: str) -> None:
        """Code of one episode goes on after its time; the others of its host are played to their end there."""
        if (playing := place.playing.get(number)) is not None:
            playing.settle(error=EnvFault(why))
        if not place.alone and not place.retired:
            place.retired = True
            self._lost(f"{why}; its host gets no more episodes")
        self.dismiss(place)

    def _died(self, place: HostProcess, why: str, *, marked: bool = True) -> None:
        """A host has ended, or is ended. Its episodes hear of it; another host takes its place.

        marked: the episodes that ran code at the end may be the cause.
        """
        if place.dead is not None or place not in self.processes:
            return
        self.processes.remove(place)
        place.kill()
        place.running = frozenset(Marks.read(place.marks)) if marked else frozenset()
        place.end()
        place.dead = (
            words(why, MOST_ERROR) if place.culprit is not None else f"crashed: {words(why, MOST_ERROR)}"
        )
        for playing in list(place.playing.values()):
            playing.settle(error=(lost := playing.lost(place)))
            self.restarted += isinstance(lost, EnvRestarted)
        if not place.alone and not place.retired:
            count = len(place.playing)
            self._lost(f"{place.dead}; its {count} episodes restart in another host")

    async def _end(self, place: HostProcess) -> None:
        """Of a host whose one episode is over."""
        until = time.monotonic() + host.CLOSE_S
        while place.closing and place.dead is None and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if place.dead is None and place in self.processes:  # else the run has ended, and all hosts with it
            place.dead = "its host was ended"
            self.processes.remove(place)
            place.end()


class _NotStarted(ConfigError):
    """A host ended before it was ready: its environment ends it, or somebody else did."""


def _end_unwanted(starting: Future[HostProcess]) -> None:
    """Of a host that was started for an episode which is over."""
    if not starting.cancelled() and starting.exception() is None:
        place = starting.result()
        place.end()
        place.line.hang_up()
