"""The processes between a run and its rewards: supervisor (keeper) -> forkserver (nursery) -> workers.

The supervisor is forked from the run once, loads the foreign functions, forks the forkserver, and forks it again if it
dies. The forkserver is single-threaded and runs no foreign code: it hands calls to workers, which run them one after
the other, and kills and replaces faulty workers. Where calls are short, a worker has the next ones before it is idle.
When the run ends, however it ends, both see their channel close and kill all processes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from whet.environment import one_thread
from whet.guard import confine, frames, sandbox, stacks, worker
from whet.guard.foreign import describe
from whet.guard.output import MARK_BYTES, OutputPipe
from whet.guard.processes import wake_with_parent
from whet.guard.temporary import OwnFolder
from whet.inputs import depth
from whet.secrets import redact
from whet.types import WhetError

Loader = Callable[[], worker.Function | worker.Guarded]
"""Makes the foreign function; runs in the keeper, so nothing of it needs to be pickled."""

KILL = b"k"
"""Run to keeper: the nursery does not answer, replace it."""
LOADING = 1
"""Number of a message of the keeper: the name of the function that it loads now. The last of them has the number 0."""
CALL = struct.Struct("!dI")
"""Head of a call's body: its timeout in seconds, and which function, by its place. The rest is for the worker."""

_TICK_S = 0.1
_BEAT_S = 1.0
_GATHER_S = 0.01
AHEAD = 32
"""Calls that a worker has at most, with the one that it runs."""
_AHEAD_S = 0.002
"""As long as they take together, by those before them: what is behind a long call would wait for it."""
AHEAD_BYTES = 2**15
"""Their arguments together: a fraction of what a channel holds, so that sending never waits."""
_PAUSE_S = 0.0005
"""Between looks at workers that have calls ahead: their answers are read together."""
_CHANNEL_BYTES = 4 * AHEAD_BYTES
"""What a channel to a worker holds: the arguments, and what the system adds to each message. macOS's holds 8 KiB."""
_MAX_PROCESSES = 64
_NO_ANSWER = "bytes that are not an answer"
_MOST_LEVELS = 8
"""Lists and mappings inside one another, in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What all workers of a jail may use."""

    workers: int
    """At work at once. Each has one function, so idle ones of others may stand beside them."""
    memory_mb: int
    max_output_bytes: int


@dataclass(slots=True)
class PendingCall:
    """A call that has no answer yet."""

    number: int
    timeout_s: float
    function: int
    body: bytes
    alone: bool = False
    """Run it in a new worker: it has ended a used one, which may have been another call's doing."""
    marked: bool = False
    """A mark ends what it prints, so that others may be sent behind it. Without one, which wakes this process, too, an
    answer costs less."""


@dataclass(slots=True, eq=False)
class Worker:
    """A reward process, seen from the forkserver."""

    pid: int
    function: int
    channel: socket.socket
    output: OutputPipe
    calls: deque[PendingCall] = field(default_factory=deque)
    """What it has: the first one runs."""
    began: float = 0.0
    """When that one did."""
    room: int = 1
    """How many it may have."""
    served: int = 0
    inbox: bytearray = field(default_factory=bytearray)

    def deadline(self) -> float:
        return self.began + self.calls[0].timeout_s

    def takes(self, call: PendingCall) -> bool:
        """Whether it may have this call behind those that it has. One that is idle waits for its turn to start."""
        return (
            self.function == call.function
            and 0 < len(self.calls) < self.room
            and self.calls[-1].marked
            and sum(len(c.body) for c in self.calls) + len(call.body) <= AHEAD_BYTES
            and not call.alone
        )


_STOPS = (signal.SIGINT, signal.SIGTERM)
"""What stops the run, which the new process leaves to it."""


def fork(body: Callable[[], None]) -> int:
    """Run `body` in a new process, which ends with it. Returns the process id. OSError where there is no room."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # python drops what it raises inside fork
    # What is garbage in this process is never collected in the new one: its finalizers may wait for threads, which only
    # this one has (a process group of torch does).
    collects = gc.isenabled()
    gc.disable()
    pid = -1
    try:
        pid = os.fork()
    finally:
        if not pid:
            gc.freeze()
        if collects:
            gc.enable()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    for number in _STOPS:
        signal.signal(number, confine.deaf)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = 1
    try:
        body()
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the run has ended, and nobody listens
    except BaseException:  # noqa: BLE001  nothing may unwind into the copied frames of the parent
        print(redact(traceback.format_exc()), file=sys.__stderr__, end="")
    finally:
        os._exit(code)


def keep(
    control: socket.socket,
    run: int,
    *,
    loaders: Mapping[str, Loader],
    limits: WorkerLimits,
    prepare: Callable[[], None],
) -> None:
    """The supervisor's main function, below the process `run`. `prepare` is called before any loader.

    It reports on `control` what it loads, then whether loading succeeded; then it sends a channel for every forkserver
    that it forks.
    """
    confine.detach()
    confine.adopt_orphans()
    confine.shut({control.fileno()}, files="read")
    confine.die_with(run)
    stacks.listen("reward-keeper")
    one_thread()
    functions, problem = _load(loaders, prepare, control)
    one_thread()  # whatever foreign code has set: from here on it is forked
    wake_with_parent()  # SIGKILL would also come when only the thread that forked this process ends
    control.sendall(frames.pack(0, json.dumps(problem).encode()))
    while not problem:
        ours, theirs = socket.socketpair()
        alive, life = os.pipe()
        keeper = os.getpid()
        with OwnFolder("rewards") as folder:  # the run may end just now: then its end of `control` is gone
            pid = fork(partial(_nursery, theirs, life, keeper, functions, limits, str(folder)))
            theirs.close()
            os.close(life)
            try:
                socket.send_fds(control, [b"n"], [ours.fileno()])
                ours.close()
                problem = _watch(control, alive, run=run, nursery=pid)
                os.close(alive)
            finally:  # the run may have ended before it got the channel
                confine.sweep(set(), {})


def _load(
    loaders: Mapping[str, Loader], prepare: Callable[[], None], control: socket.socket
) -> tuple[list[worker.Guarded], str]:
    """The functions in their order, and '' or what went wrong. `control` gets the name of each before it is loaded,
    which may end this process."""
    functions = []
    try:
        prepare()
    except WhetError as error:
        return [], str(error)
    for name, load in loaders.items():
        control.sendall(frames.pack(LOADING, json.dumps(name).encode()))
        try:
            found = load()
        except WhetError as error:
            return [], str(error)
        except BaseException as error:  # noqa: BLE001  foreign code: importing it can do anything
            return [], f"reward {name!r}: loading it raised {describe(error)}"
        functions.append(found if isinstance(found, worker.Guarded) else worker.Guarded(found))
    sandbox.readable()  # found once, here, for all workers
    return functions, ""


def _watch(control: socket.socket, alive: int, *, run: int, nursery: int) -> str:
    """Wait until the nursery has ended ('') or the run has (a word)."""
    with selectors.DefaultSelector() as selector, confine.process_end(run) as run_end:
        channels: list[socket.socket | int] = [control, alive, *run_end]
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if alive in ready:
                return ""
            if control not in ready or control.recv(1) != KILL:
                return "the run has ended"
            confine.send(nursery, signal.SIGKILL)


def _nursery(
    run: socket.socket,
    life: int,
    keeper: int,
    functions: Sequence[worker.Guarded],
    limits: WorkerLimits,
    folder: str,
) -> None:
    os.setsid()
    confine.die_with(keeper)
    confine.adopt_orphans()
    confine.shut({run.fileno(), life})
    stacks.listen("reward-nursery")
    try:
        Nursery(run, functions, limits, folder).live()
    finally:
        confine.send(keeper, signal.SIGCONT)  # one that was stopped must see that the run has ended


class Nursery:
    """Hands calls to workers in order of arrival, and answers every one exactly once."""

    def __init__(
        self, run: socket.socket, functions: Sequence[worker.Guarded], limits: WorkerLimits, folder: str
    ) -> None:
        self.run, self.functions, self.limits, self.folder = run, functions, limits, folder
        self.queue: deque[PendingCall] = deque()
        self.workers: list[Worker] = []
        self.inbox = bytearray()
        self.outbox = bytearray(frames.pack(0, b""))
        self.sent_at = 0.0
        self.exits: dict[int, int] = {}
        self.next_tick = 0.0
        self.open = True
        self.selector = selectors.DefaultSelector()
        self.selector.register(run, selectors.EVENT_READ, self.hear_run)
        run.setblocking(False)

    def live(self) -> None:
        """Run until the run closes its channel, or the folder for temporary files is gone (who cleans up /tmp takes
        what is old): the next forkserver has another one."""
        while self.open and os.path.isdir(self.folder):
            self.dispatch()
            self.ahead()
            self.flush()
            if any(len(w.calls) > 1 for w in self.workers):
                time.sleep(_PAUSE_S)
            for key, _ in self.selector.select(self.patience_s()):
                key.data()
            self.tick()
        confine.sweep(set(), self.exits)

    def busy(self) -> list[Worker]:
        return [w for w in self.workers if w.calls]

    def patience_s(self) -> float | None:
        if self.outbox:
            return _GATHER_S
        busy = self.busy()
        if not busy:
            return 0.0 if self.queue else None  # `ahead` may have ended the worker that had them
        now = time.monotonic()
        return max(0.0, min(_TICK_S, *(w.deadline() - now for w in busy)))

    # ------------------------------------------------------------ the run

    def hear_run(self) -> None:
        try:
            data = self.run.recv(frames.READ_BYTES)
        except OSError:
            data = b""
        self.open = bool(data)
        self.inbox += data
        for number, body in frames.unpack(self.inbox, frames.MAX_CALL_BYTES):
            timeout_s, function = CALL.unpack_from(body)
            self.queue.append(PendingCall(number, timeout_s, function, body[CALL.size :]))

    def flush(self) -> None:
        """Send answers: gathered while calls are quick, so that the run wakes seldom; at once at the end."""
        now = time.monotonic()
        if not self.outbox or (now - self.sent_at < _GATHER_S and (self.queue or self.busy())):
            return
        with contextlib.suppress(BlockingIOError):
            sent = self.run.send(self.outbox)
            del self.outbox[:sent]
        self.sent_at = now

    def answer(self, w: Worker, reply: dict[str, object], seconds: float, *, fit: bool = False) -> None:
        """Answer the call that `w` runs with `reply`, what it printed, and how long it took; then its next one runs.
        fit: it takes another one."""
        printed, dropped = w.output.take(marked=fit and w.calls[0].marked)
        reply["seconds"] = seconds
        reply["output"] = printed.decode(errors="replace")
        cut = reply.pop("cut", 0)
        reply["dropped"] = dropped + (cut if type(cut) is int and 0 <= cut < 2**62 else 0)
        call = w.calls.popleft()
        w.began = time.monotonic()
        self.outbox += frames.pack(call.number, json.dumps(reply).encode())

    # ------------------------------------------------------------ workers

    def dispatch(self) -> None:
        """Give waiting calls to idle workers of their function; fork workers as needed, up to the limit."""
        while self.queue and len(self.busy()) < self.limits.workers:
            work = self.queue[0]
            idle = [w for w in self.workers if not w.calls and w.function == work.function]
            if work.alone and idle:
                self.end(idle.pop())
            if work.alone or not idle:
                try:
                    idle = [self.spawn(work.function)]
                except OSError as error:  # no memory is left, or no process number
                    if self.busy():
                        return  # it is tried again when one of them is done
                    if self.workers:
                        self.end(self.workers[-1])  # an idle one of another function makes room
                        continue
                    self.refuse(self.queue.popleft(), f"no process can be started for it: {error}")
                    continue
            self.start(idle[0], self.queue.popleft())

    def ahead(self) -> None:
        """Give waiting calls to workers that are busy, if those before them were short: a process that waits for each
        call, and one that is woken for each answer, take longer than such a call."""
        while self.queue:
            takers = [w for w in self.workers if w.takes(self.queue[0])]
            if not takers:
                return
            self.send(min(takers, key=lambda w: len(w.calls)), self.queue.popleft())

    def refuse(self, work: PendingCall, detail: str) -> None:
        """Answer a call that no worker has had."""
        reply = {"failure": ["crashed", detail], "output": "", "dropped": 0, "seconds": 0.0}
        self.outbox += frames.pack(work.number, json.dumps(reply).encode())

    def start(self, w: Worker, work: PendingCall) -> None:
        if self.unhoused(w):
            self.end(w)
            self.queue.appendleft(work)
            return
        w.began = time.monotonic()
        self.send(w, work)

    def send(self, w: Worker, work: PendingCall) -> None:
        work.marked = w.room > 1
        w.calls.append(work)
        try:
            w.channel.sendall(
                frames.pack(work.number, (worker.MARKED if work.marked else worker.UNMARKED) + work.body)
            )
        except OSError as error:
            # It ended while idle, through something an earlier call left; or half a message is in its channel. Of one
            # that ended at work `hear` will hear, after its answers.
            if len(w.calls) == 1 or isinstance(error, TimeoutError):
                self.end(w)

    def spawn(self, function: int) -> Worker:
        ours, theirs = socket.socketpair()
        ours.settimeout(_BEAT_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHANNEL_BYTES)
        try:
            out, into = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
        os.set_blocking(out, False)
        nursery, mark = os.getpid(), os.urandom(MARK_BYTES)
        try:
            pid = fork(partial(self.become_worker, function, theirs, into, nursery, mark))
        except OSError:
            ours.close()
            os.close(out)
            raise
        finally:
            theirs.close()
            os.close(into)
        w = Worker(pid, function, ours, OutputPipe(out, self.limits.max_output_bytes, mark))
        self.selector.register(ours, selectors.EVENT_READ, partial(self.hear, w))
        self.selector.register(out, selectors.EVENT_READ, partial(self.hear_output, w))
        self.workers.append(w)
        return w

    def become_worker(
        self, function: int, channel: socket.socket, into: int, nursery: int, mark: bytes
    ) -> None:
        os.setsid()
        confine.die_with(nursery)
        os.dup2(into, 1)
        os.dup2(into, 2)
        guarded = self.functions[function]
        confine.shut({channel.fileno()}, files="close" if guarded.confined else "keep")
        if not guarded.confined:  # else it has no file that it may write to, not even of its stacks
            stacks.listen("reward")
            self.settle()
        worker.serve(channel, guarded, self.limits.memory_mb, self.limits.max_output_bytes, mark)

    def settle(self) -> None:
        """Temporary files of this process go into a folder of its own, which is removed with it."""
        folder = self.temporary(os.getpid())
        os.mkdir(folder, 0o700)
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None  # it is looked up again

    def unhoused(self, w: Worker) -> bool:
        """Whether a worker that had a folder for its temporary files has none any more."""
        return (
            w.served > 0
            and not self.functions[w.function].confined
            and not os.path.isdir(self.temporary(w.pid))
        )

    def temporary(self, pid: int) -> str:
        return os.path.join(self.folder, str(pid))

    def hear(self, w: Worker) -> None:
        """A worker answered, wrote invalid bytes, or ended."""
        if w not in self.workers:  # an earlier event of this round ended it
            return
        try:
            data = w.channel.recv(frames.READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self.ended(w)
            return
        w.inbox += data
        messages, problem = [], ""
        try:
            for message in frames.unpack(w.inbox, frames.MAX_REPLY_BYTES):
                messages.append(message)
        except ValueError as error:
            problem = str(error)
        seconds = (time.monotonic() - w.began) / max(len(messages), 1)  # of each, where they came together
        for number, body in messages:
            if w not in self.workers:  # its calls are in the queue again
                return
            self.hear_answer(w, number, body, seconds)
        if w in self.workers and (problem or (w.inbox and not w.calls)):
            self.garbled(w, problem or _NO_ANSWER)
        if messages:
            # grows by steps: where long calls are among the short ones, few wait behind one
            w.room = max(1, min(AHEAD, 2 * w.room, int(_AHEAD_S / max(seconds, 1e-9))))

    def hear_answer(self, w: Worker, number: int, body: bytes, seconds: float) -> None:
        try:
            reply, fit = read_reply(number, body, w)
        except ValueError as error:
            self.garbled(w, str(error))
            return
        w.served += 1
        spent = worker.out_of_resources(reply)
        if w.served > 1 and not w.calls[0].alone and spent:  # perhaps another call has used them up
            self.retry(w)
            return
        self.answer(w, reply, seconds, fit=fit)
        if spent or not fit or self.functions[w.function].once:
            self.end(w)

    def hear_output(self, w: Worker) -> None:
        if w not in self.workers:
            return
        w.output.read()
        if w.output.ended:
            self.selector.unregister(w.output.fd)

    def ended(self, w: Worker) -> None:
        """The channel of a worker closed."""
        self.blame(w, "crashed", self.exit_of(w))

    def garbled(self, w: Worker, how: str) -> None:
        """A worker wrote to its channel what is not an answer."""
        self.blame(w, "output", f"on the result channel: {how}")

    def blame(self, w: Worker, kind: str, detail: str) -> None:
        """The call that runs, unless an earlier one may have done it: then it runs again, in a new worker."""
        if w.calls and w.served and not w.calls[0].alone:
            self.retry(w)
        else:
            self.fail(w, kind, detail)

    def exit_of(self, w: Worker) -> str:
        end = time.monotonic() + _TICK_S
        while w.pid not in self.exits and time.monotonic() < end:
            confine.reap(self.exits)
            time.sleep(0.0005)
        if w.pid not in self.exits:
            return "the process closed its result channel"
        code = self.exits[w.pid]
        if code >= 0:
            return f"the process exited with code {code}"
        name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        return f"the process was ended by {name}"

    def retry(self, w: Worker) -> None:
        w.calls[0].alone = True
        self.end(w)

    def fail(self, w: Worker, kind: str, detail: str) -> None:
        """End a worker, and book the failure for the call that it runs, if any."""
        if w.calls:
            self.answer(w, {"failure": [kind, detail]}, time.monotonic() - w.began)
        self.end(w)

    def end(self, w: Worker) -> None:
        """Kill a worker and everything below it; the calls that it has are the next ones again."""
        if w.pid not in self.exits:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(w.pid, signal.SIGKILL)
            confine.send(w.pid, signal.SIGKILL)
        stacks.forget(w.pid)
        self.workers.remove(w)
        self.queue.extendleft(reversed(w.calls))
        w.calls.clear()
        for channel in (w.channel, w.output.fd):
            with contextlib.suppress(KeyError):
                self.selector.unregister(channel)
        w.channel.close()
        os.close(w.output.fd)
        others = {other.pid for other in self.workers}
        confine.sweep(others, self.exits)
        # of no process that rewards have left behind, either: its number will be another worker's
        self.exits = {pid: code for pid, code in self.exits.items() if pid in others}
        shutil.rmtree(self.temporary(w.pid), ignore_errors=True)

    def tick(self) -> None:
        """Enforce deadlines; now and then count processes and tell the run that this process lives."""
        now = time.monotonic()
        for w in self.busy():
            if now >= w.deadline():
                timeout_s = w.calls[0].timeout_s
                self.fail(w, "timeout", f"no result in {timeout_s:g} s (reward_workers.timeout_s)")
        if now < self.next_tick:
            return
        self.next_tick = now + _TICK_S
        for w in self.busy():
            if (count := len(confine.descendants(w.pid))) > _MAX_PROCESSES:
                self.fail(
                    w, "processes", f"it started {count} processes, at most {_MAX_PROCESSES} are allowed"
                )
        if self.busy() and now - self.sent_at > _BEAT_S:
            self.outbox += frames.pack(0, b"")


def read_reply(number: int, body: bytes, w: Worker) -> tuple[dict[str, object], bool]:
    """The answer to the call that `w` runs, and whether it can take another. ValueError on all else."""
    if not w.calls or number != w.calls[0].number:
        raise ValueError(_NO_ANSWER)
    try:
        reply = json.loads(body)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if depth(reply) > _MOST_LEVELS:  # the run, which reads it next, may have less room for its recursion
        raise ValueError("JSON nested too deeply")
    if not isinstance(reply, dict) or ("parts" in reply) == ("failure" in reply):
        raise ValueError("JSON that is not an answer")
    return reply, reply.pop("fit", False) is True
