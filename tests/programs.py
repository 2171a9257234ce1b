"""Programs for those who start one by its name: scripts, and runs whose server is a command. What such a program does
is done by a process that is forked (`forked`), so no interpreter has to load torch; the two end together."""

from __future__ import annotations

import json
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from forked import Forked, fork_from_the_same, played

SCRIPT = """#!/bin/sh
exec "{python}" -SI -c '
import json, os, socket, sys

_, address, name, *words = sys.argv
with socket.socket(socket.AF_UNIX) as line:
    line.connect(address)
    socket.send_fds(line, [b" "], [1, 2])
    line.sendall(json.dumps([name, words, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    code = int(line.makefile().readline() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
' "{address}" "{name}" "$@"
"""


@contextmanager
def programs(folder: Path, **codes: str) -> Iterator[None]:
    """While the block runs there is a program in `folder` for each name, which runs its code: with the arguments, the
    environment, the working directory and the outputs that the program is given."""
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory(prefix="whet-") as near, ours:
        address = f"{near}/line"  # the name of a socket may not be long
        server = Forked(_serve, address, codes, theirs)
        theirs.close()
        ours.recv()
        for name in codes:
            path = folder / name
            path.write_text(SCRIPT.format(python=sys.executable, address=address, name=name))
            path.chmod(0o755)
        try:
            yield
        finally:
            ours.close()
            server.wait(60)


def _serve(address: str, codes: dict[str, str], control: Connection) -> None:
    """In a process of its own: who waits for a program may keep its interpreter from doing anything else meanwhile."""
    fork_from_the_same()
    under_way: list[_UnderWay] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        control.send(None)
        while control not in wait([listener, control]):
            line, _ = listener.accept()
            for one in under_way:  # who was killed is gone before the next one begins
                if one.left_alone():
                    one.follower.join()
            under_way.append(_UnderWay(line, codes))
    for one in under_way:
        one.end()


class _UnderWay:
    """A process, and the line to the program that it works for."""

    def __init__(self, line: socket.socket, codes: dict[str, str]) -> None:
        _, handles, *_ = socket.recv_fds(line, 1, 2)
        name, words, cwd, env = json.loads(line.makefile().readline())
        ends = [Connection(handle, readable=False) for handle in handles]
        self.line = line
        self.process = Forked(played, tuple(words), codes[name], ends, cwd, env)
        for end in ends:
            end.close()
        self.follower = threading.Thread(target=self._follow, daemon=True)
        self.follower.start()

    def _follow(self) -> None:
        wait([self.process.process.sentinel, self.line])
        self.process.kill()
        code = self.process.wait()
        with suppress(OSError):
            self.line.sendall(b"%d\n" % code)

    def left_alone(self) -> bool:
        """Whether the program has ended: it says nothing more, so what comes is the end of its line."""
        return bool(select.select([self.line], [], [], 0)[0])

    def end(self) -> None:
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)
        self.follower.join()
        self.line.close()
