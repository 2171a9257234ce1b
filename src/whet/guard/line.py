"""Child processes of this one: for each a connection and the process behind it. `Local` starts them on this machine;
`whet.cluster.lines` on other machines, with the same process at the other end.

Such a process runs `serve(connection)` of a module, called by `guard.begin`. It ends with the process that started it,
however that ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from whet import secrets
from whet.environment import module_command, module_path, pools
from whet.guard import confine, stacks
from whet.guard.last import MARK
from whet.guard.processes import die_with, state, until, wake_with_parent
from whet.guard.temporary import OwnFolder

LOOPBACK = "127.0.0.1"


class Line(Protocol):
    """One process, as seen by its driver."""

    connection: Connection
    """Messages to and from it. Its end is the process's, too."""
    address: str
    """Of its machine, where others of its kind reach it."""
    gpu: int
    """Which of the GPUs that it sees is its own."""
    machine: str | None
    """Ray's name for its machine; None: it is this one."""

    def died(self) -> str | None:
        """How it ended, if it ended unrequested and without a message."""

    def state(self) -> str:
        """Whether it runs, as `processes.state` has it, or `hangs.UNSEEN`."""

    def dump(self) -> None:
        """Ask it to write its stack."""

    def stack(self) -> str:
        """The last stack that it wrote."""

    def hang_up(self) -> None:
        """Close the connection: an idle process ends by that."""

    def gone(self) -> bool:
        """Whether its process has ended."""

    def kill(self) -> None:
        """End it, whatever its state, and wait until it has ended."""


class Lines(Protocol):
    """Several of a kind."""

    host: str
    """Address of this machine, where all of them reach it."""
    near: bool
    """Whether all of them see the files of this machine."""

    @property
    def lines(self) -> Sequence[Line]:
        """In their order."""

    def carried(self, path: Path) -> AbstractContextManager[list[str]]:
        """Where each finds this file or folder, as long as the block runs."""

    def brought(self, path: Path) -> AbstractContextManager[Path]:
        """A folder for the first of them to write; when the block ends, its files are in `path`."""

    def again(self, number: int) -> Line:
        """Start another process to replace one that has died. ConfigError if it does not start."""

    def close(self) -> None:
        """When all have ended: free their resources."""


OpenLines = Callable[[int, int], Lines]
"""Starts so many processes, with so many threads each."""


class LocalLine:
    """A process of this machine, over a socket pair."""

    address = LOOPBACK
    machine: str | None = None

    def __init__(
        self, module: str, number: int, *, folder: Path, threads: int, gpu: int = 0, output: int = 2
    ) -> None:
        """module: whose `serve` is called. folder: for the file of its stack. output: file descriptor of its prints."""
        self.gpu, self.file = gpu, folder / f"stack-{number}"
        ours, theirs = socket.socketpair()
        env = os.environ | pools(threads)
        env |= {"PYTHONPATH": module_path(), MARK: uuid4().hex}
        # a process may be tied to the thread that started it; here, one that ends with the process alone
        tied = threading.current_thread() is threading.main_thread()
        who = f"{module.rpartition('.')[2]}-{number}"
        told = (theirs.fileno(), self.file, os.getpid(), int(tied), who, stacks.folder() or "")
        with theirs:
            # a session of its own: Ctrl-C is the driver's to answer
            self.process = subprocess.Popen(
                [*module_command("whet.guard.begin"), module, *map(str, told)],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        with suppress(OSError):  # it has ended: `died` says so
            self.connection.send_bytes(json.dumps(secrets.known()).encode())

    def died(self) -> str | None:
        code = self.process.poll()
        if code in (None, 0, 1):
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def state(self) -> str:
        return state(self.process.pid)

    def dump(self) -> None:
        if self.process.poll() is None and self.file.exists():  # else the signal would end it
            self.process.send_signal(signal.SIGUSR1)

    def stack(self) -> str:
        text = self.file.read_text(errors="replace").strip() if self.file.exists() else ""
        return text or ("" if self.gone() else stacks.silence(self.process.pid))

    def hang_up(self) -> None:
        self.connection.close()

    def gone(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Local:
    """Processes of this machine."""

    host, near = LOOPBACK, True

    def __init__(self, count: int, threads: int, *, module: str, first_gpu: int = 0, output: int = 2) -> None:
        """first_gpu: of the first process; the others' follow. output: the file descriptor that they print to."""
        self.module, self.threads, self.first_gpu, self.output = module, threads, first_gpu, output
        self._own = OwnFolder("processes")
        self.folder = self._own.path
        self.lines: list[LocalLine] = []
        try:
            for number in range(count):
                self.lines.append(self._start(number))
        except BaseException:
            end(self)
            raise

    @contextmanager
    def carried(self, path: Path) -> Iterator[list[str]]:
        yield [str(path)] * len(self.lines)

    @contextmanager
    def brought(self, path: Path) -> Iterator[Path]:
        yield path

    def again(self, number: int) -> LocalLine:
        self.lines[number].hang_up()
        self.lines[number].kill()
        self.lines[number] = self._start(number)
        return self.lines[number]

    def _start(self, number: int) -> LocalLine:
        gpu = self.first_gpu + number
        return LocalLine(
            self.module, number, folder=self.folder, threads=self.threads, gpu=gpu, output=self.output
        )

    def close(self) -> None:
        self._own.close()


def end(lines: Lines, grace_s: float = 1.0) -> None:
    """End all together; an idle one has `grace_s` to do so by itself."""
    for line in lines.lines:
        line.hang_up()
    until(lambda: all(line.gone() for line in lines.lines), grace_s)
    for line in lines.lines:
        line.kill()
    lines.close()


def bound(connection: Connection, limit_s: float) -> None:
    """From now on BlockingIOError ends a send or a receipt that does not get on for so long: the process at the other
    end may stand still in the middle of a message."""
    seconds, rest = divmod(limit_s, 1.0)
    limit = struct.pack("@ll", int(seconds), max(1, int(rest * 1e6)))  # a timeval; 0 would be no limit
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            same.setsockopt(socket.SOL_SOCKET, direction, limit)


def how_it_ended(line: Line) -> str:
    """Of a process whose connection has; its exit status may come a moment later."""
    until(line.died, 2.0, every_s=0.05)
    return line.died() or "it ended"


# ---------------------------------------------------------------- in the process


def picked_up(arguments: Sequence[str]) -> Connection:
    """The other end of a line, in the process that it leads to; its stack goes to a file when asked for, and it prints
    none of the secrets that the process at the other end knows. It leaves signals that are meant for the run to that
    process."""
    fd, path, parent, tied, who, folder = arguments
    confine.deafen()
    confine.let_forks_hear()
    if tied == "1":
        die_with(None)
    else:
        wake_with_parent()
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    file = open(f"{path}.new", "w")  # noqa: SIM115  # as long as the process lives
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    os.replace(file.name, path)  # who finds it may send the signal
    stacks.announce(who, Path(path), folder or None)
    connection = Connection(int(fd))
    with suppress(EOFError, OSError):  # nobody asks any more: whoever listens hears it
        secrets.learn_all(json.loads(connection.recv_bytes()))
    secrets.guard_output()
    return connection


async def messages(connection: Connection) -> AsyncIterator[bytes]:
    """What comes over the line, as it comes, to its end. A thread listens, so that the event loop need not."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[bytes | None] = asyncio.Queue()

    def hear() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(heard.put_nowait, connection.recv_bytes())
        except (EOFError, OSError, RuntimeError):  # the line has ended, or the loop
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(heard.put_nowait, None)

    threading.Thread(target=hear, daemon=True).start()
    while (message := await heard.get()) is not None:
        yield message


def _end_with(parent: int) -> None:
    """Who was killed leaves nobody behind; it may be gone by now."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
